"""The remains of branches in Kafka that may be deleted, without IO. The clocks of processes need not agree.

The entry AGES of the log has the ends that both topics had at some times, each with its age in seconds. A process adds to these ages the
time for which it has known the entry, by its own monotonic clock, and stores the sums. So an age is never larger than the true age, and
processes that run for a short time only continue the measurement of each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from bascule.core.log import get_log
from bascule.core.topics import XA_PREFIX
from bascule.xa.errors import ResourceError
from bascule.xa.kafka_records import AGES, STARTED, LogEntry, PreparedBranch, SideEnds, is_about_branch, log_fields, told_outcome

_log = get_log("bascule.xa")

#: The entry has one end for each of this many parts of the time for which remains are kept.
PARTS: Final = 8
#: What an earlier version reads of the entry (see AGES): it neither deletes the entry, nor takes it for a branch that sends. No process has
#: the transactional id, whose owner the earlier version may fence.
_MARK: Final = {"at_ms": 1 << 53, "slot": f"{XA_PREFIX}.ages", "rolled_back": True}


class KnownEnds(NamedTuple):
    """The ends of both topics ``age_s`` seconds ago or earlier: at ``at_ms`` by the wall clock of the writer. ``log`` is by partition."""

    age_s: float
    at_ms: int
    side: SideEnds
    log: Mapping[int, int]


class Ages:
    """What one process knows of the entry AGES."""

    def __init__(self, kept_s: float) -> None:
        """``kept_s`` is the time in seconds for which remains are kept."""
        self._kept_s = kept_s
        self._value: bytes | None = None
        self._since_s = 0.0
        self._known: list[KnownEnds] = []

    def see(self, table: Mapping[bytes, LogEntry], now_s: float) -> None:
        """Note the entry of a table that was read. An entry in the form of another version counts as none."""
        value = None if (entry := table.get(AGES)) is None else entry.value
        if value != self._value:
            self._known = [] if value is None else _decoded(value)  # [] makes ages smaller: nothing is deleted too early
            self._value, self._since_s = value, now_s

    def measured(self, asked_s: float, side: SideEnds) -> list[KnownEnds]:
        """Return the ends with their ages when a read of the table began, the oldest first.

        ``side`` has the current ends of the side topic. The result does not have the ends of a topic that was deleted since, nor ends
        beyond the current ones, whose records Kafka has lost.
        """
        known_s = max(0.0, asked_s - self._since_s)
        return [each._replace(age_s=each.age_s + known_s) for each in self._known if _are_there(each.side, side)]

    def stored(self, ends: Sequence[KnownEnds], new: KnownEnds, asked_s: float) -> bytes:
        """Return the value of the next entry: the ``ends`` that are still needed, as measured, and the new ones if they are due."""
        old = [each for each in ends if self.is_old(each)]
        kept = [*old[-1:], *ends[len(old) :]]
        if not kept or kept[-1].age_s >= self._kept_s / PARTS:
            kept.append(new)
        self._value, self._since_s, self._known = _encoded(kept), asked_s, kept
        return self._value

    def is_old(self, ends: KnownEnds) -> bool:
        """Return whether remains before these ends may be deleted."""
        return ends.age_s >= self._kept_s


def log_ends(table: Mapping[bytes, LogEntry]) -> dict[int, int]:
    """Return the ends of the log's partitions that a read table shows."""
    ends: dict[int, int] = {}
    for entry in table.values():
        ends[entry.partition] = max(entry.offset + 1, ends.get(entry.partition, 0))
    return ends


def needed(table: Mapping[bytes, LogEntry]) -> dict[int, int]:
    """Return the first offset of the side topic, by partition, that a prepared branch needs."""
    first: dict[int, int] = {}
    for key, entry in table.items():
        if is_about_branch(key) and not key.endswith(STARTED):
            prepared = PreparedBranch.decode(entry.value)
            first[prepared.partition] = min(prepared.first, first.get(prepared.partition, prepared.first))
    return first


def obsolete(table: Mapping[bytes, LogEntry], old: Sequence[KnownEnds], marks_max: int) -> list[bytes]:
    """Return the keys XID/started that nobody needs: of branches that were never prepared, and the oldest marks beyond ``marks_max``.

    A mark tells the process of a branch that another process has ended it. ``old`` has the ends that are old, the oldest first.
    """
    if not old:
        return []

    def is_old(entry: LogEntry, ends: KnownEnds) -> bool:
        return entry.offset < ends.log.get(entry.partition, 0)

    begun = {key: entry for key, entry in table.items() if is_about_branch(key) and key.endswith(STARTED)}
    marks = {key: entry for key, entry in begun.items() if told_outcome(entry) is not None}
    # A tombstone for a prepared branch could delete the mark of a process that ends the branch now.
    keys = [key for key in begun.keys() - marks.keys() if key.removesuffix(STARTED) not in table and is_old(begun[key], old[-1])]
    oldest = sorted(marks, key=lambda key: (-sum(is_old(marks[key], each) for each in old), marks[key].offset))
    return sorted(keys) + [key for key in oldest[: max(0, len(marks) - marks_max)] if is_old(marks[key], old[-1])]


def _are_there(earlier: SideEnds, now: SideEnds) -> bool:
    return earlier.topic_id == now.topic_id and all(end <= now.ends.get(partition, 0) for partition, end in earlier.ends.items())


def _encoded(ends: Sequence[KnownEnds]) -> bytes:
    ages = [[each.age_s, each.at_ms, each.side.topic_id, list(each.side.ends.items()), list(each.log.items())] for each in ends]
    return json.dumps({**_MARK, "ages": ages}).encode()


def _decoded(value: bytes) -> list[KnownEnds]:
    try:
        return [
            KnownEnds(float(age_s), int(at_ms), SideEnds(str(topic_id), dict(side)), dict(log))
            for age_s, at_ms, topic_id, side, log in log_fields(value)["ages"]
        ]
    except (ValueError, TypeError, KeyError, ResourceError) as error:
        _log.warning("ages of branch messages unreadable, measuring again", value=value[:200], error=str(error))
        return []
