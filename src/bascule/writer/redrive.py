"""Redrive of dead letters, without IO: the jobs of administrators, and the marks of dead letters that are done (docs/adr/0025-redrive.md).

Brokers store jobs in ``PREFIX.control``. The driver carries them out, and writes the marks and its reports to ``PREFIX.redrive``.
"""

from __future__ import annotations

import enum
import json
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from bascule.core.errors import BasculeError, Scope
from bascule.writer.dead_letters import LetterFilter, Place

#: The version of the records.
VERSION: Final = 1
#: Prefix of the keys of jobs in ``PREFIX.control``, followed by the id of the job.
JOB_KEY: Final = "redrive/"
#: Prefixes of keys in ``PREFIX.redrive``: the report of a job, followed by its id, and the mark of dead letters, followed by the id of the
#: dead-letter topic, the partition and the first offset.
REPORT_KEY: Final = "job/"
MARK_KEY: Final = "done/"
#: The key of the position that each transaction of a redrive moves.
POSITION_KEY: Final = "redrive"
#: Dead letters that one job may name one by one: a job is one record of Kafka.
PLACES_MAX: Final = 1_000


class UnreadableRedrive(BasculeError):
    """A job, a report or a mark of a redrive is damaged or has a newer format."""

    retriable = False
    scope = Scope.OPERATION


class MarksLost(BasculeError):
    """The topic of the marks is not the one in which the last redrive has written: which dead letters are done is not known any more."""

    retriable = False
    scope = Scope.OPERATION
    http_status = 409

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic {topic!r} was deleted or recreated, so it is not known which dead letters were redriven or discarded: all of them wait"
            " again. Restore the topic, or repeat the request with --accept-lost-marks to do some a second time, for example with"
            " `bascule redrive discard` for those that are done"
        )


class RedriveAction(enum.StrEnum):
    """What happens to the dead letters of a job."""

    REDRIVE = "redrive"
    #: They are marked as done without a write.
    DISCARD = "discard"


class RedriveState(enum.StrEnum):
    """How far the driver is with a job."""

    #: No driver has finished it yet.
    PENDING = "pending"
    DONE = "done"
    #: The driver cannot carry it out; ``error`` has the reason. Dead letters that are done stay done.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RedriveJob:
    """A request to redrive or discard dead letters of the topic with ``topic_id``, once.

    ``ends`` has the offset for each partition from which on dead letters are not meant: the job does not redrive what it has written.
    ``accept_lost_marks``: dead letters that were done before the topic of the marks was recreated may be done a second time.
    """

    id: str
    action: RedriveAction
    topic_id: str
    ends: Mapping[int, int]
    filter: LetterFilter = field(default_factory=LetterFilter)
    by: str = ""
    at_ms: int = 0
    accept_lost_marks: bool = False

    def encode(self) -> bytes:
        """Return the value of the record."""
        return _encoded({**asdict(self), "ends": sorted(self.ends.items())})

    @classmethod
    def decode(cls, value: bytes, place: str) -> RedriveJob:
        """Return the job in a value. Raises UnreadableRedrive."""
        said = _decoded(value, place)
        try:
            meant = said["filter"]
            places = meant["places"]
            chosen = LetterFilter(
                None if places is None else tuple((int(partition), int(offset)) for partition, offset in places),
                str(meant["pipeline"]), str(meant["reason"]), int(meant["since_ms"]), int(meant["until_ms"]),
                {str(name): str(text) for name, text in meant["headers"].items()},
            )  # fmt: skip
            return cls(
                str(said["id"]), RedriveAction(said["action"]), str(said["topic_id"]),
                {int(partition): int(end) for partition, end in said["ends"]}, chosen, str(said["by"]), int(said["at_ms"]),
                said.get("accept_lost_marks") is True,
            )  # fmt: skip
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
            raise _unreadable(value, place, error) from error


@dataclass(frozen=True, slots=True)
class RedriveReport:
    """What has become of a job: dead letters ``redriven``, those that ``failed`` again, ``discarded``, and ``left`` as they are.

    ``error`` is why the job has failed, or why the last of those was left.
    """

    state: RedriveState = RedriveState.PENDING
    redriven: int = 0
    failed: int = 0
    discarded: int = 0
    left: int = 0
    error: str = ""
    at_ms: int = 0

    def encode(self) -> bytes:
        """Return the value of the record."""
        return _encoded(asdict(self))

    @classmethod
    def decode(cls, value: bytes, place: str) -> RedriveReport:
        """Return the report in a value. Raises UnreadableRedrive."""
        said = _decoded(value, place)
        try:
            return cls(
                RedriveState(said["state"]), int(said["redriven"]), int(said["failed"]), int(said["discarded"]), int(said["left"]),
                str(said["error"]), int(said["at_ms"]),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise _unreadable(value, place, error) from error


class DoneLetters:
    """The dead letters that are done, of one dead-letter topic. A mark has runs of offsets, both ends included."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {}

    def add(self, partition: int, runs: Iterable[tuple[int, int]]) -> None:
        """Add the runs of a mark."""
        known = self._runs.setdefault(partition, [])
        for run in runs:
            insort(known, run)

    def has(self, place: Place) -> bool:
        """Return whether a dead letter is done. Runs do not overlap, because a dead letter is done once."""
        partition, offset = place
        runs = self._runs.get(partition, [])
        found = bisect_right(runs, (offset, _LAST)) - 1
        return found >= 0 and runs[found][0] <= offset <= runs[found][1]


_LAST: Final = 2**63


def mark_key(topic_id: str, partition: int, first: int) -> str:
    """Return the key of a mark whose first offset is ``first``. No other mark has it, because a dead letter is done once."""
    return f"{MARK_KEY}{topic_id}/{partition}/{first}"


def mark_place(key: str) -> tuple[str, int]:
    """Return topic id and partition in the key of a mark. Raises UnreadableRedrive."""
    parts = key.removeprefix(MARK_KEY).rsplit("/", 2)  # an id of a topic may contain a slash
    if not key.startswith(MARK_KEY) or len(parts) != 3 or not parts[1].isdecimal():
        raise UnreadableRedrive(f"invalid key of a mark: {key!r:.100}")
    return parts[0], int(parts[1])


def encoded_mark(job: str, offsets: Sequence[int]) -> bytes:
    """Return the value of the mark of offsets in ascending order."""
    return _encoded({"job": job, "runs": list(_runs(offsets))})


def decoded_mark(value: bytes, place: str) -> list[tuple[int, int]]:
    """Return the runs of a mark. Raises UnreadableRedrive."""
    said = _decoded(value, place)
    try:
        return [(int(first), int(last)) for first, last in said["runs"]]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise _unreadable(value, place, error) from error


def _runs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive offsets, both ends included.

    >>> list(_runs([1, 2, 5]))
    [(1, 2), (5, 5)]
    """
    first = last = offsets[0]
    for offset in offsets[1:]:
        if offset != last + 1:
            yield first, last
            first = offset
        last = offset
    yield first, last


def _encoded(said: Mapping[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **said}, separators=(",", ":")).encode()


def _decoded(value: bytes, place: str) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(value)
        version = said["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unreadable(value, place, error) from error
    if version != VERSION or isinstance(version, bool):
        raise UnreadableRedrive(f"{place}: format {version!r:.20}; this version of Bascule reads {VERSION}. Upgrade Bascule")
    return said


def _unreadable(value: bytes, place: str, error: Exception) -> UnreadableRedrive:
    return UnreadableRedrive(f"{place}: unreadable record {value[:200]!r}: {error!r}")
