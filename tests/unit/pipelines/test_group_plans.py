"""Random configurations of groups, one driver after the other: no plan moves the offset of a divert, or has a divert twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from bascule.pipelines.registry import DivertPlan, KnownPositions, joined, plan_diverts
from bascule.pipelines.spec import DivertSpec
from bascule.writer.position import DEFAULT_GROUP, Position

NAMES, GROUPS = "abcd", ("", "g", "h")
DRIVERS = 12


@dataclass
class Stored:
    """Positions as a driver leaves them."""

    common: Position | None = None
    groups: dict[str, Position] = field(default_factory=dict)
    own: dict[str, Position] = field(default_factory=dict)
    end: int = 100

    def standing(self) -> dict[str, int]:
        """Return the offset of each divert that has a position."""
        found = {name: at.offset for name, at in self.own.items()}
        for at in filter(None, (self.common, *self.groups.values())):
            found |= dict.fromkeys(at.members, at.offset)
        return found

    def take(self, plan: DivertPlan) -> None:
        """Store a plan, let the diverts read on, and let some of those that have caught up join."""
        self.common, self.groups, self.own = plan.common, dict(plan.groups), plan.separate | plan.parked

    def run(self, pick: random.Random, group_of: Mapping[str, str], parked: set[str]) -> None:
        self.end += pick.randint(0, 3)
        self.groups = {group: self.moved(at, pick) for group, at in self.groups.items()}
        if self.common is not None:
            self.common = self.moved(self.common, pick)
        for name in self.own.keys() - parked:
            self.own[name] = self.moved(self.own[name], pick)
        for name in sorted(self.own.keys() - parked):
            group = group_of[name]
            shared = self.common if group == DEFAULT_GROUP else self.groups.get(group)
            if shared is not None and shared.offset == self.own[name].offset:
                after = joined(shared, self.own.pop(name))
                if group == DEFAULT_GROUP:
                    self.common = after
                else:
                    self.groups[group] = after

    def moved(self, at: Position, pick: random.Random) -> Position:
        return replace(at, offset=pick.randint(at.offset, self.end))


def with_moves(stored: Stored, group_of: Mapping[str, str]) -> KnownPositions:
    """Return the positions with which the takeover makes its plan: members that leave a named group have their own."""
    own, groups = dict(stored.own), {}
    for group, at in stored.groups.items():
        stay = tuple(name for name in at.members if group_of.get(name) == group)
        own |= {name: replace(at, members=(name,)) for name in at.members if name in group_of and name not in stay}
        if stay:
            groups[group] = replace(at, members=stay)
    return KnownPositions(stored.common, {name: at for name, at in own.items() if name in group_of}, {}, groups)


def _first(end: Position, _: DivertSpec) -> Position:
    return end


@pytest.mark.parametrize("seed", range(200))
def test_plans_of_random_configurations_keep_the_offset_of_each_divert(seed: int) -> None:
    pick, stored = random.Random(seed), Stored()
    for _ in range(DRIVERS):
        diverts = [DivertSpec(name, "#", group=pick.choice(GROUPS), enabled=pick.random() < 0.8) for name in NAMES if pick.random() < 0.9]
        group_of = {divert.name: divert.group for divert in diverts}
        before = stored.standing()
        end = Position("journal", "id", 0, stored.end)
        plan = plan_diverts(diverts, with_moves(stored, group_of), partial(_first, end), partial(replace, end))
        if plan is None:
            assert not any(divert.enabled for divert in diverts)
            continue
        if stored.common is not None:
            assert plan.common.offset == stored.common.offset
        stored.take(plan)
        after = stored.standing()
        assert {name: after[name] for name in before if name in group_of} == {name: before[name] for name in before if name in group_of}
        shared = {DEFAULT_GROUP: plan.common, **plan.groups}
        places = Counter([*plan.separate, *plan.parked, *(name for at in shared.values() for name in at.members)])
        assert set(places.values()) <= {1}
        running = {name for name in places if name not in plan.parked}
        assert running == {divert.name for divert in diverts if divert.enabled}
        assert all(group_of[name] == group for group, at in shared.items() for name in at.members)
        assert all(at.members for at in plan.groups.values())
        assert {group_of[name] for name in plan.separate} <= shared.keys()
        stored.run(pick, group_of, set(plan.parked))
