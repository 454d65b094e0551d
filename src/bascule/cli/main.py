"""Entry point: the commands, and the handling of their errors."""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import os
import sys
from typing import Annotated, Final

import typer

from bascule import __version__
from bascule.cli import (
    adapter,
    administer,
    api,
    backup,
    bench,
    check,
    completion,
    config,
    config_import,
    context,
    exports,
    inspect,
    look,
    messages,
    permission,
    pipelines,
    postgres,
    redrive,
    run,
    top,
    user,
    why,
    xa,
)
from bascule.cli.output import fail, line
from bascule.cli.tree import CommandGroup, command_tree
from bascule.core.build import build
from bascule.core.errors import BasculeError
from bascule.core.log import LogSettings, configure
from bascule.threads.stacks import show_stacks_on_signal

#: Errors of a write to a file.
OUTPUT_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

app = typer.Typer(
    name="bascule",
    help="Run and manage a JMS broker that stores its messages in Kafka, and its bridge to Kafka on Spark.",
    epilog="Example:  bascule up --amqp-port 5672  (then point any JMS client at amqp://127.0.0.1:5672)",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for register in (
    run.register,
    postgres.register,
    messages.register,
    bench.register,
    inspect.register,
    administer.register,
    pipelines.register,
    redrive.register,
    look.register,
    why.register,
    user.register,
    permission.register,
    xa.register,
    adapter.register,
    config.register,
    config_import.register,
    backup.register,
    exports.register,
    completion.register,
    check.register,
    top.register,
    api.register,
    context.register,  # last: it adds an option to the commands of the others
):
    register(app)


def _version(wanted: bool) -> None:
    if wanted:
        line(f"bascule {__version__} ({build()})")
        raise typer.Exit


@app.callback()
def _root(
    _version_wanted: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and the build (compiled or interpreted), and exit."
        ),
    ] = False,
) -> None:
    pass


@functools.cache
def root_command() -> CommandGroup:
    """Return the command ``bascule``."""
    return command_tree(app)


def main() -> None:
    """Run a command. An expected error prints one message on standard error and sets the exit code, without a traceback.

    SIGUSR1 makes the command write the stacks of its threads to standard error.
    """
    show_stacks_on_signal()
    # The interpreter's last collections would examine all objects for a fifth of a second, just before the system frees them.
    atexit.register(gc.freeze)
    configure(LogSettings(level="warning"))  # until a command has read its settings
    try:
        root_command()(prog_name="bascule")  # the name in the scripts for completion, also for `python -m bascule`
    except BasculeError as error:
        fail(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            if error.filename is not None or error.errno not in OUTPUT_ERRORS:
                raise
            fail(f"the output cannot be written: {error.strerror}")
        # The reader of our output has gone, or its disk is full; Python must not complain about that when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
