"""The content of the inbound log: records in flight, their owners, and the claims of transactions. Without IO: no Kafka, no threads.

The log is a compacted topic. Each entry has its own key, so compaction removes only deleted entries. For the source partition P, the record
at offset N, and the token T of an owner of P:

    owner/P/T          T owns P from here on, unless another owner has taken P since the owner that T names as the previous one
    flight/P/T/N       T has scheduled the record; it is in flight until this entry is deleted
    failed/P/T/N       how often the record has failed so far, if it is not moved to the retry topic
    claim/P/T/N/XID    a prepared transaction under T has claimed the record: it alone decides about the record
    v2/read/P/T/N      T has put all records before N into the log: those of them that are not in flight are done

The group's offset cannot say which records are done: a commit that was delayed in the network may set it back at any time. A new owner
begins at the larger of the group's offset and the last ``read`` entry that counts.

The order of the log is the fence: an entry of T after the entry of a later owner does not count. A replaced process that does not know it
(because it was suspended) can schedule and claim nothing any more, and finds out when it reads up to its own entry. The entry of an owner
does not count, either, if it comes late, after the group has assigned P to another member and that member has taken P.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from bascule.core.errors import BasculeError, Scope
from bascule.core.xid import Xid


class LogUnreadable(BasculeError):
    """Raised for an invalid entry of the inbound log. Bascule does not guess: the entry may stand for a record in flight."""

    retriable = False
    scope = Scope.PROCESS


class FoldViolation(enum.StrEnum):
    """Rules of the log's entries that a test may break."""

    FENCE_IGNORED = "an entry of a replaced owner counts"


