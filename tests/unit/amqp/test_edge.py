"""The engine checks input of a peer once, when it arrives. Accepted input can be encoded again, and its cost is limited by its bytes."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.amqp import session
from bascule.amqp.codec import decode, encode
from bascule.amqp.composite import decode_composite, encode_composite
from bascule.amqp.errors import DECODE_ERROR, FRAME_SIZE_TOO_SMALL, INVALID_FIELD, AmqpError, DecodeError, EncodeError, LimitExceeded
from bascule.amqp.events import Attached, Detached, Dispositioned, Opened, SessionEnded, Transferred
from bascule.amqp.frames import AMQP_HEADER, frame_head
from bascule.amqp.limits import (
    CONTAINER_ID_LENGTH_MAX,
    DELIVERY_TAG_SIZE_BYTES_MAX,
    DESCRIPTION_LENGTH_MAX,
    LINK_NAME_LENGTH_MAX,
    NUMBER_KEYS_MAX,
    PERFORMATIVE_ITEMS_MAX,
    PERFORMATIVE_SIZE_BYTES_MAX,
)
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Error,
    Flow,
    Open,
    Received,
    Rejected,
    Source,
    Target,
    TransactionalState,
    Transfer,
)
from bascule.amqp.types import Char, Symbol, ULong
from bascule.amqp.unsettled import Unsettled
from tests.support import hostile as raw
from tests.support.costs import spent_s
from tests.support.speed import SLOWNESS
from tests.unit.amqp.pair import Pair, Script, attach, events_of, frames_of

NULL = raw.NULL
COLLIDING_ULONGS = [raw.ulong(number * raw.HASH_MODULUS % (1 << 64)) for number in range(9)]
COLLIDING_UUIDS = [b"\x98" + (number * raw.HASH_MODULUS).to_bytes(16, "big") for number in range(NUMBER_KEYS_MAX + 1)]


def keyed(keys: list[bytes]) -> bytes:
    return raw.mapped(*(part for key in keys for part in (key, NULL)))


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"\x73\x00\x00\xd8\x00", "invalid Unicode character 0xd800"),
        (b"\x73\x00\x00\xdf\xff", "invalid Unicode character 0xdfff"),
        (raw.string(b"\xed\xa0\x80"), "invalid text"),
        (raw.symbol("é".encode()), "invalid text"),
        (raw.array(0xA3, 1, b"\x02\xc3\xa9"), "invalid text"),
        (keyed(COLLIDING_UUIDS), f"more than {NUMBER_KEYS_MAX} keys"),
        (keyed([raw.described(0x24, NULL)]), "invalid type of a map key: Described"),
        (keyed([raw.listed()]), "invalid type of a map key: list"),
        (keyed([raw.array(0x40, 1)]), "invalid type of a map key: Array"),
        (keyed([b"\x82\x7f\xf8" + bytes(6)]), "invalid type of a map key: float"),
        (keyed([NULL]), "invalid type of a map key: NoneType"),
        (keyed([raw.symbol(b"a"), raw.string(b"a")]), "a duplicate key"),
        (keyed([raw.ulong(1), b"\x54\x01"]), "a duplicate key"),
        (b"\0" + raw.listed() + NULL, "the descriptor at byte 1 has type code 0xd0"),
        (b"\0" + raw.string(b"amqp:accepted:list") + NULL, "the descriptor at byte 1 has type code 0xa1"),
        (raw.array(0x00, 1, b"\x40\x40"), "the descriptor at byte"),
        (raw.listed(*[raw.array(0x40, 256)] * 5000), "items more than allowed"),
        (raw.listed(*[raw.listed(*[raw.array(0x45, 256)] * 100)] * 50), "items more than allowed"),
    ],
)
def test_invalid_text_or_costly_map_keys_raise_decode_error(encoded: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode(encoded)


@pytest.mark.parametrize("keys", [COLLIDING_ULONGS[:8], COLLIDING_UUIDS[:NUMBER_KEYS_MAX], [raw.binary(b"%d" % n) for n in range(5000)]])
def test_maps_with_many_plain_keys_are_decoded(keys: list[bytes]) -> None:
    value, _ = decode(keyed(keys))
    assert len(value) == len(keys)


def test_surrogate_char_raises_encode_error() -> None:
    with pytest.raises(EncodeError):
        encode(Char("\ud800"))


def test_item_limit_of_performative_covers_all_nested_values() -> None:
    few = raw.listed(*[raw.array(0x40, 250)] * (PERFORMATIVE_ITEMS_MAX // 250 - 1))
    for items, good in ((few, True), (raw.listed(few, few), False)):
        body = raw.described(raw.OPEN, raw.listed(raw.string(b"peer"), *[NULL] * 8, raw.mapped(raw.symbol(b"x"), items)))
        if good:
            assert isinstance(decode_composite(body)[0], Open)
        else:
            with pytest.raises(DecodeError, match="items more than allowed"):
                decode_composite(body)


def test_performative_above_size_limit_is_not_decoded() -> None:
    body = raw.described(raw.OPEN, raw.listed(*[NULL] * (PERFORMATIVE_SIZE_BYTES_MAX + 1)))
    with pytest.raises(LimitExceeded, match="performative of"):
        decode_composite(body, size_bytes_max=PERFORMATIVE_SIZE_BYTES_MAX)


# --- text that the engine sends back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        raw.described(raw.DISPOSITION, raw.listed(raw.TRUE, raw.uint(0), NULL, NULL, raw.described(
            raw.REJECTED, raw.listed(raw.described(raw.ERROR, raw.listed(raw.string("é".encode()))))))),
        raw.described(raw.ATTACH, raw.listed(raw.string(b"l"), raw.uint(5), raw.TRUE, NULL, NULL, raw.described(
            raw.SOURCE, raw.listed(raw.string(b"q"), *[NULL] * 6, raw.mapped(raw.string("é".encode()), NULL))))),
        raw.described(raw.ATTACH, raw.listed(raw.string(b"l"), raw.uint(5), raw.TRUE, NULL, NULL, raw.described(
            raw.SOURCE, raw.listed(raw.string(b"q"), *[NULL] * 5, raw.string("é".encode()))))),
        raw.described(raw.DISPOSITION, raw.listed(raw.TRUE, raw.uint(0), NULL, NULL, raw.described(
            raw.MODIFIED, raw.listed(NULL, NULL, raw.mapped(raw.string("é".encode()), NULL))))),
        raw.described(raw.DISPOSITION, raw.listed(raw.TRUE, raw.uint(0), NULL, NULL, raw.described(raw.SOURCE, raw.listed()))),
        raw.described(raw.DISPOSITION, raw.listed(raw.TRUE, raw.uint(0), NULL, NULL, raw.described(
            raw.TRANSACTIONAL_STATE, raw.listed(raw.binary(b"x" * 257))))),
    ],
    ids=["condition", "filter", "distribution mode", "annotation", "not an outcome", "long transaction id"],
)  # fmt: skip
def test_value_that_cannot_be_encoded_again_is_a_decode_error(body: bytes) -> None:
    script = Script().attached()
    script.say_bytes(raw.frame(body))
    error = script.answer(Close).error
    assert error is not None
    assert error.condition == DECODE_ERROR


def test_ascii_strings_are_accepted_as_symbols_and_encoded_as_symbols() -> None:
    source = raw.described(raw.SOURCE, raw.listed(raw.string(b"q"), *[NULL] * 6, raw.mapped(raw.string(b"name"), NULL)))
    loaded, _ = decode_composite(source)
    assert isinstance(loaded, Source)
    assert [type(key) for key in loaded.filter or {}] == [Symbol]
    assert decode_composite(encode_composite(loaded))[0] == loaded


def test_annotations_accept_ulong_keys() -> None:
    state, _ = decode_composite(raw.described(raw.MODIFIED, raw.listed(NULL, NULL, raw.mapped(raw.ulong(300), NULL))))
    assert state.message_annotations == {ULong(300): None}  # type: ignore[attr-defined]


def test_container_id_and_link_name_beyond_limit_are_refused() -> None:
    script = Script()
    script.say_bytes(AMQP_HEADER)
    script.say(Open("x" * (CONTAINER_ID_LENGTH_MAX + 1)))
    error = script.answer(Close).error
    assert error is not None
    assert (error.condition, "container-id" in (error.description or "")) == (INVALID_FIELD, True)
    script = Script().begun()
    script.say(Attach("x" * (LINK_NAME_LENGTH_MAX + 1), 0, True, source=Source("q")))
    error = script.answer(End).error
    assert error is not None
    assert (error.condition, "link name" in (error.description or "")) == (INVALID_FIELD, True)


def test_long_error_description_is_truncated() -> None:
    error, _ = decode_composite(encode_composite(Error("amqp:internal-error", "é" * 5000)))
    assert isinstance(error, Error)
    close, _ = decode_composite(encode_composite(Close(error)))
    assert isinstance(close, Close)
    assert close.error is not None
    assert close.error.description == "é" * DESCRIPTION_LENGTH_MAX


def test_unsettled_map_of_attach_is_not_kept() -> None:
    script = Script().begun()
    tags = raw.mapped(*(part for number in range(500) for part in (raw.binary(b"%d" % number), raw.described(raw.ACCEPTED, raw.LIST0))))
    terminus = raw.described(raw.TARGET, raw.listed(raw.string(b"q")))
    body = raw.described(
        raw.ATTACH, raw.listed(raw.string(b"l"), raw.uint(0), raw.FALSE, NULL, NULL, NULL, terminus, tags, NULL, raw.uint(0))
    )
    (event,) = events_of(Attached, script.say_bytes(raw.frame(body)))
    assert event.link.remote.unsettled is None


def test_long_delivery_tag_and_repeated_delivery_id_end_the_session() -> None:
    for transfers in (
        [Transfer(0, 1, b"x" * (DELIVERY_TAG_SIZE_BYTES_MAX + 1))],
        [Transfer(0, 1, b"a"), Transfer(0, 1, b"b")],
    ):
        script = Script().attached()
        events = [event for transfer in transfers for event in script.say(transfer, b"x")]
        (ended,) = events_of(SessionEnded, events)
        assert ended.error is not None
        assert ended.error.condition == INVALID_FIELD


# --- maximum frame size of the peer ----------------------------------------------------------------------------------------------


def peer_with_small_frames(*, name: str = "link", sender: bool = False, **source: Any) -> Script:
    """Return a peer that accepts frames of at most 512 bytes, and has sent an attach."""
    script = Script()
    script.say_bytes(AMQP_HEADER)
    script.say(Open("peer", max_frame_size=512))
    script.say(Begin(None, 0, 100, 100))
    script.say(Attach(name, 0, not sender, source=Source("q", **source), target=Target("q"), initial_delivery_count=0 if sender else None))
    return script


def test_attach_whose_answer_exceeds_frame_size_of_peer_is_refused() -> None:
    script = peer_with_small_frames(filter={Symbol("selector"): "x" * 600})
    refused = script.answer(Attach)
    assert (refused.source, refused.target) == (None, None)
    error = script.answer(Detach).error
    assert error is not None
    assert error.condition == FRAME_SIZE_TOO_SMALL
    (detached,) = events_of(Detached, script.say(Detach(0, True)))
    assert detached.error is not None
    assert detached.error.condition == FRAME_SIZE_TOO_SMALL


def test_attach_whose_name_exceeds_frame_size_of_peer_ends_the_session() -> None:
    script = peer_with_small_frames(name="x" * 600, sender=True)
    error = script.answer(End).error
    assert error is not None
    assert error.condition == FRAME_SIZE_TOO_SMALL
    assert not script.server.closed


def test_errors_are_truncated_to_frame_size_of_peer() -> None:
    for end in ("close", "end", "detach"):
        script = peer_with_small_frames()
        session = script.server.sessions[0]
        link = next(iter(session.links.values()))
        error = AmqpError("amqp:not-allowed", "é" * 1000, {Symbol("info"): "x" * 1000})
        {"close": script.server.close, "end": session.end, "detach": link.detach}[end](error)
        data = script.server.data_to_send()
        assert len(data) <= 512
        (frame,) = script_frames(data)
        assert frame.error.condition == "amqp:not-allowed"
        assert frame.error.description.startswith("é" * 150)


def script_frames(data: bytes) -> list[Any]:
    return [performative for _, performative, _ in frames_of(data)]


def test_error_of_rejected_outcome_is_truncated_to_frame_size_of_peer() -> None:
    for state in (
        Rejected(Error("amqp:not-allowed", "é" * 1000)),
        TransactionalState(b"t", Rejected(Error("amqp:not-allowed", "é" * 1000))),
    ):
        script = peer_with_small_frames(sender=True)
        (received,) = script.say(Transfer(0, 1, b"t"), b"x")
        received.link.settle(1, state)  # type: ignore[attr-defined]
        data = script.server.data_to_send()
        assert len(data) <= 512
        (frame,) = script_frames(data)
        outcome = frame.state if isinstance(frame.state, Rejected) else frame.state.outcome
        assert outcome.error.description.startswith("é" * 150)


def test_open_properties_beyond_frame_size_of_peer_are_omitted() -> None:
    script = Script()
    script.server.receive(AMQP_HEADER, 0.0)
    (event,) = script.server.receive(raw.frame(encode_composite(Open("peer", max_frame_size=512))), 0.0)
    assert isinstance(event, Opened)
    script.server.open(properties={Symbol("product"): "Bascule", Symbol("failover-server-list"): ["x" * 100] * 6})
    (opened,) = script_frames(script.server.data_to_send())
    assert opened.properties == {"product": "Bascule"}


# --- cost ------------------------------------------------------------------------------------------------------------------------


def peer_with_unsettled(count: int, links: int = 1) -> tuple[Script, list[SenderLink]]:
    """Return a peer with ``count`` unsettled deliveries on each link, and the links."""
    script = Script().begun()
    script.say(Flow(0, 1 << 20, 0, 100))
    found = []
    for handle in range(links):
        script.say(attach(handle, sender=False))
        script.say(Flow(0, 1 << 20, 0, 100, handle, 0, count))
        found.append(script.server.sessions[0].links[handle])
    for link in found:
        assert isinstance(link, SenderLink)
        for _ in range(count):
            link.send(b"x")
    script.server.data_to_send()
    return script, found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("first", "last", "state", "settled"),
    [(50_000, 89_000, ACCEPTED, True), (0, 49_000, None, False), (0, 49_000, Received(1, 1), False), (0, 40_000, RELEASED, False)],
    ids=["unknown ids", "no outcome", "received", "the same outcome again"],
)
def test_dispositions_that_settle_nothing_take_little_time(first: int, last: int, state: Any, settled: bool) -> None:
    script, _ = peer_with_unsettled(45_000)
    disposition = raw.frame(encode_composite(Disposition(True, first, last, settled, state)))
    script.say_bytes(disposition)
    assert spent_s(lambda: script.say_bytes(disposition * 1_000)) < 0.2 * SLOWNESS


def test_outcome_and_settlement_are_each_reported_once() -> None:
    script, _ = peer_with_unsettled(10)
    dispositions = [
        [len(event.deliveries) for event in events_of(Dispositioned, script.say(Disposition(True, first, last, settled, ACCEPTED)))]
        for first, last, settled in ((0, 4, False), (0, 6, False), (0, 9, False), (2, 3, True), (0, 9, True), (0, 9, True))
    ]
    assert dispositions == [[5], [2], [3], [2], [8], []]


def test_range_across_wraparound_of_delivery_ids_is_found_in_order() -> None:
    unsettled = Unsettled[int]()
    for delivery_id in (0xFFFFFFFE, 0xFFFFFFFF, 0, 1, 2):
        unsettled.add(delivery_id, delivery_id)
    assert [found for found, _ in unsettled.pop_range(0xFFFFFFFF, 1)] == [0xFFFFFFFF, 0, 1]
    assert sorted(unsettled.by_id) == [2, 0xFFFFFFFE]


def test_index_drops_ids_settled_one_by_one() -> None:
    unsettled = Unsettled[int]()
    for delivery_id in range(100_000):
        unsettled.add(delivery_id, delivery_id)
        unsettled.pop(delivery_id - 10)
    assert len(unsettled.ids) < 2_000
    assert [found for found, _ in unsettled.pop_range(0, 1 << 20)] == list(range(99_990, 100_000))


def test_detach_of_empty_link_takes_little_time_beside_many_unsettled() -> None:
    script, _ = peer_with_unsettled(40_000)
    pairs = b"".join(raw.frame(encode_composite(each)) for each in (attach(1, sender=False), Detach(1, True))) * 500
    assert spent_s(lambda: script.say_bytes(pairs)) < 0.5 * SLOWNESS


def test_toggling_session_window_takes_little_time_with_many_links() -> None:
    script, _ = peer_with_unsettled(1, links=1000)
    flows = raw.frame(encode_composite(Flow(1 << 10, 0, 0, 100))) + raw.frame(encode_composite(Flow(1 << 10, 100, 0, 100)))
    script.say_bytes(b"".join(raw.frame(encode_composite(Flow(1 << 10, 100, 0, 100, handle, 1, 5))) for handle in range(1000)))
    assert spent_s(lambda: script.say_bytes(flows * 1_000)) < 0.2 * SLOWNESS


@pytest.mark.parametrize(
    "later",
    [
        Transfer(0, None, b"other"),
        Transfer(0, 1, b"t", 5),
        Transfer(0, state=TransactionalState(b"2", ACCEPTED)),
        Transfer(0, more=True, state=TransactionalState(b"2", ACCEPTED)),
        Transfer(0, None, b"other", aborted=True),
    ],
    ids=["tag", "format", "transaction", "transaction in the middle", "tag of an aborted one"],
)
@pytest.mark.parametrize("state", [None, TransactionalState(b"1", ACCEPTED)], ids=["plain", "transacted"])
def test_later_transfer_that_differs_from_the_first_one_ends_its_session(later: Transfer, state: TransactionalState | None) -> None:
    script = Script().attached()
    script.say(Transfer(0, 1, b"t", more=True, state=state), b"x")
    events = script.say(later, b"y")
    (ended,) = events_of(SessionEnded, events)
    assert ended.error is not None
    assert ended.error.condition == INVALID_FIELD
    assert not events_of(Transferred, events)
    assert script.server.partial_bytes == 0


def test_later_transfers_may_repeat_the_fields_of_the_first_one() -> None:
    script = Script().attached()
    state = TransactionalState(b"1", ACCEPTED)
    script.say(Transfer(0, 1, b"t", 5, more=True, state=state), b"x")
    script.say(Transfer(0, 1, b"t", 5, more=True, state=state), b"y")
    script.say(Transfer(0, more=True), b"z")
    (arrived,) = events_of(Transferred, script.say(Transfer(0, 1, b"t", 5, True, state=state), b"!"))
    assert (arrived.payload, arrived.message_format, arrived.settled, arrived.txn_id) == (b"xyz!", 5, True, b"1")


def test_empty_transfer_frames_are_not_stored() -> None:
    script = Script().attached()
    script.say(Transfer(0, 1, b"t", more=True), b"x")
    more = raw.frame(encode_composite(Transfer(0, more=True)))
    script.say_bytes(more * 7_000)
    (partial,) = [link._partial for link in script.server.sessions[0].links.values()]  # type: ignore[attr-defined]
    assert partial.size_bytes == 1


@pytest.mark.parametrize("size_bytes", [440, 480, 512, 900, 960, 1 << 20])
def test_message_in_small_frames_arrives_whole_from_few_frame_heads(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(channel: int, performative: Any, payload_size_bytes: int) -> bytes:
        made.append(payload_size_bytes)
        return frame_head(channel, performative, payload_size_bytes)

    monkeypatch.setattr(session, "frame_head", counted)
    pair = Pair(frame_size=512)
    _, sender = pair.consumer(credit=1)
    message = bytes(number % 251 for number in range(size_bytes))
    sender.send(message)
    pair.run()
    assert [event.payload for event in events_of(Transferred, pair.at_client)] == [message]
    assert len(made) < 10
