"""Full queues, and addresses that clients may not create."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bascule.broker.dropping import DROPPED_AT_ONCE
from bascule.broker.errors import UnknownAddress
from bascule.broker.policy import BLOCK, DROP, REJECT, AddressPolicy, Policy
from bascule.broker.turns import AfterStored
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.jms.sections import scan
from tests.support.faults import Faults, InjectedFault
from tests.unit.broker.conftest import Bench


def bench_with(**settings: Any) -> Bench:
    return Bench(Policy(AddressPolicy(**settings)))


def refusals(bench: Bench) -> list[BasculeError]:
    return [error for _, error in bench.sender.answers if error is not None]


@pytest.mark.parametrize("limit", [{"max_messages": 2}, {"max_bytes": 20}])
def test_a_full_queue_refuses_messages_until_one_is_consumed(limit: dict[str, int]) -> None:
    bench = bench_with(when_full=REJECT, **limit)
    bench.fill(1, 2, 3)
    held = bench.queue().held_messages
    assert held == 2
    (error, *_) = refusals(bench)
    assert error.condition == "amqp:resource-limit-exceeded"
    assert "'q' is full" in str(error)
    consumer = bench.consumer(credit=1)
    bench.acknowledge(consumer)
    bench.fill(4)
    assert bench.waiting(bench.queue())[-1] == 4


def test_a_duplicate_of_a_message_in_a_full_queue_is_accepted() -> None:
    bench = bench_with(when_full=REJECT, max_messages=1)
    bench.fill(1, message_id="ID:1")
    bench.fill(1, message_id="ID:1")
    assert refusals(bench) == []
    assert bench.waiting(bench.queue()) == [1]


def test_an_unsettled_message_counts_for_the_limit() -> None:
    bench = bench_with(when_full=REJECT, max_messages=1)
    bench.consumer()
    bench.fill(1, 2)
    assert len(refusals(bench)) == 1


def test_full_subscription_refuses_message_to_its_topic() -> None:
    bench = bench_with(when_full=REJECT, max_messages=1)
    bench.subscription("s")
    bench.fill(1, 2, to="t")
    assert len(refusals(bench)) == 1


def test_a_full_queue_drops_the_oldest_non_persistent_messages() -> None:
    bench = bench_with(when_full=DROP, max_messages=3)
    bench.fill("kept")
    bench.fill("old", "young", durable=False)
    bench.fill("new")
    assert bench.waiting(bench.queue()) == ["kept", "young", "new"]
    bench.fill("newer", "newest")
    assert bench.waiting(bench.queue()) == ["kept", "new", "newer"]
    assert [token for token, error in bench.sender.answers if error] == ["newest"]
    assert bench.engine.counters.dropped == 2


def short_turns(bench: Bench) -> None:
    bench.engine.turns.steps = 50
    bench.engine.turns.begin_turn()


def overfull(max_bytes: int = 20_000) -> Bench:
    """Return a queue of many small non-persistent messages that a large message has put above its limit."""
    bench = bench_with(when_full=DROP, max_bytes=max_bytes)
    bench.fill(*range(DROPPED_AT_ONCE + 100), durable=False)
    queue = bench.queue()
    assert not queue.full()
    bench.put("x" * (max_bytes - 100), durable=False)
    assert queue.full()
    return bench


def offer(bench: Bench, content: str) -> bool:
    body = bench.encode(content, durable=False)
    return bench.engine.send("q", Routing.ANYCAST, body, scan(body), "client", bench.sender, content, waits=True) is None


def test_sender_waits_while_many_small_messages_are_dropped_for_a_large_one() -> None:
    bench = overfull()
    queue = bench.queue()
    short_turns(bench)
    held = queue.held_messages
    assert not offer(bench, "new")
    assert DROPPED_AT_ONCE <= held - queue.held_messages < DROPPED_AT_ONCE + 20
    turns = 1
    while not offer(bench, "new"):
        held_bytes = queue.held_bytes
        bench.broker.flush()
        assert queue.held_bytes < held_bytes, "each turn must drop messages"
        turns += 1
    assert turns > 3
    assert not queue.dropping
    assert bench.waiting(queue)[-1] == "new"
    assert not refusals(bench)


def test_sender_waits_while_a_full_queue_has_only_messages_that_the_journal_stores() -> None:
    bench = bench_with(when_full=DROP, max_messages=3)
    queue, transaction = bench.queue(), bench.engine.begin(b"t")
    for number in range(3):
        bench.put(number, durable=False, transaction=transaction)
    bench.put("durable", to="other", transaction=transaction)
    bench.engine.commit(transaction, lambda *_: None)
    body = bench.encode("new", durable=False)
    retry = bench.engine.send("q", Routing.ANYCAST, body, scan(body), "client", bench.sender, "new", waits=True)
    bench.broker.flush()
    assert (queue.held_messages, queue.incoming) == (0, 3)
    assert isinstance(retry, AfterStored)
    retry = retry()
    assert isinstance(retry, AfterStored)
    bench.broker.settle()
    assert retry() is None
    bench.broker.settle()
    assert bench.waiting(queue) == [1, 2, "new"]
    assert not refusals(bench)


def test_sender_is_refused_once_the_messages_that_a_full_queue_awaits_cannot_be_dropped() -> None:
    bench = bench_with(when_full=DROP, max_messages=2)
    bench.queue()
    for number in range(2):
        bench.put(number)
    body = bench.encode("new", durable=False)
    retry = bench.engine.send("q", Routing.ANYCAST, body, scan(body), "client", bench.sender, "new", waits=True)
    assert isinstance(retry, AfterStored)
    bench.broker.settle()
    assert retry() is None
    assert len(refusals(bench)) == 1


class SearchedBody(bytes):
    """A body that counts the searches through it."""

    searches = 0

    def find(self, *arguments: Any) -> int:
        self.searches += arguments[1] == 0  # from the beginning
        return super().find(*arguments)


def test_waiting_sender_reads_its_duplicate_id_once_over_many_turns() -> None:
    bench = overfull()
    short_turns(bench)
    body = SearchedBody(bench.encode("new", durable=False, properties={"_AMQ_DUPL_ID": "once"}))
    retry = bench.engine.send("q", Routing.ANYCAST, body, scan(body), "client", bench.sender, "new", waits=True)
    turns = 0
    while retry is not None:
        bench.broker.flush()
        retry = retry()
        turns += 1
    assert turns > 3
    assert body.searches == 1
    bench.put("again", durable=False, properties={"_AMQ_DUPL_ID": "once"})
    bench.broker.settle()
    assert bench.waiting(bench.queue())[-1] == "new"
    assert bench.sender.accepted_tokens[-2:] == ["new", "again"]


def test_message_of_sender_that_cannot_wait_goes_in_at_once_and_queue_makes_room_in_next_turns() -> None:
    bench = overfull()
    queue = bench.queue()
    short_turns(bench)
    held = queue.held_messages
    bench.put("new", durable=False)
    assert bench.waiting(queue)[-1] == "new"
    assert held - queue.held_messages < DROPPED_AT_ONCE + 20
    bench.broker.settle()
    assert not queue.dropping
    assert not queue.full()
    assert bench.waiting(queue)[-1] == "new"


def test_search_for_duplicate_id_does_not_pass_over_a_large_body() -> None:
    bench = bench_with()
    searched: list[int] = []

    class Body(bytes):
        def find(self, *arguments: Any) -> int:
            searched.append(arguments[2])
            return super().find(*arguments)

    properties = {"large": "x" * 900_000, "_AMQ_DUPL_ID": "once"}
    body = Body(bench.encode("x" * (4 << 20), durable=False, properties=properties))
    for token in ("first", "second"):
        bench.broker.send("q", body, bench.sender, token)
    bench.broker.settle()
    assert max(searched) < 2 << 20
    assert bench.queue().held_messages == 1


@pytest.mark.parametrize("waits", [True, False])
def test_message_for_many_full_subscriptions_drops_a_limited_number_of_messages_in_each_turn(waits: bool) -> None:
    bench = bench_with(when_full=DROP, max_messages=1_000)
    queues = [bench.subscription(f"s{number}") for number in range(30)]
    bench.fill(*range(100), to="t", durable=False)
    for queue in queues:
        queue.settings = dataclasses.replace(queue.settings, max_messages=1)
    bench.engine.addresses.forget_routes()
    short_turns(bench)
    body = bench.encode("new", durable=False)

    def held() -> int:
        return sum(queue.held_messages for queue in queues)

    before = held()
    again = bench.engine.send("t", Routing.MULTICAST, body, scan(body), "client", bench.sender, "new", waits=waits)
    assert DROPPED_AT_ONCE <= before - held() + (not waits) * len(queues) < DROPPED_AT_ONCE + 20
    assert sum(queue.dropping for queue in queues) == 28
    turns = 0
    while again is not None or any(queue.dropping for queue in queues):
        bench.broker.flush()
        again = again and again()
        turns += 1
    assert turns > 20
    # A message that did not wait counts for the room that the queues make.
    assert [bench.waiting(queue) for queue in queues] == [["new"]] * (30 if waits else 2) + [[]] * (0 if waits else 28)
    assert not refusals(bench)


def test_a_lowered_limit_drops_messages_over_several_turns() -> None:
    bench = bench_with(when_full=DROP, max_messages=2_000)
    bench.fill(*range(1_500), durable=False)
    queue = bench.queue()
    queue.settings = dataclasses.replace(queue.settings, max_messages=10)
    short_turns(bench)
    assert not offer(bench, "new")
    while queue.dropping:
        bench.broker.flush()
    assert queue.held_messages == 9
    assert offer(bench, "new")
    assert (bench.waiting(queue)[0], bench.waiting(queue)[-1]) == (1_491, "new")


def test_error_while_messages_are_dropped_does_not_stop_later_drops() -> None:
    bench = bench_with(when_full=DROP, max_messages=2_000)
    bench.fill(*range(1_500), durable=False)
    queue, faults = bench.queue(), Faults()
    limits = queue.settings
    queue.settings = dataclasses.replace(limits, max_messages=1)
    bench.engine.schedule.on_earlier = lambda: faults.at("timer")  # for the empty queue, which nobody uses
    faults.arm(1)
    short_turns(bench)
    assert not offer(bench, "new")
    with pytest.raises(InjectedFault):
        bench.broker.settle()
    queue.settings = limits
    bench.fill(*range(1_500), durable=False)
    queue.settings = dataclasses.replace(limits, max_messages=10)
    assert not offer(bench, "new")
    while not offer(bench, "new"):
        assert queue.dropping
        bench.broker.flush()
    assert bench.waiting(queue) == [*range(1_491, 1_500), "new"]


def test_dropping_of_messages_ends_when_queue_is_deleted() -> None:
    bench = overfull()
    short_turns(bench)
    assert not offer(bench, "new")
    bench.engine.delete_queue(bench.queue())
    bench.broker.settle()
    assert offer(bench, "new")
    assert bench.waiting(bench.queue()) == ["new"]


def test_sender_credit_for_blocking_queue_is_free_room() -> None:
    bench = bench_with(when_full=BLOCK, max_messages=5)
    bench.fill(1, 2, 3)
    assert bench.engine.share_of_room("q", Routing.ANYCAST, 1000) == 2
    assert bench.engine.share_of_room("other", Routing.ANYCAST, 1000) == 1000
    bench.fill(4, 5, 6)  # sent with credit from before
    assert refusals(bench) == []
    assert bench.engine.share_of_room("q", Routing.ANYCAST, 1000) == 0
    woken: list[int] = []
    bench.engine.when_room("q", Routing.ANYCAST, "producer", lambda: woken.append(1))
    consumer = bench.consumer()
    bench.acknowledge(consumer, 0)
    assert woken == []
    bench.acknowledge(consumer, 1)
    assert woken == [1]
    bench.acknowledge(consumer, 2)
    assert woken == [1]


def test_senders_share_the_free_room() -> None:
    bench = bench_with(max_messages=5)
    for _ in range(3):
        bench.engine.attach_producer("q", Routing.ANYCAST)
    assert bench.engine.share_of_room("q", Routing.ANYCAST, 1000) == 2


@pytest.mark.parametrize("max_bytes", [1_000, 1_001, 5_000])
def test_a_senders_share_of_a_queue_with_a_size_limit_is_exactly_enough_to_fill_it(max_bytes: int) -> None:
    bench = bench_with(max_bytes=max_bytes)
    bench.fill("x" * 80)
    share = bench.engine.share_of_room("q", Routing.ANYCAST, 1000)
    bench.fill(*["x" * 80] * (share - 1))
    assert not bench.queue().full()
    assert bench.engine.share_of_room("q", Routing.ANYCAST, 1000) == 1
    bench.fill("x" * 80)
    assert bench.queue().full()
    assert bench.engine.share_of_room("q", Routing.ANYCAST, 1000) == 0
    assert refusals(bench) == []


def test_an_address_without_auto_create_is_not_found() -> None:
    bench = Bench(Policy(AddressPolicy(auto_create=False), rules=(("free.#", {"auto_create": True}),), queues=("q",), topics=("t",)))
    bench.engine.create_configured()
    bench.fill(1)
    bench.fill(2, to="other")
    bench.fill(3, to="free.one")
    (error,) = refusals(bench)
    assert error.condition == "amqp:not-found"
    assert "'other'" in str(error)
    bench.engine.attach_producer("t", Routing.MULTICAST)
    with pytest.raises(UnknownAddress, match="no topic 't2'"):
        bench.engine.attach_producer("t2", Routing.MULTICAST)


def test_a_message_never_creates_a_temporary_queue(bench: Bench) -> None:
    bench.broker.send("temp.gone", bench.encode(1), bench.sender, 1)
    (error,) = refusals(bench)
    assert error.condition == "amqp:not-found"


def test_more_specific_address_rule_wins_for_each_setting() -> None:
    policy = Policy(
        rules=(
            ("orders.eu", {"max_messages": 3}),
            ("#", {"max_messages": 1, "max_bytes": 1}),
            ("orders.*", {"max_messages": 2, "exclusive": True}),
            ("orders.#", {"max_bytes": 2}),
        )
    )
    found = policy.of("orders.eu")
    assert (found.max_messages, found.max_bytes, found.exclusive) == (3, 2, True)
    assert (policy.of("orders.us").max_messages, policy.of("x").max_messages, policy.of("x").max_bytes) == (2, 1, 1)


@pytest.mark.parametrize("how", ["release", "fail", "reject", "transaction"])
def test_consumer_at_prefetch_limit_receives_next_message_after_any_settlement(how: str) -> None:
    bench = Bench(Policy(AddressPolicy(prefetch_max=1, redelivery_delay_ms=60_000)))
    bench.fill(1, 2)
    consumer = bench.consumer()
    message = consumer.messages[0]
    match how:
        case "reject":
            bench.engine.reject(consumer.consumer, message)
        case "transaction":
            bench.engine.acknowledge_in(bench.engine.begin(b"1"), consumer.consumer, message)
        case _:
            bench.engine.give_back(consumer.consumer, message, failed=how == "fail")
    bench.broker.settle()
    assert bench.got(consumer) == [1, 1 if how == "release" else 2]
