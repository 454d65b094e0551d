"""The user and password of a command. A password on the command line is visible to every user of the machine."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bascule.cli.output import note
from bascule.core.environment import PASSWORD_VARIABLE
from bascule.core.errors import InvalidInput

UserOption = Annotated[
    str | None,
    typer.Option(
        "--user",
        metavar="NAME",
        help=f"User for the connection. The password comes from --password-file, from {PASSWORD_VARIABLE}, or from the terminal",
        show_default=False,
    ),
]
PasswordFileOption = Annotated[
    Path | None, typer.Option("--password-file", help="Read the password of --user from the first line of this file", show_default=False)
]
_VISIBLE = "warning: every user of this machine can see the password in {} while the command runs; {}"


#: Option of the commands that connect to a broker over AMQP.
CaFileOption = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        help="Trust the certificate authorities in this PEM file (default: those of the system)",
        show_default=False,
    ),
]


def credentials(user: str | None, password_file: Path | None) -> tuple[str, str] | None:
    """Return the name and the password of the user of a command; None without ``--user``. Raises InvalidInput."""
    if user is None:
        if password_file is not None:
            raise InvalidInput("--password-file is given without --user; give the name of the user, too")
        return None
    name, colon, password = user.partition(":")
    if not name:
        raise InvalidInput("--user must begin with the name of a user")
    if not colon:
        return name, password_of(name, password_file)
    if password_file is not None:
        raise InvalidInput("--user has a password, and --password-file is given; give --user without the password")
    note(_VISIBLE.format("--user", f"use --password-file, {PASSWORD_VARIABLE}, or the prompt"))
    return name, password


def password_of(user: str, password_file: Path | None = None) -> str:
    """Return the password of a user from a file, the environment or the terminal. Raises InvalidInput."""
    if password_file is not None:
        from bascule.config.fields import read_secret

        try:
            return read_secret(f"file:{password_file}").splitlines()[0]
        except ValueError as error:
            raise InvalidInput(f"--password-file: {error}") from error
    if (password := os.environ.get(PASSWORD_VARIABLE)) is not None:
        return password
    if not sys.stdin.isatty():
        raise InvalidInput(f"no password of {user!r}: use --password-file, or set {PASSWORD_VARIABLE}")
    return getpass.getpass(f"Password of {user}: ")


def checked_token(token: str, what: str) -> str:
    """Return a token that a header of HTTP can have. ``what`` names it in an error, which does not show it. Raises InvalidInput."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput(f"{what} is empty, or has characters that no token has, such as a blank or a second line")
    return token


def configured_user(text: str) -> tuple[str, str]:
    """Return the name and the password of a user whom the broker shall accept. Raises InvalidInput."""
    name, colon, password = text.partition(":")
    if not (name and colon and password):
        raise InvalidInput(f"--user {name!r}...: must be NAME:file:PATH")
    if not password.startswith(("file:", "credential:")):
        note(_VISIBLE.format("--user", "use NAME:file:PATH, or broker.users_file"))
    return name, password


def warn_of_password(url: str) -> None:
    """Warn of a password in the URL of a broker."""
    login, at, _ = url.rpartition("@")
    if (at and ":" in login.rpartition("//")[2]) or "password=" in url.lower():
        note(_VISIBLE.format("--broker", "use --user"))
