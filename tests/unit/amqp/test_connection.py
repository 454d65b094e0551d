import pytest

from bascule.amqp.composite import Composite, encode_composite
from bascule.amqp.connection import Connection
from bascule.amqp.errors import (
    CONNECTION_FORCED,
    DECODE_ERROR,
    FRAMING_ERROR,
    ILLEGAL_STATE,
    INVALID_FIELD,
    NOT_ALLOWED,
    RESOURCE_LIMIT_EXCEEDED,
    AmqpError,
    IllegalUse,
)  # fmt: skip
from bascule.amqp.events import Attached, ConnectionClosed, Opened, SessionBegun
from bascule.amqp.frames import AMQP_HEADER, EMPTY_FRAME, SASL_HEADER, TLS_HEADER, frame
from bascule.amqp.limits import CLOSE_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, PRE_OPEN_FRAME_SIZE_BYTES_MAX, ConnectionLimits
from bascule.amqp.performatives import Attach, Begin, Close, Declare, End, Error, Flow, Open, Role, Source, Target, Transfer
from bascule.amqp.sasl import AnonymousServer, SaslServer
from tests.unit.amqp.pair import Pair, Script, attach, events_of, frames_of


def server(**options: object) -> Connection:
    return Connection(Role.SERVER, container_id="server", sasl=SaslServer({"ANONYMOUS": AnonymousServer}), **options)  # type: ignore[arg-type]


def test_client_and_server_engines_open_and_close_a_connection() -> None:
    pair = Pair().run()
    assert events_of(Opened, pair.at_server)[0].open.container_id == "client"
    assert events_of(Opened, pair.at_client)[0].open.container_id == "server"
    pair.client.close()
    pair.run()
    assert [event.by_peer for event in events_of(ConnectionClosed, pair.at_server)] == [True]
    assert [event.by_peer for event in events_of(ConnectionClosed, pair.at_client)] == [False]
    assert pair.client.closed
    assert pair.server.closed


def test_close_carries_its_error_to_the_peer() -> None:
    pair = Pair().run()
    pair.server.close(AmqpError(CONNECTION_FORCED, "going down"))
    pair.run()
    error = events_of(ConnectionClosed, pair.at_client)[0].error
    assert error is not None
    assert (error.condition, error.description) == (CONNECTION_FORCED, "going down")
    assert [event.by_peer for event in events_of(ConnectionClosed, pair.at_server)] == [False]


def test_server_refuses_connection_with_open_and_close() -> None:
    script = Script()
    script.server.receive(AMQP_HEADER + frame(0, encode_composite(Open("script"))), 0.0)
    script.server.open(properties={"amqp:connection-establishment-failed": True})
    script.server.close(AmqpError(INVALID_FIELD, "taken"))
    assert [type(performative) for _, performative, _ in frames_of(script.server.data_to_send())] == [Open, Close]


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"\x00" * 64, b"AMQP\x00\x00\x09\x01", TLS_HEADER, b"A?"]
)
def test_unknown_protocol_header_is_answered_with_supported_header_and_close(garbage: bytes) -> None:
    connection = server(require_sasl=True)
    events = connection.receive(garbage, 0.0)
    assert connection.data_to_send() == SASL_HEADER
    assert connection.closed
    error = events_of(ConnectionClosed, events)[0].error
    assert error is not None
    assert error.condition == FRAMING_ERROR


def test_client_that_skips_required_sasl_is_answered_with_sasl_header_and_close() -> None:
    connection = server(require_sasl=True)
    connection.receive(AMQP_HEADER + frame(0, encode_composite(Open("c"))), 0.0)
    assert connection.data_to_send() == SASL_HEADER
    assert connection.closed


def test_client_may_skip_sasl_unless_required() -> None:
    connection = server()
    assert events_of(Opened, connection.receive(AMQP_HEADER + frame(0, encode_composite(Open("c"))), 0.0))
    assert connection.user is None


def test_frames_are_parsed_from_chunks_of_any_size() -> None:
    whole = AMQP_HEADER + b"".join(frame(0, encode_composite(it)) for it in (Open("c"), Begin(None, 0, 10, 10), attach(sender=False)))
    for size in (1, 2, 7, 9, len(whole)):
        connection = server()
        events = [event for at in range(0, len(whole), size) for event in connection.receive(whole[at : at + size], 0.0)]
        assert [type(event) for event in events] == [Opened, SessionBegun, Attached]


