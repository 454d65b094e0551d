"""Messages, credit, drains and session windows on links."""

import pytest

from bascule.amqp.composite import Composite
from bascule.amqp.dispositions import take_disposition
from bascule.amqp.errors import (
    NOT_FOUND,
    IllegalUse,
)  # fmt: skip
from bascule.amqp.events import Attached, Detached, Dispositioned, Flowed, SessionEnded, Transferred
from bascule.amqp.limits import ConnectionLimits
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    Begin,
    Disposition,
    Error,
    Flow,
    Modified,
    Rejected,
    Source,
    Target,
    Transfer,
)  # fmt: skip
from bascule.amqp.types import Symbol
from tests.unit.amqp.pair import Pair, Script, attach, events_of, frames_of


def test_message_is_transferred_and_its_outcome_is_reported_to_sender() -> None:
    pair = Pair()
    sender, receiver = pair.producer()
    sender.send((b"head", b"body"), context="mine")
    [transfer] = events_of(Transferred, pair.run().at_server)
    assert (transfer.link, transfer.payload, transfer.settled, transfer.txn_id) == (receiver, b"headbody", False, None)
    receiver.settle(transfer.delivery_id, ACCEPTED)
    [dispositioned] = events_of(Dispositioned, pair.run().at_client)
    assert (dispositioned.deliveries, dispositioned.state, dispositioned.settled) == ([(sender, 0, "mine")], ACCEPTED, True)
    assert sender.session.unsettled == {}


@pytest.mark.parametrize("outcome", [ACCEPTED, RELEASED, Rejected(Error(NOT_FOUND)), Modified(True, True), Modified(True)], ids=repr)
def test_every_outcome_is_reported_to_sender(outcome: Composite) -> None:
    pair = Pair()
    receiver, sender = pair.consumer(credit=5)
    sender.send(b"message", context=7)
    [transfer] = events_of(Transferred, pair.run().at_client)
    receiver.settle(transfer.delivery_id, outcome)
    [dispositioned] = events_of(Dispositioned, pair.run().at_server)
    assert dispositioned.state == outcome
    assert [delivery.context for delivery in dispositioned.deliveries] == [7]


def test_presettled_message_needs_no_disposition() -> None:
    pair = Pair()
    receiver, sender = pair.consumer(credit=1)
    sender.send(b"message", settled=True)
    [transfer] = events_of(Transferred, pair.run().at_client)
    assert transfer.settled
    assert sender.session.unsettled == {}
    receiver.settle(transfer.delivery_id, ACCEPTED)
    assert pair.client.data_to_send() == b""


def test_equal_outcomes_of_adjacent_deliveries_share_one_disposition() -> None:
    pair = Pair()
    receiver, sender = pair.consumer(credit=10)
    for number in range(10):
        sender.send(b"message", context=number)
    ids = [transfer.delivery_id for transfer in events_of(Transferred, pair.run().at_client)]
    for delivery_id in (ids[1], ids[0], ids[2], ids[5], ids[4]):
        receiver.settle(delivery_id, ACCEPTED)
    receiver.settle(ids[3], RELEASED)
    data = pair.client.data_to_send()
    assert [(frame.first, frame.last, type(frame.state).__name__) for _, frame, _ in frames_of(data) if isinstance(frame, Disposition)] == [
        (0, 2, "Accepted"), (4, 5, "Accepted"), (3, 3, "Released"),
    ]  # fmt: skip
    dispositioned = events_of(Dispositioned, pair.server.receive(data, 0.0))
    assert [[delivery.context for delivery in event.deliveries] for event in dispositioned] == [[0, 1, 2], [4, 5], [3]]
    assert set(sender.session.unsettled) == {6, 7, 8, 9}


def test_sender_settles_outcome_that_consumer_left_unsettled() -> None:
    script = Script().attached(sender=False)
    link = next(iter(script.server.sessions[0].links.values()))
    assert isinstance(link, SenderLink)
    script.say(Flow(0, 100, 0, 100, 0, 0, 10))
    link.send(b"message")
    script.server.data_to_send()
    [dispositioned] = events_of(Dispositioned, script.say(Disposition(True, 0, None, False, ACCEPTED)))
    assert not dispositioned.settled
    assert link.session.unsettled
    link.session.settle_outgoing(0, ACCEPTED)
    [(_, frame, _)] = frames_of(script.server.data_to_send())
    assert frame == Disposition(False, 0, 0, True, ACCEPTED)
    assert not link.session.unsettled
    assert events_of(Dispositioned, script.say(Disposition(True, 0, None, True, ACCEPTED))) == []


