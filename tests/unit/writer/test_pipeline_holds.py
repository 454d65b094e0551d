"""The pins of pipelines on the journal, and the reasons of stalled pipelines: the rules, without Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from bascule.broker.retention import Keeper, RetentionHold
from bascule.broker.snapshot import Snapshot
from bascule.core.effects import run_blocking
from bascule.journal.offsets import OffsetMap
from bascule.writer.pipeline_holds import ALL_DISABLED, DISABLED, UNTOLD, PipelineHoldsProtocol, lowest
from bascule.writer.position import BEGUN, COMMON, DIVERT, ENDED, GROUP, Position, position_key

JOURNAL, ID = "bascule.journal", "id"
END = 100
COMMON_KEY = position_key(COMMON, JOURNAL, 0)


def at(offset: int, *members: str, owner: str = "driver.1") -> Position:
    return Position(JOURNAL, ID, 0, offset, members=members, owner=owner)


@dataclass
class HoldState:
    """Stored positions, and the notes of drivers."""

    positions: dict[str, Position] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    journal: str | None = ID
    now_s: float = 0.0
    released: list[str] = field(default_factory=list)
    asked: list[Position | None] = field(default_factory=list)  # the common positions after which marks were looked up

    def wall_s(self) -> float:
        return self.now_s

    def note_released(self, hold: RetentionHold) -> None:
        self.released.append(hold.name)

    async def stored(self) -> Mapping[str, Position]:
        return self.positions

    async def journal_id(self) -> str | None:
        return self.journal

    async def taken_since(self, common: Position | None, end: int) -> Mapping[str, int]:
        self.asked.append(common)
        return self.taken

    async def said(self, name: str) -> tuple[int, str]:
        return self.notes.get(name, (-1, ""))


@pytest.fixture
def state() -> HoldState:
    return HoldState()


def snapshot() -> Snapshot:
    """Return a snapshot at the end of a journal whose records have 10 bytes each."""
    taken = Snapshot(0, 0, END, 1, OffsetMap(), [], {})
    for offset in range(END):
        taken.offsets.sizes.note(offset, 10)
    return taken


def holds(state: HoldState, protocol: PipelineHoldsProtocol | None = None) -> dict[str, tuple[int, str]]:
    protocol = protocol or PipelineHoldsProtocol(state, JOURNAL, 0)
    return {hold.name: (hold.offset, hold.reason) for hold in run_blocking(protocol.found(snapshot()))}


def test_journal_has_no_pipeline_pins_without_positions(state: HoldState) -> None:
    assert holds(state) == {}


def test_pipeline_pins_records_it_has_not_read(state: HoldState) -> None:
    state.positions = {COMMON_KEY: at(40, "a"), position_key(f"{DIVERT}late", JOURNAL, 0): at(7, "late")}
    late, common = run_blocking(PipelineHoldsProtocol(state, JOURNAL, 0).found(snapshot()))
    assert (common.keeper, common.name, common.offset, common.records, common.bytes) == (Keeper.PIPELINE, COMMON, 40, 60, 600)
    assert (late.name, late.offset, late.reason) == (f"{DIVERT}late", 7, "")


@pytest.mark.parametrize(
    ("key", "position"),
    [
        (f"{BEGUN}a", at(3, "a")),
        (COMMON_KEY, at(3, owner="")),
        (position_key(COMMON, "other", 0), replace(at(3, "a"), topic="other")),
        (position_key(COMMON, JOURNAL, 1), replace(at(3, "a"), partition=1)),
        (position_key("ingress:in", "payments", 0), replace(at(3), topic="payments")),
    ],
    ids=["where a divert began", "vacant", "another topic", "another partition", "an ingress"],
)
def test_irrelevant_position_does_not_pin_journal(state: HoldState, key: str, position: Position) -> None:
    state.positions = {key: position}
    assert holds(state) == {}


def test_pipeline_beyond_quota_is_released_and_reported(state: HoldState) -> None:
    state.positions = {COMMON_KEY: at(40, "a")}
    (hold,) = run_blocking(PipelineHoldsProtocol(state, JOURNAL, 0, quota_bytes=599).found(snapshot()))
    assert hold.released
    assert state.released == [COMMON]
    (hold,) = run_blocking(PipelineHoldsProtocol(state, JOURNAL, 0, quota_bytes=600).found(snapshot()))
    assert not hold.released


# -- exclusive diverts that are unknown to the pipelines --------------------------------------------------------------------------


def test_messages_taken_by_exclusive_divert_without_position_pin_journal(state: HoldState) -> None:
    state.taken = {"x": 12}
    assert holds(state) == {f"{DIVERT}x": (12, UNTOLD)}


def test_common_position_covers_messages_taken_by_exclusive_diverts(state: HoldState) -> None:
    state.taken, state.positions = {"x": 12}, {COMMON_KEY: at(40, "a")}
    assert holds(state) == {COMMON: (40, "")}
    assert state.asked == []


def test_vacant_common_position_limits_search_for_exclusive_marks(state: HoldState) -> None:
    vacant = at(40, owner="")
    state.taken, state.positions = {"x": 50}, {COMMON_KEY: vacant}
    assert holds(state) == {f"{DIVERT}x": (50, UNTOLD)}
    assert state.asked == [vacant]


def test_vacant_position_of_recreated_journal_is_ignored(state: HoldState) -> None:
    state.taken, state.positions, state.journal = {"x": 2}, {COMMON_KEY: at(40, owner="")}, "another"
    assert holds(state) == {f"{DIVERT}x": (2, UNTOLD)}
    assert state.asked == [None]


def test_exclusive_marks_are_searched_again_only_after_common_position_changed(state: HoldState) -> None:
    protocol = PipelineHoldsProtocol(state, JOURNAL, 0)
    for _ in range(2):
        holds(state, protocol)
    assert state.asked == [None]
    state.positions = {COMMON_KEY: at(40, owner="")}
    for _ in range(2):
        holds(state, protocol)
    assert state.asked == [None, at(40, owner="")]


def test_stored_position_of_divert_takes_precedence_over_exclusive_marks(state: HoldState) -> None:
    state.taken, state.positions = {"x": 12}, {position_key(f"{DIVERT}x", JOURNAL, 0): at(30, "x")}
    assert holds(state) == {f"{DIVERT}x": (30, "")}


def test_position_of_a_group_covers_messages_that_its_exclusive_members_took(state: HoldState) -> None:
    group = position_key(f"{GROUP}g", JOURNAL, 0)
    state.taken, state.positions = {"x": 12, "y": 20}, {COMMON_KEY: at(10, owner=""), group: at(30, "x")}
    assert holds(state) == {f"{GROUP}g": (30, ""), f"{DIVERT}y": (20, UNTOLD)}


# -- reasons of stalled pipelines -------------------------------------------------------------------------------------------


def test_unmoved_pipeline_is_reported_with_time_of_last_move(state: HoldState) -> None:
    state.positions, state.now_s = {COMMON_KEY: at(40, "a")}, 60.0
    protocol = PipelineHoldsProtocol(state, JOURNAL, 0)
    assert holds(state, protocol) == {COMMON: (40, "")}
    state.now_s = 300.0
    assert holds(state, protocol)[COMMON][1].startswith("has not moved since 1970-01-01 00:01:00+00:00: the pipelines are not running")
    state.positions = {COMMON_KEY: at(41, "a")}
    assert holds(state, protocol) == {COMMON: (41, "")}
    assert holds(state, protocol)[COMMON][1].startswith("has not moved since 1970-01-01 00:05:00+00:00")


def test_pipeline_at_end_of_journal_is_not_reported_as_stalled(state: HoldState) -> None:
    state.positions = {COMMON_KEY: at(END, "a")}
    protocol = PipelineHoldsProtocol(state, JOURNAL, 0)
    assert [holds(state, protocol) for _ in range(2)] == [{COMMON: (END, "")}] * 2


@pytest.mark.parametrize(("offset", "shown"), [(40, "BadRecord: no JSON"), (41, "BadRecord: no JSON"), (39, "")])
def test_reason_from_driver_counts_until_pipeline_moves(state: HoldState, offset: int, shown: str) -> None:
    state.positions, state.notes = {COMMON_KEY: at(40, "a")}, {COMMON: (offset, "BadRecord: no JSON")}
    assert holds(state) == {COMMON: (40, shown)}


@pytest.mark.parametrize(("said", "shown"), [("", DISABLED), (ENDED, DISABLED), ("PositionLost: gone", "PositionLost: gone")])
def test_divert_without_owner_is_reported_disabled_or_stopped(state: HoldState, said: str, shown: str) -> None:
    key = position_key(f"{DIVERT}x", JOURNAL, 0)
    state.positions, state.notes = {key: at(40, "x", owner="")}, {f"{DIVERT}x": (40, said)}
    assert holds(state) == {f"{DIVERT}x": (40, shown)}


def test_common_position_without_members_reports_all_diverts_disabled(state: HoldState) -> None:
    state.positions = {COMMON_KEY: at(40)}
    assert holds(state) == {COMMON: (40, ALL_DISABLED)}


def test_lower_offset_of_two_reads_counts_and_no_position_of_either_is_missed() -> None:
    left = {"moved": at(1), "gone": at(2), "renewed": at(9)}
    right = {"moved": at(3), "new": at(1), "renewed": at(0)}
    assert lowest(left, right) == {"moved": at(1), "gone": at(2), "renewed": at(0), "new": at(1)}
