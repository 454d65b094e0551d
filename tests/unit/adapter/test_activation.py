"""A takeover of a partition: from the records in flight and the group's offset, no record is skipped or handled twice."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.adapter.inbound import Activation, ActivationSpec, Order, activation
from bascule.adapter.inbound.deliveries import RecordDelivery
from bascule.adapter.inbound.performing import delivery_of
from bascule.adapter.inbound.state import FLIGHT, Flights, Place, Ref, key_of
from bascule.adapter.inbound.taking_over import PartitionEvent, PartitionState, Run
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import GroupOffset, KafkaRecord
from bascule.threads.background import in_background
from bascule.xa.xid import branch, new_gtrid
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

PLACE = Place("payments", 0)
SPEC = ActivationSpec(topics=(PLACE.topic,), group="shop")
WAIT_S = 60.0 * SLOWNESS


class Group:
    """The offsets of the group, in place of a consumer."""

    def __init__(self, committed: int | None, begins: int = 0) -> None:
        self.offset = committed
        self._begins = begins
        self.away = False
        self.end = 1000

    def read_on(self, at: tuple[str, int], offset: int) -> int:
        assert at == PLACE
        return offset if offset <= self.end else 0

    def hold(self, at: Sequence[tuple[str, int]]) -> dict[tuple[str, int], GroupOffset]:
        if self.away:
            raise Unavailable("UNKNOWN_MEMBER_ID")
        if self.offset is None:
            self.offset = self._begins
        return dict.fromkeys(at, GroupOffset(self.offset))

    def commit(self, offsets: Mapping[tuple[str, int], int]) -> None:
        self.offset = offsets[PLACE]


class Member:
    """A member that takes over a partition with records in flight of an earlier member."""

    def __init__(self, in_flight: Sequence[int], committed: int | None, begins: int = 0, read_to: int | None = None) -> None:
        self.activation: Any = cast("Any", Activation({}, SPEC, lambda _: None))
        self.scheduled: list[int] = []
        self.advanced: list[int] = []
        self.activation._log.schedule = lambda refs: self.scheduled.extend(ref.offset for ref in refs)
        self.activation._log.advance = lambda ends: self.advanced.extend(end.offset for end in ends)
        self.group = Group(committed, begins)
        run = self.activation._runs[PLACE] = Run(PLACE, "new", PartitionState.OWNED, self.group.hold([PLACE])[PLACE])
        run.begin_at(read_to)
        self.activation._begin(self.group, run, [found(offset) for offset in in_flight])

    def read(self, *offsets: int) -> None:
        for offset in offsets:
            self.activation._receive(received(offset))
        self.activation._schedule(self.group)

    def moved(self) -> list[int]:
        """Return the offsets to which the activation moves the consumer."""
        behind = [self.activation._behind.pop() for _ in range(len(self.activation._behind))]
        for place in behind:
            self.activation._move(self.group, place)
        return [self.activation._runs[place].next_offset for place in behind]

    def begun(self) -> list[int]:
        """Return the offsets of the records that may be delivered now."""
        take: Callable[[float], RecordDelivery | None] = self.activation._workers.scheduler.take
        return [delivery.ref.offset for delivery in iter(lambda: take(0.0), None)]


def received(offset: int) -> KafkaRecord:
    return KafkaRecord(*PLACE, offset, None, b"", (), 0)


def found(offset: int) -> RecordDelivery:
    return delivery_of(SPEC, Ref(PLACE, "new", offset), received(offset), (key_of(FLIGHT, Ref(PLACE, "old", offset)),), redelivered=True)


@pytest.mark.parametrize(("order", "continuing"), [(Order.NONE, {PLACE}), (Order.KEY, set()), (Order.PARTITION, set())])
def test_reading_pauses_for_places_whose_records_may_join_too_many_delayed_records(
    order: Order, continuing: set[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation, "DELAYED_MAX", 2)
    retry, resumed = Place("shop.retry", 0), set[Place]()
    endpoint: Any = Activation({}, replace(SPEC, order=order), lambda _: None)
    for place in (PLACE, retry):
        endpoint._runs[place] = Run(place, place.topic, PartitionState.READY)
    for number, place in enumerate((PLACE, retry)):
        failed = RecordDelivery(Ref(place, place.topic, number), replace(found(number).record, key=bytes([number])), (), due_s=math.inf)
        endpoint._workers.add([failed])

    class Reading:
        def pause(self, places: Collection[Place]) -> None:
            resumed.difference_update(places)

        def resume(self, places: Collection[Place]) -> None:
            resumed.update(places)

    endpoint._regulate(Reading())
    assert resumed == continuing
    endpoint._workers.scheduler.drop(PLACE.topic)
    endpoint._regulate(Reading())
    assert resumed == {PLACE, retry}


def test_records_in_flight_before_group_offset_are_delivered_at_once() -> None:
    member = Member([3, 5], committed=6)
    assert member.begun() == [3, 5]
    member.read(6)
    assert (member.begun(), member.scheduled) == ([6], [6])


@pytest.mark.parametrize("committed", [5, 0, None])
def test_group_offset_does_not_skip_unread_records(committed: int | None) -> None:
    """The log has 7 and 8 of a batch that begins at 5, or an operator has reset the group's offset to read the records again."""
    member = Member([7, 8], committed)
    assert (member.begun(), member.group.offset) == ([], committed or 0)


