"""``bascule user``: create password hashes for the settings, and explain permissions."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer

from bascule.amqp.scram import ITERATIONS, ITERATIONS_MAX, SALT_BYTES, Verifier
from bascule.cli.config import ConfigOption
from bascule.cli.output import Format, FormatOption, as_json, line
from bascule.core.errors import InvalidInput
from bascule.core.permissions import Permission

#: The minimum of the standard (RFC 7677, section 4).
ITERATIONS_MIN = 4096

#: Exit status of ``bascule user can`` if the user may not.
DENIED_STATUS = 1

commands = typer.Typer(help="Passwords and permissions of users.", epilog="Example:  bascule user hash", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="user")


@commands.callback()
def _root() -> None:
    """Passwords and permissions of users."""


@commands.command(epilog="Example:  bascule user can ann send orders.eu")
def can(
    user: Annotated[str, typer.Argument(help="Name of the user; `anonymous` is a client without a login")],
    permission: Annotated[Permission, typer.Argument(help="Permission, in the words of Artemis")],
    address: Annotated[str, typer.Argument(help="Address")],
    config: ConfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Say whether the settings give a user a permission on an address, and which rule decides. Exit with 1 if they do not."""
    from bascule.config import load
    from bascule.server.policies import permissions_of

    decision = permissions_of(load(config).settings).decide(user, permission, address)
    if output is Format.JSON:
        line(as_json(decision._asdict()))
    else:
        line(f"{'allowed' if decision.allowed else 'denied'}: {decision.reason}")
    if not decision.allowed:
        raise typer.Exit(DENIED_STATUS)


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
