"""The client of a broker's admin server for commands."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.masking import mask_url

AdminOption = Annotated[
    str | None,
    typer.Option("--admin", metavar="URL", help="Address of the admin server [default: admin.host and .port]", show_default=False),
]

#: Timeout, in seconds, of a query, which the broker answers from memory.
LOOK_TIMEOUT_S = 10.0
#: Timeout, in seconds, of an action, which may process a whole queue and waits for Kafka.
ACT_TIMEOUT_S = 600.0


class AdminApiClient:
    """A client of a broker's admin server."""

    def __init__(self, url: str | None, config: Path | None) -> None:
        """Connect to ``url``, or to the address in the settings, with the token in the settings. Raises ConfigError."""
        from bascule.config import load

        settings = load(config).settings.admin
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._url = (url or f"{settings.url_scheme}://{host}:{settings.port}").rstrip("/")
        self._headers = {"content-type": "application/json"}
        self._context: ssl.SSLContext | None = None
        if settings.token is not None:
            self._headers["authorization"] = f"Bearer {settings.token.get_secret_value()}"
        if settings.tls.certificate is not None and url is None:
            from bascule.server.tls import client_context

            self._context = client_context(settings.tls.certificate, "admin.tls")

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


def _error(url: str, code: int, body: bytes) -> InvalidInput | Unavailable:
    """Return the error that the broker reported."""
    try:
        text = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        text = f"{mask_url(url)}: answered {code}"
    return (Unavailable if code >= 500 else InvalidInput)(text)
