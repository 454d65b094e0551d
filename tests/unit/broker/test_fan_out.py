"""Messages for so many queues that they enter them over several turns."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.broker import administration
from bascule.broker.fan_out import FAN_OUT_QUEUES, FAN_OUT_STEPS, LANE_MAX
from bascule.broker.order import FRONT, place_of
from bascule.broker.planned_sends import PIECE_PLACES
from bascule.broker.policy import DROP, AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.turns import Retry
from bascule.core.destination import Routing
from bascule.jms.sections import scan
from bascule.jms.selector import compile_selector
from bascule.testing.broker import message_bytes
from tests.support.faults import InjectedFault
from tests.unit.broker.conftest import START_MS, Bench

MANY = 3 * FAN_OUT_QUEUES


class Topic(Bench):
    """A topic with many subscriptions, in short turns."""

    def __init__(self, policy: AddressPolicy | None = None) -> None:
        super().__init__(Policy(policy or AddressPolicy(auto_delete=False)))
        self.queues = [self.subscription(f"s{number}") for number in range(MANY)]
        self.last = self.queues[-1]
        self.broker.settle()
        self.fill("before", to="t")
        self.acknowledge_all()
        self.engine.turns.steps = 1_000
        self.engine.turns.begin_turn()

    def acknowledge_all(self) -> None:
        for queue in self.queues:
            for message in list(queue.ready):
                queue.take_out(message)
                self.engine.gone(queue, message)
        self.broker.settle()

    def begin(self, content: str, *, durable: bool) -> None:
        """Send a message, and let it enter its first queues."""
        self.put(content, to="t", durable=durable)
        if durable:
            self.engine.journaling.flush()
            self.broker.confirm(len(self.broker.in_flight))
        assert 0 < self.entered() < MANY

    def send(self, content: str, *, to: str = "t", transaction: Any = None) -> Retry | None:
        """Send a message that is not stored for a client, which waits if the broker says so."""
        body = message_bytes(content, durable=False)
        return self.engine.send(to, Routing.MULTICAST, body, scan(body), "client", self.sender, content, transaction, waits=True)

    def turn(self) -> None:
        self.engine.turns.begin_turn()
        self.engine.go_on()

    def entered(self) -> int:
        """Return the number of queues that hold messages."""
        return sum(queue.held_messages > 0 for queue in self.queues)


def contents(bench: Bench, queue: BrokerQueue) -> list[str]:
    positions = [message.position for message in queue.ready]
    assert positions == sorted(positions)
    return [str(each) for each in bench.waiting(queue)]


def test_message_that_takes_several_turns_is_alone_in_its_piece() -> None:
    assert FAN_OUT_QUEUES >= PIECE_PLACES


@pytest.mark.parametrize("durable", [True, False])
def test_message_enters_many_queues_over_several_turns_and_keeps_its_body_until_the_last_one(durable: bool) -> None:
    topic = Topic()
    memory = topic.engine.memory
    before = (memory.messages, memory.entries, memory.bodies_bytes)
    consumer = topic.broker.attach(topic.queues[0], 1)
    topic.broker.settle()
    topic.begin("x", durable=durable)
    assert memory.entries == before[1] + MANY + 1, "its places count from the beginning, and the message itself"
    topic.engine.turns.begin_turn()
    topic.engine.dispatch()
    assert topic.entered() < MANY
    topic.acknowledge(consumer)
    turns = 0
    while topic.entered() < MANY - 1:
        topic.broker.flush()
        topic.broker.confirm(len(topic.broker.in_flight))
        turns += 1
    assert turns >= 2
    topic.broker.settle()
    topic.acknowledge(consumer)  # of a stored message: its delivery has waited for a reservation
    topic.broker.settle()
    assert memory.messages == before[0] + 1
    assert memory.entries == before[1] + MANY - 1
    assert memory.bodies_bytes > before[2]
    assert contents(topic, topic.last) == ["x"]
    topic.acknowledge_all()
    assert (memory.messages, memory.entries, memory.bodies_bytes) == before


def test_body_of_message_that_its_first_consumers_settle_stays_until_it_is_in_all_queues() -> None:
    topic = Topic()
    topic.begin("x", durable=False)
    for queue in topic.queues:
        for message in list(queue.ready):
            queue.take_out(message)
            topic.engine.gone(queue, message)
    assert topic.engine.memory.messages == 1
    topic.broker.settle()
    assert topic.entered() > 0
    topic.acknowledge_all()
    assert (topic.engine.memory.messages, topic.engine.memory.entries) == (0, 0)


def test_messages_that_are_not_stored_stay_in_order_behind_one_that_enters_many_queues() -> None:
    topic = Topic()
    topic.begin("first", durable=False)
    body = message_bytes("second", durable=False)
    topic.broker.send("t", body, topic.sender, "second", routing=Routing.MULTICAST)
    few, both = topic.subscription("few", "t.other"), topic.subscription("both", "#")
    topic.put("third", durable=False, to="t")
    topic.put("fourth", durable=False, to="t.other")
    assert (contents(topic, few), contents(topic, both)) == ([], [])
    topic.broker.settle()
    assert [contents(topic, queue) for queue in topic.queues] == [["first", "second", "third"]] * MANY
    assert contents(topic, few) == ["fourth"]
    assert contents(topic, both) == ["third", "fourth"]


def test_message_for_other_queues_does_not_wait_behind_one_that_enters_many_queues() -> None:
    topic = Topic()
    few = topic.subscription("few", "t.other")
    topic.begin("first", durable=False)
    topic.put("other", durable=False, to="t.other")
    assert contents(topic, few) == ["other"]


def test_senders_wait_while_many_messages_enter_many_queues_and_memory_counts_those_that_wait() -> None:
    topic = Topic()
    memory = topic.engine.memory
    few, both = topic.subscription("few", "t.other"), topic.subscription("both", "#")
    before = (memory.messages, memory.entries, memory.bodies_bytes)
    for number in range(LANE_MAX):
        assert topic.send(f"{number}") is None
    assert memory.messages == before[0] + LANE_MAX
    assert memory.bodies_bytes > before[2]
    retry = topic.send("many")
    late = topic.send("late", to="t.other")  # shares a queue with those that wait
    assert retry is not None
    assert late is not None
    assert topic.send("apart", to="t.apart") is not None
    topic.engine.delete_queue(both)
    assert topic.send("own", to="t.other") is None
    assert contents(topic, few) == ["own"]
    turns = 0
    while retry is not None:
        topic.turn()
        retry = retry()
        turns += 1
    assert turns > 1
    assert len(topic.engine.deliveries.fan_out.waiting) <= LANE_MAX
    topic.broker.settle()
    assert [contents(topic, queue) for queue in topic.queues] == [["0", "1", "2", "3", "many"]] * MANY
    topic.acknowledge_all()
    topic.engine.delete_queue(few)
    topic.broker.settle()
    assert (memory.messages, memory.entries, memory.bodies_bytes) == before


def test_full_queues_that_drop_messages_do_not_refuse_one_while_others_enter() -> None:
    topic = Topic(AddressPolicy(auto_delete=False, max_messages=2, when_full=DROP))
    sent = 0
    retry: Retry | None = None
    for _ in range(1_000):
        while retry is None and sent < 12:
            retry = topic.send(f"{sent}")
            sent += 1
        topic.turn()
        retry = retry() if retry is not None else None
    topic.broker.settle()
    assert sent == 12
    assert retry is None
    assert [error for _, error in topic.sender.answers if error is not None] == []
    assert {tuple(contents(topic, queue)) for queue in topic.queues} == {("10", "11")}


def test_caller_that_waits_for_a_full_queue_goes_on_when_a_message_that_it_drops_has_entered() -> None:
    topic = Topic(AddressPolicy(auto_delete=False, max_messages=1, when_full=DROP))
    topic.put("x", to="t", durable=False)
    assert topic.last.full()
    assert topic.last.held_messages == 0
    woken: list[bool] = []
    topic.last.blocked["caller"] = lambda: woken.append(topic.last.oldest_volatile() is not None)
    topic.broker.settle()
    assert woken == [True]


def test_caller_that_waits_for_a_full_queue_goes_on_when_a_delay_ends() -> None:
    bench = Bench(Policy(AddressPolicy(max_messages=1, when_full=DROP)))
    queue = bench.queue()
    bench.fill("x", durable=False, delivery_delay_ms=1_000)
    woken: list[bool] = []
    queue.blocked["caller"] = lambda: woken.append(queue.oldest_volatile() is not None)
    bench.broker.settle()
    assert woken == []
    bench.now_ms += 1_001
    bench.engine.tick()
    bench.broker.settle()
    assert woken == [True]


@pytest.mark.interpreted
def test_fault_in_the_first_piece_of_a_message_does_not_stop_later_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic()
    memory = topic.engine.memory
    before = (memory.messages, memory.entries)

    def fail(*_: object) -> None:
        raise InjectedFault

    with monkeypatch.context() as patched:
        patched.setattr(BrokerQueue, "add", fail)
        with pytest.raises(InjectedFault):
            topic.send("lost")
    assert {(queue.entering, queue.incoming, queue.incoming_bytes) for queue in topic.queues} == {(0, 0, 0)}
    assert topic.entered() == 1
    assert (memory.messages, memory.entries) == (before[0] + 1, before[1] + 1)
    topic.put("next", to="t", durable=False)
    topic.broker.settle()
    assert [contents(topic, queue) for queue in topic.queues] == [["next"]] * MANY


def test_message_has_its_place_in_a_queue_that_has_got_a_later_one_meanwhile() -> None:
    topic = Topic()
    both = topic.subscription("both", "#")
    topic.begin("stored", durable=True)
    topic.put("later", to="t.other", durable=False)
    assert contents(topic, both) == ["later"]
    topic.broker.settle()
    assert contents(topic, both) == ["stored", "later"]


def test_message_that_waits_for_another_one_keeps_its_place_before_a_stored_one() -> None:
    topic = Topic()
    both = topic.subscription("both", "#")
    topic.begin("first", durable=False)
    topic.put("second", to="t", durable=False)
    topic.put("stored", to="t.other")
    topic.engine.journaling.flush()
    topic.engine.turns.begin_turn()
    topic.broker.confirm(len(topic.broker.in_flight))
    topic.broker.settle()
    assert contents(topic, both) == ["first", "second", "stored"]


def test_snapshot_waits_until_a_stored_message_is_in_all_of_its_queues() -> None:
    topic = Topic()
    topic.begin("x", durable=True)
    taken: list[int] = []
    topic.engine.journaling.between_records(lambda: taken.append(topic.entered()))
    assert taken == []
    topic.broker.settle()
    assert taken == [MANY]


def test_delay_of_a_message_for_many_queues_begins_in_all_of_them() -> None:
    topic = Topic()
    topic.begin("x", durable=True)
    topic.broker.settle()
    topic.acknowledge_all()
    topic.put("later", to="t", delivery_delay_ms=1_000)
    topic.broker.settle()
    assert {(len(queue.delayed), queue.ready.count) for queue in topic.queues} == {(1, 0)}
    topic.now_ms = START_MS + 1_001
    topic.engine.tick()
    topic.broker.settle()
    assert {(len(queue.delayed), queue.ready.count) for queue in topic.queues} == {(0, 1)}


@pytest.mark.parametrize("durable", [True, False])
def test_delay_ends_in_many_queues_over_several_turns(durable: bool) -> None:
    topic = Topic()
    memory = topic.engine.memory
    before = (memory.messages, memory.entries, memory.bodies_bytes)
    deleted, purged = topic.queues[1], topic.queues[2]
    topic.put("x", to="t", delivery_delay_ms=1_000, durable=durable)
    topic.broker.settle()
    topic.put("early", to="t", durable=durable)
    topic.broker.settle()
    (late,) = purged.delayed
    purged.take_out(late)
    topic.engine.gone(purged, late)
    topic.now_ms = START_MS + 1_001
    topic.engine.turns.begin_turn()
    topic.engine.tick()
    assert topic.engine.turns.pending
    assert 0 < sum(len(queue.delayed) for queue in topic.queues) < MANY
    topic.engine.delete_queue(deleted)
    topic.put("after", to="t", durable=durable)
    longest = 0
    while topic.engine.turns.pending:
        waiting = sum(queue.ready.count for queue in topic.queues)
        topic.turn()
        longest = max(longest, sum(queue.ready.count for queue in topic.queues) - waiting)
    assert 0 < longest <= FAN_OUT_QUEUES * 2
    topic.broker.settle()
    rest = [queue for queue in topic.queues if queue not in (deleted, purged)]
    orders = {tuple(contents(topic, queue)) for queue in rest}
    assert len(orders) == 1
    assert sorted(*orders) == ["after", "early", "x"]
    assert orders.pop()[0] == "early"
    assert contents(topic, purged) == ["early", "after"]
    topic.queues.remove(deleted)
    topic.acknowledge_all()
    assert (memory.messages, memory.entries, memory.bodies_bytes) == before


def test_end_of_a_delay_visits_no_selector_of_a_queue_without_later_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Policy(AddressPolicy(auto_delete=False)))
    bench.put("late", delivery_delay_ms=1_000)
    bench.put("early")
    bench.broker.settle()
    put_back = list[object]()
    monkeypatch.setattr(BrokerQueue, "put_back", lambda _, messages: put_back.extend(messages))
    bench.now_ms = START_MS + 1_001
    bench.engine.tick()
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["early", "late"]
    assert put_back == []


def test_senders_of_transactions_wait_too_while_many_messages_enter_many_queues() -> None:
    topic = Topic()
    transaction = topic.engine.begin(b"1")
    assert [topic.send(f"{number}", transaction=transaction) for number in range(LANE_MAX)] == [None] * LANE_MAX
    topic.engine.commit(transaction, lambda *_: None)
    assert len(topic.engine.deliveries.fan_out.waiting) == LANE_MAX
    assert topic.send("late", transaction=topic.engine.begin(b"2")) is not None


def test_messages_whose_delay_ends_stay_in_order_behind_one_for_many_queues() -> None:
    topic = Topic()
    both = topic.subscription("both", "#")
    topic.put("first", to="t", delivery_delay_ms=1_000)
    topic.put("second", to="t.other", delivery_delay_ms=1_001)
    topic.broker.settle()
    topic.now_ms = START_MS + 1_002
    seen = list[str]()
    while len(seen) < 2:
        topic.engine.turns.begin_turn()
        topic.engine.tick()
        topic.engine.go_on()
        assert contents(topic, both)[: len(seen)] == seen
        seen = contents(topic, both)
    assert seen == ["first", "second"]


def test_body_of_message_that_is_deleted_with_its_queues_while_its_delay_ends_is_released() -> None:
    topic = Topic()
    topic.put("x", to="t", delivery_delay_ms=1_000)
    topic.broker.settle()
    topic.now_ms = START_MS + 1_001
    topic.engine.turns.begin_turn()
    topic.engine.tick()
    for queue in topic.queues:
        topic.engine.delete_queue(queue)
    assert topic.engine.memory.messages == 1
    topic.broker.settle()
    assert (topic.engine.memory.messages, topic.engine.memory.entries) == (0, 0)


def between_the_passes(topic: Topic) -> None:
    """Let the delay of a message end, and stop when it has left the delayed messages of all queues."""
    topic.put("x", to="t", delivery_delay_ms=1_000)
    topic.broker.settle()
    topic.now_ms = START_MS + 1_001
    topic.engine.turns.begin_turn()
    topic.engine.tick()
    while any(queue.delayed.count for queue in topic.queues):
        topic.engine.turns.begin_turn()
        topic.engine.turns.go_on()
    assert topic.last.waiting() == []


def test_purge_and_move_find_a_message_whose_delay_ends_over_several_turns() -> None:
    topic = Topic()
    between_the_passes(topic)
    purged, moved = topic.queues[-1], topic.queues[-2]
    assert (purged.delivering_count, len(purged.delayed)) == (0, 1)
    assert [progress.done for progress in administration.purge(topic.engine, purged)][-1] == 1
    assert [progress.done for progress in administration.move(topic.engine, moved, "q")][-1] == 1
    topic.broker.settle()
    assert [(queue.held_messages, queue.waiting_count) for queue in (purged, moved)] == [(0, 0), (0, 0)]
    assert topic.waiting(topic.queue()) == ["x"]
    assert {tuple(contents(topic, queue)) for queue in topic.queues[:-2]} == {("x",)}
    assert topic.engine.memory.entries == MANY - 1


def test_purge_finds_a_message_whose_delay_ends_in_all_queues_meanwhile() -> None:
    topic = Topic()
    both = topic.subscription("both", "#")
    topic.put("x", to="t", delivery_delay_ms=1_000)
    topic.fill(*range(administration.STEP_MESSAGES + 1), to="t.other")
    topic.now_ms = START_MS + 1_001
    topic.engine.turns.begin_turn()
    topic.engine.tick()
    topic.engine.turns.steps = 1  # a piece in each turn
    while both.delayed.count:
        topic.engine.turns.begin_turn()
        topic.engine.turns.go_on()
    topic.engine.turns.steps = 1_000
    purge = administration.purge(topic.engine, both)
    assert next(purge).done == administration.STEP_MESSAGES
    topic.broker.settle()
    assert contents(topic, both) == [str(administration.STEP_MESSAGES), "x"]
    assert [progress.done for progress in purge][-1] == administration.STEP_MESSAGES + 2
    assert both.held_messages == 0


def test_browse_shows_a_message_whose_delay_ends_over_several_turns() -> None:
    topic = Topic()
    between_the_passes(topic)
    (message,) = topic.last.delayed.after(FRONT, 10)
    assert topic.content(message) == "x"
    assert topic.last.delayed.after(place_of(message), 10) == []


@pytest.mark.parametrize("priority", [0, 4, 9])
def test_message_whose_delay_ends_is_listed_at_its_place(priority: int) -> None:
    bench = Bench(Policy(AddressPolicy()))
    for number, level in enumerate((4, 4, 9, 0, 4)):
        bench.put(number, delivery_delay_ms=1_000, priority=level)
    bench.put("leaves", delivery_delay_ms=1_000, priority=priority)
    bench.broker.settle()
    delayed = bench.queue().delayed
    before = list(delayed)
    assert delayed.let_leave(next(message for message in before if bench.content(message) == "leaves"))
    listed, place = list[Any](), FRONT
    while found := delayed.after(place, 1):
        listed += found
        place = place_of(found[0])
    assert listed == before
    assert (len(delayed), sorted(map(id, delayed))) == (6, sorted(map(id, before)))


def test_a_place_before_later_messages_costs_the_steps_of_the_selectors() -> None:
    topic = Topic()
    both = topic.subscription("both", "#")
    for number in range(200):
        topic.broker.attach(both, 0, selector=compile_selector(f"a = {number}"))
    topic.put("first", to="t", durable=False)
    topic.put("later", to="t.other")
    topic.engine.journaling.flush()
    topic.engine.turns.begin_turn()
    topic.broker.confirm(len(topic.broker.in_flight))
    assert contents(topic, both) == ["later"]
    turns = topic.engine.turns
    turns.left = before = turns.steps = 10**6
    turns.go_on()
    assert contents(topic, both) == ["first", "later"]
    assert both.ready.take_steps > 0
    assert before - turns.left == FAN_OUT_STEPS * (MANY + 1 - FAN_OUT_QUEUES) + both.ready.take_steps


def test_deleted_queue_gets_no_message_of_a_later_slice() -> None:
    topic = Topic()
    topic.begin("x", durable=True)
    topic.engine.delete_queue(topic.last)
    topic.broker.settle()
    assert topic.last.held_messages == 0
    assert topic.engine.memory.entries == MANY - 1
