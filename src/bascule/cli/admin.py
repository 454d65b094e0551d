"""The client of a broker's admin server for commands."""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bascule.cli.admin_http import ask, check_scheme, parsed
from bascule.cli.context import context_of_command
from bascule.cli.expected_answers import note_answer
from bascule.cli.login import checked_token, password_of
from bascule.core.defaults import OWNER_TOKEN_FILE
from bascule.core.environment import PASSWORD_VARIABLE
from bascule.core.errors import InvalidInput
from bascule.core.masking import mask_url

if TYPE_CHECKING:
    import ssl

    from bascule.cli.contexts import ServerContext

AdminOption = Annotated[
    str | None,
    typer.Option(
        "--admin",
        metavar="URL",
        help="Address of the admin server, perhaps with a user: https://USER@HOST:PORT (default: admin.host and .port)",
        show_default=False,
    ),
]

#: Timeout, in seconds, of a query, which the broker answers from memory.
LOOK_TIMEOUT_S = 10.0
#: Timeout, in seconds, of an action, which may process a whole queue and waits for Kafka.
ACT_TIMEOUT_S = 600.0


def with_query(path: str, parameters: Mapping[str, Any]) -> str:
    """Return a path with parameters in its query."""
    return f"{path}?{urllib.parse.urlencode(parameters, doseq=True)}" if parameters else path


class AdminApiClient:
    """A client of a broker's admin server."""

    def __init__(self, url: str | None, config: Path | None) -> None:
        """Connect to ``url``, else to the server of the context of the command, else to the address in the settings.

        Without a context, the client logs in as the user in ``url``, else with a token from the settings, else with the token in the data
        directory of a broker on this machine. Raises ConfigError, InvalidInput.
        """
        self._headers = {"content-type": "application/json"}
        self._context: ssl.SSLContext | None = None
        found = context_of_command(url, config_given=config is not None)
        if found is None:
            self._use_settings(url, config)
        else:
            self._use_context(*found)

    def _use_context(self, name: str, context: ServerContext) -> None:
        self._url = context.url
        check_scheme(context.url, f"context {name!r}")
        if context.user:
            password_file = Path(context.password_file) if context.password_file else None
            self._headers["authorization"] = _basic(context.url, context.user, password_file)
        elif context.token or context.token_file:
            what = f"the token of context {name!r}"
            check_encrypted(context.url, what)
            self._headers["authorization"] = _bearer(context.token or _token_in(name, context.token_file), what)
        if context.ca_file:
            from bascule.server.tls import authorities_context

            self._context = authorities_context(Path(context.ca_file), f"context {name!r}: ca_file")

    def _use_settings(self, url: str | None, config: Path | None) -> None:
        from bascule.config import load

        settings = load(config).settings
        admin = settings.admin
        host = f"[{admin.host}]" if ":" in admin.host else admin.host
        self._url, user = without_user((url or f"{admin.url_scheme}://{host}:{admin.port}").rstrip("/"))
        check_scheme(self._url, "address of the admin server")
        token = next((each for each in ("token", "edit_token", "view_token") if getattr(admin, each) is not None), None)
        if user:
            self._headers["authorization"] = _basic(self._url, user)
        elif token is not None:
            if not settings.broker.allow_insecure:
                check_encrypted(self._url, f"admin.{token}", ", or accept the risk with broker.allow_insecure = true")
            self._headers["authorization"] = _bearer(getattr(admin, token).get_secret_value(), f"admin.{token}")
        elif _is_here(self._url) and (owner := _owner_token(settings.embedded.data_dir)):
            self._headers["authorization"] = _bearer(owner, f"the token in {settings.embedded.data_dir}")
        if admin.tls.certificate is not None and url is None:
            from bascule.server.tls import client_context

            self._context = client_context(admin.tls.certificate, "admin.tls")

    def look(self, path: str, /, **parameters: str | int | list[str]) -> Any:
        """Return the JSON document at a path. Raises InvalidInput, Unavailable."""
        return self.look_within(LOOK_TIMEOUT_S, path, **parameters)

    def look_within(self, timeout_s: float, path: str, /, **parameters: str | int | list[str]) -> Any:
        """Return the JSON document at a path, for which the broker needs some time. Raises InvalidInput, Unavailable."""
        content = self.download_within(timeout_s, path, **parameters)
        answer = parsed(self._url, content)
        note_answer("GET", path, content)
        return answer

    def download(self, path: str, /, **parameters: str | int | list[str]) -> bytes:
        """Return the content at a path. Raises InvalidInput, Unavailable."""
        return self.download_within(LOOK_TIMEOUT_S, path, **parameters)

    def download_within(self, timeout_s: float, path: str, /, **parameters: str | int | list[str]) -> bytes:
        """Return the content at a path, for which the broker needs some time. Raises InvalidInput, Unavailable."""
        return self._ask(f"{self._url}/{with_query(path, parameters)}", None, timeout_s)

    def act(self, action: str, **arguments: str | bool) -> dict[str, Any]:
        """Run an action and return its result. Raises InvalidInput, Unavailable."""
        return self.send("POST", action, **arguments)

    def send(self, method: str, path: str, /, **arguments: Any) -> dict[str, Any]:
        """Send a request, and return its result. Raises InvalidInput, Unavailable."""
        content = self.exchange(method, path, arguments)
        answer: dict[str, Any] = parsed(self._url, content)
        note_answer(method, path, content)
        return answer

    def exchange(self, method: str, path: str, arguments: Mapping[str, Any]) -> bytes:
        """Send a request that changes something, and return the content of its answer. Raises InvalidInput, Unavailable."""
        return self._ask(f"{self._url}/{path}", json.dumps(arguments).encode(), ACT_TIMEOUT_S, method)

    def _ask(self, url: str, body: bytes | None, timeout_s: float, method: str | None = None) -> bytes:
        return ask(url, body, self._headers, timeout_s=timeout_s, method=method, tls=self._context)


