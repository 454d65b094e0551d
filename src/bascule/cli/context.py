"""``bascule context``: name brokers, and choose the broker of the commands. The option ``--context`` of these commands."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from bascule.cli.contexts import (
    CONTEXT_VARIABLE,
    ContextFile,
    ServerContext,
    change_contexts,
    chosen_context,
    read_contexts,
    shown,
)
from bascule.cli.expected_answers import begin_answers, unexpected_answer
from bascule.cli.login import checked_token
from bascule.cli.output import Format, FormatOption, note, show_document, show_rows, table
from bascule.core.errors import InvalidInput

COLUMNS: Final = ("current", "name", "url", "broker", "user")

commands = typer.Typer(
    help="Name brokers, and choose the broker of the commands.",
    epilog="Example:  bascule context add production --admin https://ann@broker.example:8672 --password-file ~/.bascule-password",
    no_args_is_help=True,
)
#: The option ``--context`` of the command that runs.
_option: ContextVar[str | None] = ContextVar("context", default=None)


def _names(incomplete: str) -> list[str]:
    try:
        return [name for name in read_contexts().contexts if name.startswith(incomplete)]
    except InvalidInput:
        return []


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context", autocompletion=_names)]


ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help=f"Use the server of this context (default: {CONTEXT_VARIABLE}, or the context of `bascule context use`)",
        show_default=False,
        autocompletion=_names,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module, and the option ``--context`` to all commands that talk to an admin server or a broker."""
    from bascule.cli.admin import AdminOption
    from bascule.cli.messages import BrokerOption

    for group in (app, *(each.typer_instance for each in app.registered_groups)):
        for command in () if group is None else group.registered_commands:
            if command.callback is not None and command.callback.__annotations__.keys() & {"admin", "broker"}:
                signature = inspect.signature(command.callback, eval_str=True)
                if any(each.annotation in (AdminOption, BrokerOption) for each in signature.parameters.values()):
                    command.callback = _with_context(command.callback, signature)
    app.add_typer(commands, name="context")


