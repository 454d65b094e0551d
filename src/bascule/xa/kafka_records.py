"""The records of Kafka as a resource, without IO: the log's entries about branches, and messages on the side topic."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, Protocol

from bascule.core.kafka_records import Outgoing
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, ResourceError, XaError
from bascule.xa.log import Outcome
from bascule.xa.xid import Xid

XID_HEADER: Final = "bascule.xa"
TARGET_HEADER: Final = "bascule.xa.target"
STARTED: Final = b"/started"
#: The key of the log's record about the ages of the topics' ends. It cannot be the id of a branch. An earlier version refuses a log with a
#: record that is not about a branch. Therefore key and value have the form of a mark, of a branch that has begun in the far future.
AGES: Final = b"#ages" + STARTED
#: The newest format of the log's records that this version reads. Format 1 has no field ``format``. A later version that changes the
#: meaning of a record adds the field, and each version before it refuses the record.
FORMAT: Final = 1


class LogEntry(Protocol):
    """The newest record of a key of the log."""

    @property
    def value(self) -> bytes:
        """Return the value."""

    @property
    def partition(self) -> int:
        """Return the partition of the log."""

    @property
    def offset(self) -> int:
        """Return the offset in the partition."""

    def place(self, topic: str, key: bytes) -> str:
        """Return the place of the record, for error messages."""


class SideRecord(NamedTuple):
    """A record of the side topic."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class SideEnds(NamedTuple):
    """The end of each partition of the side topic, and the id of the topic, which a topic created in its place does not have."""

    topic_id: str
    ends: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class BranchTopics:
    """The side topic and the log, with the same number of ``partitions``."""

    side: str
    log: str
    partitions: int

    def partition_of(self, name: str) -> int:
        """Return the partition, of either topic, for a process or a transactional id."""
        return zlib.crc32(name.encode()) % self.partitions


@dataclass(frozen=True, slots=True)
class PreparedBranch:
    """The log's record of a prepared branch: where its messages are (``last`` included), and the transactional id that finishes it."""

    slot: str
    partition: int
    first: int
    last: int
    count: int
    at_ms: int

    def encode(self) -> bytes:
        """Return the record's value."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> PreparedBranch:
        """Return what ``encode`` was given. Raises ResourceError."""
        fields = log_fields(value)
        try:
            return cls(**fields)
        except TypeError as error:
            raise _unreadable(value, error) from error


def log_fields(value: bytes) -> dict[str, Any]:
    """Return the fields of a record of the log. Raises ResourceError, also for a record of a later format."""
    try:
        fields: dict[str, Any] = json.loads(value)
        written = fields.pop("format", FORMAT)
    except (ValueError, TypeError, AttributeError) as error:
        raise _unreadable(value, error) from error
    if type(written) is not int or not 1 <= written <= FORMAT:
        raise ResourceError(f"log record has format {written!r:.20}; this version of Bascule reads formats up to {FORMAT}. Upgrade Bascule")
    return fields


def _unreadable(value: bytes, error: Exception) -> ResourceError:
    return ResourceError(f"unreadable log record {value[:200]!r}: {error}")


def key_of(xid: Xid) -> bytes:
    """Return the key of the log's record about a branch."""
    return str(xid).encode()


def is_about_branch(key: bytes) -> bool:
    """Return whether a key of the log names a branch."""
    return not key.startswith(b"#")


def xid_of(key: bytes) -> Xid:
    """Return the branch that a key of the log names. Raises InvalidInput and UnicodeDecodeError."""
    return Xid.parse(key.removesuffix(STARTED).decode())


def started(slot: str, at_ms: int, outcome: Outcome | None = None) -> bytes:
    """Return the value of a record XID/started. ``outcome`` is how another process has ended the branch."""
    fields = {"at_ms": at_ms, "slot": slot, "rolled_back": outcome is Outcome.ROLLBACK}
    return json.dumps(fields | ({"committed": True} if outcome is Outcome.COMMIT else {})).encode()


def told_outcome(entry: LogEntry | None) -> Outcome | None:
    """Return how another process has ended the branch of a record XID/started, or None. Raises ResourceError."""
    fields = {} if entry is None else log_fields(entry.value)
    if fields.get("rolled_back"):
        return Outcome.ROLLBACK
    return Outcome.COMMIT if fields.get("committed") else None


def started_ms(entry: LogEntry) -> int:
    """Return when a branch began to send, from its record XID/started, in milliseconds since the epoch. Raises ResourceError."""
    at_ms: int = log_fields(entry.value)["at_ms"]
    return at_ms


def ended_otherwise(xid: Xid, told: Outcome, *, one_phase: bool) -> XaError:
    """Return the error for a branch that another process has ended the other way.

    In one phase, only the branch was to commit; in two phases, the other outcome had been decided.
    """
    if one_phase:
        return BranchRolledBack(f"another process considered branch {xid} abandoned and rolled it back", Code.XA_RBTRANSIENT)
    code = Code.XA_HEURCOM if told is Outcome.COMMIT else Code.XA_HEURRB
    return BranchHeuristic(f"another process ended branch {xid} by {told}, contrary to the decision", code)


def slots_of(table: Mapping[bytes, LogEntry]) -> set[str]:
    """Return the transactional ids that the log names. Raises ResourceError."""
    return {log_fields(entry.value)["slot"] for key, entry in table.items() if is_about_branch(key)}


def on_side(record: Outgoing, xid: Xid, topic: str, partition: int) -> Outgoing:
    """Return a message of a branch as a record of the side topic."""
    target = json.dumps([record.topic, record.partition, record.timestamp_ms]).encode()
    return Outgoing(topic, record.key, record.value, [(XID_HEADER, key_of(xid)), (TARGET_HEADER, target), *record.headers], partition)


def copies_of(xid: Xid, records: Iterable[SideRecord]) -> list[Outgoing]:
    """Return the messages of a branch as they go to their topics. Records of other branches are skipped."""
    copies = []
    for record in records:
        headers: Any = list(record.headers)
        if len(headers) >= 2 and headers[0] == (XID_HEADER, key_of(xid)):
            topic, partition, timestamp_ms = json.loads(headers[1][1])
            copies.append(Outgoing(topic, record.key, record.value, headers[2:], partition, timestamp_ms))
    return copies


Make = Callable[[Mapping[bytes, LogEntry]], Sequence[Outgoing]]
