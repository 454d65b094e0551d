"""Recovery in threads: asks the resources with a timeout, and runs the passes of ``recovery_protocol``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from bascule.core.effects import run_blocking
from bascule.core.log import get_log
from bascule.threads.background import in_background
from bascule.xa.blocking import BlockingLog, BlockingParticipant, SystemClock
from bascule.xa.errors import ResourceFailed
from bascule.xa.log import DecisionLog, Outcome
from bascule.xa.recovery_protocol import Pass, RecoveryProtocol
from bascule.xa.report import TransactionReport
from bascule.xa.resource import Resource
from bascule.xa.xid import Xid

T = TypeVar("T")

_log = get_log("bascule.xa")


class Recoverer:
    """Carries out plans. Any number of recoverers may work on the same branches."""

    def __init__(
        self,
        manager: str,
        log: DecisionLog,
        resources: Collection[Resource[Any]],
        *,
        by: str,
        patient: bool,
        answer_within_s: float | None = None,
        lost_logs: Collection[str] = (),
    ) -> None:
        """``by`` names this process in its decisions. See ``plan`` for ``patient`` and TransactionManager for ``lost_logs``.

        ``answer_within_s``: a resource that takes longer, in seconds, to list or finish branches counts as unavailable, and gets no further
        request before it has answered. None waits without a limit.
        """
        participants = {resource.name: BlockingParticipant(resource, self._ask) for resource in resources}
        self._protocol = RecoveryProtocol(manager, BlockingLog(log), participants, SystemClock(), by, lost_logs=lost_logs)
        self._patient = patient
        self._answer_within_s = answer_within_s
        self._asked: dict[str, Future[Any]] = {}

    def look(self, live: Callable[[], Collection[bytes]] = tuple, *, patient: bool | None = None) -> Pass:
        """Return the plan of a pass. ``live`` returns the active transactions of this process. Raises Unavailable without the log."""
        return run_blocking(self._protocol.look(live, patient=self._patient if patient is None else patient))

    def run(self, live: Callable[[], Collection[bytes]] = tuple, *, patient: bool | None = None) -> Pass:
        """Run one pass. Raises Unavailable without the log; the result names the resources that do not answer."""
        return run_blocking(self._protocol.run(live, patient=self._patient if patient is None else patient))

    def report(self, gtrid: bytes, live: Callable[[], Collection[bytes]] = tuple) -> TransactionReport:
        """Return what is known of a transaction. Raises Unavailable without the log."""
        return run_blocking(self._protocol.report(gtrid, live))

    def finish_now(self, xid: Xid, outcome: Outcome, *, who: str = "operator", only: str = "", allow_split: bool = False) -> Outcome:
        """Finish a transaction's branches in all resources as ``who`` asks. A decision that is already stored in the log takes precedence.

        With ``only``, the branch in one resource is finished now, and recovery finishes the rest. Returns what was done. Raises XaError if
        a branch cannot be finished (recovery continues with it), InvalidInput for a transaction of another manager.

        A COMMIT that could split an undecided transaction raises InvalidInput, unless ``allow_split`` is set: before the deadline of the
        transaction, or if a resource of the manager does not answer or has no prepared branch of the transaction.
        """
        return run_blocking(self._protocol.finish_now(xid, outcome, who=who, only=only, allow_split=allow_split))

    def forget(self, xid: Xid) -> None:
        """Drop a heuristic outcome that the operator has handled, at its resource and in the log.

        Raises UnknownXid if none is recorded, InvalidInput for a branch of another manager or decision log, XaError if the resource does
        not answer: then the outcome stays recorded.
        """
        run_blocking(self._protocol.forget(xid))

    def _ask(self, resource: str, question: Callable[[], T]) -> T:
        """Return a resource's answer.

        A late answer is not used, because the log was read too long before; the next pass sees its effect.
        """
        if self._answer_within_s is None:
            return question()
        if (last := self._asked.get(resource)) is not None and not last.done():
            raise ResourceFailed("the previous request is not answered yet")
        answer = in_background(question, "bascule-xa-ask")
        self._asked[resource] = answer
        if not wait([answer], self._answer_within_s).done:
            raise ResourceFailed(f"no answer within {self._answer_within_s:g} s")
        return answer.result()
