"""``bascule user``: create password hashes for the settings."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer

from bascule.amqp.scram import ITERATIONS, ITERATIONS_MAX, SALT_BYTES, Verifier
from bascule.cli.output import line
from bascule.core.errors import InvalidInput

#: The minimum of the standard (RFC 7677, section 4).
ITERATIONS_MIN = 4096

commands = typer.Typer(help="Create password hashes of users.", epilog="Example:  bascule user hash", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="user")


@commands.callback()
def _root() -> None:
    """Create password hashes of users."""


@commands.command("hash", epilog='Example:  bascule user hash    (then, in the table broker.users:  ann = "SCRAM-SHA-256$...")')
def hash_password(
    iterations: Annotated[
        int,
        typer.Option(
            "--iterations",
            min=ITERATIONS_MIN,
            max=ITERATIONS_MAX,
            help="Number of hash iterations; more iterations make it slower to guess the password, and to log in",
        ),
    ] = ITERATIONS,
) -> None:
    """Read a password from the terminal or standard input, and print its hash for the table `broker.users`."""
    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise InvalidInput("no password was given")
    line(str(Verifier.of(password, secrets.token_bytes(SALT_BYTES), iterations)))
