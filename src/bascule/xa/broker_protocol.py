"""The broker as a resource, without IO: requests about branches, the meaning of the answers, and which requests are repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bascule.core.xid import Xid
from bascule.xa.errors import (
    XA_OK,
    XA_RDONLY,
    BranchHeuristic,
    BranchRolledBack,
    Code,
    DuplicateXid,
    ResourceError,
    ResourceFailed,
    RetryLater,
    UnknownXid,
    XaError,
)
from bascule.xa.resource import Vote

#: How a branch has ended, by the broker's ``outcome``; and the operation that ends it in this way.
COMMITTED, ROLLED_BACK = "committed", "rolled-back"
#: The broker's ``outcome`` of a branch that may have ended either way: the broker remembers only the last outcomes.
FORGOTTEN = "forgotten"
OPERATIONS = {COMMITTED: "commit", ROLLED_BACK: "rollback"}
#: Interval and total time, in seconds, of questions about an unanswered commit, which may be on its way to the journal.
ASK_AGAIN_S = 0.05
SETTLE_S = 30.0
#: HTTP status of the answer to a request at which the broker itself has failed. It may fail at the same work each time.
BROKER_FAULT = 500
_ROLLBACKS = frozenset(code for code in Code if code.name.startswith("XA_RB"))
#: The errors for the broker's answers, by ``xaCode``.
ERRORS: dict[Code, type[XaError]] = {
    Code.XAER_NOTA: UnknownXid,
    Code.XAER_DUPID: DuplicateXid,
    Code.XAER_RMFAIL: ResourceFailed,  # the broker failed at the request, and may have carried out a part of it
    Code.XA_RETRY: RetryLater,
    **dict.fromkeys(_ROLLBACKS, BranchRolledBack),
    **dict.fromkeys((code for code in Code if code.name.startswith("XA_HEUR")), BranchHeuristic),
}


class AnswerLost(ResourceFailed):
    """The connection was lost before the answer arrived."""


class Reply(NamedTuple):
    """The broker's answer to a request. ``code`` is None if the broker does not support branches."""

    code: int | None
    status: int | None = None
    description: str = ""
    outcome: str = ""
    text: str = ""
    #: The position of the broker's journal, or None if the broker does not report it.
    position: int | None = None


