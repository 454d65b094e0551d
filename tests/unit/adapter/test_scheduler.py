"""The scheduler returns each item once, in the order of its lane, and not before its time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bascule.adapter.inbound.scheduler import Scheduler
from bascule.adapter.inbound.spec import Order
from bascule.adapter.inbound.state import Place, Ref


@dataclass(eq=False)
class Job:
    ref: Ref
    key: bytes | None = None


def job(offset: int, key: bytes | None = None, partition: int = 0, token: str = "t") -> Job:
    return Job(Ref(Place("topic", partition), token, offset), key)


def taken(scheduler: Scheduler[Job], now_s: float = 0.0) -> list[int]:
    found = []
    while (item := scheduler.take(now_s)) is not None:
        found.append(item.ref.offset)
    return found


def test_unordered_scheduler_starts_all_items_at_once() -> None:
    scheduler: Scheduler[Job] = Scheduler(Order.NONE)
    for offset in range(3):
        scheduler.add(job(offset, b"one"))
    assert taken(scheduler) == [0, 1, 2]


def test_scheduler_by_key_starts_one_item_per_key_at_a_time() -> None:
    scheduler: Scheduler[Job] = Scheduler(Order.KEY)
    jobs = [job(0, b"a"), job(1, b"a"), job(2, b"b"), job(3), job(4)]
    for each in jobs:
        scheduler.add(each)
    assert taken(scheduler) == [0, 2, 3, 4]
    scheduler.done(jobs[0])
    assert taken(scheduler) == [1]


def test_items_waiting_behind_same_key_are_counted_per_owner() -> None:
    scheduler: Scheduler[Job] = Scheduler(Order.KEY)
    jobs = [job(0, b"a"), job(1, b"a", token="u"), job(2, b"a", token="u"), job(3, b"b")]
    for each in jobs:
        scheduler.add(each)
    assert (scheduler.ready, scheduler.behind("t"), scheduler.behind("u")) == (2, 0, 2)
    scheduler.drop("t")
    assert (scheduler.ready, scheduler.behind("t"), scheduler.behind("u")) == (1, 0, 1)
    scheduler.drop("u")
    assert (scheduler.ready, scheduler.behind("u")) == (0, 0)


def test_retried_item_stays_ahead_of_later_items_of_its_partition() -> None:
    scheduler: Scheduler[Job] = Scheduler(Order.PARTITION)
    jobs = [job(0), job(1), job(2, partition=1)]
    for each in jobs:
        scheduler.add(each)
    assert taken(scheduler) == [0, 2]
    scheduler.again(jobs[0], 5.0)
    assert taken(scheduler, 4.9) == []
    assert scheduler.next_due_s() == 5.0
    assert taken(scheduler, 5.0) == [0]
    scheduler.done(jobs[0])
    assert taken(scheduler, 5.0) == [1]


def test_earliest_due_item_is_first_and_delayed_items_block_nothing() -> None:
    scheduler: Scheduler[Job] = Scheduler(Order.NONE)
    scheduler.add(job(0), 60.0)
    scheduler.add(job(1), 1.0)
    scheduler.add(job(2))
    assert taken(scheduler, 0.0) == [2]
    assert taken(scheduler, 1.0) == [1]
    assert (scheduler.waiting, scheduler.delayed) == (1, 1)


@pytest.mark.parametrize("order", list(Order))
def test_dropped_items_are_never_started_and_block_nothing(order: Order) -> None:
    scheduler: Scheduler[Job] = Scheduler(order)
    old, other = [job(offset, b"a", token="old") for offset in range(3)], job(9, b"a", token="new")
    for each in (*old, other):
        scheduler.add(each)
    at_work = scheduler.take(0.0)
    assert at_work is old[0]
    scheduler.drop("old")
    scheduler.done(at_work)
    assert taken(scheduler) == [9]
    assert scheduler.waiting == 0


class Model(RuleBasedStateMachine):
    """A model with lists: a worker may take the first item of a lane if no worker has an item of that lane, and the item is due."""

    order = Order.NONE

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler[Job] = Scheduler(self.order)
        self.lanes: dict[object, list[Job]] = {}
        self.due: dict[Job, float] = {}
        self.at_work: list[Job] = []
        self.now_s = 0.0
        self.numbers = 0

    def lane(self, item: Job) -> object:
        if self.order is Order.PARTITION:
            return item.ref.place
        return item.key if self.order is Order.KEY and item.key is not None else item

    @rule(
        key=st.sampled_from([None, b"a", b"b"]),
        partition=st.integers(0, 1),
        token=st.sampled_from("xy"),
        delay_s=st.sampled_from([0, 0, 3]),
    )
    def add(self, key: bytes | None, partition: int, token: str, delay_s: int) -> None:
        self.numbers += 1
        item = job(self.numbers, key, partition, token)
        self.due[item] = self.now_s + delay_s if delay_s else 0.0
        self.lanes.setdefault(self.lane(item), []).append(item)
        self.scheduler.add(item, self.due[item])

    @rule()
    def take(self) -> None:
        item = self.scheduler.take(self.now_s)
        may = [lane[0] for lane in self.lanes.values() if lane and lane[0] not in self.at_work and self.due[lane[0]] <= self.now_s]
        if item is None:
            assert may == []
        else:
            assert item in may
            self.at_work.append(item)

    @precondition(lambda self: self.at_work)
    @rule(data=st.data(), again=st.booleans())
    def finish(self, data: st.DataObject, again: bool) -> None:
        item = data.draw(st.sampled_from(self.at_work))
        self.at_work.remove(item)
        if again and item in self.lanes.get(self.lane(item), []):
            self.due[item] = self.now_s + 2
            self.scheduler.again(item, self.due[item])
        else:
            self.lanes[self.lane(item)].remove(item)
            self.scheduler.done(item)

    @precondition(lambda self: self.at_work)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        given_up = data.draw(st.sampled_from(self.at_work))
        other = Job(given_up.ref, given_up.key)
        self.at_work.remove(given_up)
        lane = self.lanes.pop(self.lane(given_up))
        self.lanes[self.lane(other)] = [other, *lane[1:]]
        self.due[other] = 0.0
        self.scheduler.replace(given_up, other)

    @rule(token=st.sampled_from("xy"))
    def drop(self, token: str) -> None:
        self.scheduler.drop(token)
        for name, lane in self.lanes.items():
            self.lanes[name] = [item for item in lane if item.ref.token != token or item in self.at_work]

    @rule()
    def wait(self) -> None:
        self.now_s += 1

    @invariant()
    def counts(self) -> None:
        assert self.scheduler.waiting == sum(len(lane) for lane in self.lanes.values()) - len(self.at_work)
        assert len(self.scheduler.running()) == len(self.at_work)
        behind = sum(map(self.scheduler.behind, "xy"))
        assert self.scheduler.waiting == behind + self.scheduler.ready + self.scheduler.delayed


class ByKey(Model):
    order = Order.KEY


class ByPartition(Model):
    order = Order.PARTITION


for machine in (Model, ByKey, ByPartition):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestNoOrder = Model.TestCase
TestByKey = ByKey.TestCase
TestByPartition = ByPartition.TestCase
