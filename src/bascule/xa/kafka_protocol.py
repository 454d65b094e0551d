"""Kafka as a resource, without IO: how a branch is prepared, found, ended and cleaned up.

    side topic   the messages of all branches, in the order of sending; headers name the branch and the target of each message
    log          a compacted topic. The record XID means prepared, and has the place of the messages. The record XID/started means that
                 the branch sends; if another process has ended the branch, the record has the outcome

Prepare writes one record to the log, after all messages are stored. Commit is one Kafka transaction that copies the messages to their
topics and deletes the log's record. Rollback is one that only deletes the record. Both look for the record only after they have fenced
other processes off the transactional id, which the record names: if several processes try, only one finds the record, and ends the branch
once. Branches that end at the same time share a transaction. A record XID never expires. A record XID/started expires, and messages that
no record needs are deleted.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from bascule.core.errors import BasculeError, InvalidInput, TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.writer.errors import RecordRefused
from bascule.xa.branches import BranchStates
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, OutOfOrder, ResourceError, ResourceFailed, UnknownXid, XaError
from bascule.xa.kafka_cleaning import Ages, KnownEnds, log_ends, needed, obsolete
from bascule.xa.kafka_effects import AppendReceipt, BranchCalls
from bascule.xa.kafka_records import (
    AGES,
    STARTED,
    BranchTopics,
    LogEntry,
    PreparedBranch,
    copies_of,
    ended_otherwise,
    is_about_branch,
    key_of,
    on_side,
    started,
    started_ms,
    told_outcome,
    xid_of,
)
from bascule.xa.log import Outcome
from bascule.xa.resource import BranchState, Call, Vote, beside_a_call
from bascule.xa.xid import Xid


class KafkaBranchViolation(enum.StrEnum):
    """Rules of branches in Kafka that a test breaks."""

    #: Prepare answers YES before the record of the branch is stored.
    VOTE_UNSTORED = "kafka-branch-vote-unstored"
    #: A commit counts as carried out although the outcome of its Kafka transaction is unknown.
    DOUBT_IS_DONE = "kafka-branch-doubt-is-done"
    #: The record of a branch is deleted before the Kafka transaction that copies the messages has ended.
    RECORD_DELETED_FIRST = "kafka-branch-record-deleted-first"
    #: The messages are copied without a check that the log still has the record.
    RECORD_UNCHECKED = "kafka-branch-record-unchecked"
    #: A process ends the branch of another process under a transactional id of its own.
    OWN_SLOT_TAKEN = "kafka-branch-own-slot-taken"
    #: A process that ends the branch of another process does not record the outcome.
    ROLLBACK_UNTOLD = "kafka-branch-rollback-untold"
    #: Messages are deleted although a prepared branch needs them.
    NEEDED_DELETED = "kafka-branch-needed-deleted"
    #: A branch counts as prepared although it took so long that its messages may be deleted.
    PREPARED_LATE = "kafka-branch-prepared-late"
    #: A process measures with its wall clock how old messages of other processes are.
    AGE_BY_WALL_CLOCK = "kafka-branch-age-by-wall-clock"
    #: A branch ends although a call of the application is still within it.
    ENDED_BESIDE_CALL = "kafka-branch-ended-beside-call"


class BranchLimits(NamedTuple):
    """The limits on what a branch may send, and how long its remains are kept."""

    #: A prepared branch is copied within one Kafka transaction, whose timeout is 15 s, and 5 min for the next try (``slot``). Copying this
    #: much takes about 3 s with Kafka on the same machine. Branches that end together share the limit.
    records_max: int = 500_000
    bytes_max: int = 256 << 20
    #: Up to this size a branch keeps its messages to commit them; beyond, it reads them back from the side topic.
    kept_bytes_max: int = 16 << 20
    #: A branch must be prepared within this time, in seconds; messages of branches that were not are deleted long after it.
    prepare_within_s: float = 3600.0
    unprepared_kept_s: float = 24 * 3600.0
    #: Number of branches ended by other processes whose outcome is kept at least.
    marks_max: int = 10_000
    #: Interval, in seconds, at which obsolete messages of the side topic are deleted.
    clean_interval_s: float = 600.0


LIMITS: Final = BranchLimits()


@dataclass(slots=True)
class _Sent:
    """State of a branch of this process: its messages and their receipts."""

    slot: str
    started_ms: int
    started_s: float
    receipts: list[AppendReceipt] = field(default_factory=list)
    messages: list[Outgoing] | None = field(default_factory=list)
    size_bytes: int = 0
    record: PreparedBranch | None = None
    #: Calls of the application in progress.
    calls: int = 0


@dataclass(slots=True, eq=False)
class _Ending:
    """A prepared branch that waits for a transaction to end it."""

    xid: Xid
    outcome: Outcome
    one_phase: bool
    #: The share of the limit of one transaction, from 0 to 1. It is 1 for a branch of another process, whose size is unknown.
    weight: float
    messages: Sequence[Outgoing] = ()
    #: The error if the messages could not be read back.
    unreadable: BasculeError | None = None
    done: bool = False
    tried: bool = False
    error: BasculeError | None = None


class KafkaBranches:
    """The branches of one process in one Kafka cluster. See ``Resource`` for the calls."""

    def __init__(
        self,
        name: str,
        topics: BranchTopics,
        slots: Sequence[str],
        calls: BranchCalls,
        *,
        instance: str,
        limits: BranchLimits = LIMITS,
        lock: AbstractContextManager[Any] | None = None,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``slots`` are the transactional ids of this process, ``instance`` names it. ``lock`` is needed if several threads call."""
        self.name = name
        self.slots = tuple(slots)
        self.limits = limits
        self._topics = topics
        self._calls = calls
        self._side_partition = topics.partition_of(instance)
        self._lock = nullcontext() if lock is None else lock
        self._violations = violations
        self._branches = BranchStates()
        self._sent: dict[Xid, _Sent] = {}
        self._waiting: dict[str, list[_Ending]] = {}
        self._next_slot = itertools.cycle(self.slots)
        self._cleaned_s = calls.monotonic_s()
        self._ages = Ages(limits.unprepared_kept_s)

    @property
    def at_work(self) -> Collection[Xid]:
        """The branches that this process has begun and not ended."""
        return self._sent.keys()

    async def start(self, xid: Xid) -> None:
        """Begin a branch."""
        self._branches.check(xid, Call.START)
        slot = next(self._next_slot)
        self._calls.get_ready(slot)
        self._sent[xid] = _Sent(slot, self._calls.now_ms(), self._calls.monotonic_s())
        self._branches.move(xid, BranchState.ACTIVE)

    async def send(self, xid: Xid, record: Outgoing) -> None:
        """Store a message of a branch on the side topic. Raises InvalidInput, ResourceFailed, OutOfOrder."""
        with self.call(xid) as sent:
            await self._send(sent, xid, record)

    @contextmanager
    def call(self, xid: Xid) -> Iterator[_Sent]:
        """Surround a call of the application in a branch: the branch cannot end with success meanwhile. Raises OutOfOrder."""
        with self._lock:
            self._check_active(xid)
            sent = self._sent[xid]
            sent.calls += 1
        try:
            yield sent
        finally:
            with self._lock:
                sent.calls -= 1

    def _check_active(self, xid: Xid) -> None:
        if (state := self._branches.state(xid)) is not BranchState.ACTIVE:
            raise OutOfOrder(f"send: branch {xid} is {state.value}")

    async def _send(self, sent: _Sent, xid: Xid, record: Outgoing) -> None:
        limits = self.limits
        try:
            size_bytes = await self._calls.room(record)
        except InvalidInput:
            raise
        except Unavailable as error:
            raise ResourceFailed(f"{self.name}: {error}") from error
        if KafkaBranchViolation.ENDED_BESIDE_CALL not in self._violations:
            self._check_active(xid)
        if len(sent.receipts) >= limits.records_max or sent.size_bytes + size_bytes > limits.bytes_max:
            raise InvalidInput(
                f"transaction too large for {self.name}: the limits are {limits.records_max:,} records and {limits.bytes_max >> 20} MiB"
            )
        if not sent.receipts:
            self._write(sent, xid, STARTED, started(sent.slot, self._calls.now_ms()))
        sent.receipts.append(self._calls.append(on_side(record, xid, self._topics.side, self._side_partition)))
        sent.size_bytes += size_bytes
        if sent.size_bytes > limits.kept_bytes_max:
            sent.messages = None
        elif sent.messages is not None:
            sent.messages.append(record)

    async def end(self, xid: Xid, *, success: bool) -> None:
        """End the work of a branch. Raises BranchRolledBack if a call of the application is still within the branch."""
        after = self._branches.check(xid, Call.END if success else Call.END_FAILED)
        with self._lock:
            beside = success and self._sent[xid].calls > 0 and KafkaBranchViolation.ENDED_BESIDE_CALL not in self._violations
            self._branches.move(xid, BranchState.FAILED if beside else after)
        if beside:
            raise beside_a_call(xid)

    async def prepare(self, xid: Xid) -> Vote:
        """Return the vote of a branch."""
        after = self._branches.check(xid, Call.PREPARE)
        if not self._sent[xid].receipts:
            self._gone(xid)
            return Vote.READ_ONLY
        await self._store(xid)
        self._branches.move(xid, after)
        return Vote.YES

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """Commit a branch. A one-phase commit saves the manager's log, not this one, which tells the outcome of a commit in doubt."""
        if one_phase:
            self._branches.check(xid, Call.COMMIT_ONE_PHASE)
            try:
                if self._sent[xid].receipts:
                    await self._store(xid)
                    await self._finish(xid, Outcome.COMMIT, one_phase=True)
            finally:
                self._gone(xid)
            return
        if self._branches.state(xid) is not BranchState.NONE:
            self._branches.check(xid, Call.COMMIT)
        await self._finish(xid, Outcome.COMMIT)
        self._gone(xid)

    async def rollback(self, xid: Xid) -> None:
        """Roll back a branch, whatever its state."""
        state = self._branches.state(xid)
        try:
            if state in (BranchState.NONE, BranchState.PREPARED):
                await self._finish(xid, Outcome.ROLLBACK)
            elif (sent := self._sent[xid]).receipts:
                self._write(sent, xid, STARTED, None)
        finally:  # if Kafka is unavailable, recovery finds the branch in the log, if it was ever stored
            self._gone(xid)

    async def recover(self) -> Sequence[Xid]:
        """Return the prepared branches: branches that were not prepared belong to nobody. Cleans up from time to time."""
        asked_s = self._calls.monotonic_s()
        table = await self._table()
        prepared = [self._xid_of(key, entry) for key, entry in table.items() if is_about_branch(key) and not key.endswith(STARTED)]
        with self._lock:
            now_s = self._calls.monotonic_s()
            self._ages.see(table, now_s)
            if due := now_s - self._cleaned_s > self.limits.clean_interval_s:
                self._cleaned_s = now_s
        if due:
            await self._clean(table, asked_s)
        return prepared

    async def started(self) -> dict[Xid, float]:
        """Return the branches that send and are not prepared, with their age in seconds."""
        now_ms, table = self._calls.now_ms(), await self._table()
        return {
            self._xid_of(key, entry): (now_ms - started_ms(entry)) / 1000
            for key, entry in table.items()
            if is_about_branch(key) and key.endswith(STARTED) and key.removesuffix(STARTED) not in table and told_outcome(entry) is None
        }

    # -- preparing -----------------------------------------------------------------------------------------------------------

    async def _store(self, xid: Xid) -> None:
        """Store in the log that the branch is prepared. After any error the branch can be rolled back; after BranchRolledBack it is."""
        calls, sent = self._calls, self._sent[xid]
        try:
            # If Kafka cannot commit now for a lasting reason, it could not roll back either, and the branches elsewhere would keep their
            # locks. If Kafka fails after the vote, like any resource, the commit is repeated until Kafka is back.
            await calls.reach(sent.slot)
        except Unavailable as error:
            raise await self._refused(xid, str(error), Code.XA_RBCOMMFAIL, error) from error
        try:
            offsets = [await receipt.offset() for receipt in sent.receipts]
            places = [offset for offset in offsets if offset is not None]
            if len(places) < len(offsets):  # the commit needs the offsets to find the messages
                raise await self._refused(xid, f"Kafka did not return the offset of a record in topic {self._topics.side!r}")
            sent.record = PreparedBranch(sent.slot, self._side_partition, min(places), max(places), len(places), calls.now_ms())
            stored = self._write(sent, xid, b"", sent.record.encode())
            if KafkaBranchViolation.VOTE_UNSTORED not in self._violations:
                await stored.offset()
        except TooLarge as error:
            raise await self._refused(xid, str(error), cause=error) from error
        except Unavailable as error:
            # Unprepared, or prepared without its manager's knowledge, which rolls it back: this needs the state PREPARED.
            self._branches.move(xid, BranchState.PREPARED)
            raise ResourceFailed(f"{self.name}: {error}") from error
        self._branches.move(xid, BranchState.PREPARED)
        # By both clocks: the wall clock may have been set back, and the other one may stop while its machine is suspended.
        taken_s = max(abs(calls.now_ms() - sent.started_ms) / 1000, calls.monotonic_s() - sent.started_s)
        if taken_s > self.limits.prepare_within_s and KafkaBranchViolation.PREPARED_LATE not in self._violations:
            raise await self._refused(xid, f"more than {self.limits.prepare_within_s:g} s have passed since its start", Code.XA_RBTIMEOUT)

    async def _refused(self, xid: Xid, why: str, code: Code = Code.XA_RBOTHER, cause: BaseException | None = None) -> BranchRolledBack:
        """Roll back a branch that cannot be prepared, and return the error to raise."""
        await self.rollback(xid)
        return BranchRolledBack(f"could not prepare branch {xid}: {why}", code, cause=cause)

    # -- ending --------------------------------------------------------------------------------------------------------------

    async def _finish(self, xid: Xid, outcome: Outcome, *, one_phase: bool = False) -> None:
        """End a prepared branch, together with others that wait for the same transactional id."""
        if (sent := self._sent.get(xid)) is not None:
            slot, weight = sent.slot, max(len(sent.receipts) / self.limits.records_max, sent.size_bytes / self.limits.bytes_max)
            messages, record = sent.messages, sent.record
        else:
            record = await self._found(xid, outcome)
            slot, weight, messages = record.slot, 1.0, None
            if KafkaBranchViolation.OWN_SLOT_TAKEN in self._violations:
                slot = self.slots[0]
        mine = _Ending(xid, outcome, one_phase, weight, messages or ())
        if outcome is Outcome.COMMIT and messages is None and record is not None:
            await self._read_back(mine, record)
        await self._wait(slot, mine)
        if mine.error is not None:
            if isinstance(mine.error, UnknownXid | BranchRolledBack | BranchHeuristic):
                self._gone(xid)
            raise mine.error

    async def _wait(self, slot: str, mine: _Ending) -> None:
        """Return when a branch was ended, or could not be: by this thread together with those of others, or by another thread."""
        try:
            with self._lock:
                self._waiting.setdefault(slot, []).append(mine)
            async with self._calls.turn(slot):
                while not mine.done:
                    batch: list[_Ending] = []
                    try:
                        self._next_batch(slot, batch)
                        await self._end(slot, batch)
                    except BaseException:  # this thread is interrupted; tell the threads that wait for it
                        self._take_away(slot, batch)
                        for each in batch:
                            each.error = each.error or (
                                None if each.done else ResourceFailed(f"{self.name}: the thread that was ending branches was interrupted")
                            )
                            each.done = True
                        raise
        except BaseException:  # a second commit would copy the messages twice if this ending still waited
            self._take_away(slot, [mine])
            raise

    def _take_away(self, slot: str, endings: Sequence[_Ending]) -> None:
        """Remove endings from the queue."""
        with self._lock:
            if rest := [each for each in self._waiting.pop(slot, ()) if each not in endings]:
                self._waiting[slot] = rest

    async def _found(self, xid: Xid, outcome: Outcome) -> PreparedBranch:
        """Return the log's record of a branch of another process, which has the transactional id to end it with."""
        table = await self._table()
        if (entry := table.get(key_of(xid))) is None:
            told = told_outcome(table.get(key_of(xid) + STARTED))
            if told is not None and told is not outcome:
                raise ended_otherwise(xid, told, one_phase=False)
            raise UnknownXid(f"{self.name} has no prepared branch {xid}")
        return PreparedBranch.decode(entry.value)

    async def _read_back(self, mine: _Ending, record: PreparedBranch) -> None:
        """Read the messages of a branch from the side topic. An error counts only if the branch is still prepared when it is ended."""
        try:
            mine.messages = copies_of(mine.xid, await self._calls.side(record.partition, record.first, record.last))
        except BasculeError as error:
            mine.unreadable = error if isinstance(error, XaError) else ResourceFailed(f"{self.name}: {error}")
            return
        if (found := len(mine.messages)) != record.count:
            mine.unreadable = ResourceError(
                f"{self.name}: topic {self._topics.side!r} has only {found} of {record.count} messages of branch {mine.xid}"
            )

    def _next_batch(self, slot: str, batch: list[_Ending]) -> None:
        """Move waiting branches, in order, to ``batch``: as many as fit into one transaction, and at least one."""
        with self._lock:
            waiting = self._waiting[slot]
            count = max(1, sum(total <= 1.0 for total in itertools.accumulate(each.weight for each in waiting)))
            batch += waiting[:count]  # an interrupt loses none of them: the owner of ``batch`` tells them
            if rest := waiting[count:]:
                self._waiting[slot] = rest
            else:
                del self._waiting[slot]

    async def _end(self, slot: str, batch: Sequence[_Ending]) -> None:
        try:
            await self._calls.transact(slot, lambda table: [record for each in batch for record in self._ended(slot, each, table)])
        except RecordRefused as error:
            if len(batch) > 1:  # one of them is refused; the others must not wait for it
                for each in batch:
                    await self._end(slot, [each])
                return
            batch[0].error = ResourceError(f"{self.name}: {batch[0].xid}: {error}")
        except GeneratorExit:  # the process has died
            raise
        except BaseException as error:
            for each in batch:
                if KafkaBranchViolation.DOUBT_IS_DONE not in self._violations:
                    each.error = each.error or ResourceFailed(f"{self.name}: {str(error) or type(error).__name__}")
            if not isinstance(error, Exception):
                raise
        for each in batch:
            each.done = True

    def _ended(self, slot: str, each: _Ending, table: Mapping[bytes, LogEntry]) -> list[Outgoing]:
        """Return the records that end a branch, given the current log, or none if the branch has ended."""
        each.error = None
        key = key_of(each.xid)
        if (entry := table.get(key)) is None and KafkaBranchViolation.RECORD_UNCHECKED not in self._violations:
            told = told_outcome(table.get(key + STARTED))
            if told is not None and told is not each.outcome:
                each.error = ended_otherwise(each.xid, told, one_phase=each.one_phase)
            elif not each.tried and not (each.one_phase and told is Outcome.COMMIT):
                each.error = UnknownXid(f"{self.name} has no prepared branch {each.xid}")
            return []
        each.tried = True  # if it is gone the next time, our own transaction has ended it, or somebody else after ours failed
        if each.outcome is Outcome.COMMIT and each.unreadable is not None:
            each.error = each.unreadable
            return []
        # The branch's own process may be about to commit it in one phase, where no decision has the outcome.
        tell = each.xid not in self._sent and KafkaBranchViolation.ROLLBACK_UNTOLD not in self._violations
        mark = started(slot, self._calls.now_ms(), each.outcome) if tell else None
        partition = entry.partition if entry is not None else self._topics.partition_of(slot)
        deletions = [
            Outgoing(self._topics.log, key, None, partition=partition),
            Outgoing(self._topics.log, key + STARTED, mark, partition=partition),
        ]
        if KafkaBranchViolation.RECORD_DELETED_FIRST in self._violations:
            for record in deletions:
                self._calls.append(record)
            deletions = []
        return [*(each.messages if each.outcome is Outcome.COMMIT else ()), *deletions]

    # -- cleaning up ---------------------------------------------------------------------------------------------------------

    async def _clean(self, table: Mapping[bytes, LogEntry], asked_s: float) -> None:
        """Delete the messages that no prepared branch needs, and the remains of branches that were never prepared.

        ``asked_s`` is when the read of the table began. The age is measured from then, not from now, because this process may have stalled
        since: a branch that was older by ``unprepared_kept_s`` at that time is prepared, and in the table, or never will be.
        """
        try:
            side = await self._calls.side_ends()
        except Unavailable:
            return  # try again the next time
        ends = self._ages.measured(asked_s, side)
        if KafkaBranchViolation.AGE_BY_WALL_CLOCK in self._violations:
            ends = [each._replace(age_s=(self._calls.now_ms() - each.at_ms) / 1000) for each in ends]
        new = KnownEnds(asked_s - self._calls.monotonic_s(), self._calls.now_ms(), side, log_ends(table))
        old = [each for each in (*ends, new) if self._ages.is_old(each)]
        self._calls.append(Outgoing(self._topics.log, AGES, self._ages.stored(ends, new, asked_s), partition=0))
        for key in obsolete(table, old, self.limits.marks_max):
            self._calls.append(Outgoing(self._topics.log, key, None, partition=table[key].partition))
        if old:
            first = {} if KafkaBranchViolation.NEEDED_DELETED in self._violations else needed(table)
            await self._calls.trim({at: min(offset, first.get(at, offset)) for at, offset in old[-1].side.ends.items()})

    # -- inside --------------------------------------------------------------------------------------------------------------

    async def _table(self) -> Mapping[bytes, LogEntry]:
        try:
            return await self._calls.table()
        except Unavailable as error:
            raise ResourceFailed(f"{self.name}: {error}") from error

    def _xid_of(self, key: bytes, entry: LogEntry) -> Xid:
        try:
            return xid_of(key)
        except (UnicodeDecodeError, InvalidInput) as error:
            raise ResourceError(f"{self.name}: {entry.place(self._topics.log, key)}: the key is not a branch id: {error}") from error

    def _write(self, sent: _Sent, xid: Xid, suffix: bytes, value: bytes | None) -> AppendReceipt:
        partition = self._topics.partition_of(sent.slot)
        return self._calls.append(Outgoing(self._topics.log, key_of(xid) + suffix, value, partition=partition))

    def _gone(self, xid: Xid) -> None:
        self._branches.move(xid, BranchState.NONE)
        self._sent.pop(xid, None)
