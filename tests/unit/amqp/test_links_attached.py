"""Attaching and detaching links, the limits of deliveries, and violations of the protocol on links."""

from typing import Any

import pytest

from bascule.amqp.composite import Composite
from bascule.amqp.errors import (
    ERRANT_LINK,
    HANDLE_IN_USE,
    ILLEGAL_STATE,
    INVALID_FIELD,
    MESSAGE_SIZE_EXCEEDED,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    RESOURCE_LIMIT_EXCEEDED,
    TRANSFER_LIMIT_EXCEEDED,
    UNATTACHED_HANDLE,
    WINDOW_VIOLATION,
    AmqpError,
    IllegalUse,
)  # fmt: skip
from bascule.amqp.events import AttachConfirmed, Attached, Detached, Dispositioned, Flowed, SessionBegun, SessionEnded, Transferred
from bascule.amqp.limits import PERFORMATIVE_SIZE_BYTES_MAX, ConnectionLimits
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.performatives import (
    ACCEPTED,
    Accepted,
    Attach,
    Begin,
    Close,
    DeleteOnClose,
    Detach,
    Disposition,
    End,
    Flow,
    Source,
    Target,
    Transfer,
)  # fmt: skip
from bascule.amqp.types import Described, Symbol, ULong
from tests.unit.amqp.pair import Pair, Script, attach, events_of, frames_of


def test_refused_attach_is_answered_with_null_terminus_and_detach_with_error() -> None:
    for sender in (True, False):
        script = Script().begun()
        script.server.receive(b"", 0.0)
        session = script.server.sessions[0]
        session.on_performative(attach(sender=sender))
        link = session.links[0]
        link.refuse(AmqpError(NOT_FOUND, "no such queue"))
        answer, detach = (frame for _, frame, _ in frames_of(script.server.data_to_send()))
        assert isinstance(answer, Attach)
        assert (answer.target if sender else answer.source) is None
        assert isinstance(detach, Detach)
        assert detach.closed
        assert detach.error is not None
        assert detach.error.condition == NOT_FOUND
        script.say(Detach(0, True))
        assert session.links == {}


def test_refusal_of_attach_is_reported_to_client() -> None:
    pair = Pair()
    link = pair.session().attach_receiver("consumer", Source("nowhere"), Target())
    pair.server.receive(pair.client.data_to_send(), 0.0)
    next(iter(pair.server.sessions[0].links.values())).refuse(AmqpError(NOT_FOUND, "no such queue"))
    pair.run()
    assert [type(event) for event in pair.at_client] == [AttachConfirmed, Detached]
    assert link.source is None
    error = events_of(Detached, pair.at_client)[0].error
    assert error is not None
    assert error.condition == NOT_FOUND
    assert link.session.links == {}


def test_attached_event_carries_all_fields_of_the_attach() -> None:
    selector = Described(ULong(0x0000468C00000004), "a = 1")
    script = Script().begun()
    asked = Attach(
        "durable|2", 0, True, 1, 1,
        Source("news", 2, Symbol("never"), filter={"jms-selector": selector}, capabilities=("topic", "shared")),
        Target("client"), desired_capabilities=("SHARED-SUBS",), properties={Symbol("p"): 1}, max_message_size=1000,
    )  # fmt: skip
    [attached] = events_of(Attached, script.say(asked))
    link = attached.link
    assert isinstance(link, SenderLink)
    assert link.remote == asked
    answer = script.answer(Attach)
    assert (answer.role, answer.source, answer.target, answer.initial_delivery_count) == (False, asked.source, asked.target, 0)
    assert (answer.snd_settle_mode, answer.rcv_settle_mode) == (1, 1)


def test_dynamic_target_gets_its_address_in_the_answer_to_attach() -> None:
    pair = Pair()
    target = Target(dynamic=True, dynamic_node_properties={"lifetime-policy": DeleteOnClose()}, capabilities=("temporary-queue",))
    link = pair.session().attach_sender("temporary", Source(), target)
    [attached] = events_of(Attached, pair.server.receive(pair.client.data_to_send(), 0.0))
    assert attached.link.target == target
    attached.link.accept(target=Target("temp.1", dynamic=True), max_message_size=77, offered_capabilities=("DELAYED_DELIVERY",))
    pair.run()
    assert link.target.address == "temp.1"
    assert link.remote.max_message_size == 77
    assert link.remote.offered_capabilities == ("DELAYED_DELIVERY",)


def test_null_source_is_answered_with_the_source_the_server_knows() -> None:
    pair = Pair()
    link = pair.session().attach_receiver("subscription", None, Target())
    [attached] = events_of(Attached, pair.server.receive(pair.client.data_to_send(), 0.0))
    assert attached.link.source is None
    attached.link.accept(source=Source("news", 2))
    pair.run()
    assert link.source == Source("news", 2)