def test_pipelined_frames_of_client_are_answered_in_order() -> None:
    script = Script()
    script.say_bytes(AMQP_HEADER + b"".join(frame(0, encode_composite(it)) for it in (Open("c"), Begin(None, 0, 10, 10), attach())))
    assert [type(answer) for answer in script.answers] == [Open, Begin, Attach, Flow]


def test_pipelined_open_and_close_are_answered_in_order() -> None:
    script = Script()
    events = script.say_bytes(AMQP_HEADER + b"".join(frame(0, encode_composite(it)) for it in (Open("c"), Close())))
    assert [type(answer) for answer in script.answers] == [Open, Close]
    assert [type(event) for event in events] == [Opened, ConnectionClosed]


BREACHES: dict[str, tuple[list[Composite], str]] = {
    "second open": ([Open("c")], ILLEGAL_STATE),
    "frame without session": ([Attach("l", 0, True)], NOT_ALLOWED),
    "end without session": ([End()], NOT_ALLOWED),
    "second begin on a channel": ([Begin(None, 0, 1, 1), Begin(None, 0, 1, 1)], NOT_ALLOWED),
    "answer to no begin": ([Begin(7, 0, 1, 1)], NOT_ALLOWED),
    "described type that is no frame": ([Declare()], NOT_ALLOWED),
    "handle beyond the agreed": ([Begin(None, 0, 1, 1), Attach("l", 5000, True)], FRAMING_ERROR),
    "transfer without session": ([Transfer(0, 0, b"")], NOT_ALLOWED),
}


@pytest.mark.parametrize(("frames", "condition"), BREACHES.values(), ids=BREACHES)
def test_protocol_violation_closes_connection_with_its_condition(frames: list[Composite], condition: str) -> None:
    script = Script().opened()
    for performative in frames:
        events = script.say(performative)
    error = script.answer(Close).error
    assert error is not None
    assert error.condition == condition
    assert [event.by_peer for event in events_of(ConnectionClosed, events)] == [False]
    assert script.server.closed


def test_protocol_violation_before_local_open_is_answered_with_open_and_close() -> None:
    connection = server()
    connection.receive(AMQP_HEADER + frame(0, encode_composite(Begin(None, 0, 1, 1))), 0.0)
    assert [type(performative) for _, performative, _ in frames_of(connection.data_to_send())] == [Open, Close]


@pytest.mark.parametrize(
    ("raw", "condition"),
    [
        (b"\x00\x00\x00\x04\x02\x00\x00\x00", FRAMING_ERROR),
        (b"\xff\xff\xff\xff\x02\x00\x00\x00", FRAMING_ERROR),
        (b"\x00\x00\x00\x08\x01\x00\x00\x00", FRAMING_ERROR),
        (b"\x00\x00\x00\x08\x05\x00\x00\x00", FRAMING_ERROR),
        (b"\x00\x00\x00\x08\x02\x07\x00\x00", FRAMING_ERROR),
        (frame(0, b"\x00\x53\x12"), DECODE_ERROR),
        (frame(0, b"\x40"), DECODE_ERROR),
        (frame(0, b"\x00\x53\x77\xa1\x01x"), DECODE_ERROR),
        (frame(0, encode_composite(Begin(None, 0, 1, 1)) + b"more"), FRAMING_ERROR),
    ],
)
def test_malformed_frame_closes_connection_with_its_condition(raw: bytes, condition: str) -> None:
    script = Script().opened()
    script.say_bytes(raw)
    error = script.answer(Close).error
    assert error is not None
    assert error.condition == condition


@pytest.mark.parametrize("raw", [b"\0\0\0\x07\x02\0\0\0", b"\0\0\0\x09\x01\0\0\0", b"\0\0\0\x08\xff\0\0\0"])
def test_frame_with_invalid_data_offset_is_not_reported_as_too_large(raw: bytes) -> None:
    script = Script().opened()
    script.say_bytes(raw)
    error = script.answer(Close).error
    assert error is not None
    assert f"has its body at byte {raw[4] * 4}" in str(error.description)
    assert "exceeds" not in str(error.description)


def test_channel_above_agreed_maximum_is_a_framing_error() -> None:
    script = Script(limits=ConnectionLimits(channel_max=3)).opened()
    script.say(Begin(None, 0, 1, 1), channel=4)
    error = script.answer(Close).error
    assert error is not None
    assert error.condition == FRAMING_ERROR


def test_begin_beyond_channel_max_of_peer_raises_amqp_error() -> None:
    pair = Pair(limits=ConnectionLimits(channel_max=1)).run()
    pair.session()
    pair.session()
    with pytest.raises(AmqpError, match="2 sessions"):
        pair.client.begin()


