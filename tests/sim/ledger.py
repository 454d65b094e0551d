"""What a transaction manager of the simulation works with beside the broker: its decision log, and a database that takes part.

Both are never in trouble themselves. But a call is on its way when its caller dies, and an answer may never come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from bascule.core.errors import Unavailable
from bascule.xa.log import Decision, Heuristic, LogState, Outcome
from bascule.xa.xid import Xid
from tests.sim.world import Promise, World

T = TypeVar("T")
#: How long a call or its answer is on its way at most, and how long its caller waits.
WAY_MS: Final = 6.0
PATIENCE_MS: Final = 60.0


@dataclass(slots=True)
class Mishaps:
    """How often something goes wrong for a manager: what it says to the broker is held up, an answer is lost, the database votes no."""

    slowness: float = 0.0
    lost_answers: float = 0.0
    refusals: float = 0.0


class Remote:
    """Carries out calls some time later, whatever has become of the caller."""

    def __init__(self, world: World, mishaps: Mishaps) -> None:
        self.world = world
        self.mishaps = mishaps

    def call(self, effect: Callable[[], T]) -> Promise[T]:
        """The promise fails with Unavailable where the answer is lost: the call has taken effect, as far as its caller can tell or not."""
        answer: Promise[T] = Promise()
        self.world.after(self.world.random.random() * WAY_MS, self._carry_out, effect, answer)
        return answer

    def _carry_out(self, effect: Callable[[], T], answer: Promise[T]) -> None:
        value = effect()
        if self.world.chance(self.mishaps.lost_answers):
            self.world.note("lose verdict")
            self.world.after(PATIENCE_MS, answer.fail, Unavailable("no answer"))
        else:
            self.world.after(self.world.random.random() * WAY_MS, answer.keep, value)


class Log(Remote):
    """The decision log. ``standing`` remembers every outcome for the judgement."""

    def __init__(self, world: World, mishaps: Mishaps) -> None:
        super().__init__(world, mishaps)
        self.state = LogState()
        self.standing: dict[bytes, Outcome] = {}

    def decide(self, decision: Decision) -> Promise[Decision]:
        """See DecisionLog."""
        return self.call(lambda: self._decide(decision))

    def _decide(self, decision: Decision) -> Decision:
        self.state.add(decision)
        stands = self.state.decisions[decision.gtrid]
        self.standing.setdefault(decision.gtrid, stands.outcome)
        return stands

    def read(self) -> Promise[LogState]:
        """See DecisionLog."""
        return self.call(lambda: LogState(dict(self.state.decisions), dict(self.state.heuristics)))

    def record(self, heuristic: Heuristic) -> Promise[None]:
        """See DecisionLog."""
        return self.call(lambda: self.state.add(heuristic))

    def forget(self, gtrid: bytes) -> None:
        """See DecisionLog. Nobody waits for it."""
        self.call(lambda: self.state.decisions.pop(gtrid, None))

    def forget_heuristic(self, xid: Xid) -> None:
        """See DecisionLog. Nobody waits for it."""
        self.call(lambda: self.state.heuristics.pop(xid, None))

    @property
    def open(self) -> list[str]:
        """What is not forgotten, a rollback aside: that one stands for a day."""
        commits = [str(gtrid) for gtrid, decision in self.state.decisions.items() if decision.outcome is Outcome.COMMIT]
        return commits + [str(xid) for xid in self.state.heuristics]


class Ledger(Remote):
    """A database with a row for each transaction that has committed in it. At times it votes no."""

    def __init__(self, world: World, mishaps: Mishaps) -> None:
        super().__init__(world, mishaps)
        self.prepared: dict[Xid, None] = {}
        self.rows: set[bytes] = set()

    def prepare(self, xid: Xid) -> Promise[bool]:
        """The vote."""
        return self.call(lambda: self._prepare(xid))

    def _prepare(self, xid: Xid) -> bool:
        votes = not self.world.chance(self.mishaps.refusals)
        if votes:
            self.prepared[xid] = None
        return votes

    def end(self, xid: Xid, outcome: Outcome) -> Promise[None]:
        """Of a branch that is prepared; another one was told before."""
        return self.call(lambda: self._end(xid, outcome))

    def _end(self, xid: Xid, outcome: Outcome) -> None:
        if xid in self.prepared:
            del self.prepared[xid]
            if outcome is Outcome.COMMIT:
                self.rows.add(xid.gtrid)

    def recover(self) -> Promise[list[Xid]]:
        """The branches that are prepared."""
        return self.call(lambda: list(self.prepared))
