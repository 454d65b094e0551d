"""Arguments of requests to the admin server: numbers, and a JSON object whose check takes little time."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import Request
from starlette.types import Message

from bascule.core.errors import InvalidInput
from bascule.server.admin_arguments import BODY_BYTES_MAX, DEPTH_MAX, arguments_of, number_in
from tests.support.costs import COST_S_MAX, processor_s


@pytest.mark.parametrize("text", ["", "-1", "1.0", "+1", "\u0663", "10", "9" * 5000, "0x1"])
def test_all_numbers_of_requests_are_checked_by_one_rule(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^n '.{0,20} must be a number from 0 to 9$"):
        number_in("n", text, 0, 9)
    assert number_in("n", "007", 0, 9) == 7


def arguments_in(body: bytes) -> object:
    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    return asyncio.run(arguments_of(Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)))


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b'\\"' * (BODY_BYTES_MAX // 2 - 1),
        b'{"a": "' + b'\\"' * (BODY_BYTES_MAX // 2 - 4),
        b'"' * BODY_BYTES_MAX,
        b'"\\' * (BODY_BYTES_MAX // 2),
        b"[" * BODY_BYTES_MAX,
        b'[""' * (BODY_BYTES_MAX // 3),
    ],
    ids=["escaped quotes", "escaped quotes in an object", "quotes", "quotes and escapes", "brackets", "brackets and strings"],
)
def test_arguments_are_refused_in_a_time_proportional_to_their_size(body: bytes) -> None:
    def refused() -> None:
        with pytest.raises(InvalidInput, match=r"not valid JSON|nested more than"):
            arguments_in(body)

    assert processor_s(refused) < COST_S_MAX


def test_brackets_in_strings_are_no_levels() -> None:
    given = {"a": "[" * 100 + '\\"' + "{" * 100, "b": [[]]}
    assert arguments_in(json.dumps(given).encode()) == given
    with pytest.raises(InvalidInput, match="nested more than"):
        arguments_in(b'{"a": "\\"", "b": ' + b"[" * DEPTH_MAX + b"]" * DEPTH_MAX + b"}")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_arguments_in_another_encoding_than_utf_8_are_refused(encoding: str) -> None:
    nested = '{"a": ["\u2200", ' + "[" * 5_000 + "]" * 5_000 + "]}"  # a byte of this character is a quote in UTF-8
    for text in ('{"a": 1}', nested):
        with pytest.raises(InvalidInput, match=r"not valid JSON|nested more than"):
            arguments_in(text.encode(encoding))