def test_record_in_flight_ahead_of_group_is_delivered_once_when_read() -> None:
    member = Member([4, 7, 8], committed=5)
    assert member.begun() == [4]
    member.read(5, 6, 7)
    assert (member.begun(), member.scheduled, member.group.offset) == ([5, 6, 7], [5, 6], 8)
    member.read(8, 9)
    assert (member.begun(), member.scheduled, member.group.offset) == ([8, 9], [5, 6, 9], 10)


def test_record_in_flight_that_reading_skipped_is_delivered() -> None:
    member = Member([7, 8], committed=5)
    member.read(20)
    assert (member.begun(), member.scheduled) == ([7, 8, 20], [20])


def test_reading_continues_at_log_position_after_late_commit_moved_group_back() -> None:
    member = Member([5], committed=3, read_to=6)
    assert member.begun() == [5]
    member.activation._receive(received(3))
    assert member.moved() == [6]
    member.read(6)
    assert (member.begun(), member.scheduled, member.advanced, member.group.offset) == ([6], [6], [7], 7)


def test_stored_read_entry_is_not_stored_again_after_failed_commit() -> None:
    member = Member([], committed=4)
    commit = member.group.commit

    def refuse(_offsets: Mapping[tuple[str, int], int]) -> None:
        raise Unavailable("REBALANCE_IN_PROGRESS")

    member.group.commit = refuse  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        member.read(4, 5)
    assert (member.begun(), member.scheduled, member.advanced) == ([], [4, 5], [6])
    member.group.commit = commit  # type: ignore[method-assign]
    member.activation._schedule(member.group)
    assert (member.begun(), member.scheduled, member.advanced, member.group.offset) == ([4, 5], [4, 5], [6], 6)


def test_delivered_record_is_not_delivered_again_when_read() -> None:
    """The dead member's commit arrives after the new member has asked for the group's offset."""
    member = Member([3, 4], committed=5)
    assert member.begun() == [3, 4]
    member.read(3, 4, 5)
    assert (member.begun(), member.scheduled, member.group.offset) == ([5], [5], 6)


def test_client_that_starts_before_group_offset_is_moved_forward_and_never_back() -> None:
    """The group starts at the end of the topic, but the client finds no committed offset and starts at the beginning."""
    member = Member([], committed=None, begins=9)
    for offset in (0, 1):
        member.activation._receive(received(offset))
    assert member.moved() == [9]
    member.read(9, 10)
    assert (member.begun(), member.scheduled, member.group.offset) == ([9, 10], [9, 10], 11)
    member.activation._receive(received(2))
    assert member.moved() == [11]
    assert member.activation._offsets == {}


def test_recreated_topic_is_read_from_its_beginning() -> None:
    member = Member([], committed=9)
    member.group.end = 2
    member.activation._receive(received(0))
    assert member.moved() == [0]
    member.read(0, 1)
    assert (member.begun(), member.scheduled, member.group.offset) == ([0, 1], [0, 1], 2)


def test_group_that_begins_at_end_does_not_read_records_in_flight_again() -> None:
    member = Member([7, 8], committed=None, begins=9)
    assert (member.begun(), member.group.offset) == ([7, 8], 9)


