"""``bascule api``: any request to an admin server, with the login and the context of the other commands."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Final

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.config import ConfigOption
from bascule.core.errors import InvalidInput

#: How long to wait for the life of a message, in seconds, as `bascule why` does.
TIMEOUT_S: Final = 60.0
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(epilog="Example:  bascule api GET /metrics")(api)


def api(
    method: Annotated[str, typer.Argument(metavar="METHOD", help=f"One of {', '.join(METHODS)}")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="Path of the request, such as /queues/create")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Parameters of GET, or members of the JSON object that is sent", show_default=False),
    ] = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
) -> None:
    """Send a request to the admin server, and write the body of the answer to standard output, byte by byte.

    A member that is JSON is sent as JSON, and any other one as a text. `bascule api GET /openapi.json` describes all requests.
    """
    verb = method.upper()
    if verb not in METHODS:
        raise InvalidInput(f"method {method!r:.60} must be one of {', '.join(METHODS)}")
    if not path.startswith("/"):
        raise InvalidInput(f"path {path!r:.60} must begin with /")
    given = [_argument(each) for each in arguments or ()]
    client = AdminApiClient(admin, config)
    if verb == "GET":
        parameters: dict[str, str | int | list[str]] = {}
        for name, value in given:
            known = parameters.get(name)
            parameters[name] = [*known, value] if isinstance(known, list) else value if known is None else [str(known), value]
        if "?" in path and parameters:
            raise InvalidInput(f"path {path!r:.60} already has parameters; give all parameters in the path, or all of them behind it")
        content = client.download_within(TIMEOUT_S, path[1:], **parameters)
    else:
        if twice := sorted({name for number, (name, _) in enumerate(given) if name in dict(given[:number])}):
            raise InvalidInput(f"member {twice[0]!r:.60} is given more than once; give a JSON array for several values")
        content = client.exchange(verb, path[1:], {name: _value(value) for name, value in given})
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def _argument(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise InvalidInput(f"{text!r:.60} must be NAME=VALUE")
    return name, value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
