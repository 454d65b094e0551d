"""An ingress topic that ends before the position, as a node reports that is cut off from the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bascule.broker import ingress_tail
from bascule.broker.ingress_tail import SETTLES_S, STALE_END_S, IngressReading, IngressRecord, IngressTailViolation
from bascule.core.effects import Severity, run_blocking
from bascule.journal.reading import CutOff


class Topic:
    """A topic whose first reads are answered by a former leader, which has fewer records."""

    def __init__(self, former_reads: int) -> None:
        self.former_reads = former_reads
        self.time_s = 0.0
        self.reads = 0
        self.notes: list[str] = []

    def now_s(self) -> float:
        return self.time_s

    def ending(self) -> bool:
        return self.reads > self.former_reads

    async def topic_id(self) -> str:
        return "id"

    def topic_view(self) -> int | None:
        return None

    def read_topic_id(self) -> str:
        return ""

    async def open(self, offset: int, committed: bool) -> None: ...

    async def read(self) -> Sequence[IngressRecord]:
        self.reads += 1
        if self.reads <= self.former_reads:
            raise CutOff("ingress ends at offset 5, before the position 9")
        return []

    async def open_transaction(self) -> int:
        return -1

    async def pause(self, delay_s: float) -> None:
        self.time_s += delay_s

    async def hand_over(self, chunk: Any) -> None: ...

    def first_seen(self, topic_id: str) -> None: ...

    def largest(self) -> int:
        return 1 << 20

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        self.notes.append(event)


def reading(topic: Topic, *violations: IngressTailViolation) -> IngressReading:
    found = IngressReading(topic, "ingress", 0, topic_id="id", violations=violations)
    run_blocking(found.run(9))
    return found


def test_ingress_end_reported_by_former_leader_is_read_again() -> None:
    topic = Topic(former_reads=int(STALE_END_S / ingress_tail.RETRY_S) - 1)
    assert reading(topic).failure == ""
    assert set(topic.notes) == {"ingress read restarted"}


def test_ingress_end_that_stays_before_position_stops_intake() -> None:
    topic = Topic(former_reads=1000)
    assert reading(topic).failure == "ingress ingress has stopped: ingress ends at offset 5, before the position 9"
    assert topic.time_s == pytest.approx(STALE_END_S)


def test_simulated_fault_of_trusting_stale_ingress_end_stops_intake() -> None:
    assert reading(Topic(former_reads=1), IngressTailViolation.STALE_END_BELIEVED).failure


class Watched(Topic):
    """A topic with a record at each read. Its reader says when it may have begun to read a recreated topic."""

    def __init__(self, *views: int | None) -> None:
        super().__init__(former_reads=len(views) - 1)
        self.views = views
        self.checked: list[int] = []  # at which reads
        self.taken = 0

    def topic_view(self) -> int | None:
        return self.views[self.reads - 1]

    async def topic_id(self) -> str:
        self.checked.append(self.reads)
        return "id"

    async def read(self) -> Sequence[IngressRecord]:
        self.reads += 1
        self.time_s += SETTLES_S / 2
        return [IngressRecord(self.reads, b"", True)]

    async def hand_over(self, chunk: Any) -> None:
        self.taken += 1


def test_topic_is_checked_after_a_read_only_if_the_reader_may_have_begun_to_read_a_recreated_one() -> None:
    topic = Watched(1, 1, 1, 1, 2, 2, 2, 2)
    reading(topic)
    assert topic.checked == [0, 1, 2, 5, 6], "at the start, and for a while after each change"
    assert topic.taken == 8


def test_topic_is_checked_after_each_read_if_the_reader_does_not_know() -> None:
    topic = Watched(None, None, None)
    reading(topic)
    assert topic.checked == [0, 1, 2, 3]


def test_topic_is_checked_at_an_interval_whatever_the_reader_says() -> None:
    topic = Watched(*[1] * 16)
    reading(topic)
    assert topic.checked == [0, 1, 2, 13]


def test_simulated_fault_of_a_topic_that_is_not_checked_takes_records_of_another_one() -> None:
    topic = Watched(1, 2, 3)
    reading(topic, IngressTailViolation.VIEW_NOT_CHECKED)
    assert topic.checked == [0]
    assert topic.taken == 3


class Late(Watched):
    """A recreated topic. The node that answers the check learns of it after some checks; the reader knows at once."""

    def __init__(self, late_checks: int) -> None:
        super().__init__(*[1] * 40)
        self.late_checks = late_checks

    def ending(self) -> bool:
        return self.reads > 30

    def read_topic_id(self) -> str:
        return "id of the new topic"

    async def topic_id(self) -> str:
        self.checked.append(self.reads)
        return "id" if len(self.checked) <= self.late_checks else "id of the new topic"


@pytest.mark.parametrize("late_checks", [1, 2, 9])
def test_no_record_of_a_recreated_topic_is_taken_however_late_the_checked_node_learns_of_it(late_checks: int) -> None:
    topic = Late(late_checks)
    assert "the topic was recreated" in reading(topic).failure
    assert topic.taken == 0
    assert len(topic.checked) == late_checks + 1
