"""The client of a broker's admin server for commands."""

from __future__ import annotations

import base64
import getpass
import http.client
import json
import os
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from bascule.core.defaults import OWNER_TOKEN_FILE
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.masking import mask_url

AdminOption = Annotated[
    str | None,
    typer.Option(
        "--admin",
        metavar="URL",
        help="Address of the admin server, perhaps with a user: https://USER@HOST:PORT (default: admin.host and .port)",
        show_default=False,
    ),
]

#: The environment variable with the password of the user in the URL.
PASSWORD_VARIABLE = "BASCULE_PASSWORD"
#: Timeout, in seconds, of a query, which the broker answers from memory.
LOOK_TIMEOUT_S = 10.0
#: Timeout, in seconds, of an action, which may process a whole queue and waits for Kafka.
ACT_TIMEOUT_S = 600.0


class AdminApiClient:
    """A client of a broker's admin server."""

    def __init__(self, url: str | None, config: Path | None) -> None:
        """Connect to ``url``, or to the address in the settings. Raises ConfigError, InvalidInput.

        The client logs in as the user in ``url``, else with a token from the settings, else with the token in the data directory of a
        broker on this machine.
        """
        from bascule.config import load
        from bascule.config.fields import is_loopback

        settings = load(config).settings
        admin = settings.admin
        host = f"[{admin.host}]" if ":" in admin.host else admin.host
        self._url, user = _without_user((url or f"{admin.url_scheme}://{host}:{admin.port}").rstrip("/"))
        self._headers = {"content-type": "application/json"}
        self._context: ssl.SSLContext | None = None
        token = next((each for each in (admin.token, admin.edit_token, admin.view_token) if each is not None), None)
        if user:
            self._headers["authorization"] = f"Basic {base64.b64encode(f'{user}:{_password(self._url, user)}'.encode()).decode()}"
        elif token is not None:
            self._headers["authorization"] = f"Bearer {token.get_secret_value()}"
        elif is_loopback(_host(self._url)) and (owner := _owner_token(settings.embedded.data_dir)):
            self._headers["authorization"] = f"Bearer {owner}"
        if admin.tls.certificate is not None and url is None:
            from bascule.server.tls import client_context

            self._context = client_context(admin.tls.certificate, "admin.tls")

    def look(self, path: str, **parameters: str | int) -> Any:
        """Return the JSON document at a path. Raises InvalidInput, Unavailable."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        return self._ask(f"{self._url}/{path}{query}", None, LOOK_TIMEOUT_S)

    def act(self, action: str, **arguments: str | bool) -> dict[str, Any]:
        """Run an action and return its result. Raises InvalidInput, Unavailable."""
        answer: dict[str, Any] = self._ask(f"{self._url}/{action}", json.dumps(arguments).encode(), ACT_TIMEOUT_S)
        return answer

    def _ask(self, url: str, body: bytes | None, timeout_s: float) -> Any:
        try:
            request = urllib.request.Request(url, body, self._headers)
            with urllib.request.urlopen(request, timeout=timeout_s, context=self._context) as answer:
                return json.load(answer)
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


def _without_user(url: str) -> tuple[str, str]:
    """Return a URL without its user, and the user. Raises InvalidInput for a password, which every user of the machine could see."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    login, at, place = authority.rpartition("@")
    if not at:
        return url, ""
    if ":" in login:
        raise InvalidInput(f"the URL {mask_url(url)} must not have a password; set {PASSWORD_VARIABLE}, or enter the password when asked")
    return f"{scheme}{separator}{place}{slash}{path}", urllib.parse.unquote(login)


def _password(url: str, user: str) -> str:
    """Return the password of a user for the admin server at ``url``. Raises InvalidInput."""
    from bascule.config.fields import is_loopback

    if not url.startswith("https:") and not is_loopback(_host(url)):
        raise InvalidInput(f"the password of {user!r} would be sent unencrypted to {url}; use https")
    if (password := os.environ.get(PASSWORD_VARIABLE)) is not None:
        return password
    if not sys.stdin.isatty():
        raise InvalidInput(f"set {PASSWORD_VARIABLE} to the password of {user!r}")
    return getpass.getpass(f"Password of {user}: ")


def _owner_token(data_dir: Path) -> str:
    """Return the token of a broker with this data directory; "" if there is none for the user of this process."""
    with suppress(OSError, UnicodeDecodeError):
        return (data_dir / OWNER_TOKEN_FILE).read_text().strip()
    return ""


def _error(url: str, code: int, body: bytes) -> InvalidInput | Unavailable:
    """Return the error that the broker reported."""
    try:
        text = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        text = f"{mask_url(url)}: answered {code}"
    return (Unavailable if code >= 500 else InvalidInput)(text)