def test_detach_returns_unsettled_deliveries() -> None:
    pair = Pair()
    receiver, sender = pair.consumer(credit=5)
    for number in range(3):
        sender.send(b"message", context=number)
    pair.run()
    receiver.settle(0, ACCEPTED)
    receiver.detach(closed=False)
    pair.run()
    [dispositioned] = events_of(Dispositioned, pair.at_server)
    assert [delivery.context for delivery in dispositioned.deliveries] == [0]
    [detached] = events_of(Detached, pair.at_server)
    assert ([delivery.context for delivery in detached.deliveries], detached.closed, sender.credit) == ([1, 2], False, 0)
    assert not events_of(Detached, pair.at_client)[0].closed
    assert sender.session.links == {}
    receiver.settle(1, ACCEPTED)
    assert pair.client.data_to_send() == b""


def test_simultaneous_detach_of_both_peers_is_reported_once_to_each() -> None:
    pair = Pair()
    receiver, sender = pair.consumer(credit=5)
    sender.detach(AmqpError(NOT_FOUND, "deleted"))
    receiver.detach()
    pair.run()
    assert len(events_of(Detached, pair.at_client)) == len(events_of(Detached, pair.at_server)) == 1
    assert sender.session.links == receiver.session.links == {}
    assert not pair.server.closed


def test_pipelined_attach_and_detach_are_answered_in_order() -> None:
    script = Script().begun()
    session = script.server.sessions[0]
    session.on_performative(attach(sender=False))
    session.on_performative(Flow(0, 1, 0, 1, 0, 0, 5))
    session.on_performative(Detach(0, True))
    link = next(event.link for event in script.server.receive(b"", 0.0) if isinstance(event, Attached))
    link.accept()
    assert [type(frame) for _, frame, _ in frames_of(script.server.data_to_send())] == [Attach, Detach]
    assert link.credit == 0
    assert session.links == {}


def test_credit_given_before_answer_to_attach_counts_after_the_answer() -> None:
    script = Script().begun()
    session = script.server.sessions[0]
    session.on_performative(attach(sender=False))
    session.on_performative(Flow(0, 1, 0, 1, 0, 0, 5))
    [link] = session.links.values()
    assert link.credit == 0
    link.accept()
    assert link.credit == 5


def test_link_handles_are_reused() -> None:
    pair = Pair()
    session = pair.session()
    for _ in range(5):
        link, _ = pair.producer(session)
        link.detach()
        pair.run()
        assert link.handle == 0


def test_end_of_session_returns_unsettled_deliveries() -> None:
    pair = Pair()
    receiver, sender = pair.consumer(credit=5)
    sender.send(b"message", context=1)
    pair.run()
    receiver.session.end()
    [ended] = events_of(SessionEnded, pair.run().at_server)
    assert [delivery.context for delivery in ended.deliveries] == [1]
    assert events_of(SessionEnded, pair.at_client)
    assert pair.server.sessions == pair.client.sessions == {}
    assert sender.credit == 0
    assert events_of(SessionBegun, Pair.run(pair).at_server) == []
    assert pair.session().channel == 0


