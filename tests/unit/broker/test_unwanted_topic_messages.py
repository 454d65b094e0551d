"""The rule which topic messages are journaled (docs/adr/0002)."""

import pytest

from bascule.broker.addresses import Diverts
from bascule.broker.administration import move, return_dead_letters
from bascule.broker.policy import DROP, AddressPolicy, Policy
from bascule.core.destination import Routing
from bascule.testing.broker import BrokerInMemory, Receiver, Sender, message_bytes
from tests.unit.broker.conftest import Bench


def broker(*replayable: str, patterns: tuple[str, ...] = ()) -> BrokerInMemory:
    made = BrokerInMemory()
    made.engine.addresses.use(Diverts((), patterns, replayable))
    return made


def publish(made: BrokerInMemory) -> Sender:
    sender = Sender()
    made.send("news", message_bytes("news"), sender, "token", routing=Routing.MULTICAST)
    return sender


def appended(made: BrokerInMemory) -> int:
    made.engine.journaling.flush()
    return len(made.engine.journaling.in_flight)


def test_a_topic_message_without_durable_subscription_and_divert_is_answered_at_once() -> None:
    made = broker()
    queue = made.engine.create_queue("watch", "news", Routing.MULTICAST, durable=False)
    receiver: Receiver = made.attach(queue, credit=1)
    sender = publish(made)
    made.engine.dispatch()
    assert [error for _, error in sender.answers] == [None]
    assert len(receiver.received) == 1
    assert appended(made) == 0


def test_a_topic_message_for_a_durable_subscription_waits_for_the_journal() -> None:
    made = broker()
    made.engine.create_queue("kept", "news", Routing.MULTICAST, durable=True)
    made.settle()
    sender = publish(made)
    assert sender.answers == []
    assert appended(made) == 1


def test_a_topic_message_for_a_divert_waits_for_the_journal() -> None:
    made = broker(patterns=("news",))
    sender = publish(made)
    assert sender.answers == []
    assert appended(made) == 1


def test_a_topic_message_on_a_replayable_address_waits_for_the_journal() -> None:
    made = broker("n#", "news")
    sender = publish(made)
    assert sender.answers == []
    assert appended(made) == 1


def test_queue_message_is_accepted_after_journal() -> None:
    made = broker()
    sender = Sender()
    made.send("orders", message_bytes("order"), sender, "token")
    assert sender.answers == []
    assert appended(made) == 1


@pytest.mark.parametrize("how", ["rejected", "expired", "returned"])
def test_a_persistent_topic_message_is_journaled_when_it_moves_to_a_queue(bench: Bench, how: str) -> None:
    bench.use(Diverts((), (), ()))
    watch = bench.subscription("watch", durable=False)
    bench.fill("news", to="t", ttl_ms=1_000)
    bench.fill("gossip", to="t", ttl_ms=1_000, durable=False)
    if how == "expired":
        bench.now_ms += 1_000
        bench.engine.tick()
    else:
        receiver = bench.consumer(watch)
        for message in receiver.messages:
            bench.engine.reject(receiver.consumer, message)
    name = "ExpiryQueue" if how == "expired" else "DLQ"
    if how == "returned":
        for action in (return_dead_letters(bench.engine, bench.queue(name)), move(bench.engine, watch, name)):
            list(action)
    bench.broker.settle()
    assert len(bench.waiting(bench.queue(name))) == 2
    bench.crash()
    assert bench.waiting(bench.queue(name)) == ["news"]


def test_a_full_subscription_refuses_a_persistent_message_if_only_non_persistent_ones_are_dropped() -> None:
    bench = Bench(Policy(AddressPolicy(max_messages=2, when_full=DROP)))
    bench.use(Diverts((), (), ()))
    watch = bench.subscription("watch", durable=False)
    bench.fill("gossip", to="t", durable=False)
    bench.fill("old", "new", "newest", to="t")
    assert bench.waiting(watch) == ["old", "new"]
    assert [token for token, error in bench.sender.answers if error] == ["newest"]
