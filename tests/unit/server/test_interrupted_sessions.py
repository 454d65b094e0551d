"""Interrupted sessions of Qpid JMS: when the broker resets their client, and when it does not."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.amqp.events import ConnectionClosed, Dispositioned
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.performatives import ACCEPTED, Coordinator, Declare, Declared, Discharge, Source, TransactionalState
from bascule.amqp.transactions import encode_control
from bascule.server import coordinator
from bascule.server.interruptions import PRODUCT, REMEMBERED_MAX, REMEMBERED_S, RETURN_S, ConnectionHistory, Interruptions
from tests.unit.server.served import Client, Served, run_async

PREFETCH = 10


class Session:
    """A transacted session as Qpid JMS has it: the coordinator first, a transaction begun, then a consumer with its prefetch."""

    def __init__(self, served: Served, *, product: str = PRODUCT, container: str = "client", prefetch: int = PREFETCH) -> None:
        self.served = served
        self.client = Client(served, container, product=product)
        self.coordinator = self.attach_coordinator()
        self.transaction = self.declare()
        self.prefetch = prefetch
        self.consumer: ReceiverLink = self.client.consumer("q", prefetch)

    def attach_coordinator(self) -> SenderLink:
        link = self.client.session.attach_sender("coordinator", Source(), Coordinator())
        self.served.settle(self.client)
        return link

    def declare(self) -> bytes:
        self.coordinator.send(encode_control(Declare()))
        self.served.settle(self.client)
        answers = [event.state for event in self.client.events_of(Dispositioned) if isinstance(event.state, Declared)]
        return bytes(answers[-1].txn_id)

    def receive(self, count: int) -> None:
        """Receive messages in the transaction; the client grants new credit when little is left, by its own rule."""
        accepted = TransactionalState(self.transaction, ACCEPTED)
        for event in self.unsettled()[:count]:
            self.consumer.settle(event, accepted)
        credit = self.consumer.credit
        ahead = credit + len(self.unsettled())
        if credit <= 0.5 * self.prefetch and ahead <= 0.7 * self.prefetch:
            self.consumer.flow(credit + self.prefetch - ahead)
        self.served.settle(self.client)

    def unsettled(self) -> list[int]:
        return [number for number, link in self.client.session.incoming.items() if link is self.consumer]

    def discharge(self, *, fail: bool, continues: bool = True) -> None:
        self.coordinator.send(encode_control(Discharge(self.transaction, fail)))
        if continues:
            self.coordinator.send(encode_control(Declare()))
        self.served.settle(self.client)

    def roll_back(self) -> None:
        """Roll back as ``Session.rollback()`` does, where the consumer first returns its credit."""
        if self.consumer.credit:
            self.consumer.flow(self.consumer.credit, drain=True)
            self.served.settle(self.client)
        self.discharge(fail=True)

    @property
    def was_reset(self) -> bool:
        return any(
            event.error is not None and "interrupted transaction" in str(event.error) for event in self.client.events_of(ConnectionClosed)
        )


def served_with(messages: int, *, since_s: float = 2 * RETURN_S, lost: tuple[str, ...] = ()) -> Served:
    """Return a broker that has served for some time, and from which these clients were cut off."""
    served = Served()
    now_s = [0.0]
    served.interruptions = Interruptions(lambda: now_s[0])
    served.interruptions.serving()
    now_s[0] = since_s
    for container in lost:
        served.interruptions.lost("anonymous", container, ConnectionHistory())
    served.fill("q", messages)
    return served


@pytest.mark.parametrize("messages", [5, 500])
@pytest.mark.parametrize("prefetch", [2, PREFETCH])
@run_async
async def test_a_rollback_in_place_of_a_commit_is_recognised_by_remaining_credit(messages: int, prefetch: int) -> None:
    session = Session(served_with(messages), prefetch=prefetch)
    session.receive(1)
    session.discharge(fail=True)
    assert session.was_reset


@pytest.mark.parametrize("messages", [5, 500])
@pytest.mark.parametrize(("prefetch", "lost"), [(1, ()), (2, ()), (2, ("client",)), (PREFETCH, ()), (PREFETCH, ("client",))])
@run_async
async def test_rollback_by_application_after_receive_does_not_reset_connection(messages: int, prefetch: int, lost: tuple[str, ...]) -> None:
    session = Session(served_with(messages, lost=lost), prefetch=prefetch)
    session.receive(1)
    session.roll_back()
    assert not session.was_reset


@run_async
async def test_with_a_prefetch_of_one_only_an_interruption_explains_a_rollback() -> None:
    for lost, resets in (((), False), (("client",), True)):
        session = Session(served_with(5, lost=lost), prefetch=1)
        session.receive(1)
        session.discharge(fail=True)
        assert session.was_reset is resets


@pytest.mark.parametrize(
    ("since_s", "lost", "resets"),
    [(2 * RETURN_S, (), False), (2 * RETURN_S, ("other",), False), (2 * RETURN_S, ("client",), True), (RETURN_S / 2, (), True)],
)
@run_async
async def test_an_empty_rollback_with_prefetched_messages_counts_if_the_client_may_have_reconnected(
    since_s: float, lost: tuple[str, ...], resets: bool
) -> None:
    session = Session(served_with(5, since_s=since_s, lost=lost))
    session.roll_back()
    assert session.was_reset is resets


@run_async
async def test_a_drain_followed_by_a_receive_is_no_sign_of_a_rollback() -> None:
    session = Session(served_with(500, lost=("client",)), prefetch=100)
    session.consumer.flow(session.consumer.credit, drain=True)  # receiveNoWait, or a running receive
    session.served.settle(session.client)
    session.receive(2)
    session.discharge(fail=True)
    assert session.was_reset


@run_async
async def test_a_rollback_of_messages_from_before_the_interruption_is_answered() -> None:
    session = Session(served_with(5, lost=("client",)))
    session.discharge(fail=True)
    assert not session.was_reset


@run_async
async def test_kept_credit_stays_kept_when_the_client_repeats_its_flow() -> None:
    session = Session(served_with(50))
    session.consumer.flow(session.consumer.credit)
    session.served.settle(session.client)
    assert session.consumer.credit == 1
    assert session.client.received(session.consumer) == PREFETCH - 1


@run_async
async def test_a_session_begun_later_was_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "RECOVERED_S", 0.0)
    session = Session(served_with(5, lost=("client",)))
    session.roll_back()
    assert not session.was_reset


@run_async
async def test_only_the_first_transaction_can_reset_a_connection() -> None:
    session = Session(served_with(5, lost=("client",)))
    session.receive(1)
    session.discharge(fail=False, continues=False)
    session.transaction = session.declare()
    session.discharge(fail=True)
    assert not session.was_reset


@pytest.mark.parametrize("how", ["nothing sent ahead", "closed", "another product"])
@run_async
async def test_a_client_that_cannot_have_lost_messages_is_not_reset(how: str) -> None:
    messages = 1 if how == "nothing sent ahead" else 5
    session = Session(served_with(messages, lost=("client",)), product="other" if how == "another product" else PRODUCT)
    session.receive(1)
    session.discharge(fail=True, continues=how != "closed")
    assert not session.was_reset


@run_async
async def test_the_last_credit_is_kept_until_the_first_transaction_ends_or_a_drain() -> None:
    session = Session(served_with(50))
    assert session.client.received(session.consumer) == PREFETCH - 1
    session.discharge(fail=False)
    assert session.client.received(session.consumer) == PREFETCH
    drained = Session(served_with(50))
    drained.roll_back()
    assert drained.client.received(drained.consumer) == PREFETCH


@run_async
async def test_session_without_transactions_gets_full_credit() -> None:
    served = served_with(50)
    client = Client(served, product=PRODUCT)
    assert client.received(client.consumer("q", PREFETCH)) == PREFETCH


@run_async
async def test_a_coordinator_attached_after_messages_resets_the_connection_once() -> None:
    served = served_with(5)
    for resets in (True, False):
        client = Client(served, product=PRODUCT)
        client.consumer("q", PREFETCH)
        client.session.attach_sender("coordinator", Source(), Coordinator())
        served.settle(client)
        assert bool(client.events_of(ConnectionClosed)) is resets
    client.connection.connection_lost(None)  # another interruption
    client = Client(served, product=PRODUCT)
    client.consumer("q", PREFETCH)
    client.session.attach_sender("coordinator", Source(), Coordinator())
    served.settle(client)
    assert client.events_of(ConnectionClosed)


@run_async
async def test_messages_of_a_reset_client_wait_again_in_order() -> None:
    served = served_with(5)
    session = Session(served)
    session.receive(2)
    session.discharge(fail=True)
    assert session.was_reset
    again = Session(served)
    assert again.client.received(again.consumer) == 5


def test_interrupted_clients_are_remembered_for_a_limited_time_and_number() -> None:
    now_s = 2 * RETURN_S
    interruptions = Interruptions(lambda: now_s)
    interruptions._serves_since_s = 0.0
    properties: dict[Any, Any] = {"product": PRODUCT}
    for number in range(REMEMBERED_MAX + 1):
        interruptions.lost("anonymous", str(number), ConnectionHistory())
    assert interruptions.opened("anonymous", "0", properties) == ConnectionHistory()
    assert interruptions.opened("anonymous", "1", properties) == ConnectionHistory(now_s)
    assert interruptions.opened("anonymous", "1", properties) == ConnectionHistory()
    assert interruptions.opened("anonymous", "2", None) is None
    now_s += REMEMBERED_S
    assert interruptions.opened("anonymous", "3", properties) == ConnectionHistory()


def test_names_of_interrupted_clients_take_limited_memory() -> None:
    interruptions = Interruptions(lambda: 2 * RETURN_S)
    for number in range(40):
        interruptions.lost("ann", f"client {number}", ConnectionHistory(), frozenset(f"{link:05}{'x' * 1000}" for link in range(1000)))
    assert len(interruptions._lost) == 15  # of a megabyte each
    assert list(interruptions._lost)[-1] == ("ann", "client 39")
    for number in range(40):
        interruptions.opened("ann", f"client {number}", {"product": PRODUCT})
    assert interruptions._names_bytes == 0


def test_a_reset_client_keeps_the_time_of_its_interruption() -> None:
    now_s = 2 * RETURN_S
    interruptions = Interruptions(lambda: now_s)
    interruptions.lost("anonymous", "client", ConnectionHistory(1.0, resets=2), frozenset({"coordinator"}))
    assert interruptions.opened("anonymous", "client", {"product": PRODUCT}) == ConnectionHistory(1.0, frozenset({"coordinator"}), 3)
    interruptions.lost("anonymous", "client", ConnectionHistory(1.0, frozenset({"coordinator"}), 3))  # it breaks by itself
    assert interruptions.opened("anonymous", "client", {"product": PRODUCT}) == ConnectionHistory(now_s)


def test_another_user_with_the_client_id_of_an_interrupted_client_does_not_stand_for_it() -> None:
    now_s = 2 * RETURN_S
    interruptions, properties = Interruptions(lambda: now_s), {"product": PRODUCT}
    interruptions._serves_since_s = 0.0
    interruptions.lost("ann", "desk", ConnectionHistory())
    assert interruptions.opened("bob", "desk", properties) == ConnectionHistory()
    assert interruptions.opened("ann", "desk", properties) == ConnectionHistory(now_s)