def test_huge_disposition_range_costs_only_the_unsettled_deliveries() -> None:
    pair = Pair()
    _, sender = pair.consumer(credit=3)
    for _ in range(3):
        sender.send(b"message")
    pair.run()
    take_disposition(sender.session, (True, 1, 1 << 30, True, ACCEPTED))  # type: ignore[arg-type]
    assert set(sender.session.unsettled) == {0}


def test_credit_decreases_with_each_message_and_is_topped_up() -> None:
    pair = Pair(credit=2)
    sender, receiver = pair.producer()
    assert sender.credit == 2
    sender.send(b"1")
    pair.run()
    assert (sender.credit, receiver.credit) == (1, 1)
    receiver.flow(5)
    assert events_of(Flowed, pair.run().at_client)[0].link is sender
    assert (sender.credit, receiver.credit) == (5, 5)


def test_credit_update_that_crosses_a_message_counts_the_message() -> None:
    pair = Pair(credit=2)
    sender, receiver = pair.producer()
    receiver.flow(10)
    sender.send(b"on its way")
    pair.run()
    assert (sender.credit, receiver.credit) == (9, 9)


def test_send_without_credit_raises_illegal_use() -> None:
    pair = Pair(credit=0)
    sender, _ = pair.producer()
    with pytest.raises(IllegalUse):
        sender.send(b"message")


def test_drain_returns_unused_credit() -> None:
    pair = Pair()
    receiver, sender = pair.consumer()
    receiver.flow(10, drain=True)
    [flowed] = events_of(Flowed, pair.run().at_server)
    assert flowed.link is sender
    assert sender.drain
    sender.send(b"the last one")
    sender.drained()
    pair.run()
    assert (sender.credit, receiver.credit, receiver.drain, sender.drain) == (0, 0, False, False)
    assert [type(event) for event in pair.at_client] == [Transferred, Flowed]
    receiver.flow(3)
    pair.run()
    assert sender.credit == 3


@pytest.mark.parametrize("message", [b"small", bytes(2_000)])  # the second message takes several frames
def test_receiver_ends_drain_when_message_uses_up_the_credit(message: bytes) -> None:
    pair = Pair(frame_size=512)
    receiver, sender = pair.consumer()
    receiver.flow(1, drain=True)
    pair.run()
    sender.send(message)
    data = pair.server.data_to_send()
    pair.client.receive(data[:-1], 0.0)
    assert receiver.drain
    assert events_of(Transferred, pair.client.receive(data[-1:], 0.0))
    assert not receiver.drain


def test_drain_used_up_by_messages_is_answered_once() -> None:
    pair = Pair()
    receiver, sender = pair.consumer()
    receiver.flow(1, drain=True)
    pair.run()
    sender.send(b"the last one")
    for expected in (1, 0):
        sender.drained()
        assert len(events_of(Flowed, pair.run().at_client)) == expected


def test_drain_of_zero_credit_is_answered_at_once() -> None:
    pair = Pair()
    receiver, sender = pair.consumer()
    receiver.flow(0, drain=True)
    pair.run()
    assert events_of(Flowed, pair.at_client)
    assert not sender.drain


def test_flow_with_echo_is_answered() -> None:
    pair = Pair()
    receiver, sender = pair.consumer()
    sender.available = 42
    receiver.flow(7, echo=True)
    data = pair.client.data_to_send()
    pair.server.receive(data, 0.0)
    [(_, flow, _)] = frames_of(pair.server.data_to_send())
    assert isinstance(flow, Flow)
    assert (flow.link_credit, flow.available, flow.echo) == (7, 42, False)


def test_large_message_is_split_into_many_frames() -> None:
    pair = Pair(frame_size=512)
    sender, _ = pair.producer()
    message = bytes(range(256)) * 40
    sender.send((message[:5000], message[5000:]), message_format=3)
    sender.send(b"small")
    data = pair.client.data_to_send()
    sizes = [len(payload) for _, frame, payload in frames_of(data) if isinstance(frame, Transfer)]
    assert len(sizes) > 20
    assert sum(sizes) == len(message) + 5
    transfers = events_of(Transferred, pair.server.receive(data, 0.0))
    assert [(event.payload, event.message_format) for event in transfers] == [(message, 3), (b"small", 0)]


