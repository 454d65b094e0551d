"""``bascule user``: change the file of users, create password hashes for the settings, and explain permissions."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from bascule.amqp.verifiers import ITERATIONS, ITERATIONS_MAX, SALT_BYTES, Verifier
from bascule.cli.config import ConfigOption
from bascule.cli.output import Format, FormatOption, line, note, show_document, show_rows
from bascule.core.errors import InvalidInput
from bascule.core.permissions import Permission

#: The minimum of the standard (RFC 7677, section 4).
ITERATIONS_MIN = 4096

#: Exit status of ``bascule user can`` if the user may not.
DENIED_STATUS = 1

NameArgument = Annotated[str, typer.Argument(help="Name of the user")]
IterationsOption = Annotated[
    int,
    typer.Option(
        "--iterations",
        min=ITERATIONS_MIN,
        max=ITERATIONS_MAX,
        help="Number of hash iterations; more iterations make it slower to guess the password, and to log in",
    ),
]
PasswordFileOption = Annotated[
    Path | None, typer.Option("--password-file", help="Read the password from the first line of this file", show_default=False)
]
FileOption = Annotated[Path | None, typer.Option("--file", help="File of users (default: broker.users_file)", show_default=False)]

commands = typer.Typer(
    help="Users, their passwords and permissions.", epilog="Example:  bascule user add ann --role sales", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="user")


@commands.callback()
def _root() -> None:
    """Users, their passwords and permissions."""


@commands.command(epilog="Example:  bascule user can ann send orders.eu")
def can(
    user: Annotated[str, typer.Argument(help="Name of the user; `anonymous` is a client without a login")],
    permission: Annotated[Permission, typer.Argument(help="Permission, in the words of Artemis")],
    address: Annotated[str, typer.Argument(help="Address")],
    role: Annotated[
        list[str] | None, typer.Option("--role", help="Role that the token of the user gives; repeat it for more roles")
    ] = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Say whether the settings give a user a permission on an address, and which rule decides. Exit with 1 if they do not."""
    from bascule.config import load
    from bascule.server.divert_users import pipelines_of
    from bascule.server.policies import permissions_of
    from bascule.server.user_directory import read_users, roles_of

    settings = load(config).settings
    of_tokens = settings.broker.oidc.roles
    given = frozenset(role or ())
    if unknown := given - frozenset(of_tokens):
        raise InvalidInput(f"no token gives the role {min(unknown)!r}; broker.oidc.roles has {', '.join(of_tokens) or 'none'}")
    decision = permissions_of(settings, roles_of(settings, read_users(settings))).decide(user, permission, address, given)

    def draw() -> None:
        line(f"{'allowed' if decision.allowed else 'denied'}: {decision.reason}")
        if pipelines := pipelines_of(settings, user):
            line(f"pipelines that act as the user: {', '.join(pipelines)}")
        if of_tokens and not given:
            line(f"a token may also give roles, as --role: {', '.join(of_tokens)}")

    show_document(decision._asdict(), output, draw)
    if not decision.allowed:
        raise typer.Exit(DENIED_STATUS)


@commands.command("hash", epilog='Example:  bascule user hash    (then, in the table broker.users:  ann = "SCRAM-SHA-256$...")')
def hash_password(iterations: IterationsOption = ITERATIONS, password_file: PasswordFileOption = None) -> None:
    """Read a password from the terminal, standard input or a file, and print its hash for the table `broker.users`."""
    from bascule.cli.user_edits import given_password

    line(str(Verifier.of(given_password(password_file), secrets.token_bytes(SALT_BYTES), iterations)))


@commands.command(epilog="Example:  bascule user add ann --role sales --role shipping")
def add(
    name: NameArgument,
    role: Annotated[list[str] | None, typer.Option("--role", help="Role of the user; may be repeated", show_default=False)] = None,
    iterations: IterationsOption = ITERATIONS,
    password_file: PasswordFileOption = None,
    no_password: Annotated[bool, typer.Option("--no-password", help="The user logs in by certificate or token only")] = False,
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Add a user to the file of users, which is created if it does not exist. A running broker knows the user within two seconds.

    The password comes from the terminal, from a line of standard input, or from a file.
    """
    from bascule.cli import user_edits

    if no_password and password_file is not None:
        raise InvalidInput("--no-password excludes --password-file")
    target = user_edits.target(file, config)
    if no_password:
        note(user_edits.add_without_password(target, name, role or []))
    else:
        note(user_edits.add(target, name, role or [], iterations, password_file))


@commands.command(epilog="Example:  bascule user certificate ann.pem")
def certificate(
    certificate: Annotated[Path, typer.Argument(help="PEM file with the certificate of a client")],
    admin: Annotated[bool, typer.Option("--admin", help="Apply [admin.tls] in place of [broker.tls]")] = False,
    config: ConfigOption = None,
) -> None:
    """Print the user of a client's certificate, by user_from and user_rules. The command does not check who has signed the certificate."""
    from bascule.config import load
    from bascule.server.certificate_users import user_of_file

    settings = load(config).settings
    where, tls = ("admin.tls", settings.admin.tls) if admin else ("broker.tls", settings.broker.tls)
    if tls.client_ca is None:
        raise InvalidInput(f"{where}.client_ca is not set, so no certificate is a login")
    line(user_of_file(tls, certificate))


@commands.command(epilog="Example:  bascule user passwd ann")
def passwd(
    name: NameArgument,
    iterations: IterationsOption = ITERATIONS,
    password_file: PasswordFileOption = None,
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Change the password of a user in the file of users. A running broker ends the user's connections."""
    from bascule.cli import user_edits

    note(user_edits.change_password(user_edits.target(file, config), name, iterations, password_file))


@commands.command(epilog="Example:  bascule user remove ann")
def remove(name: NameArgument, file: FileOption = None, config: ConfigOption = None) -> None:
    """Remove a user from the file of users. A running broker ends the user's connections."""
    from bascule.cli import user_edits

    note(user_edits.remove(user_edits.target(file, config), name))


@commands.command(epilog="Example:  bascule user roles ann sales shipping    (ann has these two roles from now on)")
def roles(
    name: NameArgument,
    role: Annotated[list[str] | None, typer.Argument(help="The roles that the user has from now on", show_default=False)] = None,
    none: Annotated[bool, typer.Option("--none", help="Take all roles from the user")] = False,
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Set the roles of a user in the file of users. Without a role, print the roles that the user has in the file.

    If the user loses a role, a running broker ends the user's connections.
    """
    from bascule.cli import user_edits

    if role and none:
        raise InvalidInput("--none excludes roles; give the roles that the user has from now on, or --none")
    target = user_edits.target(file, config)
    if role or none:
        note(user_edits.set_roles(target, name, role or []))
    else:
        for each in user_edits.existing(target, name).roles:
            line(each)


@commands.command("list", epilog="Example:  bascule user list --format json")
def list_users(
    file: Annotated[
        Path | None, typer.Option("--file", help="File of users, in place of the users of the settings", show_default=False)
    ] = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the users of the settings and of the file of users, with their roles and the number of hash iterations."""
    from bascule.config import Settings, load
    from bascule.server.user_directory import listed_users

    settings = load(config).settings if file is None else Settings.model_validate({"broker": {"users_file": file}})
    users = [user._asdict() for user in listed_users(settings)]
    show_rows(users, ("user", "roles", "source", "iterations"), output)
