"""Where each pipeline stands when a driver starts: known positions, new pipelines, diverts that catch up and join. Mostly pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bascule.journal.errors import DamagedRecord, ForeignRecord
from bascule.journal.fence import STRAY_RECORDS_MAX, JoiningFence
from bascule.journal.records import Header, Kind, decode_header
from bascule.kafka.history import TopicHistory, content_of, known_offset
from bascule.pipelines.divert import journal_header
from bascule.pipelines.spec import DivertSpec, StartPosition
from bascule.writer.epochs import exclusive_of
from bascule.writer.position import DEFAULT_GROUP, EARLIEST, LATEST, Position, PositionLost


@dataclass(frozen=True, slots=True)
class DivertPlan:
    """Plan of the driver for the diverts: the ``common`` position with its members, and the other positions by divert.

    ``common`` is the position of the default group, and ``groups`` has the positions of the other groups that have members. ``separate``
    are enabled diverts that have not reached the position of their group yet, and removed ones that answer for the messages that they took
    until they reach the common position. ``parked`` are disabled diverts, which keep their position. ``lost`` says why some enabled diverts
    cannot continue, and ``common_lost`` why the default group cannot; then ``untouched`` has the own positions of its diverts. ``new`` has
    the first position of diverts that were not known before. ``removed`` are diverts that took messages, before ``end``, for which the
    common position may have to answer. If ``vacant``, there is nothing for which it has to answer.
    """

    common: Position
    separate: dict[str, Position]
    parked: dict[str, Position]
    new: dict[str, Position]
    removed: frozenset[str] = frozenset()
    end: int = 0
    lost: Mapping[str, PositionLost] = field(default_factory=dict)
    groups: dict[str, Position] = field(default_factory=dict)
    common_lost: PositionLost | None = None
    untouched: dict[str, Position] = field(default_factory=dict)
    vacant: bool = False

    @property
    def idle(self) -> bool:
        """Return True if there is nothing to run and nothing to keep."""
        return self.vacant and not (self.groups or self.separate or self.parked or self.lost)

    def covered_elsewhere(self, configured: Container[str]) -> frozenset[str]:
        """Return the configured diverts that another position than the common one covers."""
        names = {name for name in (*self.separate, *self.parked) if name in configured}
        return frozenset(names.union(*(position.members for position in self.groups.values())))

    def owned_by(self, name: Callable[[], str]) -> DivertPlan:
        """Return the plan with a new owner in the positions from which the diverts run."""
        owner = name()
        return replace(
            self,
            common=self.common if self.vacant else replace(self.common, owner=owner),
            groups={group: replace(position, owner=owner) for group, position in self.groups.items()},
            separate={divert: replace(position, owner=owner) for divert, position in self.separate.items()},
            parked={divert: replace(position, owner="") for divert, position in self.parked.items()},
        )


@dataclass(frozen=True, slots=True)
class KnownPositions:
    """Positions that are stored when a driver starts.

    ``common`` is the position of the default group, ``groups`` has those of other groups, and ``own`` those of single diverts. ``taken``
    has, by divert, the first position of messages that an exclusive divert took and that no position covers yet. Without a common position,
    ``covered`` is the offset up to which an earlier one has answered for messages of exclusive diverts that were not configured.
    """

    common: Position | None = None
    own: Mapping[str, Position] = field(default_factory=dict)
    taken: Mapping[str, Position] = field(default_factory=dict)
    groups: Mapping[str, Position] = field(default_factory=dict)
    covered: int = 0

    def of(self, divert: DivertSpec) -> Position | None:
        """Return the position from which a divert continues, or None if the divert has none."""
        shared = self.common if divert.group == DEFAULT_GROUP else self.groups.get(divert.group)
        for found in (shared, self.common):
            if found is not None and divert.name in found.members:
                return found
        return self.own.get(divert.name)


def plan_diverts(
    diverts: Sequence[DivertSpec], known: KnownPositions, start_of: Callable[[DivertSpec], Position], at_end: Callable[[], Position]
) -> DivertPlan | None:
    """Return the plan, or None if there is no divert and never was one.

    A member that is disabled gets the position of its group as its own, and later catches up from there; so does a member that is now in
    another group. A member of the common position that is no longer configured is forgotten; the common position answers for its messages.
    A new divert begins where its configuration says, and not after messages that it took. A divert at the offset of its group's position
    is a member. A group without members has no position, except the default group: it answers for messages of exclusive diverts that are
    not configured.
    """
    if not diverts and known.common is None and not known.own:
        return None
    standing, new = _standing(diverts, known, start_of)
    enabled = {divert.name: divert.group for divert in diverts if divert.enabled}
    disabled = {divert.name for divert in diverts} - enabled.keys()
    if known.common is None and not (enabled or known.own or known.groups):
        return None
    bases = {group: _base_of(group, [name for name, of in enabled.items() if of == group], known, standing) for group in enabled.values()}
    base = bases.get(DEFAULT_GROUP) or known.common
    if base is None or base.offset < known.covered:
        base = at_end()
    bases[DEFAULT_GROUP] = base
    there = {name for name, group in enabled.items() if standing[name].offset == bases[group].offset}
    stored = {**known.own, **known.taken}
    removed = {name: at for name, at in stored.items() if name not in enabled.keys() | disabled and at.offset != base.offset}
    distinct = {name: replace(at, members=(name,)) for name, at in (standing | removed).items() if name not in there}
    shared = {}
    for group, at in bases.items():
        members = tuple(sorted(name for name in there if enabled[name] == group))
        shared[group] = replace(_best_informed(at, [standing[name] for name in members]), members=members)
    return DivertPlan(
        common=shared.pop(DEFAULT_GROUP),
        separate={name: at for name, at in distinct.items() if name not in disabled},
        parked={name: at for name, at in distinct.items() if name in disabled},
        new=new,
        groups=shared,
    )


def _standing(
    diverts: Sequence[DivertSpec], known: KnownPositions, start_of: Callable[[DivertSpec], Position]
) -> tuple[dict[str, Position], dict[str, Position]]:
    """Return where the diverts stand, and where those of them begin that are new."""
    standing: dict[str, Position] = {}
    new: dict[str, Position] = {}
    for divert in diverts:
        found = known.of(divert)
        if found is not None:
            standing[divert.name] = found
        elif divert.enabled or divert.name in known.taken:
            starts = ([start_of(divert)] if divert.enabled else []) + ([known.taken[divert.name]] if divert.name in known.taken else [])
            standing[divert.name] = new[divert.name] = min(starts, key=lambda position: position.offset)
    return standing, new


def _base_of(group: str, enabled: Sequence[str], known: KnownPositions, standing: Mapping[str, Position]) -> Position:
    """Return the position that the enabled diverts of a group join: the stored one, or that of the divert that is ahead.

    The stored position of a named group counts only while a member stays: without one, nothing is gained by waiting for it.
    """
    stored = known.common if group == DEFAULT_GROUP else known.groups.get(group)
    if stored is not None and (group == DEFAULT_GROUP or set(stored.members) & set(enabled)):
        return stored
    return max((standing[name] for name in enabled), key=lambda position: position.offset)


def joined(common: Position, other: Position) -> Position:
    """Return the position of a group with the members of another position at the same offset."""
    if common.offset != other.offset:
        raise PositionLost(f"position at offset {other.offset} cannot join the common position at offset {common.offset}")
    members = tuple(sorted({*common.members, *other.members}))
    return replace(_best_informed(common, [other]), members=members, carried=common.carried.with_pipelines_of(other.carried))


def _best_informed(base: Position, others: Sequence[Position]) -> Position:
    # At one offset all fences agree, except that a position that began in the middle of the journal does not know the sequence yet.
    known = max([base, *others], key=lambda position: position.sequence)
    leader_epoch = max(each.leader_epoch for each in [base, *others])
    return replace(base, epoch=known.epoch, sequence=known.sequence, exclusive=known.exclusive, leader_epoch=leader_epoch)


def offset_of(start: StartPosition, history: TopicHistory) -> int:
    """Return the offset at which a new pipeline begins."""
    if start.at == EARLIEST:
        return history.earliest()
    if start.at == LATEST:
        return history.latest()
    return max(history.at_time(start.timestamp_ms), history.earliest())


def journal_position(topic: str, topic_id: str, partition: int, offset: int, history: TopicHistory) -> Position:
    """Return the position of a reader that begins at ``offset`` in the journal. The records before it determine the fence.

    Raises DamagedRecord if the records before contradict one another.
    """
    first = history.earliest()
    if offset <= first == 0:
        return Position(topic, topic_id, partition, offset, epoch=-1, sequence=0)
    fence = JoiningFence(strays_end=offset)
    exclusive: tuple[str, ...] = ()
    for at, header, value in _headers(history, max(first, offset - STRAY_RECORDS_MAX), offset):
        if fence.admits(at, header) and header.kind is Kind.EPOCH:
            exclusive = exclusive_of(value)
    if fence.epoch < first:
        # The start record of the epoch was trimmed: records of a dead broker may precede the first record of the current epoch.
        ahead = _headers(history, offset, min(offset + STRAY_RECORDS_MAX, history.latest()))
        newest = max((header.epoch for _, header, _ in ahead if header.kind is not Kind.EPOCH and header.epoch < first), default=-1)
        fence.epoch, fence.sequence = max(newest, fence.epoch), -1
    if fence.epoch >= 0 and fence.epoch < offset - STRAY_RECORDS_MAX and fence.epoch >= first:
        for message in history.records(fence.epoch, fence.epoch + 1):
            value = content_of(message)[1] or b""
            if decode_header(value).kind is not Kind.EPOCH:
                raise DamagedRecord(f"offset {fence.epoch} is not an epoch start, and records name this offset as their epoch")
            exclusive = exclusive_of(value)
    return Position(topic, topic_id, partition, offset, epoch=fence.epoch, sequence=fence.sequence, exclusive=exclusive)


def _headers(history: TopicHistory, start: int, end: int) -> Iterator[tuple[int, Header, bytes]]:
    """Yield offset, header and value of the records that are journal records."""
    for record in history.records(start, end):
        at, (key, value) = known_offset(record), content_of(record)
        try:
            header = journal_header(key, value)
        except ForeignRecord:
            continue
        yield at, header, value or b""
