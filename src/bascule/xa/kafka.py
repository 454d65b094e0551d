"""Kafka as a resource. What a branch sends goes to a side topic at once, and to its own topics when the branch commits.

    side topic   the messages of all branches, in the order of sending; a header says whose each is and where it belongs
    log          a compacted topic. XID: prepared, with the place of the messages. XID/started: sending, for whoever wants to know;
                 or, of a branch that another process has rolled back, that it was

Prepare is one record in the log, written when all messages are stored. Commit is one Kafka transaction that copies the messages to their
topics and deletes the log's record; rollback is one that only deletes it. Both look for the record after their transactional id is
theirs alone, and that id stands in the record: so of all processes that try, one finds it, and it does the work once. Branches that end at
the same time share a transaction. A record XID never expires; XID/started does, and messages that no record needs are deleted.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from bascule.core.errors import BasculeError, InvalidInput, TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import XA_PREFIX
from bascule.kafka.compacted import CLIENT_SETTINGS, OffsetUnknown, Stored, await_stored, trim
from bascule.kafka.history import TopicHistory
from bascule.kafka.own_topics import BRANCH_PARTITIONS
from bascule.kafka.transactional import end_open_transactions
from bascule.writer.errors import RecordRefused
from bascule.xa.branches import BranchStates
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, OutOfOrder, ResourceError, ResourceFailed, UnknownXid, XaError
from bascule.xa.kafka_clients import Clients, partition_of
from bascule.xa.log import Outcome
from bascule.xa.resource import BranchState, Call, Vote
from bascule.xa.xid import Xid

#: Transactions at once in one process: while one commits, the next gathers and gets its incarnation.
SLOTS = 2
#: A process has one of so many identities on its host, so that Kafka has few transactional ids to remember. To share one only costs time.
IDENTITIES = 64
#: Up to this size a branch keeps its messages to commit them; beyond, it reads them back from the side topic.
KEPT_BYTES_MAX = 16 << 20
#: A prepared branch is copied within one Kafka transaction, whose time-out is 15 s (``slot``): as much takes some 3 s with a Kafka on one
#: machine. Branches that end together share that.
BRANCH_RECORDS_MAX = 500_000
BRANCH_BYTES_MAX = 256 << 20
#: A branch must be prepared within this time; messages of branches that were not are deleted long after it.
PREPARE_WITHIN_S = 3600.0
UNPREPARED_KEPT_S = 24 * 3600.0
#: The side topic is looked at so often for messages that nobody needs.
TRIM_INTERVAL_S = 600.0

XID_HEADER = "bascule.xa"
TARGET_HEADER = "bascule.xa.target"
STARTED = b"/started"


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
        """The record's value."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> PreparedBranch:
        """What ``encode`` gave. Raises ResourceError."""
        try:
            return cls(**json.loads(value))
        except (ValueError, TypeError) as error:
            raise ResourceError(f"unreadable log record {value[:200]!r}: {error}") from error


@dataclass(slots=True)
class _Sent:
    """What a branch of this process has sent."""

    slot: int
    started_s: float  # time.time: the monotonic clock stands still with a machine
    offsets: list[Future[int]] = field(default_factory=list)
    messages: list[Outgoing] | None = field(default_factory=list)
    size_bytes: int = 0

    @property
    def weight(self) -> float:
        """Of what a branch may send, how much."""
        return max(len(self.offsets) / BRANCH_RECORDS_MAX, self.size_bytes / BRANCH_BYTES_MAX)


@dataclass(slots=True, eq=False)
class _Ending:
    """A prepared branch that waits for a transaction to end it."""

    xid: Xid
    outcome: Outcome
    messages: list[Outgoing] | None
    one_phase: bool
    #: 1 for as much as one transaction is to take, or for a branch of another process, of which that is not known.
    weight: float
    done: bool = False
    tried: bool = False
    error: BasculeError | None = None


