"""Transaction branches (X/Open XA): transactions that are prepared, so that any connection may end them, also after a restart.

A prepared branch is its journal entry, and the messages that it has taken from queues: those are in its hands, seen and counted by nobody
else. Its sends are in no queue; they are routed by the commit, as those of any transaction are, and compared with what was sent before
(``_AMQ_DUPL_ID``) only then: an id that waited in a branch would shut out others, and be lost with a rollback.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from bascule.broker.branch_entries import drafts_of
from bascule.broker.errors import (
    BranchBusy,
    BranchExists,
    BranchForced,
    JournalUnavailable,
    ResourceLimit,
    UnknownBranch,
    UnknownTransaction,
)
from bascule.broker.message import BrokerMessage
from bascule.broker.queue import BrokerQueue
from bascule.broker.transactions import LocalTransaction
from bascule.core import crash
from bascule.core.errors import BasculeError, TransactionRolledBack
from bascule.core.xid import Xid
from bascule.journal.branches import Ended, Ending, PreparedEntry, Received, decode_prepared, ended_entry
from bascule.journal.records import entries

if TYPE_CHECKING:
    from bascule.broker.commit_plan import CommitPlan
    from bascule.broker.engine import Engine

#: Maximum number and total size of branches that wait for their outcome: managers that never return must not fill the memory.
PREPARED_MAX = 10_000
PREPARED_BYTES_MAX = 256 << 20
#: Outcomes that are remembered, to answer clients that did not receive them.
ENDED_MAX = 10_000

COMMITS = frozenset((Ending.COMMITTED, Ending.FORCED_COMMIT))
ROLLBACKS = frozenset((Ending.ROLLED_BACK, Ending.FORCED_ROLLBACK))
_FORCED = frozenset((Ending.FORCED_COMMIT, Ending.FORCED_ROLLBACK))


class BranchViolation(enum.StrEnum):
    """Rules of branches that a test breaks."""

    #: A prepare is answered before the branch is stored.
    VOTE_UNSTORED = "branch-vote-unstored"
    #: The sends of a branch are routed when it is prepared.
    SENDS_AT_PREPARE = "branch-sends-at-prepare"
    #: A branch stays prepared after its first end, and is carried out twice.
    ENDED_TWICE = "branch-ended-twice"
    #: A commit carries out all acknowledgements but one.
    ACKNOWLEDGEMENT_DROPPED = "branch-acknowledgement-dropped"
    #: Messages of a branch that is rolled back are not marked as redelivered.
    ROLLBACK_UNMARKED = "branch-rollback-unmarked"
    #: The broker forgets how branches have ended.
    ENDS_FORGOTTEN = "branch-ends-forgotten"
    #: The broker forgets which branches an administrator has ended.
    FORCED_ENDS_FORGOTTEN = "branch-forced-ends-forgotten"
    #: The broker does not know which commits in one phase are on their way into the journal.
    COMMITTING_UNKNOWN = "branch-committing-unknown"
    #: That an administrator's end is forgotten is not journaled.
    FORGET_UNJOURNALED = "branch-forget-unjournaled"
    #: Snapshots leave prepared branches out.
    SNAPSHOT_WITHOUT_PREPARED = "branch-snapshot-without-prepared"
    #: Snapshots leave out how branches have ended.
    SNAPSHOT_WITHOUT_ENDED = "branch-snapshot-without-ended"
    #: Snapshots leave out which branches an administrator has ended.
    SNAPSHOT_WITHOUT_FORCED = "branch-snapshot-without-forced"


class Branch:
    """A prepared branch. ``entry`` is what the journal says of it, ``acks`` the messages that it holds."""

    __slots__ = ("acks", "ending", "entry", "received", "sent", "since_ms", "stored", "xid")

    def __init__(self, entry: bytes, xid: Xid, since_ms: int, *, sent: int, received: int, stored: bool) -> None:
        self.entry = entry
        self.xid = xid
        self.since_ms = since_ms
        self.sent = sent
        self.received = received
        self.stored = stored  # the entry is in the journal: it is prepared from then on
        self.acks: list[tuple[BrokerQueue, BrokerMessage]] = []
        self.ending: Ending | None = None  # decided, and not stored yet

    @classmethod
    def from_entry(cls, entry: bytes) -> Branch:
        """The branch that a PREPARED entry of the journal describes. Raises DamagedRecord."""
        prepared = _prepared(entry)
        received = sum(len(counts) for _, counts in prepared.received)
        return cls(entry, prepared.xid, prepared.since_ms, sent=len(prepared.sends), received=received, stored=True)

    def taken(self) -> tuple[Received, ...]:
        """The messages that it has received, as the journal names them."""
        return _prepared(self.entry).received


@dataclass(slots=True)
class Branches:
    """The branches of one broker, as far as they are decided; what is stored of their ends."""

    prepared: dict[Xid, Branch] = field(default_factory=dict)
    forced: dict[Xid, Ended] = field(default_factory=dict)  # ended by an administrator, not forgotten
    ended: dict[Xid, Ending] = field(default_factory=dict)  # the last ones, oldest first
    #: Refused though the broker cannot say that they have not been committed.
    refused: dict[Xid, None] = field(default_factory=dict)
    #: Of those in ``ended`` that were committed: the sequence of a journal record that is not before the commit's.
    committed_at: dict[Xid, int] = field(default_factory=dict)
    #: Commits in journal records up to this sequence may be forgotten.
    forgotten_to: int = 0
    committing: set[Xid] = field(default_factory=set)  # in one phase, decided and not stored yet
    violations: Collection[enum.StrEnum] = frozenset()  # rules that a test breaks

    @property
    def prepared_bytes(self) -> int:
        """What the entries of prepared branches take."""
        return sum(len(branch.entry) for branch in self.prepared.values())

    def held(self) -> Iterator[tuple[BrokerQueue, BrokerMessage]]:
        """Messages in the hands of branches."""
        for branch in self.prepared.values():
            yield from branch.acks

    def over(self, ended: Ended, sequence: int) -> None:
        """The journal says so, in a record that is not behind ``sequence``."""
        again = BranchViolation.ENDED_TWICE in self.violations and ended.xid not in self.ended
        branch = self.prepared.pop(ended.xid, None)
        if again and branch is not None:
            branch.ending = None
            self.prepared[ended.xid] = branch
        if ended.ending in _FORCED:
            if BranchViolation.FORCED_ENDS_FORGOTTEN not in self.violations:
                self.forced[ended.xid] = ended
        elif ended.ending is Ending.FORGOTTEN:
            self.forced.pop(ended.xid, None)
        else:
            self.remember(ended.xid, ended.ending, sequence)

    def remember(self, xid: Xid, ending: Ending, sequence: int) -> None:
        """What became of a branch, for who asks again."""
        if BranchViolation.ENDS_FORGOTTEN in self.violations:
            return
        self.ended[xid] = ending
        if ending is Ending.COMMITTED:
            self.committed_at[xid] = sequence
        self._forget_old()

    def refuse(self, xid: Xid, since: int | None = None) -> None:
        """It is not prepared. Its prepare may still be on its way, on a connection that its client has given up: it is to fail."""
        if self.may_have_forgotten(since):
            self.refused[xid] = None
            if len(self.refused) > ENDED_MAX:
                del self.refused[next(iter(self.refused))]
            return
        self.ended.setdefault(xid, Ending.ROLLED_BACK)
        self._forget_old()

    def may_have_forgotten(self, since: int | None) -> bool:
        """Return whether a commit may be forgotten. ``since`` is the sequence of a journal record before the commit, if that is known."""
        return self.forgotten_to > (since or 0)

    def loaded(self, sequence: int) -> None:
        """A snapshot says all this: what it has no room for was committed in records up to its sequence."""
        if len(self.ended) >= ENDED_MAX:
            self.forgotten_to = sequence

    def _forget_old(self) -> None:
        if len(self.ended) > ENDED_MAX:
            oldest = next(iter(self.ended))
            del self.ended[oldest]
            self.forgotten_to = max(self.forgotten_to, self.committed_at.pop(oldest, 0))

    def entries(self, at_ms: int) -> Callable[[], bytes]:
        """Return a function that makes the journal entries of all this, as far as it is stored now: a snapshot has them.

        The function may be called later, and in another thread.
        """
        forced, ended = list(self.forced.values()), list(self.ended.items())
        prepared = [branch.entry for branch in self.prepared.values() if branch.stored]

        def encoded() -> bytes:
            parts = {
                BranchViolation.SNAPSHOT_WITHOUT_FORCED: [ended_entry(*each) for each in forced],
                BranchViolation.SNAPSHOT_WITHOUT_ENDED: [ended_entry(xid, ending, at_ms) for xid, ending in ended],
                BranchViolation.SNAPSHOT_WITHOUT_PREPARED: prepared,
            }
            return b"".join(entry for violation, entries in parts.items() if violation not in self.violations for entry in entries)

        return encoded


class Listed(NamedTuple):
    """A branch that somebody has to see to. ``ending`` is None for one that is prepared, else what an administrator made of it."""

    xid: Xid
    ending: Ending | None
    since_ms: int
    sent: int
    received: int
    size_bytes: int


def listed(engine: Engine) -> Iterator[Listed]:
    """Return all branches that are prepared now, or were ended by an administrator and are not forgotten.

    They may be many: the caller can go through them over several turns.
    """
    branches = engine.branches
    prepared = [branch for branch in branches.prepared.values() if branch.stored]
    waiting = (Listed(branch.xid, None, branch.since_ms, branch.sent, branch.received, len(branch.entry)) for branch in prepared)
    forced = (Listed(ended.xid, ended.ending, ended.at_ms, 0, 0, 0) for ended in list(branches.forced.values()))
    return chain(waiting, forced)


def prepare(engine: Engine, transaction: LocalTransaction | None, xid: Xid, container: str, done: Callable[[bool], None]) -> None:
    """A transaction becomes a branch; ``done(True)`` once that is stored, ``done(False)`` at once where there was nothing in it.

    Without a transaction, which has gone with its connection, it may be the repeat of one whose answer was lost.
    Raises TransactionRolledBack.
    """
    branches = engine.branches
    known = branches.prepared.get(xid)
    if transaction is None:
        if known is None or known.ending is not None:
            raise _lost(branches, xid)
        engine.journaling.tell(done, True)
        return
    error = _taken(branches, xid) or transaction.doomed or engine.stalled or _no_room(engine, transaction)
    if error is not None:
        engine.rollback(transaction)
        raise TransactionRolledBack(str(error), cause=error)
    if not (transaction.drafts or transaction.acks):
        engine.local_transactions.end(transaction)
        transaction.hand_over()
        done(False)
        return
    crash.point("branch.prepare.before")
    try:
        branch = _journal_prepared(engine, transaction, xid, container)
    except Exception as failure:
        error = engine.local_transactions.cause_of(failure, transaction)
        engine.rollback(transaction)
        raise TransactionRolledBack(str(error), cause=error) from failure
    engine.local_transactions.end(transaction)
    branches.prepared[xid] = branch
    branch.acks = [(consumer.queue, message) for consumer, message in transaction.acks]
    transaction.hand_over()
    if BranchViolation.SENDS_AT_PREPARE in branches.violations:
        engine.carry_out(list(drafts_of(branch.entry)), [], len(branch.entry))
    engine.journaling.then(_stored, branch)
    engine.journaling.tell(done, True)
    if BranchViolation.VOTE_UNSTORED in branches.violations:
        done(True)  # the client ignores the second answer
    crash.point("branch.prepare.after")


def _journal_prepared(engine: Engine, transaction: LocalTransaction, xid: Xid, container: str) -> Branch:
    """The branch of a transaction, whose entry is in the open record. If it raises, nothing was done."""
    plan, since_ms = engine.local_transactions.prepare_plan(transaction), engine.clock()
    entry = plan.entry(xid, since_ms, container)
    with engine.journaling.atomic(len(entry), 0):
        engine.journaling.add(entry)
    return Branch(entry, xid, since_ms, sent=plan.sent, received=plan.received, stored=False)


def commit_one_phase(
    engine: Engine,
    transaction: LocalTransaction | None,
    xid: Xid,
    done: Callable[[BasculeError | None], None],
    since: int | None = None,
) -> None:
    """As a commit of the transaction, which is remembered by its xid. Without one: see ``prepare``.

    Raises TransactionRolledBack; UnknownBranch if the commit may have been carried out and forgotten since the record ``since``.
    """
    branches = engine.branches
    if transaction is None:
        if xid not in branches.committing and branches.ended.get(xid) is not Ending.COMMITTED:
            if xid not in branches.ended and branches.may_have_forgotten(since):
                branches.refuse(xid, since)
                raise _unknown(engine, xid, since)
            raise _lost(branches, xid)
        engine.journaling.tell(done, None)
        return
    error = _taken(branches, xid)
    if error is not None:
        engine.rollback(transaction)
        raise TransactionRolledBack(str(error), cause=error)
    ended = Ended(xid, Ending.COMMITTED, engine.clock())
    if BranchViolation.COMMITTING_UNKNOWN not in branches.violations:
        branches.committing.add(xid)
    if engine.commit(transaction, done, ended_entry(*ended)):
        transaction.hand_over()
        engine.journaling.then(_committed, engine, ended)
    else:
        branches.committing.discard(xid)


def _committed(engine: Engine, ended: Ended) -> None:
    engine.branches.committing.discard(ended.xid)
    engine.branches.over(ended, engine.journaling.sequence)


def plan_end(engine: Engine, xid: Xid, ending: Ending) -> CommitPlan | None:
    """Begin to plan what the end of a branch decides; None if the branch is not there, or is not to be committed.

    The caller may call ``end`` once the plan is over, and must close the plan.
    """
    branch = engine.branches.prepared.get(xid)
    if branch is None or branch.ending is not None or ending not in COMMITS:
        return None
    plan = engine.commit_plan(drafts_of(branch.entry), branch.acks, 2 * len(branch.entry))
    plan.entry = branch.entry
    return plan


def end(
    engine: Engine, xid: Xid, ending: Ending, done: Callable[[], None], since: int | None = None, plan: CommitPlan | None = None
) -> None:
    """A prepared branch is committed or rolled back; ``done()`` once that is stored. For ``since`` see ``Branches.may_have_forgotten``.

    ``plan`` is that of ``plan_end`` for the same xid and ending, if there is one.

    Raises UnknownBranch, BranchForced, BranchBusy, JournalUnavailable, RecordTooLarge. If it raises, the branch stays as it is.
    """
    branches = engine.branches
    if xid in branches.forced:
        raise BranchForced(f"branch {xid} was {_said(branches.forced[xid].ending)}", branches.forced[xid].ending)
    if xid in branches.committing:
        raise BranchBusy(f"branch {xid} is being committed")
    branch = branches.prepared.get(xid)
    if branch is None:
        error = _unknown(engine, xid, since)
        if ending is Ending.ROLLED_BACK:
            branches.refuse(xid, since)
        raise error
    if branch.ending is ending:
        engine.journaling.tell(done)
        return
    if branch.ending is not None:
        raise BranchBusy(f"branch {xid} is being {_said(branch.ending)}")
    if engine.stalled is not None:
        raise JournalUnavailable(str(engine.stalled))  # not the same error again and again: each time its frames would be kept
    crash.point("branch.end.before")
    ended = Ended(xid, ending, engine.clock())
    entry = ended_entry(*ended)
    if ending in COMMITS:
        if plan is not None and plan.entry is branch.entry:
            plan.finish()
            engine.carry_out_plan(plan, len(branch.entry), entry)
        else:
            dropped = BranchViolation.ACKNOWLEDGEMENT_DROPPED in branches.violations
            engine.carry_out(list(drafts_of(branch.entry)), branch.acks[: -1 if dropped else None], len(branch.entry), entry)
        branch.acks = []
    else:
        engine.journaling.add(entry)
    branch.ending = ending
    engine.journaling.then(_over, engine, branch, ended)
    engine.journaling.tell(done)
    crash.point("branch.end.after")


def forget(engine: Engine, xid: Xid, done: Callable[[], None]) -> None:
    """An administrator's end of a branch has been seen to; ``done()`` once that is stored. Raises UnknownBranch."""
    if xid not in engine.branches.forced:
        raise UnknownBranch(f"branch {xid} has not been ended by an administrator")
    ended = Ended(xid, Ending.FORGOTTEN, engine.clock())
    if BranchViolation.FORGET_UNJOURNALED in engine.branches.violations:
        engine.branches.over(ended, 0)
        engine.journaling.after_barrier(done)
        return
    engine.journaling.add(ended_entry(*ended))
    engine.journaling.then(engine.branches.over, ended, 0)
    engine.journaling.tell(done)