def _with_context(callback: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Return the function of a command with the option ``--context``, which reports answers of other servers and versions as errors."""

    @functools.wraps(callback)
    def command(*arguments: Any, context: str | None = None, **options: Any) -> Any:
        _option.set(context)
        begin_answers()
        try:
            return callback(*arguments, **options)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if (why := unexpected_answer(error)) is None:
                raise  # a defect of the command
            raise InvalidInput(f"the server gave another answer than this version of the command expects: {why:.200}") from error

    option = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ContextOption)
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    return command


def use_context_option(name: str | None) -> None:
    """Set the value of ``--context`` of the command whose arguments a shell completes, which does not run."""
    _option.set(name)


def context_of_command(url: str | None, *, config_given: bool, given_by: str = "--admin") -> tuple[str, ServerContext] | None:
    """Return the context of the command that runs, with its name; None if ``url`` or the settings apply.

    ``given_by`` is the option of ``url``. Raises InvalidInput.
    """
    option = _option.get()
    if url is None:
        return chosen_context(option, config_given=config_given)
    if option is not None:
        raise InvalidInput(f"{given_by} and --context exclude each other")
    return None


def broker_of(name: str, context: ServerContext, user: str) -> str:
    """Return the URL of the broker of a context, for a login as ``user`` ("": none).

    Raises InvalidInput, also if the login would be sent unencrypted to another machine.
    """
    if not context.broker:
        raise InvalidInput(
            f"context {name!r} has no address of a broker; give --broker URL, here or in `bascule context add {name}`, "
            "or let no context apply with `bascule context use --none`"
        )
    check_broker(context.broker, user, f"context {name!r}: broker")
    return context.broker


def check_broker(url: str, user: str, where: str) -> None:
    """Check the URL of the broker of a context, for a login as ``user`` ("": none). ``where`` says in an error where the URL is given.

    The URL has no login, since the context has one. Raises InvalidInput.
    """
    from bascule.client.url import BrokerUrl
    from bascule.config.fields import is_loopback

    address = BrokerUrl.parse(url)
    if "@" in url or address.user is not None or address.password is not None:
        raise InvalidInput(f"{where}: the URL must not have a user or a password; the user of the context is that of --admin")
    for each in address.endpoints if user else ():
        if not each.tls and not is_loopback(each.host):
            raise InvalidInput(f"{where}: the login of {user!r} would be sent unencrypted to {each}; use amqps")


@commands.command(
    epilog="Example:  bascule context add staging --admin https://broker.example:8672 --token-file /run/secrets/bascule --use"
)
def add(
    name: NameArgument,
    admin: Annotated[
        str, typer.Option("--admin", metavar="URL", help="Address of the admin server, perhaps with a user: https://USER@HOST:PORT")
    ],
    password_file: Annotated[
        Path | None,
        typer.Option("--password-file", help="Read the password of the user from the first line of this file", show_default=False),
    ] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="Read the token from this file", show_default=False)] = None,
    store_token: Annotated[
        bool, typer.Option("--store-token", help="Read a token from the terminal or standard input, and store it in the clear")
    ] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file", help="Trust the certificate authorities in this PEM file (default: those of the system)", show_default=False
        ),
    ] = None,
    broker: Annotated[
        str,
        typer.Option(
            "--broker",
            metavar="URL",
            help="Address of the broker for commands with messages: amqps://HOST[:PORT], or failover:(URL,URL)",
            show_default=False,
        ),
    ] = "",
    use: Annotated[bool, typer.Option("--use", help="Make it the current context")] = False,
) -> None:
    """Add a context, or replace it. The file of contexts has the paths of secrets, and no secrets without `--store-token`."""
    from bascule.cli.admin import check_encrypted, without_user
    from bascule.cli.admin_http import check_scheme

    url, user = without_user(admin.rstrip("/"))
    check_scheme(url, "--admin")
    if password_file is not None and not user:
        raise InvalidInput("--password-file is given without a user; give --admin https://USER@HOST:PORT")
    if sum((bool(user), token_file is not None, store_token)) > 1:
        raise InvalidInput("give one login: a user in the URL, --token-file or --store-token")
    if user or token_file is not None or store_token:
        check_encrypted(url, "the login")
    if broker:
        check_broker(broker, user, "--broker")
    token = _token() if store_token else ""
    context = ServerContext(url, user, _absolute(password_file), _absolute(token_file), token, _absolute(ca_file), broker)

    def change(content: ContextFile) -> ContextFile:
        changed = content.with_context(name, context)
        return replace(changed, current=name) if use else changed

    change_contexts(change)
    note(f"context {name}: {url}" + (" (current)" if use else ""))


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.expanduser().absolute())


def _token() -> str:
    if sys.stdin.isatty():
        token: str = typer.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline().strip()
    if not token:
        raise InvalidInput("no token was given; give it on one line of standard input")
    return checked_token(token, "the token")


@commands.command("use", epilog="Example:  bascule context use production")
def use_context(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the context", autocompletion=_names, show_default=False)] = "",
    none: Annotated[bool, typer.Option("--none", help="Use no context: the settings apply")] = False,
) -> None:
    """Make a context the current one, whose servers the commands use."""
    if bool(name) == none:
        raise InvalidInput("give the name of a context, or --none")

    def change(content: ContextFile) -> ContextFile:
        if name:
            content.named(name)
        return replace(content, current=name)

    change_contexts(change)
    note(f"current context: {name or 'none'}")


@commands.command("list", epilog="Example:  bascule context list -o wide")
def list_contexts(output: FormatOption = Format.TABLE) -> None:
    """List the contexts. Tokens are not shown."""
    content = read_contexts()
    show_rows([shown(name, content) for name in sorted(content.contexts)], COLUMNS, output)


@commands.command("show", epilog="Example:  bascule context show production")
def show_context(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name (default: the current context)", autocompletion=_names)] = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Show one context. A token is not shown."""
    content = read_contexts()
    if not name and not content.current:
        raise InvalidInput("there is no current context; give the name of a context")
    document = shown(name or content.current, content)
    show_document(document, output, lambda: table(("context", ""), document.items()))


@commands.command("remove", epilog="Example:  bascule context remove staging")
def remove_context(name: NameArgument) -> None:
    """Remove a context. The files that it names stay."""
    change_contexts(lambda content: content.without(name))
    note(f"removed context {name}")
