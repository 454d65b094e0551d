"""How the resource interprets the broker's answers to requests about branches, and which requests it repeats."""

from __future__ import annotations

from collections import deque

import pytest

from bascule.core.effects import run_blocking
from bascule.core.xa_codes import XA_OK, XA_RDONLY, Code
from bascule.core.xid import Xid
from bascule.xa import broker_protocol
from bascule.xa.broker_protocol import COMMITTED, FORGOTTEN, ROLLED_BACK, SETTLE_S, AnswerLost, Reply
from bascule.xa.errors import (
    BranchHeuristic,
    BranchRolledBack,
    DuplicateXid,
    ResourceError,
    ResourceFailed,
    RetryLater,
    UnknownXid,
    XaError,
)
from bascule.xa.resource import Vote

XID = Xid(1, b"transaction", b"jms")
LOST = AnswerLost("connection lost")
GONE = Reply(Code.XAER_NOTA, 404, "no such branch")
BUSY = Reply(Code.XA_RETRY, 503, "it is being committed")
OK = Reply(XA_OK, 200, "OK")
FAILED = Reply(Code.XAER_RMFAIL, 500, "failed")


def known(outcome: str) -> Reply:
    return Reply(Code.XAER_NOTA, 404, f"the branch has been {outcome}", outcome)


class Script:
    """A broker that gives the answers of a test, in this order."""

    def __init__(self, *answers: Reply | Exception | None) -> None:
        self.answers = deque(answers)
        self.asked: list[str] = []
        self.since: list[int | None] = []
        self.now_s = 0.0

    async def ask(self, operation: str, xid: Xid | None, since: int | None = None) -> Reply:
        self.since.append(since)
        reply = self._next(operation)
        if reply is None:
            raise AssertionError("a request on any connection has an answer")
        return reply

    async def hand_over(self, operation: str, xid: Xid, since: int | None = None) -> Reply | None:
        self.since.append(since)
        return self._next(f"own {operation}")

    def position(self) -> int | None:
        return 17

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic_s(self) -> float:
        return self.now_s

    def _next(self, operation: str) -> Reply | None:
        self.asked.append(operation)
        answer = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answer", "vote"),
    [(OK, Vote.YES), (Reply(XA_RDONLY, 200, "OK"), Vote.READ_ONLY), (None, Vote.READ_ONLY)],
    ids=["prepared", "nothing to commit", "no transaction begun"],
)
def test_prepare_returns_vote_of_broker(answer: Reply | None, vote: Vote) -> None:
    assert run_blocking(broker_protocol.prepare(Script(answer), XID)) is vote


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (Code.XA_RBTIMEOUT, BranchRolledBack),
        (Code.XAER_DUPID, DuplicateXid),
        (Code.XAER_RMERR, ResourceError),
        (Code.XAER_RMFAIL, ResourceFailed),
        (Code.XA_HEURMIX, BranchHeuristic),
        (None, ResourceError),
        (4711, ResourceError),
    ],
)
def test_refused_prepare_raises_error_for_xa_code(code: int | None, error: type[XaError]) -> None:
    with pytest.raises(error):
        run_blocking(broker_protocol.prepare(Script(Reply(code, 409, "no")), XID))


def test_branch_request_is_repeated_once_after_lost_connection() -> None:
    script = Script(LOST, OK)
    run_blocking(broker_protocol.end(script, XID, COMMITTED))
    assert script.asked == ["commit", "commit"]
    with pytest.raises(ResourceFailed):
        run_blocking(broker_protocol.end(Script(LOST), XID, ROLLED_BACK))


@pytest.mark.parametrize(("wanted", "found", "code"), [(COMMITTED, ROLLED_BACK, Code.XA_HEURRB), (ROLLED_BACK, COMMITTED, Code.XA_HEURCOM)])
def test_commit_or_rollback_of_branch_with_opposite_outcome_raises_heuristic(wanted: str, found: str, code: Code) -> None:
    with pytest.raises(BranchHeuristic, match=f"is {found} at the broker") as raised:
        run_blocking(broker_protocol.end(Script(known(found)), XID, wanted))
    assert raised.value.xa_code is code


