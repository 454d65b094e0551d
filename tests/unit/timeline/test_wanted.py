"""Message ids as users write them, and as messages have them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from bascule.amqp.types import ULong
from bascule.core.errors import InvalidInput
from bascule.jms.ids import message_id_text
from bascule.jms.sections import PROPERTIES, VALUE, message_id_of, section_bytes
from bascule.timeline import wanted as wanted_module
from bascule.timeline.wanted import ID_LENGTH_MAX, WantedId, has

UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")


def message(identity: Any) -> bytes:
    return section_bytes(PROPERTIES, [identity]) + section_bytes(VALUE, "ID:other")


@pytest.mark.parametrize(
    "identity", ["ID:a:1", "plain", "é", UUID, ULong(0), ULong(7), ULong(1 << 40), b"\x01\x02", b"", "ID:AMQP_UUID:x"], ids=repr
)
def test_id_as_the_broker_shows_it_finds_its_message(identity: Any) -> None:
    text, body = message_id_text(identity), message(identity)
    wanted = WantedId(text)
    assert wanted.may_be_in(body)
    assert wanted.is_of(body)
    assert wanted.is_written(text)
    assert message_id_of(body) == text
    assert not WantedId("ID:other").is_of(body)


@pytest.mark.parametrize(("text", "identity"), [("a:1", "ID:a:1"), ("plain", "plain"), ("ID:plain", "ID:plain"), (str(UUID), UUID)])
def test_prefix_is_optional(text: str, identity: Any) -> None:
    assert WantedId(text).is_of(message(identity))


@pytest.mark.parametrize("body", [b"", b"\x00", section_bytes(VALUE, "a"), message(["list"]), message({"a": 1}), message(1.5)], ids=repr)
def test_message_without_a_readable_id_is_not_found(body: bytes) -> None:
    assert not WantedId("ID:a").is_of(body)
    assert message_id_of(body) == ""


def test_long_id_is_recognised_where_the_audit_has_cut_it() -> None:
    assert WantedId("ID:" + "x" * 2_000).is_written(("ID:" + "x" * 2_000)[: wanted_module.AUDITED_LENGTH])


@pytest.mark.parametrize("text", ["", "x" * (ID_LENGTH_MAX + 1), "\ud800"], ids=["empty", "long", "surrogate"])
def test_text_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        WantedId(text)


@pytest.mark.parametrize("place", [0, 7, 8, 9, 15, 16, 17, 27])
def test_needle_is_found_at_the_edges_of_pieces(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanted_module, "SEARCHED_BYTES", 8)
    value = b"." * place + b"abc" + b"." * (27 - place)
    assert has(value, b"abc")
    assert has(value, b"abc", place, place + 3)
    assert not has(value, b"abc", place + 1)
    assert not has(value, b"abc", 0, place + 2)