BREACHES: dict[str, tuple[bool, list[tuple[Composite, bytes]], type[Composite], str]] = {
    "handle in use": (True, [(attach(0), b"")], End, HANDLE_IN_USE),
    "transfer on no handle": (True, [(Transfer(9, 0, b"t"), b"")], End, UNATTACHED_HANDLE),
    "detach of no handle": (True, [(Detach(9), b"")], End, UNATTACHED_HANDLE),
    "flow of no handle": (True, [(Flow(0, 1, 0, 1, 9, 0, 1), b"")], End, UNATTACHED_HANDLE),
    "transfer to a receiver": (False, [(Transfer(0, 0, b"t"), b"")], End, ERRANT_LINK),
    "delivery without id": (True, [(Transfer(0, None, b"t"), b"")], End, INVALID_FIELD),
    "delivery without tag": (True, [(Transfer(0, 0), b"")], End, INVALID_FIELD),
    "delivery within a delivery": (True, [(Transfer(0, 0, b"t", more=True), b""), (Transfer(0, 1, b"u"), b"")], End, INVALID_FIELD),
    "backward disposition": (False, [(Disposition(True, 5, 3, True, ACCEPTED), b"")], End, INVALID_FIELD),
    "resumed delivery": (True, [(Transfer(0, 0, b"t", resume=True), b"")], Detach, NOT_IMPLEMENTED),
    "no credit": (True, [(Transfer(0, number, b"t"), b"") for number in range(11)], Detach, TRANSFER_LIMIT_EXCEEDED),
    "too large in one frame": (True, [(Transfer(0, 0, b"t"), b"x" * 101)], Detach, MESSAGE_SIZE_EXCEEDED),
    "too large in two frames": (
        True, [(Transfer(0, 0, b"t", more=True), b"x" * 60), (Transfer(0, 0, b"t", more=True), b"x" * 60)], Detach, MESSAGE_SIZE_EXCEEDED,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sender", "frames", "answer", "condition"), BREACHES.values(), ids=BREACHES)
def test_protocol_violation_ends_only_its_link_or_session(
    sender: bool, frames: list[tuple[Composite, bytes]], answer: type[Any], condition: str
) -> None:
    script = Script(limits=ConnectionLimits(message_size_bytes_max=100)).attached(sender=sender)
    events = [event for frame, payload in frames for event in script.say(frame, payload)]
    found = script.answer(answer)
    assert found.error.condition == condition
    assert len(events_of(SessionEnded if answer is End else Detached, events)) == 1
    assert not script.server.closed
    # The engine ignores frames that the peer sent before it saw the end, and allows a new link after the peer's answer.
    assert script.say(Transfer(0, 50, b"t"), b"late") == []
    assert script.say(Detach(0, True) if answer is Detach else End()) == []
    assert script.answers == []
    if answer is End:
        script.say(Begin(None, 0, 1, 1))
    assert events_of(Attached, script.say(attach(3)))


def test_transfer_beyond_session_window_ends_the_session() -> None:
    script = Script().attached()
    script.server.sessions[0]._incoming_window = 0
    script.say(Transfer(0, 0, b"t"))
    error = script.answer(End).error
    assert error is not None
    assert error.condition == WINDOW_VIOLATION


def test_second_answer_to_attach_is_illegal() -> None:
    pair = Pair()
    sender, receiver = pair.producer()
    with pytest.raises(IllegalUse, match="cannot answer the attach"):
        receiver.accept()
    with pytest.raises(AmqpError) as caught:
        sender.on_attach(Attach("producer", 0, True))
    assert caught.value.condition == ILLEGAL_STATE


def test_credit_is_withheld_at_the_limit_of_unsettled_deliveries() -> None:
    pair = Pair(limits=ConnectionLimits(unsettled_per_session_max=3))
    receiver, sender = pair.consumer(credit=10)
    for _ in range(3):
        sender.send(b"message")
    assert sender.credit == 0
    transfers = events_of(Transferred, pair.run().at_client)
    receiver.flow(20)
    pair.run()
    assert sender.credit == 0
    receiver.settle(transfers[0].delivery_id, ACCEPTED)
    assert events_of(Flowed, pair.run().at_server)
    assert sender.credit == 20


@pytest.mark.parametrize("by_us", [False, True])
def test_withheld_credit_returns_when_link_with_unsettled_deliveries_detaches(by_us: bool) -> None:
    pair = Pair(limits=ConnectionLimits(unsettled_per_session_max=3))
    session = pair.session()
    receiver, sender = pair.consumer(session, credit=10)
    other = session.attach_receiver("other", Source("queue"), Target())
    waiting = events_of(Attached, pair.run().at_server)[0].link
    other.flow(20)
    pair.run()
    for _ in range(3):
        sender.send(b"message")
    pair.run()
    assert waiting.credit == 0
    (sender if by_us else receiver).detach()
    assert [event.link for event in events_of(Flowed, pair.run().at_server)] == [waiting]
    assert (waiting.credit, sender.credit) == (20, 0)


def test_producer_beyond_limit_of_unsettled_deliveries_loses_its_session() -> None:
    script = Script(limits=ConnectionLimits(unsettled_per_session_max=3)).attached()
    for number in range(4):
        script.say(Transfer(0, number, b"t", 0))
    error = script.answer(End).error
    assert error is not None
    assert error.condition == RESOURCE_LIMIT_EXCEEDED


def test_sender_may_settle_its_own_delivery() -> None:
    script = Script().attached()
    [transfer] = events_of(Transferred, script.say(Transfer(0, 0, b"t", 0)))
    assert script.say(Disposition(False, 0, None, True)) == []
    transfer.link.settle(0, ACCEPTED)
    assert script.server.data_to_send() == b""


def test_delivery_counters_wrap_around() -> None:
    pair = Pair()
    receiver, sender = pair.consumer()
    for session, peer in ((sender.session, receiver.session),):
        session._next_delivery_id = session._next_outgoing_id = 0xFFFFFFFE
        peer._next_incoming_id = 0xFFFFFFFE
    sender.delivery_count = receiver.delivery_count = 0xFFFFFFFE
    receiver.flow(10)
    pair.run()
    for number in range(4):
        sender.send(b"%d" % number)
    transfers = events_of(Transferred, pair.run().at_client)
    assert [transfer.delivery_id for transfer in transfers] == [0xFFFFFFFE, 0xFFFFFFFF, 0, 1]
    for transfer in transfers:
        receiver.settle(transfer.delivery_id, ACCEPTED)
    receiver.flow(10)
    pair.run()
    assert sender.session.unsettled == {}
    assert (sender.credit, sender.delivery_count) == (10, 2)
    sender.send(b"again")
    assert sender.session._outgoing_window > 0
    assert isinstance(receiver, ReceiverLink)
    assert Accepted() == ACCEPTED


def test_partial_messages_beyond_the_byte_limit_close_the_connection() -> None:
    script = Script(limits=ConnectionLimits(partial_bytes_max=1000)).begun()
    for handle in range(3):
        script.say(attach(handle))
    for handle in range(2):
        script.say(Transfer(handle, handle, b"t", 0, more=True), b"x" * 450)
    assert script.server.partial_bytes == 900
    script.say(Transfer(0, aborted=True))
    assert script.server.partial_bytes == 450
    script.say(Detach(1, True))
    assert script.server.partial_bytes == 0
    script.say(Transfer(0, 2, b"t", 0, more=True), b"x" * 900)
    script.say(Transfer(2, 3, b"t", 0, more=True), b"x" * 200)
    error = script.answer(Close).error
    assert error is not None
    assert error.condition == RESOURCE_LIMIT_EXCEEDED
    assert script.server.partial_bytes == 0


def test_link_beyond_the_limit_ends_the_session() -> None:
    script = Script(limits=ConnectionLimits(links_max=2)).begun()
    for handle in range(3):
        script.say(attach(handle))
    error = script.answer(End).error
    assert error is not None
    assert error.condition == RESOURCE_LIMIT_EXCEEDED


def test_attach_above_performative_size_limit_closes_the_connection() -> None:
    script = Script().begun()
    script.say(Attach("name", 0, True, source=Source("q", filter={"jms-selector": "x" * PERFORMATIVE_SIZE_BYTES_MAX})))
    error = script.answer(Close).error
    assert error is not None
    assert error.condition == RESOURCE_LIMIT_EXCEEDED


def refused(script: Script, count: int, first: int = 0) -> None:
    """Attach links that the server refuses."""
    session = script.server.sessions[0]
    for handle in range(first, first + count):
        session.on_performative(attach(handle))
        script.server.receive(b"", 0.0)
        next(link for link in session.links.values() if link.remote_handle == handle).refuse(AmqpError(NOT_FOUND, "no such queue"))


def test_refused_links_count_until_the_peer_answers_their_detach() -> None:
    script = Script().begun()
    counts = script.server.link_counts
    refused(script, 5)
    assert counts.count == 5
    assert counts.names_bytes >= 5 * len("link 0")
    for handle in range(5):
        script.say(Detach(handle, True))
    assert (counts.count, counts.names_bytes, counts.unanswered) == (0, 0, 0)


def test_an_end_is_overdue_if_it_was_unanswered_before() -> None:
    script = Script().begun()
    counts = script.server.link_counts
    refused(script, 5)
    assert counts.overdue() == 0
    refused(script, 4, 5)
    script.say(Detach(0, True))
    assert (counts.overdue(), counts.unanswered) == (4, 8)
    for handle in range(1, 7):
        script.say(Detach(handle, True))
    assert (counts.overdue(), counts.overdue()) == (2, 2)
    script.say(Begin(None, 0, 100, 100), channel=1)
    script.server.sessions[1].end(AmqpError(NOT_FOUND, "too many"))
    assert (counts.overdue(), counts.overdue()) == (2, 3)
    script.say(End(), channel=1)
    assert (counts.overdue(), counts.unanswered) == (2, 2)


def test_the_end_of_a_session_answers_the_detaches_of_its_links() -> None:
    script = Script().begun()
    refused(script, 5)
    script.server.sessions[0].end()
    assert script.server.link_counts.unanswered == 6
    script.say(End())
    assert script.server.link_counts.unanswered == 0


@pytest.mark.parametrize("by", ["client", "server"])
def test_links_of_both_ends_count_until_they_are_detached(by: str) -> None:
    pair = Pair()
    session = pair.session()
    ours, theirs = pair.producer(session)
    counts = pair.client.link_counts, pair.server.link_counts
    assert [each.count for each in counts] == [1, 1]
    (ours if by == "client" else theirs).detach()
    pair.run()
    assert [(each.count, each.names_bytes) for each in counts] == [(0, 0), (0, 0)]
    pair.producer(session)
    session.end()
    pair.run()
    assert [(each.count, each.names_bytes) for each in counts] == [(0, 0), (0, 0)]
    assert [each.unanswered for each in counts] == [0, 0]
