"""What becomes of the stored positions of diverts when a driver starts: the plan, with what the journal says. Reads, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from bascule.core.log import get_log
from bascule.kafka.history import TopicHistory
from bascule.kafka.lineage import PartitionLineage
from bascule.pipelines.losses import loss_of
from bascule.pipelines.registry import DivertPlan, KnownPositions, journal_position, offset_of, plan_diverts
from bascule.pipelines.spec import DivertSpec
from bascule.writer.epochs import first_marks, taken_since
from bascule.writer.position import BEGUN, DEFAULT_GROUP, DIVERT, GROUP, Position, PositionLost, group_pipeline

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """Keys that have, had or may have a position: by group, by divert, and by divert for the positions where diverts once began."""

    groups: Mapping[str, str]
    own: Mapping[str, str]
    begun: Mapping[str, str]

    @classmethod
    def of(cls, keys: Collection[str]) -> Self:
        """Return the keys by their names."""
        return cls(
            *({key.partition("/")[0].removeprefix(kind): key for key in keys if key.startswith(kind)} for kind in (GROUP, DIVERT, BEGUN))
        )


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Knows which diverts have run before. ``topic`` has the positions."""

    has_begun: Callable[[str], bool]
    topic: str

    def check(self, divert: str) -> None:
        """Raise PositionLost if a divert without a position has run before."""
        if self.has_begun(divert):
            raise PositionLost(f"the position of divert {divert!r} is lost: the divert has run before. Restore topic {self.topic!r}")


@dataclass(frozen=True, slots=True)
class JournalAtStart:
    """The journal at the start of a driver."""

    topic: str
    partition: int
    topic_id: str
    history: TopicHistory
    lineage: PartitionLineage
    first: int
    end: int
    leader_epoch: int

    def position(self, offset: int) -> Position:
        """Return the position of a reader that begins at ``offset``."""
        found = journal_position(self.topic, self.topic_id, self.partition, offset, self.history)
        return replace(found, leader_epoch=self.leader_epoch)

    def taken_since(self, position: Position | None) -> dict[str, int]:
        """Return the offsets after ``position`` at which messages of exclusive diverts begin, by divert.

        A position in an earlier journal is ignored. If no position covers the messages, the marks in them stand in for an epoch whose start
        record was trimmed.
        """
        known = position if position is not None and position.topic_id == self.topic_id else None
        unknown = first_marks(known, self.history, self.end) if known is None or known.vacant else {}
        return {name: max(self.first, offset) for name, offset in (taken_since(known, self.history, self.end) | unknown).items()}

    def after_moves(self, groups: Mapping[str, Position], diverts: Sequence[DivertSpec]) -> tuple[dict[str, Position], dict[str, Position]]:
        """Return the positions of named groups with the members that stay, and the positions with which the other members leave.

        A member leaves if it is now in another group, or if the position of the group is lost. A member that is no longer configured leaves
        if it may have taken messages.
        """
        group_of = {divert.name: divert.group for divert in diverts}
        staying: dict[str, Position] = {}
        leaving: dict[str, Position] = {}
        for group, at in groups.items():
            lost = loss_of(group_pipeline(group), at, self.topic_id, self.first, self.lineage) is not None
            stay = tuple(name for name in at.members if group_of.get(name) == group and not lost)
            if stay:
                staying[group] = replace(at, members=stay)
            gone = set(at.members).difference(stay)
            taken = self.taken_since(at) if gone.difference(group_of) else {}
            leaving |= {name: replace(at, members=(name,)) for name in gone if name in group_of or name in taken}
        return staying, leaving

    def left_common(
        self, common: Position | None, diverts: Sequence[DivertSpec], loss: PositionLost
    ) -> tuple[Position, dict[str, Position]] | None:
        """Return a lost common position without an owner if no divert that is configured continues from it; None if one does.

        The default group then begins like one that never ran. The second value has the lost positions of its removed members that may have
        taken messages: they leave it like those of a named group, and answer for the messages that still exist.
        """
        if common is None or {divert.name for divert in diverts}.intersection(common.members):
            return None
        same = common.topic_id == self.topic_id
        left = replace(common, offset=min(common.offset, self.end) if same else common.offset, members=(), owner="")
        taken = self.taken_since(left)
        for name in set(common.members).difference(taken):
            log.error("unread records of a removed divert deleted", divert=name, reason=str(loss))
        return left, {name: replace(common, members=(name,)) for name in common.members if name in taken}

    def losses_of(self, own: Mapping[str, Position]) -> dict[str, PositionLost]:
        """Return why diverts cannot continue from their own positions, for those that cannot."""
        found = {name: loss_of(f"{DIVERT}{name}", at, self.topic_id, self.first, self.lineage) for name, at in own.items()}
        return {name: loss for name, loss in found.items() if loss is not None}

    def what_is_left(
        self, own: Mapping[str, Position], diverts: Sequence[DivertSpec]
    ) -> tuple[dict[str, Position], dict[str, PositionLost]]:
        """Return the positions of diverts that do not share the common position, and why those of them that are enabled cannot continue.

        A removed divert whose position is lost gets the first offset of the journal, because nobody knows what it took in the rest.
        """
        losses = self.losses_of(own)
        removed = losses.keys() - {divert.name for divert in diverts}
        for name in removed:
            log.error("unread records of a removed divert deleted", divert=name, reason=str(losses[name]))
        left = {name: replace(self.position(self.first), exclusive=(name,), members=(name,)) for name in removed}
        return {**own, **left}, {divert.name: losses[divert.name] for divert in diverts if divert.enabled and divert.name in losses}


