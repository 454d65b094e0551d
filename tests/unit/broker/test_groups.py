"""Message groups and exclusive consumers: one consumer at a time, in order."""

from __future__ import annotations

import pytest

from bascule.broker.message import BrokerMessage
from bascule.broker.order import FRONT, Line, place_of
from bascule.broker.policy import AddressPolicy, Policy
from bascule.testing.broker import Receiver
from tests.unit.broker.conftest import Bench


def groups_of(bench: Bench, receiver: Receiver) -> list[str]:
    return [str(message.group) for message in receiver.messages]


def test_all_messages_of_a_group_go_to_one_consumer_in_order(bench: Bench) -> None:
    consumers = [bench.consumer() for _ in range(3)]
    for number in range(30):
        bench.fill(number, group=f"g{number % 5}")
    for group in range(5):
        (holder,) = [consumer for consumer in consumers if f"g{group}" in groups_of(bench, consumer)]
        assert [content for content in bench.got(holder) if content % 5 == group] == list(range(group, 30, 5))
    assert sum(len(consumer.received) for consumer in consumers) == 30


def test_a_consumer_without_credit_blocks_only_its_own_groups(bench: Bench) -> None:
    slow, fast = bench.consumer(credit=1), bench.consumer(credit=0)
    bench.fill("a1", group="a")
    bench.broker.give(fast, 10)
    bench.fill("a2", group="a")
    bench.fill("b1", group="b")
    bench.fill("none")
    bench.fill("a3", group="a")
    assert bench.got(slow) == ["a1"]
    assert bench.got(fast) == ["b1", "none"]
    bench.broker.give(slow, 10)
    bench.broker.settle()
    assert bench.got(slow) == ["a1", "a2", "a3"]


def test_a_group_moves_in_order_to_another_consumer_when_its_consumer_detaches(bench: Bench) -> None:
    first, second = bench.consumer(credit=2), bench.consumer(credit=0)
    bench.fill(1, 2, 3, 4, group="g")
    bench.broker.give(second, 10)
    bench.broker.settle()
    assert (bench.got(first), bench.got(second)) == ([1, 2], [])
    bench.acknowledge(first, 0)
    bench.engine.detach(first.consumer, failed=False)
    bench.broker.settle()
    assert bench.got(second) == [2, 3, 4]
    bench.fill(5, group="g")
    assert bench.got(second) == [2, 3, 4, 5]


def test_a_released_message_is_redelivered_before_messages_set_aside(bench: Bench) -> None:
    holder, other = bench.consumer(credit=2), bench.consumer(credit=0)
    bench.fill(1, 2, 3, 4, group="g")
    bench.broker.give(other, 10)
    bench.broker.settle()
    for message in holder.messages[::-1]:
        bench.engine.give_back(holder.consumer, message, failed=False)
    bench.broker.settle()
    bench.broker.give(holder, 10)
    bench.broker.settle()
    assert bench.got(holder) == [1, 2, 1, 2, 3, 4]
    assert bench.got(other) == []


def test_a_group_keeps_its_order_within_a_priority(bench: Bench) -> None:
    holder, other = bench.consumer(credit=1), bench.consumer(credit=0)
    bench.fill(0, group="g")
    bench.broker.give(other, 10)
    for number, priority in enumerate((4, 9, 4, 9), start=1):
        bench.fill(number, group="g", priority=priority)
    bench.broker.give(holder, 10)
    bench.broker.settle()
    assert bench.got(holder) == [0, 2, 4, 1, 3]


def test_message_not_selected_by_consumer_of_its_group_goes_to_another_consumer(bench: Bench) -> None:
    reds = bench.consumer(selector="colour = 'red'")
    bench.fill("red", group="g", properties={"colour": "red"})
    everything = bench.consumer()
    bench.fill("blue", group="g", properties={"colour": "blue"})
    bench.fill("red again", group="g", properties={"colour": "red"})
    assert bench.got(reds) == ["red", "red again"]
    assert bench.got(everything) == ["blue"]


def test_groups_survive_a_crash(bench: Bench) -> None:
    for number in range(10):
        bench.fill(number, group=f"g{number % 2}")
    bench.crash()
    consumers = [bench.consumer(credit=1), bench.consumer(credit=1)]
    for consumer in consumers:
        bench.broker.give(consumer, 100)
        bench.broker.settle()
    assert sorted(bench.got(consumers[0]) + bench.got(consumers[1])) == list(range(10))
    assert not set(groups_of(bench, consumers[0])) & set(groups_of(bench, consumers[1]))


