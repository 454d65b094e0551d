"""Retention: up to which offset the journal may be deleted.

Pipelines, waiting messages and the configured retention need what is behind it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from bascule.broker.snapshot import Snapshot


class RetentionViolation(enum.StrEnum):
    """Rules of retention that a test can break."""

    ONE_RECORD_TOO_MANY = "a record of the journal that is still needed is trimmed"
    PIPELINES_KEEP_NOTHING = "the journal is trimmed regardless of the positions of pipelines"
    UNCOMMITTED_POSITIONS_COUNT = "positions of pipelines count before they are committed"
    WAITING_MESSAGES_KEEP_NOTHING = "the journal is trimmed regardless of the messages in queues"


class Keeper(enum.StrEnum):
    """The kinds of things that need the journal."""

    PIPELINE = "pipeline"
    QUEUE = "queue"
    BRANCH = "branch"
    RETENTION = "retention"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class RetentionHold:
    """A pin: something needs the journal from ``offset`` on. The pin with the lowest offset decides.

    ``records`` and ``bytes`` count from ``offset`` to the last snapshot; for the pin of the snapshot itself, from the snapshot to the end.
    """

    keeper: Keeper
    name: str
    offset: int
    records: int
    bytes: int
    reason: str  # "" for a pipeline that is reading
    released: bool = False  # for a pipeline beyond its quota: the journal is trimmed all the same

    @classmethod
    def up_to(cls, taken: Snapshot, keeper: Keeper, name: str, offset: int, reason: str, quota_bytes: int = 0) -> RetentionHold:
        """Return the pin from an offset to a snapshot. If ``quota_bytes`` is not 0 and more bytes lie in between, the pin is released."""
        end = taken.next_offset
        size_bytes = taken.offsets.sizes.between(offset, end)
        return cls(keeper, name, offset, max(0, end - offset), size_bytes, reason, bool(quota_bytes and size_bytes > quota_bytes))


@dataclass(frozen=True, slots=True)
class OwnersRetention:
    """How much of the journal the owner keeps for future diverts: the records younger than a time, and at most a number of bytes."""

    period_s: float
    size_bytes: int = 0  # 0 for no limit

    def start(self, begins: int, taken: Snapshot) -> tuple[int, str]:
        """Return the offset from which the journal is kept, and the setting that decides.

        ``begins`` is the offset for the retention time.
        """
        bounded = taken.offsets.sizes.start_of_last(self.size_bytes) if self.size_bytes else begins
        if bounded > begins:
            return bounded, f"the last journal.retention_bytes = {self.size_bytes}"
        return begins, f"younger than journal.retention_s = {self.period_s:g}"


def holds_of(
    taken: Snapshot, pipelines: Sequence[RetentionHold], begins: int, retention: OwnersRetention, branch: str
) -> list[RetentionHold]:
    """Return the pins of the journal, except that of the snapshot itself.

    ``begins`` is the offset at which the retention time begins; ``branch`` is the xid of the branch that has received the oldest message,
    or "".
    """
    return [*pipelines, *_of_messages(taken, branch), *_of_retention(taken, begins, retention)]


def _of_messages(taken: Snapshot, branch: str) -> Iterator[RetentionHold]:
    oldest = taken.oldest()
    if oldest is not None:
        _, queue = oldest
        keeper, name, reason = Keeper.QUEUE, str(queue["name"]), "the oldest message of the queue has not been consumed"
        if branch:
            keeper, name, reason = Keeper.BRANCH, branch, f"prepared branch that has received a message of {name!r}"
        yield RetentionHold.up_to(taken, keeper, name, taken.first_offset(), reason)


def _of_retention(taken: Snapshot, begins: int, retention: OwnersRetention) -> Iterator[RetentionHold]:
    start, reason = retention.start(begins, taken)
    if start < taken.next_offset:
        yield RetentionHold.up_to(taken, Keeper.RETENTION, "", start, reason)


def needed_from(taken: Snapshot, holds: Sequence[RetentionHold], violations: Collection[enum.StrEnum] = frozenset()) -> int:
    """Return the offset before which nothing needs the journal."""
    forgotten: set[Keeper] = set()
    if RetentionViolation.PIPELINES_KEEP_NOTHING in violations:
        forgotten.add(Keeper.PIPELINE)
    if RetentionViolation.WAITING_MESSAGES_KEEP_NOTHING in violations:
        forgotten |= {Keeper.QUEUE, Keeper.BRANCH}
    needed = min([taken.next_offset, *(hold.offset for hold in holds if not hold.released and hold.keeper not in forgotten)])
    return needed + (RetentionViolation.ONE_RECORD_TOO_MANY in violations)
