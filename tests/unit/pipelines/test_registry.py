"""Positions of diverts when a driver starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bascule.core.destination import Routing
from bascule.journal.records import KEY_OF_KIND, Kind, Op, Send, encode_record, json_entry, send_entry
from bascule.pipelines.divert import JournalReader
from bascule.pipelines.registry import DivertPlan, KnownPositions, joined, journal_position, plan_diverts
from bascule.pipelines.spec import EARLIEST, DivertSpec, StartPosition
from bascule.writer.position import Position
from tests.support.journal import text_message

AT = Position("journal", "id", 0, 100, epoch=5, sequence=90)
END = 900


def starts(divert: DivertSpec) -> Position:
    return replace(AT, offset=0, epoch=-1, sequence=0) if divert.start.at == EARLIEST else replace(AT, offset=100)


def divert(name: str, start: str = "latest", enabled: bool = True, group: str = "") -> DivertSpec:
    return DivertSpec(name, "#", start=StartPosition(start), enabled=enabled, group=group)


def planned(
    diverts: Sequence[DivertSpec], common: Position | None = None, own: Mapping[str, Position] | None = None,
    taken: Mapping[str, Position] | None = None, groups: Mapping[str, Position] | None = None,
    starts: Callable[[DivertSpec], Position] = starts,
) -> DivertPlan | None:  # fmt: skip
    return plan_diverts(diverts, KnownPositions(common, own or {}, taken or {}, groups or {}), starts, lambda: replace(AT, offset=END))


def test_diverts_started_together_are_members_at_once() -> None:
    plan = planned([divert("a"), divert("b")])
    assert plan is not None
    assert plan.common.members == ("a", "b")
    assert plan.separate == {}
    assert set(plan.new) == {"a", "b"}


def test_divert_with_earlier_start_has_own_position_until_caught_up() -> None:
    plan = planned([divert("now"), divert("past", EARLIEST)])
    assert plan is not None
    assert plan.common.members == ("now",)
    assert plan.common.offset == 100
    assert {name: at.offset for name, at in plan.separate.items()} == {"past": 0}


def test_new_divert_does_not_move_common_position() -> None:
    common = replace(AT, offset=50, members=("a",))
    plan = planned([divert("a"), divert("b")], common)
    assert plan is not None
    assert (plan.common.offset, plan.common.members) == (50, ("a",))
    assert plan.separate["b"].offset == 100


def test_disabled_divert_is_parked_and_catches_up_when_enabled() -> None:
    common = replace(AT, members=("a", "b"))
    plan = planned([divert("a"), divert("b", enabled=False)], common)
    assert plan is not None
    assert plan.common.members == ("a",)
    assert plan.parked["b"].offset == 100
    later = planned([divert("a"), divert("b")], replace(common, offset=500, members=("a",)), plan.parked)
    assert later is not None
    assert later.separate["b"].offset == 100
    assert later.new == {}


def test_removed_divert_is_forgotten_and_others_continue() -> None:
    plan = planned([divert("a")], replace(AT, members=("a", "gone")))
    assert plan is not None
    assert plan.common == replace(AT, members=("a",))
    assert plan.separate == plan.parked == {}


def test_divert_starts_at_first_taken_message_even_when_disabled_or_removed() -> None:
    common, taken = replace(AT, offset=300, members=("a",)), replace(AT, offset=400)
    plan = planned(
        [divert("a"), divert("b"), divert("c", enabled=False)],
        common,
        taken=dict.fromkeys("bc", taken),
        starts=lambda _: replace(AT, offset=500),
    )
    assert plan is not None
    assert (plan.separate["b"].offset, plan.parked["c"].offset, set(plan.new)) == (400, 400, {"b", "c"})
    first = planned([divert("a")], taken={"removed": replace(AT, offset=50)})
    assert first is not None
    assert (first.common.offset, first.separate["removed"].offset, set(first.new)) == (100, 50, {"a"})


def test_removed_divert_keeps_own_position_until_it_reaches_common_position() -> None:
    common = replace(AT, members=("a",))
    plan = planned([divert("a")], common, {"gone": replace(AT, offset=50), "there": AT})
    assert plan is not None
    assert plan.separate == {"gone": replace(AT, offset=50, members=("gone",))}
    last = planned([], common)
    assert last is not None
    assert last.common == replace(AT, members=())


def test_no_plan_without_enabled_diverts_and_positions() -> None:
    assert planned([]) is None
    assert planned([divert("a", enabled=False)]) is None


def test_first_diverts_of_groups_have_a_position_for_each_group() -> None:
    plan = planned([divert("a"), divert("b", group="g"), divert("c", EARLIEST, group="g"), divert("d", EARLIEST, group="h")])
    assert plan is not None
    assert (plan.common.offset, plan.common.members) == (100, ("a",))
    assert {group: (at.offset, at.members) for group, at in plan.groups.items()} == {"g": (100, ("b",)), "h": (0, ("d",))}
    assert {name: at.offset for name, at in plan.separate.items()} == {"c": 0}


def test_divert_that_leaves_the_default_group_founds_its_group_at_the_same_offset() -> None:
    common = replace(AT, offset=50, members=("a", "b"), owner="driver")
    plan = planned([divert("a"), divert("b", group="g")], common)
    assert plan is not None
    assert (plan.common.offset, plan.common.members) == (50, ("a",))
    assert (plan.groups["g"].offset, plan.groups["g"].members) == (50, ("b",))
    assert plan.separate == plan.new == {}


def test_divert_that_changes_its_group_catches_up_from_its_earlier_position() -> None:
    common, group = replace(AT, offset=50, members=("a", "b")), replace(AT, offset=80, members=("c",))
    diverts = [divert("a"), divert("b", group="g"), divert("c", group="g"), divert("d")]
    plan = planned(diverts, common, {"d": replace(AT, offset=60)}, groups={"g": group})
    assert plan is not None
    assert (plan.common.members, plan.groups["g"]) == (("a",), group)
    assert {name: at.offset for name, at in plan.separate.items()} == {"b": 50, "d": 60}


def test_group_whose_members_have_left_begins_at_the_divert_that_is_ahead() -> None:
    own = {"c": replace(AT, offset=80)}
    plan = planned([divert("b", group="g"), divert("c")], replace(AT, offset=50, members=("b",)), own)
    assert plan is not None
    assert (plan.common.offset, plan.common.members, plan.separate["c"].offset) == (50, (), 80)
    assert plan.groups == {"g": replace(AT, offset=50, members=("b",))}


def test_disabled_members_of_a_group_are_parked_at_its_position() -> None:
    group = replace(AT, offset=80, members=("a", "b"))
    plan = planned([divert("a", group="g"), divert("b", enabled=False, group="g")], groups={"g": group})
    assert plan is not None
    assert plan.groups == {"g": replace(group, members=("a",))}
    assert plan.parked == {"b": replace(group, members=("b",))}
    assert (plan.common.offset, plan.common.members) == (END, ())
    last = planned([divert("b", enabled=False, group="g")], groups={"g": group})
    assert last is not None
    assert (last.groups, set(last.parked)) == ({}, {"b"})


def test_common_position_does_not_begin_before_messages_that_an_earlier_one_has_answered_for() -> None:
    known = KnownPositions(covered=101)
    plan = plan_diverts([divert("a")], known, starts, lambda: replace(AT, offset=END))
    assert plan is not None
    assert (plan.common.offset, plan.common.members, plan.separate["a"].offset) == (END, (), 100)
    plan = plan_diverts([divert("a")], replace(known, covered=100), starts, lambda: replace(AT, offset=END))
    assert plan is not None
    assert plan.common.members == ("a",)


def test_removed_divert_with_own_position_joins_the_common_position_though_no_divert_is_left() -> None:
    plan = planned([], own={"gone": replace(AT, offset=50)})
    assert plan is not None
    assert (plan.common.offset, plan.separate["gone"].offset) == (END, 50)


def test_joined_position_keeps_newer_fence() -> None:
    just_begun = replace(AT, epoch=-1, sequence=-1, members=("a",))
    after = joined(just_begun, replace(AT, members=("b",)))
    assert (after.epoch, after.sequence, after.members) == (5, 90, ("a", "b"))


class Record:
    """A record with the methods of the Kafka client's message."""

    def __init__(self, offset: int, kind: Kind, value: bytes) -> None:
        self._fields = (offset, KEY_OF_KIND[kind], value)

    def offset(self) -> int:
        return self._fields[0]

    def key(self) -> bytes:
        return self._fields[1]

    def value(self) -> bytes:
        return self._fields[2]


