"""Where each pipeline stands when a driver starts: known positions, new pipelines, diverts that catch up and join. Mostly pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bascule.journal.errors import DamagedRecord, ForeignRecord
from bascule.journal.fence import STRAY_RECORDS_MAX, Fence
from bascule.journal.records import Header, Kind, decode_header
from bascule.kafka.history import TopicHistory, content_of, known_offset
from bascule.pipelines.divert import journal_header
from bascule.pipelines.spec import EARLIEST, LATEST, DivertSpec, StartPosition
from bascule.writer.epochs import exclusive_of
from bascule.writer.position import Position, PositionLost


@dataclass(frozen=True, slots=True)
class DivertPlan:
    """Plan of the driver for the diverts: the ``common`` position with its members, and the other positions by divert.

    ``separate`` are enabled diverts that have not reached the common position yet, and removed ones that answer until then for the messages
    that they took. ``parked`` are disabled diverts, which keep their position. ``lost`` says why some enabled diverts cannot continue.
    ``new`` has the first position of diverts that were not known before. ``removed`` are diverts that took messages, before ``end``, for
    which the common position may have to answer.
    """

    common: Position
    separate: dict[str, Position]
    parked: dict[str, Position]
    new: dict[str, Position]
    removed: frozenset[str] = frozenset()
    end: int = 0
    lost: Mapping[str, PositionLost] = field(default_factory=dict)


def plan_diverts(
    diverts: Sequence[DivertSpec],
    common: Position | None,
    own: Mapping[str, Position],
    start_of: Callable[[DivertSpec], Position],
    taken: Mapping[str, Position],
) -> DivertPlan | None:
    """Return the plan, or None if there is no divert and never was one.

    ``taken`` has, by divert, the first position of messages that an exclusive divert took and that no position covers yet. A member that is
    disabled gets the common position as its own, and later catches up from there. A member that is no longer configured is forgotten; the
    common position answers for its messages. A new divert begins where its configuration says, and not after messages that it took. A
    divert at the offset of the common position is a member.
    """
    if not diverts and common is None:
        return None
    members = common.members if common else ()
    standing: dict[str, Position] = {}
    new: dict[str, Position] = {}
    for divert in diverts:
        if common is not None and divert.name in members:
            standing[divert.name] = common
        elif divert.name in own:
            standing[divert.name] = own[divert.name]
        elif divert.enabled or divert.name in taken:
            starts = ([start_of(divert)] if divert.enabled else []) + ([taken[divert.name]] if divert.name in taken else [])
            standing[divert.name] = new[divert.name] = min(starts, key=lambda position: position.offset)
    enabled = {divert.name for divert in diverts if divert.enabled}
    disabled = {divert.name for divert in diverts} - enabled
    base = common or max((standing[name] for name in enabled), key=lambda position: position.offset, default=None)
    if base is None:
        return None
    there = tuple(sorted(name for name in enabled if standing[name].offset == base.offset))
    removed = {name: at for name, at in {**own, **taken}.items() if name not in enabled | disabled and at.offset != base.offset}
    distinct = {name: replace(at, members=(name,)) for name, at in (standing | removed).items() if name not in there}
    return DivertPlan(
        common=replace(_best_informed(base, [standing[name] for name in there]), members=there),
        separate={name: at for name, at in distinct.items() if name not in disabled},
        parked={name: at for name, at in distinct.items() if name in disabled},
        new=new,
    )


def joined(common: Position, other: Position) -> Position:
    """Return the common position with the members of another position at the same offset."""
    if common.offset != other.offset:
        raise PositionLost(f"position at offset {other.offset} cannot join the common position at offset {common.offset}")
    return replace(_best_informed(common, [other]), members=tuple(sorted({*common.members, *other.members})))


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
    fence = Fence(epoch=-1, sequence=-1)
    exclusive: tuple[str, ...] = ()
    for at, header, value in _headers(history, max(first, offset - STRAY_RECORDS_MAX), offset):
        if header.kind is not Kind.EPOCH and header.epoch > fence.epoch:
            # The first records may belong to a dead broker: the newer epoch counts.
            fence.epoch, fence.sequence = header.epoch, -1
        if fence.admits(at, header) and header.kind is Kind.EPOCH:
            exclusive = exclusive_of(value)
    if fence.epoch < first:
        # The start record of the epoch was trimmed: records of a dead broker may precede the first record of the current epoch.
        ahead = _headers(history, offset, min(offset + STRAY_RECORDS_MAX, history.latest()))
        newest = max((header.epoch for _, header, _ in ahead if header.kind is not Kind.EPOCH and header.epoch < first), default=-1)
        if newest > fence.epoch:
            fence.epoch, fence.sequence = newest, -1
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