# -- inside ------------------------------------------------------------------------------------------------------------


def _stored(branch: Branch) -> None:
    crash.point("branch.prepare.stored")
    branch.stored = True


def _over(engine: Engine, branch: Branch, ended: Ended) -> None:
    crash.point("branch.end.stored")
    engine.branches.over(ended, engine.journaling.sequence)
    if ended.ending in ROLLBACKS:
        engine.counters.rolled_back += 1
        engine.take_back(branch.acks)
        if BranchViolation.ROLLBACK_UNMARKED in engine.branches.violations:
            for queue, message in branch.acks:
                queue.counts.pop(message.position, None)


def _no_room(engine: Engine, transaction: LocalTransaction) -> ResourceLimit | None:
    prepared = engine.branches.prepared
    if len(prepared) >= PREPARED_MAX:
        return ResourceLimit(f"{len(prepared)} branches are prepared and wait for their outcome: `recover` lists them")
    size_bytes = transaction.size_bytes + engine.branches.prepared_bytes
    limit = min(PREPARED_BYTES_MAX, engine.memory.branches_max_bytes)
    if prepared and size_bytes > limit:
        return ResourceLimit(f"prepared branches would hold {size_bytes} bytes, more than {limit}: `recover` lists them")
    return None


def _taken(branches: Branches, xid: Xid) -> BasculeError | None:
    """Why no other transaction can have the name: what is there under it would be gone with this one's end."""
    if xid in branches.prepared or xid in branches.forced:
        return BranchExists(f"branch {xid} is already prepared")
    if xid in branches.committing:
        return BranchExists(f"branch {xid} is being committed")
    if xid in branches.ended:
        return UnknownBranch(f"branch {xid} has ended: {_said(branches.ended[xid])}")
    if xid in branches.refused:
        return UnknownBranch(f"a rollback of branch {xid} was requested")
    return None


