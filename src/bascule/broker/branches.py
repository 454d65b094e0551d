"""Prepared transaction branches (X/Open XA). Any connection may end a prepared branch, also after a restart of the broker.

A prepared branch consists of its journal entry and of the messages that it received. Only the branch holds these messages: no consumer gets
them and no browser shows them. The sends of the branch are in no queue. The commit routes them and only then looks for duplicates
(``_AMQ_DUPL_ID``). Otherwise an id in a prepared branch would cause other messages to be dropped, which a rollback would then lose.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from bascule.broker.branch_entries import drafts_of
from bascule.broker.errors import (
    BranchBusy,
    BranchExists,
    BranchForced,
    JournalUnavailable,
    UnknownBranch,
    UnknownTransaction,
)
from bascule.broker.message import BrokerMessage
from bascule.broker.prepared_use import PreparedUse
from bascule.broker.queue import BrokerQueue
from bascule.broker.transactions import LocalTransaction
from bascule.core import crash
from bascule.core.errors import BasculeError, TransactionRolledBack
from bascule.core.xid import Xid
from bascule.journal.branches import FORCED, Ended, Ending, PreparedEntry, Received, decode_prepared, ended_entry
from bascule.journal.records import entries

if TYPE_CHECKING:
    from bascule.broker.commit_plan import CommitPlan
    from bascule.broker.engine import Engine

#: Number of outcomes that are remembered for clients that did not receive the answer.
ENDED_MAX = 10_000

COMMITS = frozenset((Ending.COMMITTED, Ending.FORCED_COMMIT))
ROLLBACKS = frozenset((Ending.ROLLED_BACK, Ending.FORCED_ROLLBACK))


class BranchViolation(enum.StrEnum):
    """Rules of branches that a test can break."""

    #: A prepare is answered before the branch is stored.
    VOTE_UNSTORED = "branch-vote-unstored"
    #: The sends of a branch are routed by its prepare.
    SENDS_AT_PREPARE = "branch-sends-at-prepare"
    #: A branch stays prepared after its first outcome, and is ended twice.
    ENDED_TWICE = "branch-ended-twice"
    #: A commit drops the last acknowledgement.
    ACKNOWLEDGEMENT_DROPPED = "branch-acknowledgement-dropped"
    #: Messages of a branch that is rolled back are not marked as redelivered.
    ROLLBACK_UNMARKED = "branch-rollback-unmarked"
    #: The broker forgets the outcomes of branches.
    ENDS_FORGOTTEN = "branch-ends-forgotten"
    #: The broker forgets which branches an administrator has ended.
    FORCED_ENDS_FORGOTTEN = "branch-forced-ends-forgotten"
    #: The broker does not know which one-phase commits are being stored.
    COMMITTING_UNKNOWN = "branch-committing-unknown"
    #: A ``forget`` of a heuristic outcome is not journaled.
    FORGET_UNJOURNALED = "branch-forget-unjournaled"
    #: Snapshots lack the prepared branches.
    SNAPSHOT_WITHOUT_PREPARED = "branch-snapshot-without-prepared"
    #: Snapshots lack the outcomes of branches.
    SNAPSHOT_WITHOUT_ENDED = "branch-snapshot-without-ended"
    #: Snapshots lack the branches that an administrator has ended.
    SNAPSHOT_WITHOUT_FORCED = "branch-snapshot-without-forced"
    #: A branch whose outcome the broker has forgotten counts as rolled back.
    FORGOTTEN_IS_ROLLED_BACK = "branch-forgotten-is-rolled-back"
    #: A branch that has ended counts as one of the prepared branches of its user.
    ENDED_STILL_COUNT = "branch-ended-still-count"


class Branch:
    """A prepared branch. ``entry`` is its journal entry; ``acks`` are the messages that it has received."""

    __slots__ = ("acks", "ending", "entry", "queues", "received", "sent", "since_ms", "stored", "user", "xid")

    def __init__(self, entry: bytes, xid: Xid, since_ms: int, *, sent: int, received: int, stored: bool, user: str) -> None:
        self.entry = entry
        self.xid, self.user = xid, user  # "" if the branch belongs to nobody
        self.since_ms = since_ms
        self.sent = sent
        self.received = received
        self.stored = stored  # whether the journal has stored the entry; the branch is prepared from then on
        self.acks: list[tuple[BrokerQueue, BrokerMessage]] = []
        self.queues: dict[BrokerQueue, None] = {}  # of the messages that it has received
        self.ending: Ending | None = None  # the outcome, from the decision until the journal has stored it

    @classmethod
    def from_entry(cls, entry: bytes) -> Branch:
        """Return the branch that a PREPARED entry of the journal describes. Raises DamagedRecord if the entry cannot be decoded."""
        prepared = _prepared(entry)
        received = sum(len(counts) for _, counts in prepared.received)
        return cls(entry, prepared.xid, prepared.since_ms, sent=len(prepared.sends), received=received, stored=True, user=prepared.user)

    def taken(self) -> tuple[Received, ...]:
        """Return the received messages, as the journal identifies them."""
        return _prepared(self.entry).received


@dataclass(slots=True)
class Branches:
    """The branches of one broker, and the outcomes that the journal has stored."""

    prepared: dict[Xid, Branch] = field(default_factory=dict)  # changed only by ``add`` and ``over``, which count
    use: PreparedUse = field(default_factory=PreparedUse)  # of ``prepared``
    forced: dict[Xid, Ended] = field(default_factory=dict)  # ended by an administrator, not forgotten yet
    ended: dict[Xid, Ending] = field(default_factory=dict)  # the last outcomes, oldest first
    #: Branches whose rollback was requested, and that may have been committed and forgotten before.
    refused: dict[Xid, None] = field(default_factory=dict)
    #: The journal sequence at the refusal, for each branch in ``refused``, and for each refused branch in ``ended``.
    refused_at: dict[Xid, int] = field(default_factory=dict)
    #: The largest journal sequence of a forgotten refusal; -1 if no refusal is forgotten.
    refusals_forgotten_to: int = -1
    #: For each committed branch in ``ended``: a sequence that is not before the journal record of the commit.
    committed_at: dict[Xid, int] = field(default_factory=dict)
    #: The broker may have forgotten commits in journal records up to this sequence.
    forgotten_to: int = 0
    committing: set[Xid] = field(default_factory=set)  # one-phase commits that are decided and not stored yet
    violations: Collection[enum.StrEnum] = frozenset()  # rules that a test breaks
    ended_max: int | None = None  # outcomes that are remembered; None: ENDED_MAX

    @property
    def remembered_max(self) -> int:
        """Return the number of outcomes that are remembered."""
        return ENDED_MAX if self.ended_max is None else self.ended_max

    def add(self, branch: Branch) -> None:
        """Add a prepared branch, perhaps in place of one with its xid."""
        self._remove(branch.xid)
        self.prepared[branch.xid] = branch
        self.use.add(branch.user, len(branch.entry))

    def _remove(self, xid: Xid) -> Branch | None:
        branch = self.prepared.pop(xid, None)
        if branch is not None and BranchViolation.ENDED_STILL_COUNT not in self.violations:
            self.use.remove(branch.user, len(branch.entry))
        return branch

    def owner(self, xid: Xid) -> str:
        """Return the user of a branch that is prepared or that an administrator has ended; "" if it belongs to nobody."""
        return "" if (found := self.prepared.get(xid) or self.forced.get(xid)) is None else found.user

    def held(self) -> Iterator[tuple[BrokerQueue, BrokerMessage]]:
        """Yield the messages that prepared branches hold, with their queues."""
        for branch in self.prepared.values():
            yield from branch.acks

    def over(self, ended: Ended, sequence: int) -> None:
        """Apply an outcome that the journal has stored, in a record that is not behind ``sequence``."""
        again = BranchViolation.ENDED_TWICE in self.violations and ended.xid not in self.ended
        branch = self._remove(ended.xid)
        if again and branch is not None:
            branch.ending = None
            self.add(branch)
        if ended.ending in FORCED:
            if BranchViolation.FORCED_ENDS_FORGOTTEN not in self.violations:
                self.forced[ended.xid] = ended
        elif ended.ending is Ending.FORGOTTEN:
            self.forced.pop(ended.xid, None)
        else:
            self.remember(ended.xid, ended.ending, sequence)

    def remember(self, xid: Xid, ending: Ending, sequence: int) -> None:
        """Remember the outcome of a branch, in order to answer a repeated request."""
        if BranchViolation.ENDS_FORGOTTEN in self.violations:
            return
        self.ended[xid] = ending
        if ending is Ending.COMMITTED:
            self.committed_at[xid] = sequence
        self._forget_old()

    def refuse(self, xid: Xid, sequence: int, since: int | None = None) -> None:
        """Make a later prepare of a branch fail. The prepare may still be on its way, on a connection that its client has given up.

        ``sequence`` is the present sequence of the journal. For ``since`` see ``may_have_forgotten``.
        """
        if self.may_have_forgotten(since):
            self.refused[xid] = None
            self.refused_at[xid] = sequence
            if len(self.refused) > self.remembered_max:
                oldest = next(iter(self.refused))
                del self.refused[oldest]
                self._forget_refusal(oldest)
            return
        if xid not in self.ended:
            self.ended[xid] = Ending.ROLLED_BACK
            self.refused_at[xid] = sequence
        self._forget_old()

    def may_have_refused(self, begun_at: int) -> bool:
        """Return whether the broker may have forgotten the refusal of a branch, which is never older than the branch's transaction.

        ``begun_at`` is the journal sequence at the beginning of the transaction.
        """
        return self.refusals_forgotten_to >= begun_at

    def may_have_forgotten(self, since: int | None) -> bool:
        """Return whether a commit may be forgotten. ``since`` is the sequence of a record before the commit, or None if it is unknown."""
        return self.forgotten_to > (since or 0) and BranchViolation.FORGOTTEN_IS_ROLLED_BACK not in self.violations

    def loaded(self, sequence: int) -> None:
        """Complete the load of a snapshot at ``sequence``. If its list of outcomes is full, older commits may be forgotten."""
        if len(self.ended) >= self.remembered_max:
            self.forgotten_to = sequence

    def _forget_old(self) -> None:
        if len(self.ended) > self.remembered_max:
            oldest = next(iter(self.ended))
            del self.ended[oldest]
            self.forgotten_to = max(self.forgotten_to, self.committed_at.pop(oldest, 0))
            self._forget_refusal(oldest)

    def _forget_refusal(self, xid: Xid) -> None:
        self.refusals_forgotten_to = max(self.refusals_forgotten_to, self.refused_at.pop(xid, -1))

    def entries(self, at_ms: int) -> Callable[[], bytes]:
        """Return a function that encodes the stored branches and outcomes as journal entries, for a snapshot.

        The state is that of this call. The function may be called later, and in another thread.
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
    """One branch in the list for transaction managers. ``ending`` is None for a prepared branch, else the heuristic outcome."""

    xid: Xid
    ending: Ending | None
    since_ms: int
    sent: int
    received: int
    size_bytes: int
    user: str