def test_closed_session_window_withholds_credit_and_rest_of_large_message() -> None:
    pair = Pair(limits=ConnectionLimits(incoming_window_frames=10), frame_size=512)
    sender, receiver = pair.producer()
    session = sender.session
    for number in range(9):
        sender.send(b"%d" % number, settled=True)
    sender.send(b"x" * 5000)
    assert session._outgoing
    assert sender.credit == 0
    payloads = [event.payload for event in events_of(Transferred, pair.run().at_server)]
    assert payloads == [*(b"%d" % number for number in range(9)), b"x" * 5000]
    assert not session._outgoing
    assert events_of(Flowed, pair.at_client)
    assert sender.credit == receiver.credit == 100 - 10


def test_session_window_closed_from_the_start_withholds_all_credit() -> None:
    script = Script().opened()
    script.say(Begin(None, 0, 0, 100))
    [attached] = events_of(Attached, script.say(attach(sender=False)))
    script.say(Flow(0, 0, 0, 100, 0, 0, 10))
    assert attached.link.credit == 0
    assert events_of(Flowed, script.say(Flow(0, 2, 0, 100)))
    assert attached.link.credit == 10
    attached.link.send(b"one")
    attached.link.send(b"two")
    assert attached.link.credit == 0


@pytest.mark.parametrize(("size_bytes", "begun", "arrived"), [(7, 4, 4), (5000, 1, 0)])
def test_detach_at_closed_session_window_leaves_no_gap_in_delivery_ids(size_bytes: int, begun: int, arrived: int) -> None:
    pair = Pair(limits=ConnectionLimits(incoming_window_frames=4), frame_size=512)
    session = pair.session()
    sender, _ = pair.producer(session)
    other, _ = pair.producer(session)
    while sender.credit:
        sender.send(b"x" * size_bytes)
    sender.detach()
    [detached] = events_of(Detached, pair.run().at_client)
    assert len(detached.deliveries) == begun
    assert len(events_of(Transferred, pair.at_server)) == arrived  # the engine drops the rest of the large message
    other.send(b"after")
    [transferred] = events_of(Transferred, pair.run().at_server)
    assert transferred.delivery_id == begun
    assert not events_of(SessionEnded, pair.at_client)


def test_aborted_message_is_dropped_and_uses_credit() -> None:
    script = Script().attached()
    assert script.say(Transfer(0, 0, b"t", 0, False, True), b"part") == []
    [flowed] = events_of(Flowed, script.say(Transfer(0, None, None, None, None, False, aborted=True)))
    assert flowed.link.credit == 9  # the engine reports the used credit, because only the application gives more
    assert events_of(Flowed, script.say(Transfer(0, 1, b"t", 0, aborted=True)))
    [transfer] = events_of(Transferred, script.say(Transfer(0, 2, b"t", 0), b"whole"))
    assert transfer.payload == b"whole"
    assert transfer.link.credit == 7


def test_settled_flag_on_a_later_frame_is_honoured() -> None:
    script = Script().attached()
    script.say(Transfer(0, 0, b"t", 0, None, True), b"a")
    [transfer] = events_of(Transferred, script.say(Transfer(0, 0, b"t", 0, True), b"b"))
    assert transfer.settled
    assert transfer.payload == b"ab"


@pytest.mark.parametrize("cut_bytes", [0, 1, 30])
def test_frames_beyond_the_steps_of_a_piece_are_handled_in_the_next_pieces(cut_bytes: int) -> None:
    steps, count = 5, 12
    pair = Pair(limits=ConnectionLimits(input_steps_per_piece=steps))
    sender, _ = pair.producer()
    for number in range(count):
        sender.send(b"message", context=number)
    data = pair.client.data_to_send()
    end = len(data) - cut_bytes
    pieces = [events_of(Transferred, pair.server.receive(data[:end], 0.0))]
    while pair.server.unfinished is not None:
        pieces.append(events_of(Transferred, pair.server.go_on()))
    pieces.append(events_of(Transferred, pair.server.receive(data[end:], 0.0)))
    assert [event.delivery_id for piece in pieces for event in piece] == list(range(count))
    assert max(map(len, pieces)) == steps


def test_few_frames_with_long_fields_are_handled_in_a_piece() -> None:
    pair = Pair(limits=ConnectionLimits(input_steps_per_piece=128))
    session = pair.session()
    properties = {Symbol(f"p{number}"): number for number in range(4_000)}
    for number in range(10):
        session.attach_sender(f"link {number}", Source(), Target("q"), properties=properties)
    pieces = [events_of(Attached, pair.server.receive(pair.client.data_to_send(), 0.0))]
    while pair.server.unfinished is not None:
        pieces.append(events_of(Attached, pair.server.go_on()))
    assert sum(map(len, pieces)) == 10
    assert max(map(len, pieces)) <= 4