def _lost(branches: Branches, xid: Xid) -> TransactionRolledBack:
    if xid in branches.prepared:  # by another transaction, whose vote holds
        exists = BranchExists(f"branch {xid} is already prepared")
        return TransactionRolledBack(str(exists), cause=exists)
    branches.refuse(xid)
    lost = UnknownTransaction(f"the transaction of branch {xid} does not exist: it ended with its connection")
    return TransactionRolledBack(str(lost), cause=lost)


def _unknown(engine: Engine, xid: Xid, since: int | None) -> UnknownBranch:
    ending = engine.branches.ended.get(xid)
    if ending is None and engine.branches.may_have_forgotten(since):
        return UnknownBranch(f"there is no branch {xid}; the broker remembers only the last {ENDED_MAX:,} ended branches", forgotten=True)
    if ending is None:
        return UnknownBranch(f"there is no branch {xid}")
    return UnknownBranch(f"branch {xid} has been {_said(ending)}", ending)


def _said(ending: Ending) -> str:
    return {
        Ending.COMMITTED: "committed", Ending.ROLLED_BACK: "rolled back", Ending.FORCED_COMMIT: "committed by an administrator",
        Ending.FORCED_ROLLBACK: "rolled back by an administrator", Ending.FORGOTTEN: "forgotten",
    }[ending]  # fmt: skip


def _prepared(entry: bytes) -> PreparedEntry:
    _, start, end = next(entries(entry, 0))
    return decode_prepared(entry, start, end)