def listed(engine: Engine) -> Iterator[Listed]:
    """Yield the prepared branches, and those that an administrator has ended and nobody has forgotten. There may be many."""
    branches = engine.branches
    prepared, forced = [branch for branch in branches.prepared.values() if branch.stored], list(branches.forced.values())
    for branch in prepared:
        yield Listed(branch.xid, None, branch.since_ms, branch.sent, branch.received, len(branch.entry), branch.user)
    for ended in forced:
        yield Listed(ended.xid, ended.ending, ended.at_ms, 0, 0, 0, ended.user)


def prepare(
    engine: Engine, transaction: LocalTransaction | None, xid: Xid, container: str, done: Callable[[bool], None], user: str = ""
) -> None:
    """Prepare a transaction as a branch of ``user``.

    Call ``done(True)`` once the branch is stored, or ``done(False)`` at once if the transaction is empty.

    ``transaction`` is None if the connection no longer has it. The request then may be the repetition of a prepare whose answer was lost.
    Raises TransactionRolledBack if the transaction cannot be prepared.
    """
    branches = engine.branches
    known = branches.prepared.get(xid)
    if transaction is None:
        if known is None or known.ending is not None:
            raise _lost(engine, xid)
        engine.journaling.tell(done, True)
        return
    bytes_max, limits = engine.memory.branches_max_bytes, engine.policy.user_limits
    error = _taken(branches, xid) or transaction.doomed or engine.stalled
    error = error or branches.use.refusal(user, transaction.size_bytes, bytes_max, limits)
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
        branch = _journal_prepared(engine, transaction, xid, container, user)
    except Exception as failure:
        error = engine.local_transactions.cause_of(failure, transaction)
        engine.rollback(transaction)
        raise TransactionRolledBack(str(error), cause=error) from failure
    engine.local_transactions.end(transaction)
    branches.add(branch)
    transaction.hand_over()
    if BranchViolation.SENDS_AT_PREPARE in branches.violations:
        engine.carry_out(list(drafts_of(branch.entry)), [], len(branch.entry))
    engine.journaling.then(_stored, branch)
    engine.journaling.tell(done, True)
    if BranchViolation.VOTE_UNSTORED in branches.violations:
        done(True)  # the client ignores the second answer
    crash.point("branch.prepare.after")


