"""The arguments of a request to the admin server: a JSON object of bounded size, depth and numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from starlette.requests import Request

from bascule.core.errors import InvalidInput

#: Maximum size in bytes of the arguments of an action, which are a few names.
BODY_BYTES_MAX: Final = 64 << 10
#: Maximum depth of the JSON of a request; the arguments of all actions are texts, true and false in one object.
DEPTH_MAX: Final = 8
#: Maximum number of digits of a number in a request: Python refuses to read numbers of thousands of digits.
DIGITS_MAX: Final = 19
#: A string, or a bracket outside of strings. A string without its end is one, too: otherwise another search would begin at each quotation
#: mark within it, and 64 KiB would take 20 seconds.
_STRING_OR_BRACKET: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class LengthRequired(InvalidInput):
    """The request does not state the length of its body."""

    http_status = 411


def number_in(name: str, text: str, lowest: int, highest: int) -> int:
    """Return the number in a parameter or in the path of a request. Raises InvalidInput."""
    if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX and lowest <= int(text) <= highest):
        raise InvalidInput(f"{name} {text!r:.20} must be a number from {lowest} to {highest}")
    return int(text)


async def arguments_of(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request. Raises InvalidInput."""
    if "transfer-encoding" in request.headers:
        raise LengthRequired("a chunked body is not supported; send the body with Content-Length")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise InvalidInput(f"the arguments have more than {BODY_BYTES_MAX} bytes")
    _check_depth(body)
    try:  # as text: of bytes, the parser would also accept UTF-16, in which quotes and brackets look otherwise
        arguments = json.loads(
            body.decode() or "{}", parse_constant=_no_number, parse_int=_integer, parse_float=_decimal, object_pairs_hook=_once_each
        )
    except ValueError as error:
        raise InvalidInput(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidInput("the arguments must be a JSON object")
    for name, value in arguments.items():
        if not all(map(_is_text, (name, *_texts(value)))):
            raise InvalidInput(f"argument {name!r:.60} must be Unicode text, but contains half of a surrogate pair")
    return arguments


def _check_depth(body: bytes) -> None:
    """Check the depth before the parser needs its stack. Raises InvalidInput."""
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(body):
        match found.group():
            case b"[" | b"{":
                depth += 1
            case b"]" | b"}":
                depth -= 1
        if depth > DEPTH_MAX:
            raise InvalidInput(f"the arguments are nested more than {DEPTH_MAX} levels deep")


def _integer(text: str) -> int:
    _check_digits(text)
    return int(text)


def _decimal(text: str) -> float:
    _check_digits(text)
    return float(text)


def _check_digits(text: str) -> None:
    if len(text) > DIGITS_MAX:
        raise ValueError(f"a number has {len(text)} characters; at most {DIGITS_MAX} are allowed")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value, whose depth is limited."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _is_text(value: str) -> bool:
    """Return whether a string can be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
