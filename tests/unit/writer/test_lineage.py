"""Checks of a position against the tail of a log: leaders that are new, lag, are cut off, or have lost records."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.writer.lineage import READ_ANYWHERE, LineageViolation, LogEnd, SeenRecord, check_read, check_tail, still_leads
from bascule.writer.position import UNKNOWN_EPOCH, Position, PositionLost

LAST = SeenRecord(9, b"k", b"v", 1)


@dataclass
class Partition:
    """A partition that reports ``ends`` in turn, and then repeats the last one."""

    ends: list[LogEnd]
    kept: bool | None = True  # whether the leader's log reaches the offset within the epoch
    same: bool = True  # whether the leader has the record that was read
    place: str = "orders-3"
    time_s: float = 0.0
    looked_again: int = 0
    led: list[int] = field(default_factory=list)  # the leader epochs of nodes that answer first, before the leader does
    asked: list[str] = field(default_factory=list)

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds

    async def end(self, *, again: bool = False) -> LogEnd:
        self.looked_again += again
        return self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]

    async def reached(self, offset: int, leader_epoch: int, since: int) -> bool | None:
        self.asked.append(f"{offset} in {leader_epoch}")
        return self.kept if self._leads(since) else None

    async def has(self, record: SeenRecord, since: int) -> bool | None:
        self.asked.append(f"record {record.offset}")
        return self.same if self._leads(since) else None

    def _leads(self, since: int) -> bool:
        return not self.led or self.led.pop(0) >= since


def tail(partition: Partition, leader_epoch: int = 4, *violations: LineageViolation) -> int:
    return run_blocking(check_tail(partition, 10, leader_epoch, violations=violations))


def read(partition: Partition, leader_epoch: int = 4, position_epoch: int | None = None, *violations: LineageViolation) -> int:
    at = Position("orders", "id", 3, 7, leader_epoch=max(0, leader_epoch) if position_epoch is None else position_epoch)
    return run_blocking(check_read(partition, at, leader_epoch, LAST, 10, violations=violations))


def test_same_leader_epoch_needs_no_further_query() -> None:
    partition = Partition([LogEnd(10, 4)])
    assert (tail(partition), read(partition)) == (4, 4)
    assert partition.asked == []
    assert partition.time_s == 0


@pytest.mark.parametrize("end", [LogEnd(10, 0), LogEnd(99, 4)])
def test_records_that_any_leader_may_have_returned_are_compared_in_each_epoch(end: LogEnd) -> None:
    partition = Partition([LogEnd(5, 4), end])
    assert read(partition, READ_ANYWHERE, end.leader_epoch) == end.leader_epoch
    assert partition.asked == [f"record {LAST.offset}"]
    with pytest.raises(Unavailable, match="has changed"):
        read(Partition([end], same=False), READ_ANYWHERE)


@pytest.mark.parametrize("end", [5, 10, 99])
def test_later_leader_without_read_records_has_lost_tail_at_any_log_length(end: int) -> None:
    with pytest.raises(PositionLost, match=rf"^orders-3 has lost its tail: records up to offset 10 .* ends at offset {end}"):
        tail(Partition([LogEnd(end, 6)], kept=False))


def test_later_leader_with_all_read_records_is_accepted() -> None:
    partition = Partition([LogEnd(99, 6)])
    assert tail(partition) == 6
    assert partition.asked == ["10 in 4"]


@pytest.mark.parametrize("old", [LogEnd(5, 4), LogEnd(5, 3), LogEnd(99, 3)])
def test_stale_end_of_former_leader_is_queried_again(old: LogEnd) -> None:
    partition = Partition([old, old, LogEnd(12, 6)])
    assert tail(partition) == 6
    assert partition.looked_again == 2
    assert read(Partition([old, LogEnd(12, 4)])) == 4


@pytest.mark.parametrize("kept", [True, None])
def test_leader_without_high_watermark_is_queried_again(kept: bool | None) -> None:
    assert tail(Partition([LogEnd(5, 5), LogEnd(12, 5)], kept=True)) == 5
    with pytest.raises(Unavailable, match="is cut off from the cluster, or has just become the leader"):
        tail(Partition([LogEnd(5, 5)], kept=kept))


@pytest.mark.parametrize("end", [LogEnd(5, 4), LogEnd(5, 3), LogEnd(99, 3)])
def test_position_is_unavailable_and_not_lost_when_only_stale_leader_answers(end: LogEnd) -> None:
    partition = Partition([end])
    with pytest.raises(Unavailable, match=f"stale end offset {end.offset} of orders-3") as raised:
        tail(partition)
    assert raised.value.retriable
    with pytest.raises(Unavailable):
        read(partition)


def test_position_without_leader_epoch_is_checked_by_end_offset() -> None:
    assert tail(Partition([LogEnd(10, 6)]), UNKNOWN_EPOCH) == 6
    assert tail(Partition([LogEnd(5, 6), LogEnd(10, 6)]), UNKNOWN_EPOCH) == 6
    with pytest.raises(PositionLost):
        tail(Partition([LogEnd(5, 6)]), UNKNOWN_EPOCH)
    assert read(Partition([LogEnd(10, 6)]), UNKNOWN_EPOCH) == 6


def test_records_read_during_leader_change_count_when_new_leader_has_last_record() -> None:
    partition = Partition([LogEnd(12, 6)])
    assert read(partition) == 6
    assert partition.asked == ["record 9", "7 in 4"]
    with pytest.raises(Unavailable, match=r"the record at offset 9 of orders-3 has changed: the new leader \(leader epoch 6\)"):
        read(Partition([LogEnd(12, 6)], same=False))


def test_records_of_a_new_leader_that_lacks_records_before_the_position_do_not_count() -> None:
    with pytest.raises(PositionLost, match=r"^orders-3 has lost its tail: records up to offset 7 \(leader epoch 4\) were read"):
        read(Partition([LogEnd(12, 6)], kept=False))
    with pytest.raises(PositionLost):
        read(Partition([LogEnd(12, 6)], kept=False), READ_ANYWHERE, 4)
    assert read(Partition([LogEnd(12, 6)], kept=False), READ_ANYWHERE, 6) == 6


@pytest.mark.parametrize("former", [[5], [5, 4], [6, 5]])
def test_answer_of_a_former_leader_about_records_does_not_count(former: list[int]) -> None:
    """The end came from the leader of epoch 6, and other clients ask nodes that led before."""
    partition = Partition([LogEnd(12, 6)], led=[*former])
    assert read(partition) == 6
    assert partition.looked_again == sum(epoch < 6 for epoch in former)
    with pytest.raises(Unavailable, match="stale end offset"):
        read(Partition([LogEnd(12, 6)], led=[5] * 99))
    with pytest.raises(Unavailable, match="stale end offset"):
        tail(Partition([LogEnd(12, 6)], kept=False, led=[5] * 99))


@pytest.mark.parametrize("later", [5, 7])
def test_leader_that_changes_between_the_checks_counts_for_neither(later: int) -> None:
    """The earlier one of two leaders does not confirm the records, so they are checked again."""
    assert read(Partition([LogEnd(12, 6), LogEnd(12, later)])) == min(6, later)


def test_each_simulated_lineage_violation_is_detected() -> None:
    with pytest.raises(PositionLost):
        tail(Partition([LogEnd(5, 4), LogEnd(12, 4)]), 4, LineageViolation.STALE_END_BELIEVED)
    assert tail(Partition([LogEnd(99, 6)], kept=False), 4, LineageViolation.GROWTH_NOT_CHECKED) == 6
    assert read(Partition([LogEnd(12, 6)], same=False), 4, 4, LineageViolation.RECORDS_NOT_COMPARED) == 6
    assert read(Partition([LogEnd(12, 6)], kept=False), 4, 4, LineageViolation.POSITION_NOT_CHECKED) == 6
    assert read(Partition([LogEnd(12, 6)], led=[4, 4]), 4, 4, LineageViolation.FORMER_LEADER_ASKED) == 6
    assert still_leads(LogEnd(9, 6), 4, 10, violations=[LineageViolation.LEADER_NOT_CONFIRMED])


@pytest.mark.parametrize(
    ("end", "confirmed"),
    [
        (LogEnd(10, 4), True),
        (LogEnd(9, 4), False),
        (LogEnd(99, 5), False),
        (LogEnd(99, 3), False),
        (LogEnd(99, UNKNOWN_EPOCH), False),
    ],
)
def test_only_the_leader_of_the_position_confirms_what_was_read(end: LogEnd, confirmed: bool) -> None:
    assert still_leads(end, 4, 10) == confirmed


def test_cluster_without_leader_epochs_confirms_with_each_answer() -> None:
    assert still_leads(LogEnd(3, UNKNOWN_EPOCH), UNKNOWN_EPOCH, 10)
