"""Where each pipeline stands when a driver starts: known positions, new pipelines, diverts that catch up and join. Mostly pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bascule.journal.fence import STRAY_RECORDS_MAX, Fence
from bascule.journal.records import DamagedRecord, ForeignRecord, Header, Kind, decode_header
from bascule.kafka.history import TopicHistory, content_of, known_offset
from bascule.pipelines.divert import journal_header
from bascule.pipelines.spec import EARLIEST, LATEST, DivertSpec, StartPosition
from bascule.writer.epochs import exclusive_of
from bascule.writer.position import Position, PositionLost


@dataclass(frozen=True, slots=True)
class DivertPlan:
    """What the driver makes of the diverts: ``common`` with its members, and those that stand elsewhere, each by itself.

    ``separate`` are enabled diverts that still have to reach the common position, and removed ones that answer until then for what they
    took; ``parked`` are disabled ones that keep theirs, and ``lost`` says why enabled ones among them cannot go on; ``new`` is where
    those begin that were not known before; ``removed`` took what the common position may have to answer for, before ``end``.
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
    """The plan; None when no divert is or was there. ``taken`` is where begins what exclusive diverts took for which nobody stands yet.

    A member that is disabled parts with the common position as its own, and later catches up from there; one that is no longer configured
    is forgotten: from the common position on, that answers for it. A new divert begins where it says, and not behind what it took.
    Whoever stands at the common offset is a member.
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
    elsewhere = {name: replace(at, members=(name,)) for name, at in (standing | removed).items() if name not in there}
    return DivertPlan(
        common=replace(_best_informed(base, [standing[name] for name in there]), members=there),
        separate={name: at for name, at in elsewhere.items() if name not in disabled},
        parked={name: at for name, at in elsewhere.items() if name in disabled},
        new=new,
    )


def joined(common: Position, other: Position) -> Position:
    """The common position with the members of one that stands at the same offset."""
    if common.offset != other.offset:
        raise PositionLost(f"position at offset {other.offset} cannot join the common position at offset {common.offset}")
    return replace(_best_informed(common, [other]), members=tuple(sorted({*common.members, *other.members})))


def _best_informed(base: Position, others: Sequence[Position]) -> Position:
    # At one offset all fences agree, save that one which has just begun in the middle knows no sequence yet.
    known = max([base, *others], key=lambda position: position.sequence)
    leader_epoch = max(each.leader_epoch for each in [base, *others])
    return replace(base, epoch=known.epoch, sequence=known.sequence, exclusive=known.exclusive, leader_epoch=leader_epoch)


def offset_of(start: StartPosition, history: TopicHistory) -> int:
    """The offset at which a new pipeline begins."""
    if start.at == EARLIEST:
        return history.earliest()
    if start.at == LATEST:
        return history.latest()
    return max(history.at_time(start.timestamp_ms), history.earliest())


def journal_position(topic: str, topic_id: str, partition: int, offset: int, history: TopicHistory) -> Position:
    """The position of a reader that begins at ``offset`` in the middle of the journal, its fence set by what stands before it.

    Raises DamagedRecord when the records before contradict one another.
    """
    first = history.earliest()
    if offset <= first == 0:
        return Position(topic, topic_id, partition, offset, epoch=-1, sequence=0)
    fence = Fence(epoch=-1, sequence=-1)
    exclusive: tuple[str, ...] = ()
    for at, header, value in _headers(history, max(first, offset - STRAY_RECORDS_MAX), offset):
        if header.kind is not Kind.EPOCH and header.epoch > fence.epoch:
            # Begun among records of a dead broker, perhaps: the newer epoch counts.
            fence.epoch, fence.sequence = header.epoch, -1
        if fence.admits(at, header) and header.kind is Kind.EPOCH:
            exclusive = exclusive_of(value)
    if fence.epoch < first:
        # Its start is trimmed: records of a dead broker may stand before the first one of the epoch in force.
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
    """Offset, header and value of the records that are a journal's."""
    for record in history.records(start, end):
        at, (key, value) = known_offset(record), content_of(record)
        try:
            header = journal_header(key, value)
        except ForeignRecord:
            continue
        yield at, header, value or b""