@pytest.mark.parametrize("answer", [known(COMMITTED), GONE], ids=["already committed", "not known"])
def test_commit_of_ended_or_unknown_branch_raises_unknown_xid(answer: Reply) -> None:
    with pytest.raises(UnknownXid):
        run_blocking(broker_protocol.end(Script(answer), XID, COMMITTED))


def test_recover_parses_branches_from_lines_of_answer() -> None:
    text = "prepared 17 1:67:62\nheuristic-commit 18 7:6768:"
    found = run_blocking(broker_protocol.recover(Script(Reply(XA_OK, 200, "OK", text=text))))
    assert found == [Xid(1, b"g", b"b"), Xid(7, b"gh", b"")]


def test_answered_one_phase_commit_is_not_queried_again() -> None:
    script = Script(OK)
    run_blocking(broker_protocol.commit_one_phase(script, XID))
    assert script.asked == ["own commit"]
    with pytest.raises(BranchRolledBack):
        run_blocking(broker_protocol.commit_one_phase(Script(Reply(Code.XA_RBROLLBACK, 409, "no")), XID))


@pytest.mark.parametrize("answer", [ResourceError("not allowed"), FAILED, Reply(None)])
def test_one_phase_commit_with_lost_answer_stays_in_doubt_when_broker_refuses_outcome(answer: Reply | Exception) -> None:
    with pytest.raises(ResourceFailed):
        run_blocking(broker_protocol.commit_one_phase(Script(LOST, answer), XID))


@pytest.mark.parametrize("unanswered", [LOST, FAILED], ids=["connection lost", "broker failed at the request"])
def test_one_phase_commit_with_unknown_outcome_is_resolved_by_outcome_query(unanswered: Reply | Exception) -> None:
    script = Script(unanswered, BUSY, known(COMMITTED))
    run_blocking(broker_protocol.commit_one_phase(script, XID))
    assert script.asked == ["own commit", "rollback", "rollback"]
    for answer in (known(ROLLED_BACK), GONE):
        with pytest.raises(BranchRolledBack) as raised:
            run_blocking(broker_protocol.commit_one_phase(Script(unanswered, answer), XID))
        assert (raised.value.xa_code, raised.value.retriable) == (
            (Code.XA_RBCOMMFAIL, True) if unanswered is LOST else (Code.XA_RBROLLBACK, False)
        ), "the broker may fail at the same work each time"


@pytest.mark.parametrize("answers", [(LOST, known(FORGOTTEN)), (known(FORGOTTEN),)], ids=["outcome query", "repeated commit"])
def test_one_phase_commit_forgotten_by_broker_is_in_doubt(answers: tuple[Reply | Exception, ...]) -> None:
    script = Script(*answers)
    with pytest.raises(ResourceFailed):
        run_blocking(broker_protocol.commit_one_phase(script, XID))
    assert set(script.since) == {17}  # from ``since`` the broker knows whether it has forgotten outcomes in the meantime


def test_commit_of_prepared_branch_forgotten_by_broker_is_heuristic_hazard() -> None:
    with pytest.raises(BranchHeuristic) as raised:
        run_blocking(broker_protocol.end(Script(known(FORGOTTEN)), XID, COMMITTED))
    assert raised.value.xa_code is Code.XA_HEURHAZ
    with pytest.raises(UnknownXid):
        run_blocking(broker_protocol.end(Script(known(FORGOTTEN)), XID, ROLLED_BACK))


def test_one_phase_commit_stays_in_doubt_when_broker_is_busy_too_long_or_away() -> None:
    script = Script(LOST, BUSY)
    with pytest.raises(ResourceFailed, match="connection lost"):
        run_blocking(broker_protocol.commit_one_phase(script, XID))
    assert script.now_s > SETTLE_S
    with pytest.raises(ResourceFailed):
        run_blocking(broker_protocol.commit_one_phase(Script(LOST), XID))


def test_end_of_busy_branch_raises_retry_later() -> None:
    with pytest.raises(RetryLater):
        run_blocking(broker_protocol.end(Script(BUSY), XID, COMMITTED))
