"""The engine writes a message of many frames in pieces, and other frames of the connection between them."""

import random
import tracemalloc
from collections.abc import Callable

import pytest

from bascule.amqp.errors import IllegalUse
from bascule.amqp.events import Transferred
from bascule.amqp.frames import frame_head
from bascule.amqp.limits import DELIVERY_FRAME_SIZE_BYTES_MAX, FRAME_SIZE_BYTES_MIN, ConnectionLimits
from bascule.amqp.performatives import Close, Detach, End, Source, Target, Transfer
from tests.unit.amqp.pair import Pair, events_of, frames_of

PIECE_BYTES = 8 * FRAME_SIZE_BYTES_MIN
LARGE = bytes(100 * FRAME_SIZE_BYTES_MIN)


def pair_with_pieces(frame_size: int = FRAME_SIZE_BYTES_MIN) -> Pair:
    return Pair(limits=ConnectionLimits(frames_per_piece_bytes=PIECE_BYTES), frame_size=frame_size)


def test_large_message_is_framed_in_pieces() -> None:
    pair = pair_with_pieces()
    _, sender = pair.consumer(credit=2)
    sender.send(LARGE)
    sizes = []
    while pair.server.out:
        data = pair.server.data_to_send()
        sizes.append(len(frames_of(data)))
        pair.at_client += pair.client.receive(data, 0.0)
        pair.server.send_more()
    assert len(sizes) > 10
    assert max(sizes) <= PIECE_BYTES // FRAME_SIZE_BYTES_MIN + 1
    assert [transfer.payload for transfer in events_of(Transferred, pair.at_client)] == [LARGE]


def test_no_more_than_one_piece_is_framed_while_transport_is_blocked() -> None:
    pair = pair_with_pieces()
    _, sender = pair.consumer(credit=1)
    sender.send(LARGE)
    pair.server.data_to_send(take_more=False)
    assert pair.server.send_more() == []
    assert pair.server.data_to_send(take_more=True) == b""
    pair.server.send_more()
    assert len(pair.server.data_to_send()) >= PIECE_BYTES


def test_other_links_and_sessions_proceed_while_large_message_is_being_sent() -> None:
    pair = pair_with_pieces()
    session = pair.session()
    receiver, sender = pair.consumer(session, credit=2)
    beside = session.attach_receiver("beside", Source("queue"), Target())
    elsewhere = pair.session().attach_receiver("elsewhere", Source("queue"), Target())
    pair.run()
    beside.flow(1)
    elsewhere.flow(1)
    pair.run()
    links = {link.name: link for each in pair.server.sessions.values() for link in each.links.values()}
    sender.send(LARGE)
    assert sender.credit == 0
    with pytest.raises(IllegalUse, match="no credit"):
        sender.send(b"second")
    links["beside"].send(b"small")  # type: ignore[attr-defined]
    links["elsewhere"].send(b"small")  # type: ignore[attr-defined]
    transfers = events_of(Transferred, pair.client.receive(pair.server.data_to_send(), 0.0))
    assert [transfer.link for transfer in transfers] == [beside, elsewhere]
    while pair.server.outgoing.sessions:
        credited = pair.server.send_more()
        transfers += events_of(Transferred, pair.client.receive(pair.server.data_to_send(), 0.0))
    assert [event.link for event in credited] == [sender]
    assert sender.credit == 1
    assert transfers[-1].link is receiver