def test_takeover_of_partition_is_retried_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.adapter.inbound.activation.TAKE_AGAIN_S", 0.0)
    activation = Member([], committed=0).activation
    answers = iter([KafkaException(KafkaError(KafkaError._FAIL)), None])

    def owner(_place: Place) -> None:
        if (failure := next(answers)) is not None:
            raise failure

    activation._log.owner = owner
    activation._log.take = lambda *_: "new"
    activation._log.flights = lambda _: Flights({}, {}, {})
    activation._held = lambda _: GroupOffset(0)
    run = Run(PLACE)
    activation._take(run)
    assert (run.token, activation._taken.get_nowait()) == ("new", (run, []))


def test_blocked_partition_is_reported_in_status_and_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("bascule.adapter.inbound.activation.TAKE_AGAIN_S", 0.0)
    activation = Member([], committed=0).activation
    claimed = [Flights({}, {}, {branch(new_gtrid("store", 0), "inbound"): 5})]
    stops = activation._stopping.wait
    waits = iter([False, False, True])
    monkeypatch.setattr(activation._stopping, "wait", lambda _: next(waits) and activation._stopping.set() and stops(0))
    activation._log.owner = lambda _: None
    activation._log.take = lambda *_: "new"
    activation._log.flights = lambda _: claimed[0]
    activation._held = lambda _: GroupOffset(0)
    run = activation._runs[PLACE] = Run(PLACE)
    activation._take(run)
    status = activation.status()
    assert status.blocked == ("payments-0",)
    assert "payments-0 is blocked: transactions" in status.trouble
    assert "of manager 'store'" in status.partitions["payments-0"]
    (line,) = [record for record in caplog.records if "is blocked" in record.getMessage()]
    assert line.levelname == "ERROR"


class TakeoverInThread:
    """A takeover in its own thread, and the order of its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bascule.adapter.inbound.activation.TAKE_AGAIN_S", 0.001)
        self.steps: list[str] = []
        member = Member([], committed=4)
        self.activation, self.group = member.activation, member.group
        log = self.activation._log
        log.owner = lambda _: self.steps.append("owner before") or "old"
        log.take = lambda _, after: self.steps.append(f"taken after {after}") or "new"
        log.flights = lambda _: Flights({}, {}, {})
        self.run = Run(PLACE)
        self.thread = threading.Thread(target=self.activation._take, args=(self.run,))
        self.thread.start()
        wait_for(lambda: self.activation._asked.qsize(), "the question to the group")

    def answer(self) -> None:
        self.activation._answer(self.group)


def test_partition_is_taken_over_only_after_group_confirms_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = TakeoverInThread(monkeypatch)
    assert taking.steps == ["owner before"]
    taking.group.away = True
    with pytest.raises(Unavailable):
        taking.answer()
    taking.group.away = False
    assert taking.steps == ["owner before"]
    taking.answer()
    taking.thread.join()
    assert (taking.steps, taking.run.token, taking.run.next_offset) == (["owner before", "taken after old"], "new", 4)


def test_revoked_partition_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = TakeoverInThread(monkeypatch)
    taking.run.on(PartitionEvent.LEFT)
    taking.answer()
    taking.thread.join()
    assert (taking.steps, taking.run.token) == (["owner before"], "")


class Hanging:
    """A group, a log and dead letters. One of them hangs until the test releases it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hangs: str) -> None:
        self._hangs = hangs
        self.reached, self.released, self.closed = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr("bascule.adapter.inbound.activation.set_up", lambda *_: None)
        monkeypatch.setattr("bascule.adapter.inbound.activation.missing", lambda *_: [])
        monkeypatch.setattr("bascule.adapter.inbound.activation.GroupConsumer", self._group)
        monkeypatch.setattr("bascule.adapter.inbound.activation.END_S", 2.0)
        monkeypatch.setattr("bascule.adapter.inbound.activation.TAKE_AGAIN_S", 0.01)
        self.activation: Any = Activation({}, ActivationSpec(topics=(PLACE.topic,), group="shop"), lambda _: None)
        log = self.activation._log
        log.recover = list
        log.owner = lambda _: self._point("bascule-take-shop")
        log.close = lambda: self._point("bascule-close-shop")
        self.activation._dead_letters.count = lambda: self._point("bascule-housekeeping-shop") or 0

    def _point(self, name: str) -> None:
        if name == self._hangs:
            self.reached.set()
            self.released.wait(WAIT_S)

    def _group(self, *_args: object, on_assigned: Callable[[list[Place]], None], **_rest: object) -> Any:
        self._assigned = on_assigned
        return self

    def poll(self, _count: int, _timeout_s: float) -> list[KafkaRecord]:
        if PLACE not in self.activation._runs:
            self._assigned([PLACE])
        self._point("bascule-inbound-shop")
        threading.Event().wait(0.01)
        return []

    def pause(self, _partitions: object) -> None: ...

    def resume(self, _partitions: object) -> None: ...

    def hold(self, _at: object) -> dict[Place, int]:
        raise Unavailable("the group is away")

    def close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize("hangs", ["bascule-inbound-shop", "bascule-housekeeping-shop", "bascule-take-shop", "bascule-close-shop"])
