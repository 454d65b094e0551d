"""The counts of a transaction manager: how transactions ended, how long each phase took, which are in doubt."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from bascule.core.durations import Durations
from bascule.xa.log import Heuristic
from bascule.xa.plan import Action
from bascule.xa.recovery_protocol import Pass
from bascule.xa.two_phase import TransactionPhase, TransactionStatus

#: Upper bounds, in seconds, of the histogram of phases: from a commit in memory to a resource that hangs.
BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class ManagerStatistics:
    """The counts at one moment.

    ``ended`` counts the outcomes that were reported to applications. ``in_doubt`` has the transactions that are not finished in all
    resources, as far as this process knows, and for how many seconds it has known that. ``heuristics`` are recorded in the log and not
    forgotten.
    """

    ended: Mapping[TransactionStatus, int]
    phases: Mapping[TransactionPhase, Durations]
    in_doubt: Mapping[bytes, float]
    heuristics: tuple[Heuristic, ...]


class Statistics:
    """Thread-safe counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = dict.fromkeys((TransactionStatus.COMMITTED, TransactionStatus.ROLLED_BACK, TransactionStatus.IN_DOUBT), 0)
        self._phases = dict.fromkeys(TransactionPhase, Durations.none(BOUNDS_S))
        self._in_doubt: dict[bytes, float] = {}
        self._heuristics: tuple[Heuristic, ...] = ()

    def ended(
        self, gtrid: bytes, status: TransactionStatus, times_s: Mapping[TransactionPhase, float], pending: bool, now_s: float
    ) -> None:
        """Count the end of a transaction of this process. ``pending`` says that recovery has something left to do."""
        with self._lock:
            self._ended[status] += 1
            for phase, seconds in times_s.items():
                self._phases[phase] = self._phases[phase].with_these((seconds,))
            if pending:
                self._in_doubt[gtrid] = now_s

    def known(self) -> Collection[bytes]:
        """Return the transactions in doubt."""
        with self._lock:
            return set(self._in_doubt)

    def recovered(self, done: Pass, before: Collection[bytes], now_s: float) -> None:
        """Record the end of a recovery pass that began when ``before`` was in doubt."""
        over = {each.xid for each in done.heuristics}  # they wait for the operator, and no branch is prepared
        waiting = {step.xid.gtrid for step in done.steps if step.action in (Action.WAIT, Action.FOREIGN) and step.xid not in over}
        left = waiting | {step.xid.gtrid for step in done.failed}
        with self._lock:
            if not done.unreachable:  # otherwise the state of the silent resource is unknown
                for gtrid in set(before) - left:
                    self._in_doubt.pop(gtrid, None)
            for gtrid in left:
                self._in_doubt.setdefault(gtrid, now_s)
            self._heuristics = tuple(done.heuristics)

    def snapshot(self, now_s: float) -> ManagerStatistics:
        """Return the numbers of this moment."""
        with self._lock:
            in_doubt = {gtrid: now_s - since_s for gtrid, since_s in self._in_doubt.items()}
            return ManagerStatistics(dict(self._ended), dict(self._phases), in_doubt, self._heuristics)