def _journal_prepared(engine: Engine, transaction: LocalTransaction, xid: Xid, container: str, user: str) -> Branch:
    """Write the PREPARED entry of a transaction into the open record and return the branch. Changes nothing if it raises."""
    plan, since_ms = engine.local_transactions.prepare_plan(transaction), engine.clock()
    entry = plan.entry(xid, since_ms, container, user)
    with engine.journaling.atomic(len(entry), 0):
        engine.journaling.add(entry)
    branch = Branch(entry, xid, since_ms, sent=plan.sent, received=plan.received, stored=False, user=user)
    branch.acks, branch.queues = plan.acks, plan.queues
    return branch


def commit_one_phase(
    engine: Engine,
    transaction: LocalTransaction | None,
    xid: Xid,
    done: Callable[[BasculeError | None], None],
    since: int | None = None,
) -> None:
    """Commit a transaction in one phase and remember the outcome under its xid. ``transaction`` may be None, as in ``prepare``.

    ``done`` is called as by the commit of a local transaction. Raises TransactionRolledBack if the transaction cannot be committed,
    UnknownBranch if the broker may have carried out and forgotten the commit since the record ``since``.
    """
    branches = engine.branches
    if transaction is None:
        if xid not in branches.committing and branches.ended.get(xid) is not Ending.COMMITTED:
            if xid not in branches.ended and branches.may_have_forgotten(since):
                branches.refuse(xid, engine.journaling.confirmed_sequence, since)
                raise _unknown(engine, xid, since)
            raise _lost(engine, xid)
        engine.journaling.tell(done, None)
        return
    error = _taken(branches, xid)
    if error is None and branches.may_have_refused(transaction.begun_at):
        error = UnknownBranch(f"a rollback of branch {xid} may have been requested; the broker remembers only the most recent requests")
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
    """Begin to plan the commit of a branch. Return None if the branch is not prepared, or if ``ending`` is not a commit.

    The caller calls ``end`` once the plan is complete, and must close the plan.
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
    """Commit or roll back a prepared branch. Call ``done()`` once the outcome is stored.

    For ``since`` see ``Branches.may_have_forgotten``. ``plan`` is the result of ``plan_end`` for the same xid and ending, or None.

    Raises UnknownBranch, BranchForced, BranchBusy, JournalUnavailable, RecordTooLarge. The branch does not change if this function raises.
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
            branches.refuse(xid, engine.journaling.confirmed_sequence, since)
        raise error
    if branch.ending is ending:
        engine.journaling.tell(done)
        return
    if branch.ending is not None:
        raise BranchBusy(f"branch {xid} is being {_said(branch.ending)}")
    if engine.stalled is not None:
        raise JournalUnavailable(str(engine.stalled))  # a new error: the same object would keep the frames of each raise
    crash.point("branch.end.before")
    ended = Ended(xid, ending, engine.clock(), branch.user if ending in FORCED else "")
    entry = ended_entry(*ended)
    if ending in COMMITS:
        if plan is not None and plan.entry is branch.entry:
            plan.finish()
            engine.carry_out_plan(plan, entry)
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
    """Forget the heuristic outcome of a branch. Call ``done()`` once this is stored.

    Raises UnknownBranch if no administrator has ended the branch.
    """
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
        engine.take_back(branch.queues, branch.acks)
        if BranchViolation.ROLLBACK_UNMARKED in engine.branches.violations:
            for queue, message in branch.acks:
                queue.counts.pop(message.position, None)