def server_of_command(url: str | None, config: Path | None) -> AdminApiClient | None:
    """Return the admin server that ``--admin`` or a context names; None if only the settings apply. Raises ConfigError, InvalidInput."""
    if url is None and context_of_command(url, config_given=config is not None) is None:
        return None
    return AdminApiClient(url, config)


def _host(url: str) -> str:
    try:
        return urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return ""  # the request reports the error


def without_user(url: str) -> tuple[str, str]:
    """Return a URL without its user, and the user. Raises InvalidInput for a password, which every user of the machine could see."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    login, at, place = authority.rpartition("@")
    if not at:
        return url, ""
    if ":" in login:
        raise InvalidInput(f"the URL {mask_url(url)} must not have a password; set {PASSWORD_VARIABLE}, or enter the password when asked")
    return f"{scheme}{separator}{place}{slash}{path}", urllib.parse.unquote(login)


def _basic(url: str, user: str, password_file: Path | None = None) -> str:
    """Return the header with the login of a user for the admin server at ``url``. Raises InvalidInput."""
    check_encrypted(url, f"the password of {user!r}")
    if ":" in user:
        raise InvalidInput(f"user {user!r:.60}: a user whose name has a colon cannot log in with a password over HTTP")
    return f"Basic {base64.b64encode(f'{user}:{password_of(user, password_file)}'.encode()).decode()}"


def _bearer(token: str, what: str) -> str:
    return f"Bearer {checked_token(token, what)}"


def check_encrypted(url: str, what: str, else_: str = "") -> None:
    """Check that nobody on a network can read a login. ``what`` names it in an error, which ends with ``else_``. Raises InvalidInput."""
    if not url.startswith("https:") and not _is_here(url):
        raise InvalidInput(f"{what} would be sent unencrypted to {url}; use https{else_}")


def _is_here(url: str) -> bool:
    """Return whether a URL leads to this machine. The kernel connects to loopback for the address that stands for all interfaces."""
    from bascule.config.fields import is_loopback

    host = _host(url)
    return is_loopback(host) or host in ("0.0.0.0", "::")


def _token_in(context: str, file: str) -> str:
    from bascule.config.fields import read_secret

    try:
        return read_secret(f"file:{file}")
    except ValueError as error:
        raise InvalidInput(f"token_file of context {context!r}: {error}") from error


def _owner_token(data_dir: Path) -> str:
    """Return the token of a broker with this data directory; "" if there is none for the user of this process."""
    with suppress(OSError, UnicodeDecodeError):
        return (data_dir / OWNER_TOKEN_FILE).read_text().strip()
    return ""
