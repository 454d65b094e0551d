"""Up to where the journal may be deleted: pipelines, waiting messages and the owner's retention still need what is behind."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bascule.broker.snapshot import Snapshot


class RetentionViolation(enum.StrEnum):
    """Rules of retention that a test may break."""

    ONE_RECORD_TOO_MANY = "one record of the journal is trimmed that is still needed"
    PIPELINES_KEEP_NOTHING = "the journal is trimmed without a look at the positions of pipelines"
    UNCOMMITTED_POSITIONS_COUNT = "positions of pipelines count before they are committed"
    WAITING_MESSAGES_KEEP_NOTHING = "the journal is trimmed without a look at the messages that wait"


class Keeper(enum.StrEnum):
    """What kind of thing needs the journal."""

    PIPELINE = "pipeline"
    QUEUE = "queue"
    BRANCH = "branch"
    RETENTION = "retention"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class RetentionHold:
    """One for whom the journal is kept from ``offset`` on. The farthest back decides.

    ``records`` and ``bytes`` (by the mean size of a record) lie from there up to the last snapshot; of the snapshot itself, behind it.
    """

    keeper: Keeper
    name: str
    offset: int
    records: int
    bytes: int
    reason: str  # "" of a pipeline that reads on
    released: bool = False  # of a pipeline beyond the owner's quota: the journal is trimmed all the same

    @classmethod
    def up_to(cls, end: int, keeper: Keeper, name: str, offset: int, mean_bytes: float, reason: str, quota_bytes: int = 0) -> RetentionHold:
        """A hold up to a snapshot at ``end``. With a quota (0: none) it is released where more bytes lie behind it."""
        records = max(0, end - offset)
        size_bytes = int(records * mean_bytes)
        return cls(keeper, name, offset, records, size_bytes, reason, bool(quota_bytes and size_bytes > quota_bytes))


def holds_of(
    taken: Snapshot, pipelines: Sequence[RetentionHold], retained: int, retention_s: float, held: Mapping[int, str], mean_bytes: float
) -> list[RetentionHold]:
    """What the journal is kept for beside the snapshot itself.

    ``retained`` is the offset where the owner's retention begins, ``held`` names the branches that have received a mid.
    """
    return [*pipelines, *_of_messages(taken, held, mean_bytes), *_of_retention(taken, retained, retention_s, mean_bytes)]


def _of_messages(taken: Snapshot, held: Mapping[int, str], mean_bytes: float) -> Iterator[RetentionHold]:
    oldest = taken.oldest()
    if oldest is not None:
        mid, queue = oldest
        keeper, name, reason = Keeper.QUEUE, str(queue["name"]), "its oldest message has not been taken"
        if mid in held:
            keeper, name, reason = Keeper.BRANCH, held[mid], f"prepared, and has received a message of {name!r}"
        yield RetentionHold.up_to(taken.next_offset, keeper, name, taken.first_offset(), mean_bytes, reason)


def _of_retention(taken: Snapshot, retained: int, retention_s: float, mean_bytes: float) -> Iterator[RetentionHold]:
    if retained < taken.next_offset:
        reason = f"younger than journal.retention_s = {retention_s:g}"
        yield RetentionHold.up_to(taken.next_offset, Keeper.RETENTION, "", retained, mean_bytes, reason)


def needed_from(taken: Snapshot, holds: Sequence[RetentionHold], violations: Collection[enum.StrEnum] = frozenset()) -> int:
    """The offset before which nobody needs the journal."""
    forgotten: set[Keeper] = set()
    if RetentionViolation.PIPELINES_KEEP_NOTHING in violations:
        forgotten.add(Keeper.PIPELINE)
    if RetentionViolation.WAITING_MESSAGES_KEEP_NOTHING in violations:
        forgotten |= {Keeper.QUEUE, Keeper.BRANCH}
    needed = min([taken.next_offset, *(hold.offset for hold in holds if not hold.released and hold.keeper not in forgotten)])
    return needed + (RetentionViolation.ONE_RECORD_TOO_MANY in violations)