class Place(NamedTuple):
    """A partition of a source topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Ref(NamedTuple):
    """A record in flight, held by the owner with ``token``."""

    place: Place
    token: str
    offset: int


class Entry(NamedTuple):
    """The parts of a key of the log."""

    kind: str
    ref: Ref
    xid: Xid | None = None


#: The version of the entry format. Entries of version 1 do not name it; a key of a later version ``N`` begins with ``vN/``.
VERSION = 2
_VERSIONED = re.compile(rb"v(\d{1,9})/")
NOBODY = "-"
OWNER, FLIGHT, FAILED, CLAIM, READ = "owner", "flight", "failed", "claim", "read"
_FIELDS = {OWNER: 4, FLIGHT: 5, FAILED: 5, CLAIM: 6, READ: 5}
#: The version that introduced a kind of entry, if not version 1. Earlier releases must not skip such an entry.
_SINCE = {READ: 2}


def key_of(kind: str, ref: Ref, xid: Xid | None = None) -> bytes:
    """Return the key of an entry.

    >>> key_of(FLIGHT, Ref(Place("payments", 2), "5f", 17))
    b'flight/payments/2/5f/17'
    """
    place = ref.place
    parts = [kind, place.topic, str(place.partition), ref.token, str(ref.offset), str(xid)]
    version = f"v{_SINCE[kind]}/" if kind in _SINCE else ""
    return (version + "/".join(parts[: _FIELDS[kind]])).encode()


def entry_of(key: bytes) -> Entry:
    """Return the entry of a key. Raises LogUnreadable, also for an entry of a later version."""
    versioned = _VERSIONED.match(key)
    version = 1 if versioned is None else int(versioned[1])
    if version > VERSION:
        raise LogUnreadable(
            f"entry {key[:200]!r} has format {version}; this version of Bascule reads formats up to {VERSION}. Upgrade Bascule"
        )
    try:
        kind, topic, partition, token, *rest = key.removeprefix(versioned[0] if versioned else b"").decode().split("/", 5)
        if len(rest) + 4 != _FIELDS[kind] or version != _SINCE.get(kind, 1):
            raise ValueError(kind)
        offset = int(rest[0]) if rest else -1
        return Entry(kind, Ref(Place(topic, int(partition)), token, offset), Xid.parse(rest[1]) if kind == CLAIM else None)
    except (ValueError, KeyError, BasculeError) as error:
        raise LogUnreadable(f"unreadable key {key[:200]!r}: {error}") from error


@dataclass(slots=True)
class Flight:
    """A record in flight: the keys of its entries, those among them that are ``flight`` entries, and how often it has failed."""

    keys: set[bytes] = field(default_factory=set)
    scheduled: set[bytes] = field(default_factory=set)
    failures: int = 0


class RecordClaim(NamedTuple):
    """The claim of a prepared transaction on a record."""

    offset: int
    key: bytes


class Claimed(NamedTuple):
    """A claim, and the keys that say that its record is in flight."""

    place: Place
    claim: RecordClaim
    keys: tuple[bytes, ...]


class Flights(NamedTuple):
    """The state of a source partition: keys and failures of records in flight by offset, and claimed offsets by transaction.

    Records before ``read_to`` are done unless they are in flight. It is None if the log does not say so, for example a log of an earlier
    release.
    """

    keys: dict[int, tuple[bytes, ...]]
    failures: dict[int, int]
    claims: dict[Xid, int]
    read_to: int | None = None


@dataclass(slots=True)
class PlaceState:
    """The state of one source partition."""

    owner: str | None = None
    owners: dict[str, bytes] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    claims: dict[Xid, RecordClaim] = field(default_factory=dict)
    #: The ``read`` entries in the order of the log, with their offsets. The last one counts.
    reads: dict[bytes, int] = field(default_factory=dict)
    #: Entries that do not count. The next owner deletes them, and then the entries of the owners before it.
    void: set[bytes] = field(default_factory=set)

    def seen(self) -> Flights:
        """Return a copy of the records in flight."""
        return Flights(
            {offset: tuple(flight.keys) for offset, flight in self.flights.items()},
            {offset: flight.failures for offset, flight in self.flights.items()},
            {xid: claim.offset for xid, claim in self.claims.items()},
            next(reversed(self.reads.values()), None),
        )

    def first_claim(self, offset: int) -> Xid | None:
        """Return the transaction with the first remaining claim of a record, or None."""
        return next((xid for xid, claim in self.claims.items() if claim.offset == offset), None)


class LogFold:
    """The state of a log, built entry by entry in the order of its offsets (within each source partition)."""

    def __init__(self, violations: Collection[enum.StrEnum] = ()) -> None:
        self._fenced = FoldViolation.FENCE_IGNORED not in violations
        self.places: dict[Place, PlaceState] = {}

    def place(self, place: Place) -> PlaceState:
        """Return the state of a source partition, which is empty if nothing is known."""
        return self.places.setdefault(place, PlaceState())

    def claimed(self, xid: Xid) -> Claimed | None:
        """Return where a transaction has claimed a record, or None."""
        for place, state in self.places.items():
            if (claim := state.claims.get(xid)) is not None:
                flight = state.flights.get(claim.offset)
                return Claimed(place, claim, tuple(sorted(flight.keys)) if flight is not None else ())
        return None

    def apply(self, key: bytes, value: bytes | None) -> None:
        """Apply the next record of the log. Raises LogUnreadable."""
        entry = entry_of(key)
        state = self.place(entry.ref.place)
        if value is None:
            _remove(state, entry, key)
        elif entry.kind == OWNER and state.owner in (None, _after(value) or state.owner):
            state.owner = entry.ref.token
            state.owners[entry.ref.token] = key
        elif entry.kind == OWNER or (self._fenced and state.owner not in (None, entry.ref.token)):
            state.void.add(key)
        elif entry.xid is not None:
            state.claims[entry.xid] = RecordClaim(entry.ref.offset, key)
        elif entry.kind == READ:
            state.reads.pop(key, None)
            state.reads[key] = entry.ref.offset
        elif entry.kind == FAILED and entry.ref.offset not in state.flights:
            state.void.add(key)  # the entry is late: the record is done
        else:
            flight = state.flights.setdefault(entry.ref.offset, Flight())
            flight.keys.add(key)
            if entry.kind == FLIGHT:
                flight.scheduled.add(key)
            if entry.kind == FAILED:
                flight.failures = max(flight.failures, json.loads(value))


def owner_value(by: str, after: str | None) -> bytes:
    """Return the value of an owner entry: the process, for display, and the token of the previous owner (None: there was none)."""
    return f"{by} {after or NOBODY}".encode()


def _after(value: bytes) -> str:
    return value.decode(errors="replace").partition(" ")[2]


def _remove(state: PlaceState, entry: Entry, key: bytes) -> None:
    state.void.discard(key)
    if entry.kind == OWNER:
        state.owners.pop(entry.ref.token, None)
    elif entry.kind == READ:
        state.reads.pop(key, None)
    elif entry.xid is not None:
        if (claim := state.claims.get(entry.xid)) is not None and claim.key == key:
            del state.claims[entry.xid]
    elif (flight := state.flights.get(entry.ref.offset)) is not None:
        flight.keys.discard(key)
        flight.scheduled.discard(key)
        if not flight.scheduled:
            state.void |= flight.keys
            del state.flights[entry.ref.offset]