def test_max_frame_size_below_512_is_refused() -> None:
    script = Script()
    script.say_bytes(AMQP_HEADER + frame(0, encode_composite(Open("c", max_frame_size=100))))
    error = script.answer(Close).error
    assert error is not None
    assert error.condition == INVALID_FIELD


def test_large_frame_before_open_closes_connection() -> None:
    connection = server(max_frame_size=1 << 20)
    big = frame(0, encode_composite(Open("c", properties={"p": "x" * PRE_OPEN_FRAME_SIZE_BYTES_MAX})))
    connection.receive(AMQP_HEADER + big, 0.0)
    assert connection.closed
    assert connection.error is not None
    assert connection.error.condition == FRAMING_ERROR


def test_peer_that_sends_too_many_bytes_before_open_is_closed() -> None:
    connection = server(limits=ConnectionLimits(pre_open_bytes_max=1000))
    connection.receive(AMQP_HEADER, 0.0)
    for _ in range(125):
        connection.receive(EMPTY_FRAME, 0.0)
    assert connection.closed
    assert connection.error is not None
    assert connection.error.condition == RESOURCE_LIMIT_EXCEEDED


def test_peer_that_never_opens_is_closed_after_handshake_timeout() -> None:
    connection = server()
    assert connection.tick(100.0) == 100.0 + HANDSHAKE_TIMEOUT_S
    assert not connection.closed
    connection.receive(AMQP_HEADER, 101.0)
    connection.tick(100.0 + HANDSHAKE_TIMEOUT_S)
    assert connection.closed


def test_silent_peer_is_closed_after_idle_timeout() -> None:
    script = Script(idle_timeout_s=10.0).opened()
    assert script.server.tick(9.0) == 10.0
    script.server.receive(EMPTY_FRAME, 9.0)
    assert script.server.tick(10.0) == 19.0
    script.server.tick(19.0)
    assert script.server.closed
    [(_, close, _)] = frames_of(script.server.data_to_send())
    assert isinstance(close, Close)
    assert close.error is not None
    assert close.error.condition == RESOURCE_LIMIT_EXCEEDED


def test_peer_is_told_half_of_the_idle_timeout() -> None:
    pair = Pair(idle_timeout_s=30.0).run()
    assert pair.client.remote_open.idle_time_out == 15_000


def test_heartbeats_are_sent_within_idle_timeout_of_peer() -> None:
    connection = server(idle_timeout_s=None)
    connection.receive(AMQP_HEADER + frame(0, encode_composite(Open("c", idle_time_out=3000))), 0.0)
    connection.open()
    now_s, silent_since_s = 0.0, 0.0
    for _ in range(20):
        due_s = connection.tick(now_s)
        if connection.data_to_send():
            assert now_s - silent_since_s < 3.0
            silent_since_s = now_s
        now_s = due_s
    assert now_s - silent_since_s < 3.0


def test_connection_without_timeouts_needs_no_timer() -> None:
    script = Script(idle_timeout_s=None).opened()
    assert script.server.tick(0.0) == float("inf")


def test_unanswered_close_ends_after_close_timeout() -> None:
    script = Script().opened()
    script.server.close()
    assert script.server.tick(5.0) == 5.0 + CLOSE_TIMEOUT_S
    assert not script.server.closed
    script.server.tick(5.0 + CLOSE_TIMEOUT_S)
    assert script.server.closed


def test_frames_after_local_close_are_ignored() -> None:
    script = Script().begun()
    script.server.close()
    assert script.say(attach()) == []
    assert not script.server.closed
    assert [type(event) for event in script.say(Close(Error("x:y")))] == [ConnectionClosed]
    assert script.server.closed


def test_calls_on_closed_connection_do_nothing() -> None:
    script = Script().attached(sender=False)
    link = next(iter(script.server.sessions[0].links.values()))
    script.say(Close())
    assert script.say(Begin(None, 0, 1, 1), channel=5) == []
    link.detach()
    link.session.end()
    script.server.close()
    script.server.open()
    assert link.credit == 0
    assert script.server.data_to_send() == b""


def test_second_open_raises_illegal_use() -> None:
    script = Script().opened()
    with pytest.raises(IllegalUse):
        script.server.open()


def test_client_may_begin_session_and_attach_link_before_server_answers() -> None:
    pair = Pair()
    session = pair.client.begin()
    session.attach_sender("early", Source(), Target("queue"))
    pair.run()
    assert [type(event) for event in pair.at_server] == [Opened, SessionBegun, Attached]
