"""The decision log as a topic, without IO: the first decision in the order of the offsets counts.

Each entry has its own key, so compaction deletes only forgotten entries, and the order never changes. A decision is an append, followed by
a read up to that record. No Kafka transaction and no fence is needed: any number of processes may decide at once.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from bascule.core import crash
from bascule.xa.log import Decision, Entry, Heuristic, LogDamaged, LogIdentity, LogState, decode, encode
from bascule.xa.xid import Xid


class LogTopicViolation(enum.StrEnum):
    """Rules of the log that a test breaks."""

    #: The last decision stands, not the first.
    LAST_DECISION_STANDS = "log-topic-last-decision-stands"
    #: A manager acts on its decision before the record is stored.
    DECISION_UNSTORED = "log-topic-decision-unstored"
    #: A manager does not read whether another decision was stored before its own.
    OWN_DECISION_STANDS = "log-topic-own-decision-stands"
    #: A manager reads the log up to the end that a node names, instead of its own record.
    END_TRUSTED = "log-topic-end-trusted"


class LogRecord(NamedTuple):
    """The newest record of a key."""

    value: bytes
    offset: int


class TopicCalls(Protocol):
    """The effects. They raise Unavailable."""

    def new_key(self) -> bytes:
        """Return a new unique key."""

    async def append(self, key: bytes, value: bytes) -> int | None:
        """Store a record. Return its offset when all in-sync replicas have it, or None if it is stored at an unknown offset."""

    async def reach(self, offset: int) -> Mapping[bytes, LogRecord]:
        """Return the newest record of each key, read up to an offset that the caller knows to be stored."""

    async def tail(self, *, barrier: bool = True) -> Mapping[bytes, LogRecord]:
        """Return the newest record of each key. With a barrier, nothing is missing that was stored before the call.

        Without a barrier, the end is the one that a node reports; no decision may depend on it.
        """

    def known(self) -> Iterable[bytes]:
        """Return the keys that the last read has found."""

    def post(self, key: bytes, value: bytes | None) -> None:
        """Send a record, or with None the deletion of a key, without waiting for it."""


async def decide(calls: TopicCalls, decision: Decision, *, violations: Collection[enum.StrEnum] = frozenset()) -> Decision:
    """Store a decision and return the one that counts. Raises LogDamaged."""
    if LogTopicViolation.DECISION_UNSTORED in violations:
        calls.post(prefix_of(decision) + calls.new_key(), encode(decision))
        return decision
    table = await _append(calls, decision, violations)
    if LogTopicViolation.OWN_DECISION_STANDS in violations:
        return decision
    mine = prefix_of(decision)
    found = sorted((record.offset, key) for key, record in table.items() if key.startswith(mine))
    if not found:  # another process has seen the decision, carried it out and forgotten it
        return decision
    offset, key = found[-1 if LogTopicViolation.LAST_DECISION_STANDS in violations else 0]
    first = _entry(key, table[key])
    if not isinstance(first, Decision):
        raise LogDamaged(f"offset {offset}, key {key!r}: the entry is not a decision")
    return first


async def read(calls: TopicCalls, *, violations: Collection[enum.StrEnum] = frozenset()) -> LogState:
    """Return all entries that were stored when the call began. Raises LogDamaged."""
    table = await calls.tail()
    last_stands = LogTopicViolation.LAST_DECISION_STANDS in violations
    state = LogState()
    for key, record in sorted(table.items(), key=lambda each: each[1].offset, reverse=last_stands):
        state.add(_entry(key, record))
    return state


async def identify(calls: TopicCalls, log_id: str, at_ms: int) -> None:
    """Give the log an id if it has none. If processes do so at once, the first id counts."""
    await _append(calls, LogIdentity(log_id, at_ms))


async def store_heuristic(calls: TopicCalls, heuristic: Heuristic) -> None:
    """Store a heuristic outcome."""
    await _append(calls, heuristic)


def forget(calls: TopicCalls, gtrids: Iterable[bytes]) -> None:
    """Delete decisions. The next recovery finds a decision again whose deletion was lost."""
    _delete(calls, tuple(gtrid + b"#" for gtrid in gtrids))


def forget_heuristic(calls: TopicCalls, xid: Xid) -> None:
    """Delete the heuristic outcome of a branch."""
    _delete(calls, (str(xid).encode() + b"#",))


def prefix_of(entry: Entry) -> bytes:
    """Return the prefix of the keys of entries about the same transaction or branch, or of the log's identity."""
    if isinstance(entry, LogIdentity):
        return b"#"
    return (entry.gtrid if isinstance(entry, Decision) else str(entry.xid).encode()) + b"#"


async def _append(calls: TopicCalls, entry: Entry, violations: Collection[enum.StrEnum] = frozenset()) -> Mapping[bytes, LogRecord]:
    """Return the table after the entry was added to it."""
    offset = None
    while offset is None:  # an entry at an unknown offset is stored before the next one, and of two entries the first counts
        offset = await calls.append(prefix_of(entry) + calls.new_key(), encode(entry))
    crash.point("xa.log.append.after")
    return await (calls.tail(barrier=False) if LogTopicViolation.END_TRUSTED in violations else calls.reach(offset))


def _delete(calls: TopicCalls, prefixes: tuple[bytes, ...]) -> None:
    for key in [key for key in calls.known() if key.startswith(prefixes)]:
        calls.post(key, None)


def _entry(key: bytes, record: LogRecord) -> Entry:
    try:
        return decode(record.value)
    except LogDamaged as error:
        raise LogDamaged(f"offset {record.offset}, key {key!r}: {error}") from error
