"""The client of a broker's admin server for commands."""

from __future__ import annotations

import base64
import json
import urllib.parse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bascule.cli.context import context_of_command
from bascule.cli.login import password_of
from bascule.core.defaults import OWNER_TOKEN_FILE
from bascule.core.environment import PASSWORD_VARIABLE
from bascule.core.errors import InvalidInput, Unavailable
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
#: Characters of an answer in plain text that an error quotes.
REASON_MAX = 300


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
        if context.user:
            password_file = Path(context.password_file) if context.password_file else None
            self._headers["authorization"] = _basic(context.url, context.user, password_file)
        elif context.token or context.token_file:
            _check_encrypted(context.url, f"the token of context {name!r}")
            self._headers["authorization"] = f"Bearer {context.token or _token_in(name, context.token_file)}"
        if context.ca_file:
            self._context = _trusting(context.ca_file, f"context {name!r}")

    def _use_settings(self, url: str | None, config: Path | None) -> None:
        from bascule.config import load
        from bascule.config.fields import is_loopback

        settings = load(config).settings
        admin = settings.admin
        host = f"[{admin.host}]" if ":" in admin.host else admin.host
        self._url, user = without_user((url or f"{admin.url_scheme}://{host}:{admin.port}").rstrip("/"))
        token = next((each for each in (admin.token, admin.edit_token, admin.view_token) if each is not None), None)
        if user:
            self._headers["authorization"] = _basic(self._url, user)
        elif token is not None:
            self._headers["authorization"] = f"Bearer {token.get_secret_value()}"
        elif is_loopback(_host(self._url)) and (owner := _owner_token(settings.embedded.data_dir)):
            self._headers["authorization"] = f"Bearer {owner}"
        if admin.tls.certificate is not None and url is None:
            from bascule.server.tls import client_context

            self._context = client_context(admin.tls.certificate, "admin.tls")

    def look(self, path: str, **parameters: str | int | list[str]) -> Any:
        """Return the JSON document at a path. Raises InvalidInput, Unavailable."""
        return _parsed(self._url, self.download(path, **parameters))

    def download(self, path: str, **parameters: str | int | list[str]) -> bytes:
        """Return the content at a path. Raises InvalidInput, Unavailable."""
        query = f"?{urllib.parse.urlencode(parameters, doseq=True)}" if parameters else ""
        return self._ask(f"{self._url}/{path}{query}", None, LOOK_TIMEOUT_S)

    def act(self, action: str, **arguments: str | bool) -> dict[str, Any]:
        """Run an action and return its result. Raises InvalidInput, Unavailable."""
        answer: dict[str, Any] = _parsed(self._url, self._ask(f"{self._url}/{action}", json.dumps(arguments).encode(), ACT_TIMEOUT_S))
        return answer

    def send(self, method: str, path: str, **arguments: str | int) -> dict[str, Any]:
        """Send a request, and return its result. Raises InvalidInput, Unavailable."""
        body = json.dumps(arguments).encode()
        answer: dict[str, Any] = _parsed(self._url, self._ask(f"{self._url}/{path}", body, ACT_TIMEOUT_S, method))
        return answer

    def _ask(self, url: str, body: bytes | None, timeout_s: float, method: str | None = None) -> bytes:
        import http.client  # here, since the import of TLS takes a third of the time of `bascule --help`
        import urllib.error
        import urllib.request

        try:
            request = urllib.request.Request(url, body, self._headers, method=method)
            with urllib.request.urlopen(request, timeout=timeout_s, context=self._context) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            with error:
                raise _error(url, error.code, error.read()) from None
        except ValueError as error:
            raise InvalidInput(mask_url(f"invalid URL of the admin server {url}: {error}")) from error
        except http.client.InvalidURL as error:
            raise InvalidInput(mask_url(f"invalid URL of the admin server {url}: {error}")) from None
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(mask_url(f"no broker answers at {url}: {getattr(error, 'reason', None) or error}")) from error


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
    _check_encrypted(url, f"the password of {user!r}")
    return f"Basic {base64.b64encode(f'{user}:{password_of(user, password_file)}'.encode()).decode()}"


def _check_encrypted(url: str, what: str) -> None:
    from bascule.config.fields import is_loopback

    if not url.startswith("https:") and not is_loopback(_host(url)):
        raise InvalidInput(f"{what} would be sent unencrypted to {url}; use https")


def _token_in(context: str, file: str) -> str:
    from bascule.config.fields import read_secret

    try:
        return read_secret(f"file:{file}")
    except ValueError as error:
        raise InvalidInput(f"token_file of context {context!r}: {error}") from error


def _trusting(ca_file: str, where: str) -> ssl.SSLContext:
    """Return a context of TLS that trusts the authorities in a file alone. Raises InvalidInput."""
    import ssl

    from bascule.server.tls import trust

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust(context, Path(ca_file), f"{where}: ca_file")
    return context


def _owner_token(data_dir: Path) -> str:
    """Return the token of a broker with this data directory; "" if there is none for the user of this process."""
    with suppress(OSError, UnicodeDecodeError):
        return (data_dir / OWNER_TOKEN_FILE).read_text().strip()
    return ""


def _parsed(url: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise InvalidInput(mask_url(f"{url} is not the admin server of a broker: its answer is not JSON")) from error


def _error(url: str, code: int, body: bytes) -> InvalidInput | Unavailable:
    """Return the error that the broker reported."""
    try:
        text = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        said = body.decode(errors="replace").strip()
        reason = f": {said}" if said and len(said) <= REASON_MAX and said.isprintable() else ""  # not the page of a proxy
        text = f"{mask_url(url)}: answered {code}{reason}"
    return (Unavailable if code >= 500 else InvalidInput)(text)