def test_two_large_messages_are_sent_in_turns() -> None:
    pair = pair_with_pieces()
    session = pair.session()
    first, one = pair.consumer(session, credit=1)
    second = session.attach_receiver("second", Source("queue"), Target())
    pair.run()
    second.flow(1)
    pair.run()
    [other] = [link for link in pair.server.sessions[0].links.values() if link is not one]
    one.send(LARGE)
    other.send(LARGE)  # type: ignore[attr-defined]
    handles = []
    while data := pair.server.data_to_send():
        handles += [frame.handle for _, frame, _ in frames_of(data) if isinstance(frame, Transfer)]
        pair.client.receive(data, 0.0)
        pair.server.send_more()
    middle = handles[len(handles) // 4 : len(handles) // 2]
    assert set(middle) == {one.handle, other.handle}
    assert (first.credit, second.credit) == (0, 0)


@pytest.mark.parametrize(("end", "last"), [("detach", Detach), ("end", End), ("close", Close)])
def test_large_message_is_dropped_after_detach_end_or_close(end: str, last: type) -> None:
    pair = pair_with_pieces()
    _, sender = pair.consumer(credit=1)
    sender.send(LARGE)
    assert pair.server.outgoing.kept_bytes == len(LARGE)
    if end == "detach":
        sender.detach()
    elif end == "end":
        sender.session.end()
    else:
        pair.server.close()
    frames = [type(performative) for _, performative, _ in frames_of(pair.server.data_to_send())]
    assert frames[-1] is last
    assert frames.count(Transfer) <= PIECE_BYTES // FRAME_SIZE_BYTES_MIN + 1
    assert pair.server.send_more() == []
    assert pair.server.data_to_send() == b""
    assert (pair.server.outgoing.kept_bytes, pair.server.outgoing.unwritten_bytes) == (0, 0)


def test_drain_is_answered_after_the_message_being_sent() -> None:
    pair = pair_with_pieces()
    receiver, sender = pair.consumer(credit=1)
    sender.send(LARGE)
    receiver.flow(1, drain=True, echo=True)
    pair.server.receive(pair.client.data_to_send(), 0.0)
    sender.drained()
    received = 0
    while data := pair.server.data_to_send():
        received += len(events_of(Transferred, pair.client.receive(data, 0.0)))
        assert receiver.drain == (not received)
        pair.server.send_more()
    assert received == 1
    assert not receiver.drain


def test_message_counts_as_kept_until_last_frame_is_written() -> None:
    pair = pair_with_pieces()
    _, sender = pair.consumer(credit=1)
    sender.send(LARGE)
    before = pair.server.outgoing.unwritten_bytes
    pair.server.data_to_send()
    pair.server.send_more()
    assert pair.server.outgoing.unwritten_bytes < before
    assert pair.server.outgoing.kept_bytes == len(LARGE)


def test_frames_stay_below_own_maximum_when_peer_accepts_larger_ones() -> None:
    pair = Pair(frame_size=1 << 30)
    _, sender = pair.consumer(credit=1)
    sender.send(bytes(3 * DELIVERY_FRAME_SIZE_BYTES_MAX))
    data = pair.server.data_to_send()
    assert len(frames_of(data)) == 4
    assert [len(transfer.payload) for transfer in events_of(Transferred, pair.client.receive(data, 0.0))] == [
        3 * DELIVERY_FRAME_SIZE_BYTES_MAX
    ]


HUGE_BYTES = 8 << 20


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that work uses in addition."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_parts_of_a_large_message_are_sent_without_a_copy() -> None:
    pair = Pair(limits=ConnectionLimits(frames_per_piece_bytes=PIECE_BYTES, message_size_bytes_max=2 * HUGE_BYTES))
    _, sender = pair.consumer(credit=1)
    body = random.Random(1).randbytes(HUGE_BYTES)
    assert peak_bytes(lambda: sender.send((b"head", b"er", memoryview(body)[10:]))) < HUGE_BYTES // 4
    received: list[Transferred] = []
    while data := pair.server.data_to_send():
        received += events_of(Transferred, pair.client.receive(data, 0.0))
        pair.server.receive(pair.client.data_to_send(), 0.0)
        pair.server.send_more()
    assert [event.payload for event in received] == [b"header" + body[10:]]


def test_large_message_of_many_frames_is_completed_without_a_copy() -> None:
    pair = Pair(limits=ConnectionLimits(message_size_bytes_max=2 * HUGE_BYTES))
    link, _ = pair.producer()
    body = random.Random(2).randbytes(HUGE_BYTES)
    frames = [body[start : start + 60_000] for start in range(0, HUGE_BYTES, 60_000)]
    heads = [Transfer(link.handle, 0, b"0", more=True), *(Transfer(link.handle, more=True) for _ in frames[1:])]
    heads[-1].more = False
    inputs = [frame_head(link.session.channel, head, len(frame)) + frame for head, frame in zip(heads, frames, strict=True)]
    received: list[Transferred] = []

    def receive() -> None:
        for each in inputs:
            received.extend(events_of(Transferred, pair.server.receive(each, 0.0)))

    assert peak_bytes(receive) < 1.5 * HUGE_BYTES  # the buffer grows by an eighth
    assert [event.payload for event in received] == [body]