def test_messages_set_aside_are_in_snapshots_and_in_the_depth_of_the_queue(bench: Bench) -> None:
    bench.consumer(credit=1)
    bench.fill(1, 2, 3, group="g")
    other = bench.consumer()
    bench.broker.settle()
    queue = bench.queue()
    assert (queue.held_messages, queue.waiting_count, queue.delivering_count) == (3, 2, 1)
    assert [bench.content(message) for message in queue.waiting()] == [2, 3]
    assert bench.got(other) == []
    bench.broker.take_snapshot()
    bench.broker.settle()
    bench.crash()
    assert bench.waiting(bench.queue()) == [1, 2, 3]


@pytest.mark.interpreted
def test_messages_set_aside_for_several_consumers_are_removed_without_a_search(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = bench.consumer(credit=1), bench.consumer(credit=1), bench.consumer(credit=0)
    bench.fill("a", group="a")
    bench.fill("b", group="b")
    for _ in range(100):
        bench.fill("a", group="a", ttl_ms=10)
        bench.fill("b", group="b", ttl_ms=10)
    bench.broker.give(third, 1)
    bench.broker.settle()
    assert (len(first.received), len(second.received), len(third.received)) == (1, 1, 0)
    queue = bench.queue()
    assert queue.groups is not None
    assert queue.groups.count == 200
    bench.fill(*["c"] * 100, ttl_ms=10)
    searched: list[BrokerMessage] = []
    remove = Line.remove

    def search(line: Line, message: BrokerMessage) -> bool:
        if not line.head or line.head[0] is not message:
            searched.append(message)
        return remove(line, message)

    monkeypatch.setattr(Line, "remove", search)
    bench.now_ms += 10_000
    bench.engine.tick()
    bench.broker.settle()
    assert queue.waiting_count == 0
    assert not searched  # each was the first of the messages set aside for its consumer, or of the queue


@pytest.mark.interpreted
def test_reader_looks_at_few_consumers_whatever_number_has_messages_set_aside(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = [bench.consumer(credit=1) for _ in range(40)]
    for number in range(40):
        bench.fill(number, group=f"g{number}")
    for number in range(3 * 40):
        bench.fill(number, group=f"g{number % 40}", priority=4 + number % 2)
    bench.broker.give(bench.consumer(credit=0), 1)
    bench.broker.settle()
    queue = bench.queue()
    assert queue.groups is not None
    assert queue.groups.count > 90
    assert sum(len(holder.received) for holder in holders) >= 20
    in_order = [message.position for message in queue.waiting()]
    looked: list[Line] = []
    after = Line.after
    monkeypatch.setattr(Line, "after", lambda line, *rest: looked.append(line) or after(line, *rest))  # type: ignore[func-returns-value]
    place, read = FRONT, list[BrokerMessage]()
    while found := queue.after(place, 10):
        assert len(looked) <= 4
        looked.clear()
        read += found
        place = place_of(found[-1])
    assert [message.position for message in read] == in_order


def test_exclusive_queue_serves_oldest_consumer_until_it_leaves() -> None:
    bench = Bench(Policy(AddressPolicy(exclusive=True)))
    first, second = bench.consumer(credit=2), bench.consumer()
    bench.fill(1, 2, 3)
    assert (bench.got(first), bench.got(second)) == ([1, 2], [])
    bench.acknowledge(first, 0)
    bench.engine.detach(first.consumer, failed=False)
    bench.broker.settle()
    assert bench.got(second) == [2, 3]


def test_a_consumer_gets_at_most_prefetch_unsettled_messages() -> None:
    bench = Bench(Policy(AddressPolicy(prefetch_max=2)))
    greedy = bench.consumer()
    bench.fill(1, 2, 3, 4)
    assert bench.got(greedy) == [1, 2]
    other = bench.consumer()
    assert bench.got(other) == [3, 4]
    bench.fill(5)
    bench.acknowledge(greedy, 0)
    bench.broker.settle()
    assert bench.got(greedy) == [1, 2, 5]