def test_hanging_thread_is_named_by_stop_and_not_awaited(monkeypatch: pytest.MonkeyPatch, hangs: str) -> None:
    """For example, a commit of offsets while Kafka is away, or a takeover that asks a database that does not answer."""
    hanging = Hanging(monkeypatch, hangs)
    hanging.activation.start()
    try:
        assert hangs == "bascule-close-shop" or hanging.reached.wait(WAIT_S)
        assert in_background(lambda: hanging.activation.stop(0.1), "test-stop").result(WAIT_S / 2) == [hangs]
        assert hanging.reached.is_set()
        # The end of the process does not wait for a daemon thread.
        assert all(each.daemon for each in threading.enumerate() if each.name == hangs)
    finally:
        hanging.released.set()


def test_restart_is_refused_until_threads_left_by_stop_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch, "bascule-inbound-shop")
    activation = hanging.activation
    activation.start()
    try:
        assert hanging.reached.wait(WAIT_S)
        activation.stop(0.1)
        with pytest.raises(Unavailable, match="bascule-inbound-shop"):
            activation.start()
    finally:
        hanging.released.set()
    assert hanging.closed.wait(WAIT_S)
    wait_for(lambda: not activation.status().running, "the end of what was left behind", WAIT_S)
    activation.start()
    assert activation.stop(0.1) == []


def test_far_future_retry_time_is_limited_to_longest_backoff() -> None:
    headers = [("bascule.retry.origin", b"payments/0/1"), ("bascule.retry.due", b"9" * 14)]
    retry = KafkaRecord(SPEC.retry_topic, 0, 5, None, b"", headers, 0)
    due_s = delivery_of(SPEC, Ref(Place(SPEC.retry_topic, 0), "new", 5), retry).due_s
    assert 0 < due_s <= time.monotonic() + SPEC.backoff.longest_s


class Reading:
    """The partitions that a consumer reads, without those that are paused."""

    def __init__(self) -> None:
        self.flowing: set[Place] = set()

    def pause(self, places: Collection[Place]) -> None:
        self.flowing.difference_update(places)

    def resume(self, places: Collection[Place]) -> None:
        self.flowing.update(places)


@pytest.mark.parametrize(("waiting", "flows"), [({0: 1001}, {1, 2}), ({0: 1001, 1: 1001}, {2}), ({0: 500, 1: 500}, {0, 1, 2})])
def test_records_behind_failing_record_pause_only_their_partition(waiting: dict[int, int], flows: set[int]) -> None:
    activation: Any = Activation({}, replace(SPEC, order=Order.PARTITION), lambda _: None)
    for partition in range(3):
        place = Place(PLACE.topic, partition)
        activation._runs[place] = Run(place, f"token-{partition}", PartitionState.READY)
        refs = [Ref(place, f"token-{partition}", offset) for offset in range(1 + waiting.get(partition, 0))]
        activation._workers.add([delivery_of(SPEC, ref, KafkaRecord(*place, ref.offset, None, b"", (), 0)) for ref in refs])
    scheduler = activation._workers.scheduler
    for head in [scheduler.take(0.0) for _ in range(3)]:
        scheduler.again(head, 60.0)
    reading = Reading()
    activation._regulate(reading)
    assert {place.partition for place in reading.flowing} == flows


def test_reading_pauses_when_workers_have_enough_records() -> None:
    member = Member([], committed=0)
    reading = Reading()
    member.activation._regulate(reading)
    assert reading.flowing == {PLACE}
    member.read(*range(1000))
    member.activation._regulate(reading)
    assert reading.flowing == set()