class KafkaBranch:
    """The handle: sends records. For one thread at a time."""

    def __init__(self, send: Callable[[Outgoing], None]) -> None:
        self._send = send

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int = -1,
        timestamp_ms: int = 0,
    ) -> None:
        """A record of the transaction; readers with ``read_committed`` see all of them at once, or none.

        ``value`` None is a tombstone; ``partition`` -1 is chosen by the key as Java's client does; ``timestamp_ms`` 0 is the commit's time.
        Raises InvalidInput for a topic that is not there, a record that is too large for it, or one too many: a branch takes 500,000, and
        256 MiB; ResourceFailed when Kafka does not tell how much the topic takes.
        """
        self._send(Outgoing(topic, key, value, list(headers), partition, timestamp_ms))


class KafkaResource:
    """A Kafka cluster. Safe for threads.

    Topics ``PREFIX.side`` and ``PREFIX.log`` are created by the first branch; where a setting of theirs loses what is prepared, UnsafeTopic
    is raised instead.
    """

    def __init__(self, name: str, kafka: Mapping[str, Any], *, prefix: str = XA_PREFIX, instance: str | None = None) -> None:
        """``kafka`` is for librdkafka (``bootstrap.servers``, security); ``instance``, in the transactional ids, is the process's own."""
        self.name = name
        self._kafka = {**CLIENT_SETTINGS, **kafka}
        self._side, self._log = f"{prefix}.side", f"{prefix}.log"
        instance = instance or f"{socket.gethostname()}.{os.getpid() % IDENTITIES}"
        self._slot_ids = [f"{prefix}.{instance}.{number}" for number in range(SLOTS)]
        self._side_partition = partition_of(instance)
        self._branches = BranchStates()
        self._sent: dict[Xid, _Sent] = {}
        self._waiting: dict[str, list[_Ending]] = {}
        self._lock = threading.Lock()
        self._next_slot = itertools.cycle(range(SLOTS))
        self._clients: Clients | None = None
        self._trimming = threading.Lock()
        self._trimmed_s = time.monotonic()

    def start(self, xid: Xid, *, timeout_s: float) -> KafkaBranch:  # noqa: ARG002 - its time is PREPARE_WITHIN_S
        """See Resource. The handle sends."""
        self._branches.check(xid, Call.START)
        slot = next(self._next_slot)
        with self._open().slot(self._slot_ids[slot], own=True) as at:
            at.prepare()
        self._sent[xid] = _Sent(slot, time.time())
        self._branches.move(xid, BranchState.ACTIVE)
        return KafkaBranch(lambda record: self._send(xid, record))

    def end(self, xid: Xid, *, success: bool) -> None:
        """See Resource."""
        self._branches.move(xid, self._branches.check(xid, Call.END if success else Call.END_FAILED))

    def prepare(self, xid: Xid) -> Vote:
        """See Resource."""
        after = self._branches.check(xid, Call.PREPARE)
        if not self._sent[xid].offsets:
            self._gone(xid)
            return Vote.READ_ONLY
        self._store(xid)
        self._branches.move(xid, after)
        return Vote.YES

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource. One-phase saves the manager's log, not this one: it tells what became of a commit in doubt."""
        if one_phase:
            self._branches.check(xid, Call.COMMIT_ONE_PHASE)
            try:
                if self._sent[xid].offsets:
                    self._store(xid)
                    self._finish(xid, Outcome.COMMIT, one_phase=True)
            finally:
                self._gone(xid)
            return
        if self._branches.state(xid) is not BranchState.NONE:
            self._branches.check(xid, Call.COMMIT)
        self._finish(xid, Outcome.COMMIT)
        self._gone(xid)

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        state = self._branches.state(xid)
        try:
            if state in (BranchState.NONE, BranchState.PREPARED):
                self._finish(xid, Outcome.ROLLBACK)
            elif self._sent[xid].offsets:
                self._open().appender.append(Outgoing(self._log, _key(xid) + STARTED, None, partition=self._log_partition(xid)))
        finally:  # where Kafka is away, it is by the log alone that recovery finds it, if it ever was there
            self._gone(xid)

    def recover(self) -> Sequence[Xid]:
        """See Resource. Only prepared branches: what was started and not prepared is nobody's."""
        asked_ms = _now_ms()
        table = self._table()
        prepared = [self._xid_of(key, stored) for key, stored in table.items() if not key.endswith(STARTED)]
        with self._trimming:
            if time.monotonic() - self._trimmed_s > TRIM_INTERVAL_S:
                self._trimmed_s = time.monotonic()
                self._clean(table, asked_ms)
        return prepared

    def started(self) -> dict[Xid, float]:
        """Branches that send and are not prepared, by their age in seconds."""
        now_s = time.time()
        entries = {key: stored for key, stored in self._table().items() if key.endswith(STARTED) and not _is_rolled_back(stored)}
        ages_s = {key: now_s - json.loads(stored.value)["at_ms"] / 1000 for key, stored in entries.items()}
        return {Xid.parse(key.removesuffix(STARTED).decode()): age_s for key, age_s in ages_s.items()}

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        raise UnknownXid(f"{self.name} remembers no heuristic outcome of {xid}")

    def close(self) -> None:
        """Frees the clients. Prepared branches stay as they are."""
        with self._lock:
            clients, self._clients = self._clients, None
        if clients is not None:
            clients.close()

    def _send(self, xid: Xid, record: Outgoing) -> None:
        if self._branches.state(xid) is not BranchState.ACTIVE:
            raise OutOfOrder(f"send: branch {xid} is {self._branches.state(xid).value}")
        clients, sent = self._open(), self._sent[xid]
        try:
            size_bytes = clients.check(record)
        except InvalidInput:
            raise
        except Unavailable as error:
            raise ResourceFailed(f"{self.name}: {error}") from error
        if len(sent.offsets) >= BRANCH_RECORDS_MAX or sent.size_bytes + size_bytes > BRANCH_BYTES_MAX:
            raise InvalidInput(
                f"a transaction sends {BRANCH_RECORDS_MAX:,} records to {self.name} at most, and {BRANCH_BYTES_MAX >> 20} MiB"
            )
        if not sent.offsets:
            started = _started(self._slot_ids[sent.slot], rolled_back=False)
            clients.appender.append(Outgoing(self._log, _key(xid) + STARTED, started, partition=self._log_partition(xid)))
        ours = [(XID_HEADER, _key(xid)), (TARGET_HEADER, json.dumps([record.topic, record.partition, record.timestamp_ms]).encode())]
        on_side = Outgoing(self._side, record.key, record.value, [*ours, *record.headers], self._side_partition)
        sent.offsets.append(clients.appender.append(on_side))
        sent.size_bytes += size_bytes
        if sent.size_bytes > KEPT_BYTES_MAX:
            sent.messages = None
        elif sent.messages is not None:
            sent.messages.append(record)

    def _store(self, xid: Xid) -> None:
        """Makes the branch prepared, in the log. Whatever it raises, the branch may be rolled back; by BranchRolledBack it is."""
        clients, sent = self._open(), self._sent[xid]
        slot = self._slot_ids[sent.slot]
        try:
            # What Kafka cannot commit now for a reason that stays, it could not roll back, either: its branches elsewhere kept their locks.
            # One that works goes away after the vote like any resource; then commit is repeated until it is back.
            with clients.slot(slot, own=True) as at:
                at.reach()
        except Unavailable as error:
            self.rollback(xid)
            raise BranchRolledBack(f"{xid}: {error}", Code.XA_RBCOMMFAIL, cause=error) from error
        try:
            offsets = [each.result() for each in sent.offsets]
            record = PreparedBranch(slot, self._side_partition, min(offsets), max(offsets), len(offsets), _now_ms())
            await_stored(clients.appender.append(Outgoing(self._log, _key(xid), record.encode(), partition=partition_of(slot))))
        except (TooLarge, OffsetUnknown) as error:  # by their offsets what was sent is found when the branch is committed
            self.rollback(xid)
            raise BranchRolledBack(f"{xid}: {error}", Code.XA_RBOTHER, cause=error) from error
        except Unavailable as error:
            # Not prepared, or prepared and unknown to its manager, which rolls it back: by the state it must have then.
            self._branches.move(xid, BranchState.PREPARED)
            raise ResourceFailed(f"{self.name}: {error}") from error
        self._branches.move(xid, BranchState.PREPARED)
        if abs(time.time() - sent.started_s) > PREPARE_WITHIN_S:
            self.rollback(xid)
            raise BranchRolledBack(f"{xid} was not prepared within {PREPARE_WITHIN_S:g} s", Code.XA_RBTIMEOUT)

    def _finish(self, xid: Xid, outcome: Outcome, *, one_phase: bool = False) -> None:
        """Ends a prepared branch, together with others that wait for the same transactional id."""
        sent = self._sent.get(xid)
        slot = self._slot_ids[sent.slot] if sent else self._slot_of(xid, outcome)
        mine = _Ending(xid, outcome, sent.messages if sent else None, one_phase, sent.weight if sent else 1.0)
        clients = self._open()
        with self._lock:
            self._waiting.setdefault(slot, []).append(mine)
        with clients.turn(slot):
            while not mine.done:
                self._end(slot, self._next_batch(slot))
        if mine.error is not None:
            if isinstance(mine.error, UnknownXid | BranchRolledBack | BranchHeuristic):
                self._gone(xid)
            raise mine.error

    def _next_batch(self, slot: str) -> list[_Ending]:
        """Of the branches that wait, in their order, as many as one transaction is to take; one at least."""
        with self._lock:
            waiting = self._waiting.pop(slot)
            count = max(1, sum(total <= 1.0 for total in itertools.accumulate(each.weight for each in waiting)))
            if rest := waiting[count:]:
                self._waiting[slot] = rest
        return waiting[:count]

    def _end(self, slot: str, batch: list[_Ending]) -> None:
        try:
            with self._open().slot(slot, own=slot in self._slot_ids) as at:
                at.transact(lambda table: [record for each in batch for record in self._ended(slot, each, table)])
        except RecordRefused as error:
            if len(batch) > 1:  # it is one of them; the others shall not wait for it
                for each in batch:
                    self._end(slot, [each])
                return
            batch[0].error = ResourceError(f"{self.name}: {batch[0].xid}: {error}")
        except Exception as error:
            for each in batch:
                each.error = each.error or ResourceFailed(f"{self.name}: {error}")
        for each in batch:
            each.done = True

    def _ended(self, slot: str, each: _Ending, table: Mapping[bytes, Stored]) -> list[Outgoing]:
        """The records that end a branch, given the log as it is now; none where it has ended."""
        each.error = None
        key = _key(each.xid)
        if (stored := table.get(key)) is None:
            if each.outcome is Outcome.COMMIT and _is_rolled_back(table.get(key + STARTED)):
                each.error = _rolled_back(each.xid, one_phase=each.one_phase)
            elif not each.tried:
                each.error = UnknownXid(f"{self.name} has no prepared branch {each.xid}")
            return []
        each.tried = True  # if it is gone the next time, our own transaction has done it, or somebody else's after ours failed
        copies: list[Outgoing] = []
        if each.outcome is Outcome.COMMIT:
            try:
                copies = each.messages if each.messages is not None else self._read_back(each.xid, PreparedBranch.decode(stored.value))
            except BasculeError as error:
                each.error = error if isinstance(error, ResourceError) else ResourceFailed(f"{self.name}: {error}")
                return []
        # Its own process may be about to commit it in one phase, where no decision says what became of it.
        told = _started(slot, rolled_back=True) if each.outcome is Outcome.ROLLBACK and each.xid not in self._sent else None
        return [
            *copies,
            Outgoing(self._log, key, None, partition=stored.partition),
            Outgoing(self._log, key + STARTED, told, partition=stored.partition),
        ]

    def _read_back(self, xid: Xid, prepared: PreparedBranch) -> list[Outgoing]:
        copies = []
        for record in TopicHistory(self._kafka, self._side, prepared.partition).records(prepared.first, prepared.last + 1):
            headers: Any = record.headers() or []
            if len(headers) >= 2 and headers[0] == (XID_HEADER, _key(xid)):
                topic, partition, timestamp_ms = json.loads(headers[1][1])
                copies.append(Outgoing(topic, record.key(), record.value(), headers[2:], partition, timestamp_ms))
        if len(copies) != prepared.count:
            raise ResourceError(f"{self.name}: of {prepared.count} messages of {xid} only {len(copies)} are in {self._side}")
        return copies

    def _slot_of(self, xid: Xid, outcome: Outcome) -> str:
        """The transactional id that a branch of another process says it is to be ended with."""
        table = self._table()
        if (stored := table.get(_key(xid))) is None:
            if outcome is Outcome.COMMIT and _is_rolled_back(table.get(_key(xid) + STARTED)):
                raise _rolled_back(xid, one_phase=False)
            raise UnknownXid(f"{self.name} has no prepared branch {xid}")
        return PreparedBranch.decode(stored.value).slot

    def _table(self) -> dict[bytes, Stored]:
        try:
            return self._open().reader.read_behind_barrier(held_up=self._end_transactions)
        except Unavailable as error:
            raise ResourceFailed(f"{self.name}: {error}") from error

    def _end_transactions(self, table: Mapping[bytes, Stored]) -> None:
        """Somebody died in the middle of one, under an id that its branches name."""
        ids = {json.loads(stored.value)["slot"] for stored in table.values()}
        end_open_transactions(self._kafka, ids.difference(self._slot_ids))

    def _clean(self, table: Mapping[bytes, Stored], asked_ms: int) -> None:
        """Deletes the messages that no prepared branch needs, and what is left of branches that were never prepared.

        ``asked_ms`` is when it began to read the table. By that what is old is told, and not by now: this process may have stood still
        since, and what is older than that by UNPREPARED_KEPT_S is prepared, and in the table, or never will be.
        """
        old_ms = asked_ms - int(UNPREPARED_KEPT_S * 1000)
        needed: dict[int, int] = {}
        for key, stored in table.items():
            if not key.endswith(STARTED):
                prepared = PreparedBranch.decode(stored.value)
                needed[prepared.partition] = min(prepared.first, needed.get(prepared.partition, prepared.first))
            elif json.loads(stored.value)["at_ms"] < old_ms:
                self._open().appender.append(Outgoing(self._log, key, None, partition=stored.partition))
        with suppress(Unavailable):
            young = {at: TopicHistory(self._kafka, self._side, at).at_time(old_ms) for at in range(BRANCH_PARTITIONS)}
            trim(self._kafka, self._side, {at: min(offset, needed.get(at, offset)) for at, offset in young.items()})

    def _xid_of(self, key: bytes, stored: Stored) -> Xid:
        try:
            return Xid.parse(key.decode())
        except (UnicodeDecodeError, InvalidInput) as error:
            raise ResourceError(f"{self.name}: {stored.place(self._log, key)}: no branch: {error}") from error

    def _log_partition(self, xid: Xid) -> int:
        return partition_of(self._slot_ids[self._sent[xid].slot])

    def _gone(self, xid: Xid) -> None:
        self._branches.move(xid, BranchState.NONE)
        self._sent.pop(xid, None)

    def _open(self) -> Clients:
        with self._lock:
            if self._clients is None:
                try:
                    self._clients = Clients(self._kafka, self._side, self._log, self._end_transactions)
                except Unavailable as error:
                    raise ResourceFailed(f"{self.name}: {error}") from error
            return self._clients


def _key(xid: Xid) -> bytes:
    return str(xid).encode()


def _started(slot: str, *, rolled_back: bool) -> bytes:
    return json.dumps({"at_ms": _now_ms(), "slot": slot, "rolled_back": rolled_back}).encode()


def _rolled_back(xid: Xid, *, one_phase: bool) -> XaError:
    """In one phase nothing but the branch was to commit; in two phases COMMIT had been decided."""
    if one_phase:
        return BranchRolledBack(f"another process took {xid} for left behind, and has rolled it back")
    return BranchHeuristic(f"{xid} was rolled back by another process, against the decision", Code.XA_HEURRB)


def _is_rolled_back(started: Stored | None) -> bool:
    return started is not None and bool(json.loads(started.value).get("rolled_back"))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