def plan_takeover(
    diverts: Sequence[DivertSpec], stored: KnownPositions, beginnings: Beginnings, journal: JournalAtStart,
    common_lost: PositionLost | None = None,
) -> DivertPlan | None:  # fmt: skip
    """Return the plan for the diverts, or None if there is nothing to do. ``stored`` has the positions as they are stored.

    If the common position is lost (``common_lost``), its members stop. Diverts of the default group that have positions of their own, for
    example because an administrator has moved them, continue alone, and so do the other groups.
    """
    groups, leaving = journal.after_moves(stored.groups, diverts)
    own = {**leaving, **stored.own}
    untouched: dict[str, Position] = {}
    planned = diverts
    if common_lost is not None and stored.common is not None:
        planned = [divert for divert in diverts if divert.group != DEFAULT_GROUP]
        names = {divert.name for divert in planned}
        own |= {name: replace(stored.common, members=(name,)) for name in names.intersection(stored.common.members)}
        untouched = {name: at for name, at in own.items() if name not in names}
        own = {name: at for name, at in own.items() if name in names}
    own, lost = journal.what_is_left(own, planned)
    fit = [replace(divert, enabled=divert.enabled and divert.name not in lost) for divert in planned]
    plan = _plan(fit, KnownPositions(stored.common, own, groups=groups), beginnings, journal)
    if plan is None:
        return None
    if common_lost is not None and stored.common is not None:
        members = tuple(name for name in stored.common.members if name not in own)
        common = replace(stored.common, members=members)
        alone = {divert.name: untouched[divert.name] for divert in diverts if divert.enabled and divert.name in untouched}
        losses = journal.losses_of(alone)
        lost |= losses
        alone = {name: at for name, at in alone.items() if name not in losses}
        untouched = {name: at for name, at in untouched.items() if name not in alone}
        plan = replace(plan, common=common, untouched=untouched, common_lost=common_lost, vacant=False, separate=plan.separate | alone)
    return replace(plan, lost=lost)


def _plan(diverts: Sequence[DivertSpec], known: KnownPositions, beginnings: Beginnings, journal: JournalAtStart) -> DivertPlan | None:
    """Return the plan. Messages that exclusive diverts took and no position covers are looked up in the journal."""
    common = None if known.common is None or known.common.vacant else known.common
    if not diverts and common is None and not known.own:
        return None
    configured = {divert.name for divert in diverts}
    taken = journal.taken_since(known.common)
    # A divert that has its own position and is no longer configured still answers for the messages that it took. The common position
    # answers for all others.
    own = {name: at for name, at in known.own.items() if name in configured or name in taken or name in journal.taken_since(at)}
    members = {name for at in (common, *known.groups.values()) if at is not None for name in at.members}
    unclaimed = taken.keys() - {*own, *members}
    if common is not None:
        unclaimed &= configured

    def at(offset: int) -> Position:
        return replace(common, members=(), owner="") if common is not None and offset == common.offset else journal.position(offset)

    def start_of(divert: DivertSpec) -> Position:
        beginnings.check(divert.name)
        return at(min(offset_of(divert.start, journal.history), journal.end))

    unclaimed_at = {name: at(taken[name]) for name in unclaimed if not beginnings.has_begun(name)}
    vacant = known.common if common is None else None
    covered = vacant.offset if vacant is not None and vacant.topic_id == journal.topic_id else 0
    plan = plan_diverts(diverts, KnownPositions(common, own, unclaimed_at, known.groups, covered), start_of, lambda: at(journal.end))
    if plan is None:
        return None
    plan = replace(plan, removed=frozenset({*own, *taken} - configured), end=journal.end)
    default = {divert.name for divert in diverts if divert.group == DEFAULT_GROUP}
    if plan.removed or default.intersection((*plan.common.members, *plan.separate, *plan.parked)):
        return plan
    # Nothing of earlier diverts is left to answer for.
    mark = replace(plan.common, offset=journal.end, epoch=journal.end, exclusive=(), members=(), owner="")
    return replace(plan, common=mark, vacant=True)
