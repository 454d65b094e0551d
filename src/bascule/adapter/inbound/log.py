"""The inbound log in Kafka, and the resource that makes the receipt of a record part of a transaction.

To claim a record for a transaction is to append, and to read up to one's own entry: it counts unless somebody has taken the partition over
before it in the log. So no process that was replaced commits what its successor handles, whenever it wakes up.
"""

from __future__ import annotations

import socket
import threading
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from bascule.adapter.inbound.state import CLAIM, FAILED, FLIGHT, OWNER, LogFold, Place, PlaceState, Ref, key_of, owner_value
from bascule.core import crash
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.core.xid import Xid
from bascule.kafka.compacted import (
    CLIENT_SETTINGS,
    DELETIONS_KEPT_S,
    TABLE_CONFIG,
    Appender,
    OffsetUnknown,
    TableReader,
    await_stored,
    trim,
)
from bascule.kafka.guards import Role, ensure
from bascule.xa.branches import Branches
from bascule.xa.errors import BranchRolledBack, ResourceFailed, UnknownXid, XaError
from bascule.xa.resource import Call, State, Vote

#: Source partitions are spread over so many: appends of one are in order, and those of others do not wait for them.
PARTITIONS = 8
#: Read back within this time, or the log counts as unreachable. Nobody writes transactions to it, so nothing holds it up.
READ_TIMEOUT_S = 30.0
#: Deleted up to the oldest entry that still says something: so it is ``delete``, too, though never by age. Segments that are small are
#: compacted soon, where one old entry stands in the way of that.
LOG_CONFIG: Mapping[str, str] = {
    **TABLE_CONFIG,
    "cleanup.policy": "compact,delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(16 << 20),
    "segment.ms": "600000",
    "delete.retention.ms": str(int(DELETIONS_KEPT_S * 1000)),
}
#: Entries that come in numbers wait for one another so long: a request to Kafka costs more than an entry.
LINGER_MS = 5
#: Less than this is not worth a request to delete it.
TRIM_RECORDS_MIN = 10_000

_log = get_log("bascule.adapter")
_R = TypeVar("_R")


class _Clients(NamedTuple):
    """What somebody waits for goes by ``single``, what comes in numbers by ``many``: of one key, the second after the first's answer."""

    single: Appender
    many: Appender
    reader: TableReader


class Superseded(BranchRolledBack):
    """Another member of the group has taken the record's partition over, and the record is its business now; or the record is done."""


class Flights(NamedTuple):
    """What is in flight of a source partition: offset -> the keys that say so, offset -> failures so far; who has claimed."""

    keys: dict[int, tuple[bytes, ...]]
    failures: dict[int, int]
    claims: dict[Xid, int]


@dataclass(slots=True)
class InboundBranch:
    """The handle: says which record the transaction consumes."""

    ref: Ref | None = None

    def take(self, ref: Ref) -> None:
        """This one; it is done with when the transaction commits, and in flight as before when it does not."""
        self.ref = ref