class History:
    """A journal of four epochs, 0, 3, 8 and 10. Two records of epoch 0 follow the start of epoch 3, and one of epoch 3 that of epoch 8."""

    def __init__(self, first: int) -> None:
        start = json_entry(Op.EPOCH, {"exclusive": []})
        send = send_entry(Send(1, Routing.ANYCAST, 4, 0, 0, 0, "a", (1,), (), (), None, text_message("1")))
        kinds = [(Kind.EPOCH, 0, 0), (Kind.DATA, 0, 1), (Kind.DATA, 0, 2), (Kind.EPOCH, 0, 0)]
        kinds += [(Kind.DATA, 0, 3), (Kind.DATA, 0, 4), (Kind.DATA, 3, 3), (Kind.DATA, 3, 4)]
        kinds += [(Kind.EPOCH, 0, 0), (Kind.DATA, 3, 5), (Kind.EPOCH, 0, 0), (Kind.DATA, 10, 5), (Kind.DATA, 10, 6)]
        self.first = first
        self.all = [
            Record(offset, kind, encode_record(kind, epoch, sequence, start if kind is Kind.EPOCH else send))
            for offset, (kind, epoch, sequence) in enumerate(kinds)
        ]

    def earliest(self) -> int:
        return self.first

    def latest(self) -> int:
        return len(self.all)

    def records(self, start: int, end: int) -> Iterator[Record]:
        assert end <= self.latest(), "the product must not wait for records after the end"
        return iter(self.all[max(start, self.first) : end])


@pytest.mark.parametrize("first", range(13))
def test_reader_that_starts_in_middle_ignores_records_of_fenced_broker(first: int) -> None:
    history: Any = History(first)
    # If the start of epoch 8 is deleted, which has no other record, nothing says that record 9 is of a fenced broker.
    for offset in range(10 if first == 9 else first, 14):
        reader = JournalReader(journal_position("journal", "id", 0, offset, history), [DivertSpec("all", "#")])
        taken = [each.offset for record in history.all[offset:] for each in reader.take(record.offset(), record.key(), record.value())]
        assert taken == [at for at in (1, 2, 6, 7, 11, 12) if at >= offset]
