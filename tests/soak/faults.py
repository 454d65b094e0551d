"""Faults of the processes, drawn from a seed: every kind occurs, in a random order."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from tests.soak.plan import Plan
from tests.soak.site import Site, log_uniform

#: How long a fault waits for its target; then another kind is tried.
TARGET_WAIT_S = 20.0
#: Probability that a driver is killed while it starts; otherwise it must be ready.
KILLED_IN_START = 0.25
#: Probability that a fault does not wait until the previous one is over.
OVERLAPPING = 0.4
#: Random moments may lie beyond their mean; this keeps the faults within the time.
HASTE = 0.8
RECOVERY_WAIT_S = 30.0
#: Pause between faults on a machine so slow that the time ends before the faults are done.
GAP_S = 1.0


class Fault(NamedTuple):
    """A fault: what was done, when (s since the epoch), and for how long the part was unavailable."""

    at_s: float
    kind: str
    target: str
    away_s: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.target}, {self.away_s:.1f} s"


class Faults:
    """Injects faults into a site. ``tell`` gets a line for each fault."""

    def __init__(self, site: Site, plan: Plan, tell: Callable[[str], None]) -> None:
        self.done: list[Fault] = []
        self._site = site
        self._plan = plan
        self._tell = tell
        self._random = random.Random(plan.seed)
        self._turn: list[str] = []
        self._early = False  # a driver may be killed while it starts

    def run(self) -> None:
        """Inject faults until the time is over, the planned number is reached and every kind has occurred."""
        begun_s = time.monotonic()
        while True:
            left_s = self._plan.seconds - (time.monotonic() - begun_s)
            left = max(self._plan.faults - len(self.done), len(set(self._plan.kinds) - {fault.kind for fault in self.done}))
            if not left and left_s <= 0:
                return
            gap_s = self._random.expovariate(1.0) * max(left_s / max(left, 1), GAP_S) * HASTE
            overlapping = self._random.random() < OVERLAPPING
            self._site.wait(lambda: False, gap_s)
            if not left and time.monotonic() - begun_s >= self._plan.seconds:
                return
            if not overlapping:
                self._site.wait(self._site.well, RECOVERY_WAIT_S)
            self._strike()

    def _strike(self) -> None:
        """Inject the next kind that finds its target."""
        if not self._turn:
            self._turn = self._random.sample(self._plan.kinds, len(self._plan.kinds))
        self._early = self._random.random() < KILLED_IN_START
        for kind in list(self._turn):
            action, _, victim = kind.partition("-")
            away_s = self._away_s(action)
            find: Callable[[], Any] = getattr(self, f"_find_{victim}")
            found: list[Any] = []

            def there(find: Callable[[], Any] = find, found: list[Any] = found) -> bool:
                found[:] = [find()]
                return found[0] is not None

            if self._site.wait(there, TARGET_WAIT_S):
                self._turn.remove(kind)
                at_s = time.time()
                getattr(self, f"_{action}")(victim, found[0], away_s)
                self.done.append(Fault(at_s, kind, str(found[0]), away_s))
                self._tell(f"{len(self.done)}. {self.done[-1]}")
                return

    def _away_s(self, action: str) -> float:
        if action == "pause":
            return log_uniform(self._random, self._plan.pause_min_s, self._plan.pause_max_s)
        return self._random.random() * self._plan.down_max_s

    # -- targets: None while there is none ---------------------------------------------------------------------------------------------

    def _find_active(self) -> str | None:
        return self._site.active()

    def _find_standby(self) -> str | None:
        return self._site.standby()

    def _find_over(self) -> str | None:
        return self._site.active() if self._site.standby() is not None else None

    def _find_driver(self) -> str | None:
        ready = self._site.driver_ready() or (self._early and self._site.up("driver"))
        return "driver" if ready else None

    def _find_worker(self) -> int | None:
        workers = self._site.workers() if self._site.driver_ready() else []
        return self._random.choice(workers) if workers else None

    def _find_kafka(self) -> str | None:
        return "kafka" if self._site.up("kafka") else None

    # -- actions -----------------------------------------------------------------------------------------------------------------------

    def _kill(self, victim: str, target: Any, away_s: float) -> None:
        if victim == "worker":
            with suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)
        else:
            self._site.kill(target, away_s)

    def _hand(self, _victim: str, target: str, away_s: float) -> None:
        self._site.terminate(target, away_s)

    def _pause(self, victim: str, target: Any, away_s: float) -> None:
        if victim == "worker":
            self._site.pause("worker", [target], away_s)
        elif victim == "driver":
            self._site.pause("driver", self._site.driver_pids(), away_s)
        else:
            self._site.pause(target, [pid for pid in [self._site.parts[target].pid()] if pid is not None], away_s)