def _taken(branches: Branches, xid: Xid) -> BasculeError | None:
    """Return why a transaction cannot use an xid, or None. Its outcome would replace what is stored under this xid."""
    if xid in branches.prepared or xid in branches.forced:
        return BranchExists(f"branch {xid} is already prepared")
    if xid in branches.committing:
        return BranchExists(f"branch {xid} is being committed")
    if xid in branches.ended:
        return UnknownBranch(f"branch {xid} has ended: {_said(branches.ended[xid])}")
    if xid in branches.refused:
        return UnknownBranch(f"a rollback of branch {xid} was requested")
    return None


def _lost(engine: Engine, xid: Xid) -> TransactionRolledBack:
    branches = engine.branches
    cause = _taken(branches, xid) if xid in branches.prepared else None  # prepared from another transaction; that vote stays valid
    if cause is None:
        branches.refuse(xid, engine.journaling.confirmed_sequence)
        cause = UnknownTransaction(f"the transaction of branch {xid} does not exist: it ended with its connection")
    return TransactionRolledBack(str(cause), cause=cause)


def _unknown(engine: Engine, xid: Xid, since: int | None) -> UnknownBranch:
    ending, known = engine.branches.ended.get(xid), f"{engine.branches.remembered_max:,}"
    if ending is not None:
        return UnknownBranch(f"branch {xid} has been {_said(ending)}", ending)
    if engine.branches.may_have_forgotten(since):
        return UnknownBranch(f"there is no branch {xid}; the broker remembers only the last {known} ended branches", forgotten=True)
    return UnknownBranch(f"there is no branch {xid}")


def _said(ending: Ending) -> str:
    return {
        Ending.COMMITTED: "committed", Ending.ROLLED_BACK: "rolled back", Ending.FORCED_COMMIT: "committed by an administrator",
        Ending.FORCED_ROLLBACK: "rolled back by an administrator", Ending.FORGOTTEN: "forgotten",
    }[ending]  # fmt: skip


def _prepared(entry: bytes) -> PreparedEntry:
    _, start, end = next(entries(entry, 0))
    return decode_prepared(entry, start, end)
