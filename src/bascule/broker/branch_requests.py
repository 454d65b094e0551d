"""Requests about transaction branches, without IO: the effect of each request on the engine, and its answer.

docs/reference/amqp.md describes each request and answer. The management node and the simulation call this module.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, MutableMapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from bascule.broker import branches
from bascule.broker.commit_plan import CommitPlan
from bascule.broker.containment import ErrorKind
from bascule.broker.engine import Engine
from bascule.broker.errors import RequestFailed, UnknownBranch, UnknownTransaction
from bascule.broker.transactions import LocalTransaction
from bascule.broker.turns import Work
from bascule.core.errors import BasculeError, TransactionRolledBack
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission, Unauthorized
from bascule.core.xa_codes import XA_OK, XA_RDONLY
from bascule.core.xid import Xid
from bascule.journal.branches import Ending

STATES: Final = {None: "prepared", Ending.FORCED_COMMIT: "heuristic-commit", Ending.FORCED_ROLLBACK: "heuristic-rollback"}
#: Steps to describe one branch in a list.
LISTED_STEPS: Final = 4
ENDINGS: Final = {Ending.COMMITTED: "committed", Ending.ROLLED_BACK: "rolled-back"}
FORGOTTEN: Final = "forgotten"


class RequestViolation(enum.StrEnum):
    """Rules of the requests that a test can break."""

    #: A prepared transaction stays with its connection, and is rolled back when the connection ends.
    TRANSACTION_STAYS = "request-transaction-stays"
    #: The list of branches is answered from memory.
    LIST_UNSTORED = "request-list-unstored"
    #: A joined transaction that does not exist counts as one without work.
    LOST_JOIN_IS_EMPTY = "request-lost-join-is-empty"
    #: A joined transaction does not become part of the branch.
    JOINED_STAYS = "request-joined-stays"


class Answer(NamedTuple):
    """The answer to a request. ``code`` is XA_OK, XA_RDONLY or a ``Code``; ``outcome`` says how a branch that no longer exists ended.

    ``outcome`` is ``FORGOTTEN`` if the branch may have been committed and the broker no longer remembers its outcome.
    """

    status: int
    description: str
    code: int
    text: str | None = None
    outcome: str | None = None


Say = Callable[[Answer], None]


@dataclass(slots=True)
class BranchRequest:
    """A request about a branch.

    ``transactions`` are the local transactions of its connection; ``name`` is the transaction that it names, or None.

    ``since`` is the sequence of a journal record that the sender knows to be older than the commit of the branch, or None.

    ``user`` sends the request, and ``may_end`` says whether this user may see and end the branches of another user.
    """

    operation: str
    xid: Xid
    container: str
    transactions: MutableMapping[bytes, LocalTransaction]
    name: bytes | None = None
    since: int | None = None
    user: str = ""
    may_end: Callable[[str], bool] = lambda _owner: True
    joined: tuple[bytes, ...] = ()  # other transactions of its connection that become parts of the branch
    plan: CommitPlan | None = None  # the plan of the commit, if the request commits a prepared branch

    def is_foreign(self, engine: Engine) -> bool:
        """Return whether the request is about a branch of another user, and not about a transaction of its connection."""
        owner = engine.branches.owner(self.xid)
        own = self.operation in OF_TRANSACTIONS and self.name is not None and self.name in self.transactions
        return owner != "" and not own and not self.may_end(owner)

    def transaction(self, violations: Collection[enum.StrEnum]) -> LocalTransaction | None:
        """Remove the named transaction from its connection and return it. Return None if the connection has no such transaction."""
        if self.name is None:
            return None
        if RequestViolation.TRANSACTION_STAYS in violations:
            return copy(self.transactions.get(self.name))
        return self.transactions.pop(self.name, None)


def plan(engine: Engine, request: BranchRequest, *, violations: Collection[enum.StrEnum] = frozenset()) -> bool:
    """Plan the decisions of a request in short turns, if it is a prepare or a commit.

    Return True once ``carry_out`` may be called in this turn.

    If the result is False, the caller calls this function again in the next turn and handles nothing that arrived behind the request before
    that. The caller must call ``drop`` if it does not carry out the request.
    """
    if request.operation not in ("prepare", "commit"):
        return True
    if request.name is None:
        if request.plan is None and request.operation == "commit" and not request.is_foreign(engine):
            request.plan = branches.plan_end(engine, request.xid, Ending.COMMITTED)
        return request.plan is None or request.plan.ready()
    transaction = request.transactions.get(request.name)
    if transaction is None:
        _end_joined(engine, request)
        return True
    _join(engine, request, transaction, violations)
    return engine.plan_prepare(transaction) if request.operation == "prepare" else engine.plan_commit(transaction)


def _join(engine: Engine, request: BranchRequest, transaction: LocalTransaction, violations: Collection[enum.StrEnum]) -> None:
    """Give a transaction the work of the transactions that the request joins to it. If one of them is lost, it can only be rolled back."""
    names, request.joined = request.joined, ()
    for name in () if RequestViolation.JOINED_STAYS in violations else names:
        other = None if name == request.name else request.transactions.pop(name, None)
        if other is not None:
            engine.local_transactions.join(transaction, other)
        elif transaction.doomed is None and RequestViolation.LOST_JOIN_IS_EMPTY not in violations:
            error = UnknownTransaction(f"there is no joined transaction {name.hex():.64} on this connection")
            engine.local_transactions.doom(transaction, error)


def _end_joined(engine: Engine, request: BranchRequest) -> None:
    """Roll back the transactions that a request joins to one that does not exist, or that is rolled back: all end with its outcome."""
    names, request.joined = request.joined, ()
    others = [other for name in names if (other := request.transactions.pop(name, None)) is not None]
    engine.rollback_all(others)


def drop(engine: Engine, request: BranchRequest) -> None:
    """Drop the plan of a request that has ended or is not carried out."""
    if request.plan is not None:
        request.plan.close()
        request.plan = None
    transaction = None if request.name is None else request.transactions.get(request.name)
    if transaction is not None:
        engine.drop_plan(transaction)
        if transaction.joined and transaction.doomed is None:
            error = TransactionRolledBack("the request that joined transactions of other sessions was dropped")
            engine.local_transactions.doom(transaction, error)


def carry_out(engine: Engine, request: BranchRequest, say: Say, *, violations: Collection[enum.StrEnum] = frozenset()) -> None:
    """Carry out a request. Call ``say`` once with the answer, after the journal has stored everything that the answer reports."""
    try:
        if request.is_foreign(engine):
            raise Unauthorized(request.user, Permission.RECOVER, MANAGEMENT_ADDRESS)
        OPERATIONS[request.operation](engine, request, say, violations)
    except BasculeError as error:
        engine.journaling.after_barrier(say, failure(error))  # a fenced broker never gets past the barrier
    except Exception as error:
        engine.journaling.errors.contain(ErrorKind.REQUEST, error, operation=request.operation, xid=str(request.xid))
        engine.journaling.after_barrier(say, failure(RequestFailed("the broker failed to carry out the request; see the broker's log")))
    finally:
        if request.plan is not None:
            drop(engine, request)


def done(code: int = XA_OK, text: str | None = None) -> Answer:
    """Return the answer that reports success."""
    return Answer(200, "OK", code, text)


def failure(error: BasculeError) -> Answer:
    """Return the answer to a request that failed and changes nothing."""
    outcome = None
    if isinstance(error, UnknownBranch):
        outcome = FORGOTTEN if error.forgotten else ENDINGS[error.ending] if error.ending is not None else None
    return Answer(error.http_status, str(error), error.xa_code, outcome=outcome)


def _prepare(engine: Engine, request: BranchRequest, say: Say, violations: Collection[enum.StrEnum]) -> None:
    def voted(prepared: bool) -> None:
        say(done(XA_OK if prepared else XA_RDONLY))

    branches.prepare(engine, request.transaction(violations), request.xid, request.container, voted, request.user)


def _commit(engine: Engine, request: BranchRequest, say: Say, violations: Collection[enum.StrEnum]) -> None:
    if request.name is None:
        branches.end(engine, request.xid, Ending.COMMITTED, partial(say, done()), request.since, request.plan)
        return

    def committed(error: BasculeError | None) -> None:
        say(done() if error is None else failure(error))

    branches.commit_one_phase(engine, request.transaction(violations), request.xid, committed, request.since)


def _suspend(_engine: Engine, request: BranchRequest, say: Say, _: Collection[enum.StrEnum]) -> None:
    """Keep a transaction for a later request: its discharge as a commit leaves it to the connection."""
    transaction = None if request.name is None else request.transactions.get(request.name)
    if transaction is None:
        raise _no_transaction(request)
    transaction.suspended = True
    say(done())


def _no_transaction(request: BranchRequest) -> UnknownTransaction:
    return UnknownTransaction(f"there is no transaction {(request.name or b'').hex():.64} on this connection")


def _rollback(engine: Engine, request: BranchRequest, say: Say, _: Collection[enum.StrEnum]) -> None:
    if request.name is not None:
        known = request.name in request.transactions
        request.joined += (request.name,)
        _end_joined(engine, request)
        if not known:
            raise _no_transaction(request)
        say(done())
        return
    branches.end(engine, request.xid, Ending.ROLLED_BACK, partial(say, done()), request.since)


def _recover(engine: Engine, request: BranchRequest, say: Say, violations: Collection[enum.StrEnum]) -> None:
    def listed() -> None:
        engine.turns.begin(_listing(engine, request, say))

    if RequestViolation.LIST_UNSTORED in violations:
        listed()
    else:
        engine.journaling.after_barrier(listed)


def _listing(engine: Engine, request: BranchRequest, say: Say) -> Work:
    """Answer with a list of all current branches that the sender may end."""
    lines = []
    try:
        for each in branches.listed(engine):
            if each.user == "" or request.may_end(each.user):
                lines.append(f"{STATES[each.ending]} {each.since_ms} {each.xid.format_id}:{each.xid.gtrid.hex()}:{each.xid.bqual.hex()}")
            yield LISTED_STEPS
        answer = done(text="\n".join(lines))
    except Exception as error:
        engine.journaling.errors.contain(ErrorKind.REQUEST, error, operation=request.operation)
        answer = failure(RequestFailed("the broker failed to list the branches; see the broker's log"))
    engine.journaling.errors.run(ErrorKind.ANSWER, say, answer)


def _forget(engine: Engine, request: BranchRequest, say: Say, _: Collection[enum.StrEnum]) -> None:
    branches.forget(engine, request.xid, partial(say, done()))


OPERATIONS: Final[dict[str, Callable[[Engine, BranchRequest, Say, Collection[enum.StrEnum]], None]]] = {
    "prepare": _prepare,
    "commit": _commit,
    "rollback": _rollback,
    "suspend": _suspend,
    "recover": _recover,
    "forget": _forget,
}
#: Operations that are about a transaction of the connection, if they name one: they have no effect on a branch that exists.
OF_TRANSACTIONS: Final = frozenset({"prepare", "commit", "rollback", "suspend"})
#: Operations that need no xid.
WITHOUT_XID: Final = frozenset({"recover"})
NO_XID: Final = Xid(0, b"", b"")
