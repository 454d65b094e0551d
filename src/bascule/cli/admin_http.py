"""Requests to an admin server. A request has the login of a user, so it goes to no other server than the one that was named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NoReturn

from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.masking import mask_url

if TYPE_CHECKING:
    import ssl
    import urllib.request

#: Schemes of an admin server.
SCHEMES: Final = ("https://", "http://")
#: Characters of an answer in plain text that an error quotes.
REASON_MAX: Final = 300


def check_scheme(url: str, where: str) -> None:
    """Check that a URL is for HTTP. ``where`` says in an error where it is given. Raises InvalidInput."""
    if not url.startswith(SCHEMES):
        raise InvalidInput(f"{where}: {mask_url(url)} must begin with https:// or http://")


def ask(
    url: str, body: bytes | None, headers: dict[str, str], *, timeout_s: float, method: str | None, tls: ssl.SSLContext | None
) -> bytes:
    """Send a request and return the content of the answer. Raises InvalidInput, Unavailable."""
    import http.client  # here, since the import of TLS takes a third of the time of `bascule --help`
    import urllib.error
    import urllib.request

    try:
        request = urllib.request.Request(url, body, headers, method=method)
        with _opener(tls).open(request, timeout=timeout_s) as answer:
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


def parsed(url: str, content: bytes) -> Any:
    """Return the JSON document in an answer. Raises InvalidInput."""
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(mask_url(f"{url} is not the admin server of a broker: its answer is not JSON")) from error


def _opener(tls: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """Return what sends a request to its server alone: not through the proxies of the environment, and not on to where it redirects."""
    import urllib.request

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(context=tls), urllib.request.UnknownHandler(),
        urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _error(url: str, code: int, body: bytes) -> InvalidInput | Unavailable:
    """Return the error that the broker reported."""
    if 300 <= code < 400:
        where = "redirects are not followed; give the address of the admin server itself"
        return InvalidInput(mask_url(f"{url}: answered {code}; {where}"))
    try:
        text = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        said = body.decode(errors="replace").strip()
        reason = f": {said}" if said and len(said) <= REASON_MAX and said.isprintable() else ""  # not the page of a proxy
        text = f"{mask_url(url)}: answered {code}{reason}"
    return (Unavailable if code >= 500 else InvalidInput)(text)