class BrokerCalls(Protocol):
    """The effects of the protocol. ``since`` is the result of ``position`` before the commit of a branch was requested."""

    async def ask(self, operation: str, xid: Xid | None, since: int | None = None) -> Reply:
        """Make a request on any connection. Raises AnswerLost, or another XaError if there is no connection."""

    async def hand_over(self, operation: str, xid: Xid, since: int | None = None) -> Reply | None:
        """Make a request about the local transaction of a branch, on its own connection. Return None if the branch has done no work."""

    def position(self) -> int | None:
        """Return the largest position in the answers so far, or None."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    def monotonic_s(self) -> float:
        """Return the seconds of a monotonic clock."""


class _Known(UnknownXid):
    """Raised for a branch that has ended in a way that the broker remembers."""

    def __init__(self, text: str, outcome: str) -> None:
        super().__init__(text)
        self.outcome = outcome


def checked(reply: Reply) -> int:
    """Return XA_OK or XA_RDONLY. Raises XaError for any other answer."""
    if reply.code in (XA_OK, XA_RDONLY):
        return int(reply.code)
    if reply.code not in set(Code):
        raise ResourceError(f"the broker does not support transaction branches: it answered {reply.status} {reply.description}")
    error = ERRORS.get(Code(reply.code), ResourceError)(reply.description, Code(reply.code))
    if reply.status == BROKER_FAULT:
        error.retriable = False
    raise _Known(str(error), reply.outcome) if reply.outcome else error


def is_rolled_back(reply: Reply) -> bool:
    """Return True if the broker has answered that it has rolled back the branch."""
    return reply.code in _ROLLBACKS


def check_gone(reply: Reply, xid: Xid) -> None:
    """Check the answer to the rollback of an undecided branch, which somebody else may have rolled back meanwhile.

    Raises BranchHeuristic if the branch has been committed, XaError if it may still exist.
    """
    try:
        checked(reply)
    except _Known as known:
        if known.outcome == COMMITTED:
            raise BranchHeuristic(f"{xid} has been committed at the broker, against the decision", Code.XA_HEURCOM) from known
    except UnknownXid:
        return


async def prepare(calls: BrokerCalls, xid: Xid) -> Vote:
    """Return the vote of a branch."""
    reply = await calls.hand_over("prepare", xid)
    return Vote.READ_ONLY if reply is None or checked(reply) == XA_RDONLY else Vote.YES


async def commit_one_phase(calls: BrokerCalls, xid: Xid) -> None:
    """Commit the local transaction of a branch. Raises BranchRolledBack; ResourceFailed if the outcome stays unknown."""
    since = calls.position()
    try:
        reply = await calls.hand_over("commit", xid, since)
        if reply is not None:
            checked(reply)
    except _Known as known:
        if known.outcome == FORGOTTEN:
            raise ResourceFailed(str(known)) from known
        raise
    except ResourceFailed as error:
        await _settle(calls, xid, since, error)


async def end(calls: BrokerCalls, xid: Xid, wanted: str) -> None:
    """End a prepared branch. ``wanted`` is COMMITTED or ROLLED_BACK.

    Raises UnknownXid if the branch is gone, BranchHeuristic if it has ended the other way as far as the broker remembers, XaError.
    """
    try:
        await request(calls, OPERATIONS[wanted], xid)
    except _Known as known:
        if known.outcome == wanted:
            raise
        if known.outcome == FORGOTTEN:
            if wanted == ROLLED_BACK:
                raise
            raise BranchHeuristic(
                f"the outcome of branch {xid} is unknown: the broker remembers only the most recent outcomes", Code.XA_HEURHAZ
            ) from known
        code = Code.XA_HEURCOM if known.outcome == COMMITTED else Code.XA_HEURRB
        raise BranchHeuristic(f"branch {xid} is {known.outcome} at the broker, contrary to the decision", code) from known


async def recover(calls: BrokerCalls) -> Sequence[Xid]:
    """Return the branches that somebody has to finish or forget."""
    reply = await request(calls, "recover", None)
    return [_listed(line) for line in reply.text.splitlines()]


async def request(calls: BrokerCalls, operation: str, xid: Xid | None, since: int | None = None) -> Reply:
    """Make a request that can be repeated: once more if the connection is lost. Raises XaError."""
    try:
        reply = await calls.ask(operation, xid, since)
    except AnswerLost:
        reply = await calls.ask(operation, xid, since)
    checked(reply)
    return reply


async def _settle(calls: BrokerCalls, xid: Xid, since: int | None, error: ResourceFailed) -> None:
    """Find out the outcome of a commit in one phase. If the broker has not carried it out, it refuses it from now on.

    Raises BranchRolledBack if the broker has not committed, ResourceFailed if it does not answer or may have forgotten the commit.
    """
    deadline_s = calls.monotonic_s() + SETTLE_S
    while True:
        try:
            await request(calls, OPERATIONS[ROLLED_BACK], xid, since)
        except _Known as known:
            if known.outcome == COMMITTED:
                return
            if known.outcome == FORGOTTEN:
                raise ResourceFailed(f"{error}; {known}") from known
        except RetryLater:  # the commit is being stored
            if calls.monotonic_s() > deadline_s:
                raise error from None
            await calls.sleep(ASK_AGAIN_S)
            continue
        except UnknownXid:
            pass
        except ResourceError as refused:  # refused to answer; that is no answer
            raise ResourceFailed(f"{error}; {refused}") from refused
        code = Code.XA_RBCOMMFAIL if error.retriable else Code.XA_RBROLLBACK
        raise BranchRolledBack(f"the broker did not commit branch {xid}: {error}", code, cause=error) from error


def _listed(line: str) -> Xid:
    """Return the branch in a line of ``recover``: STATE SINCE_MS FORMAT:GTRID:BQUAL, the last two in hexadecimal digits."""
    format_id, gtrid, bqual = line.split(" ")[2].split(":")
    return Xid(int(format_id), bytes.fromhex(gtrid), bytes.fromhex(bqual))
