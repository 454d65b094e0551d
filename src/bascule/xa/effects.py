"""The effects of the XA protocols: calls on resources, on the decision log, and the clocks.

``two_phase`` and ``recovery_protocol`` await them. ``blocking`` performs them in the calling thread; the simulation performs them in
virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from bascule.xa.log import Decision, Heuristic, LogState, Outcome
from bascule.xa.resource import Vote
from bascule.xa.xid import Xid

T = TypeVar("T")


class Decider(Protocol):
    """The calls on the table of decisions of a resource. See ``Decides``."""

    async def commit_deciding(self, xid: Xid, decision: Decision) -> None:
        """Commit a branch together with the decision."""

    async def decide(self, decision: Decision) -> Decision:
        """Store a decision and return the one that counts."""

    async def decisions(self, manager: str) -> Sequence[Decision]:
        """Return the decisions of a manager."""

    async def forget_decisions(self, gtrids: Iterable[bytes]) -> None:
        """Delete decisions, at some time."""


class Participant(Protocol):
    """The calls on one resource. See ``Resource`` for what each call promises and raises."""

    @property
    def name(self) -> str:
        """The name of the resource."""

    @property
    def priority(self) -> int:
        """See CommitPriority."""

    @property
    def decider(self) -> Decider | None:
        """The resource's table of decisions, or None if it has none."""

    @property
    def decides(self) -> bool:
        """Whether its branches cannot be prepared, so that its commit is the decision. Known once a branch has started."""

    async def start(self, xid: Xid, *, timeout_s: float) -> Any:
        """Begin a branch and return the application's handle."""

    async def end(self, xid: Xid, *, success: bool) -> None:
        """End the work of a branch."""

    async def prepare(self, xid: Xid) -> Vote:
        """Return the vote of a branch."""

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """Commit a branch."""

    async def rollback(self, xid: Xid) -> None:
        """Roll a branch back."""

    async def recover(self) -> Sequence[Xid]:
        """Return the prepared branches of the resource, of all managers."""

    async def forget(self, xid: Xid) -> None:
        """Drop a heuristic outcome."""

    async def token(self, xid: Xid) -> str:
        """Return the token by which ``outcome`` finds out the outcome of a prepared branch in any process, or "" without support."""

    async def outcome(self, xid: Xid, token: str) -> Outcome | None:
        """Return how a branch has ended, or None if the resource does not know. Raises XaError if the resource cannot answer now."""


class AtOnce(Protocol):
    """Runs steps at the same time."""

    async def __call__(self, steps: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T | BaseException]:
        """Return the result or the error of each step, in order, after all have ended."""


def raise_first(results: Sequence[object]) -> None:
    """Raise the first error in the results of AtOnce, with an error that ends the process before others."""
    errors = [each for each in results if isinstance(each, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, Exception)):
        raise error


class Decisions(Protocol):
    """The calls on the decision log. See ``DecisionLog``."""

    async def decide(self, decision: Decision) -> Decision:
        """Store a decision and return the one that counts."""

    async def read(self) -> LogState:
        """Return all stored entries."""

    async def record(self, heuristic: Heuristic) -> None:
        """Store a heuristic outcome."""

    async def forget(self, gtrids: Iterable[bytes]) -> None:
        """Delete decisions, at some time."""

    async def forget_heuristic(self, xid: Xid) -> None:
        """Delete a heuristic outcome."""


class Clock(Protocol):
    """The clocks of the process."""

    def now_ms(self) -> int:
        """Return the time in milliseconds since the epoch."""

    def monotonic_s(self) -> float:
        """Return the seconds of a monotonic clock."""