class InboundLog:
    """The inbound log of a group, and a resource of transactions. Safe for threads; the topic is created by the first use."""

    def __init__(self, name: str, kafka: Mapping[str, Any], *, group: str, topic: str | None = None) -> None:
        """``topic`` is ``GROUP.inbound`` unless told otherwise; nobody else may write to it."""
        self.name = name
        self.group = group
        self.topic = topic or f"{group}.inbound"
        self._kafka = {**CLIENT_SETTINGS, **kafka}
        self._by = f"{socket.gethostname()}/{uuid.uuid4().hex[:8]}"
        self._branches = Branches()
        self._taken: dict[Xid, InboundBranch] = {}
        self._lock = threading.RLock()
        self._clients: _Clients | None = None
        self._fold = LogFold()
        self._trimmed: dict[int, int] = {}
        #: Of records that are done, and which Kafka may not have stored.
        self._deletions: deque[tuple[Place, bytes]] = deque()

    # -- of the adapter

    def owner(self, place: Place) -> str | None:
        """Who has a source partition now: the token. Raises Unavailable."""
        return self._read(lambda fold: fold.place(place).owner)

    def take(self, place: Place, after: str | None) -> str:
        """A source partition is in the hands of the caller from here on; gives its token.

        ``after`` is the owner before, asked for while the partition was the caller's: who has taken it since then has it, and keeps it.
        Raises Unavailable, then too.
        """
        token = uuid.uuid4().hex[:12]
        ref = Ref(place, token, -1)
        offset = self._append(key_of(OWNER, ref), owner_value(self._by, after), place).result()
        crash.point("inbound.take.owner")
        # What does not count is deleted before the owners that say so: else it would seem to count when they are gone.
        owner, gone = self._reach(place, offset, lambda state: (state.owner, [*state.void, *_owners_before(state, token)]))
        if owner != token:
            raise Unavailable(f"{place} has been taken over by somebody else meanwhile")
        for key in gone:
            self._append(key, None, place)
        return token

    def flights(self, place: Place) -> Flights:
        """What is in flight now, read to the end. Raises Unavailable."""
        return self._read(lambda fold: _flights(fold.place(place)))

    def all_flights(self) -> dict[Place, Flights]:
        """As ``flights``, of every source partition that has any."""
        return self._read(lambda fold: {place: _flights(state) for place, state in fold.places.items() if state.flights or state.claims})

    def schedule(self, refs: Sequence[Ref]) -> None:
        """Returns when all of them are in flight, and stored. May be repeated. Raises Unavailable: some may be stored, or all."""
        for future in [self._append(key_of(FLIGHT, ref), b"1", ref.place, many=True) for ref in refs]:
            await_stored(future)

    def failed(self, ref: Ref, failures: int) -> bytes:
        """Keeps how often a record has failed; gives the key. Lazy: when it gets lost the record is tried once more."""
        key = key_of(FAILED, ref)
        self._append(key, str(failures).encode(), ref.place)
        return key

    def done(self, place: Place, keys: Iterable[bytes], *, wait: bool = False) -> None:
        """A record is in flight no more. Raises Unavailable, if ``wait``; else what Kafka does not store is told again by ``housekeep``."""
        crash.point("inbound.done.before")
        gone = list(keys)
        # One key is that of the schedule, which has been answered; others may be on their way.
        futures = [self._append(key, None, place, many=not wait and len(gone) == 1) for key in gone]
        if wait:
            for future in futures:
                await_stored(future)
        else:
            for key, future in zip(gone, futures, strict=True):
                future.add_done_callback(partial(self._keep, place, key))
        crash.point("inbound.done.after")

    def append(self, outgoing: Outgoing) -> Future[int]:
        """A record of another topic, outside of any transaction."""
        return self._open().single.append(outgoing)

    def _keep(self, place: Place, key: bytes, deletion: Future[int]) -> None:
        if not isinstance(deletion.exception(), OffsetUnknown | None):
            self._deletions.append((place, key))

    def _delete_again(self) -> None:
        """Else what was done in an outage would come again at the next taking over, however late. Nothing is lost by a second deletion."""
        for _ in range(len(self._deletions)):
            place, key = self._deletions.popleft()
            self.done(place, [key])

    def housekeep(self) -> None:
        """Says again what is done, and deletes what lies before the oldest entry that says something. Raises Unavailable."""
        self._delete_again()
        with self._lock:
            reader = self._open().reader
            table = self._guarded(lambda: reader.read(READ_TIMEOUT_S))
            ends = reader.reached()
        for stored in table.values():
            ends[stored.partition] = min(ends[stored.partition], stored.offset)
        worth = {at: end for at, end in ends.items() if end - self._trimmed.get(at, 0) >= TRIM_RECORDS_MIN}
        if worth:
            trim(self._kafka, self.topic, worth)
            self._trimmed |= worth

    def close(self) -> None:
        """Waits for what is under way, and frees the clients."""
        if self._clients is not None:
            self._delete_again()
        with self._lock:
            clients, self._clients = self._clients, None
        if clients is not None:
            for client in clients:
                client.close()

    # -- of the transaction manager

    def start(self, xid: Xid, *, timeout_s: float) -> InboundBranch:  # noqa: ARG002 - nothing is held before prepare
        """See Resource. The handle takes the record."""
        after = self._branches.check(xid, Call.START)
        self._taken[xid] = InboundBranch()
        self._branches.move(xid, after)
        return self._taken[xid]

    def end(self, xid: Xid, *, success: bool) -> None:
        """See Resource."""
        self._branches.move(xid, self._branches.check(xid, Call.END if success else Call.END_FAILED))

    def prepare(self, xid: Xid) -> Vote:
        """See Resource. Raises Superseded."""
        after = self._branches.check(xid, Call.PREPARE)
        branch = self._taken[xid]
        if branch.ref is None:
            self._gone(xid)
            return Vote.READ_ONLY
        self._branches.move(xid, after)  # whatever is raised, it may be rolled back from there
        self._claim(xid, branch.ref)
        return Vote.YES

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource."""
        if one_phase:
            self._branches.check(xid, Call.COMMIT_ONE_PHASE)
            if self.prepare(xid) is Vote.YES:
                self._finish(xid, commit=True)
            return
        if self._branches.state(xid) is not State.NONE:
            self._branches.check(xid, Call.COMMIT)
        self._finish(xid, commit=True)

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        state, branch = self._branches.state(xid), self._taken.get(xid)
        try:
            if state is State.PREPARED and branch is not None and branch.ref is not None:
                # Also a claim that was not answered and cannot be read yet: should it come, it comes before its deletion.
                deletion = self._append(key_of(CLAIM, branch.ref, xid), None, branch.ref.place)
                self._answer(lambda: await_stored(deletion))
            elif state in (State.NONE, State.PREPARED):
                self._finish(xid, commit=False)
        finally:  # recovery finds it by the log, if it ever was there
            self._gone(xid)

    def recover(self) -> Sequence[Xid]:
        """See Resource."""
        return self._answer(lambda: self._read(lambda fold: [xid for state in fold.places.values() for xid in state.claims]))

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        raise UnknownXid(f"{self.name} remembers no heuristic outcome of {xid}")

    def _claim(self, xid: Xid, ref: Ref) -> None:
        key = key_of(CLAIM, ref, xid)

        def claim() -> XaError | None:
            offset = self._append(key, b"1", ref.place).result()
            crash.point("inbound.claim.after")
            return self._reach(ref.place, offset, lambda state: _refusal(state, xid, ref))

        if (refusal := self._answer(claim)) is None:
            return
        if isinstance(refusal, BranchRolledBack):
            self._append(key, None, ref.place)
            self._gone(xid)
        raise refusal

    def _finish(self, xid: Xid, *, commit: bool) -> None:
        with self._lock:
            found = self._fold.claim(xid)
        if found is None:
            found = self._answer(lambda: self._read(lambda fold: fold.claim(xid)))
        if found is None:
            self._gone(xid)
            raise UnknownXid(f"{self.name} has no prepared branch {xid}")
        place, claim = found
        if commit:
            with self._lock:
                flight = self._fold.place(place).flights.get(claim.offset)
                keys = sorted(flight.keys) if flight else []
            # Stored before the claim goes: between the two it is claimed and gone, and to be told once more does no harm. Without a claim
            # nobody would know that a record which is still in flight is done.
            self._answer(lambda: self.done(place, keys, wait=True))
        self._answer(lambda: await_stored(self._append(claim.key, None, place)))
        self._gone(xid)

    def _gone(self, xid: Xid) -> None:
        self._branches.move(xid, State.NONE)
        self._taken.pop(xid, None)

    def _answer(self, call: Callable[[], _R]) -> _R:
        try:
            return call()
        except Unavailable as error:
            raise ResourceFailed(f"{self.name}: {error}") from error

    # -- of Kafka

    def _append(self, key: bytes, value: bytes | None, place: Place, *, many: bool = False) -> Future[int]:
        clients = self._open()
        return (clients.many if many else clients.single).append(Outgoing(self.topic, key, value, partition=_partition(place)))

    def _read(self, see: Callable[[LogFold], _R]) -> _R:
        with self._lock:
            reader = self._open().reader
            self._guarded(lambda: reader.read(READ_TIMEOUT_S))
            return see(self._fold)

    def _reach(self, place: Place, offset: int, see: Callable[[PlaceState], _R]) -> _R:
        with self._lock:
            reader = self._open().reader
            self._guarded(lambda: reader.reach(_partition(place), offset, READ_TIMEOUT_S))
            return see(self._fold.place(place))

    def _guarded(self, read: Callable[[], _R]) -> _R:
        """A reader that fell behind what is trimmed, or failed half-way, begins anew: it passes over nothing."""
        try:
            return read()
        except BasculeError:
            clients = self._open()
            clients.reader.close()
            self._clients = clients._replace(reader=self._reader())
            raise

    def _reader(self) -> TableReader:
        return TableReader(self._kafka, self.topic, range(PARTITIONS), self._follow, begin=self._begin)

    def _begin(self) -> None:
        self._fold = LogFold()

    def _follow(self, key: bytes, value: bytes | None) -> None:
        self._fold.apply(key, value)

    def _open(self) -> _Clients:
        if (clients := self._clients) is not None:
            return clients
        with self._lock:
            if self._clients is None:
                ensure(self._kafka, self.topic, Role.MARKS, PARTITIONS, LOG_CONFIG)
                many = Appender({"linger.ms": LINGER_MS, **self._kafka})
                self._clients = _Clients(Appender(self._kafka), many, self._reader())
            return self._clients


def _flights(state: PlaceState) -> Flights:
    keys = {offset: tuple(flight.keys) for offset, flight in state.flights.items()}
    failures = {offset: flight.failures for offset, flight in state.flights.items()}
    return Flights(keys, failures, {xid: claim.offset for xid, claim in state.claims.items()})


def _refusal(state: PlaceState, xid: Xid, ref: Ref) -> XaError | None:
    """Why a claim does not count; None where it does: it is the first one of a record that is in flight."""
    first = next((each for each, claim in state.claims.items() if claim.offset == ref.offset), None)
    where = f"{ref.place}, offset {ref.offset}"
    if ref.offset in state.flights and first == xid:
        return None
    if state.owner != ref.token:
        return Superseded(f"{where} is another member's now")
    if ref.offset not in state.flights:
        return Superseded(f"{where} is done")
    if first is None:
        return BranchRolledBack(f"{where}: {xid} was rolled back by another process")
    return ResourceFailed(f"{where} is claimed by {first}, whose outcome is open")


def _owners_before(state: PlaceState, token: str) -> list[bytes]:
    """In the order of the log; none where another one has come after, and deleted ours."""
    tokens = list(state.owners)
    return [state.owners[each] for each in tokens[: tokens.index(token)]] if token in tokens else []


@lru_cache(maxsize=1024)
def _partition(place: Place) -> int:
    return zlib.crc32(str(place).encode()) % PARTITIONS
