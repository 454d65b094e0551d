"""Many simulated runs, in several processes, and their coverage: troubles, states and transitions of the protocols."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Final, NoReturn

from bascule.core.states import TABLES
from tests.sim.simulation import Simulation
from tests.sim.world import TROUBLE

#: Seeds that a forked process runs. It never collects garbage, which would cost a sixth of its time, and needs 75 MB at its end.
CHUNK: Final = 50
PROCESSES: Final = 2
#: A run takes a tenth of a second; one that takes this long does not end.
RUN_LIMIT_S: Final = 60.0
#: Troubles that have their own simulations (``tests.sim.adapter``, ``branches``, ``hosts``).
APART: Final = frozenset(
    {
        "kill member", "stop member", "rebalance", "set group back", "read log anew", "finish claim", "recover claim", "fail endpoint",
        "retry record", "dead-letter record", "trim branches", "end open transaction", "send beside", "refuse beside",
        "hold up statement", "remove log", "write late",
    }
)  # fmt: skip


@dataclass(slots=True)
class Report:
    """The results and the coverage of a number of runs."""

    done: int = 0
    bad: dict[int, str] = field(default_factory=dict)  # anomalies by seed
    idle: list[int] = field(default_factory=list)  # seeds that sent nothing
    troubles: Counter[str] = field(default_factory=Counter)
    transitions: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # machine, state, event

    def add(self, other: Report) -> None:
        """Add the results of other runs."""
        self.done += other.done
        self.bad |= other.bad
        self.idle += other.idle
        self.troubles += other.troubles
        self.transitions += other.transitions

    @property
    def unseen(self) -> set[str]:
        """Return the troubles that no run has seen."""
        return TROUBLE.keys() - APART - self.troubles.keys()

    def lines(self) -> Iterator[str]:
        """Yield lines that say what was covered, and what was not."""
        yield f"{self.done} runs, {len(self.bad)} with anomalies"
        yield f"troubles: {len(self.troubles)} of {len(TROUBLE.keys() - APART)} seen" + _missing(self.unseen)
        for name, table in sorted(TABLES.items()):
            taken = {(state, event) for machine, state, event in self.transitions if machine == name}
            every = {(state.name, event.name) for state, event in table}
            after = {after.name for (state, event), after in table.items() if (state.name, event.name) in taken}
            reached = after | {state for state, _ in taken}
            states = {state.name for state in table.states}
            yield f"{name}: {len(reached)} of {len(states)} states" + _missing(states - reached)
            yield f"{name}: {len(taken)} of {len(every)} transitions" + _missing({f"{state} on {event}" for state, event in every - taken})


def _missing(names: set[str]) -> str:
    return f"; not: {', '.join(sorted(names))}" if names else ""


def run(seed: int) -> Report:
    """Run one seed. Transitions count for this process's tables."""
    report = Report(done=1)
    for table in TABLES.values():
        table.taken = Counter()
    simulation = Simulation(seed)
    try:
        tally = simulation.run()
    except Exception as error:
        raise RuntimeError(f"seed {seed} ends with {type(error).__name__}: {error}") from error
    if tally.anomalies:
        report.bad[seed] = str(tally)
    if not tally.sent:
        report.idle.append(seed)
    report.troubles = simulation.world.seen
    for name, table in TABLES.items():
        report.transitions.update({(name, state.name, event.name): count for (state, event), count in (table.taken or {}).items()})
    return report


@contextmanager
def _limited(seed: int) -> Iterator[None]:
    """Raise TimeoutError, whose traceback shows where the run is, in a run that does not end."""

    def late(*_: int | FrameType | None) -> None:
        raise TimeoutError(f"seed {seed} does not end within {RUN_LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, RUN_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_chunk(seeds: range) -> Report:
    """Run seeds one after another, in a process for this purpose."""
    report = Report()
    for seed in seeds:
        with _limited(seed):
            report.add(run(seed))
    return report


def run_forked(seeds: range) -> Report:
    """Run seeds in a forked process, which shares the imports and takes its garbage with it. Raises the error that ends it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _tell(seeds, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if not said:
        raise RuntimeError(f"the process of {seeds} has died")
    result: Report | BaseException = pickle.loads(said)
    if isinstance(result, BaseException):
        raise result
    return result


def _tell(seeds: range, writing: int) -> NoReturn:
    """Run seeds, write the report or the error, and end the process."""
    result: Report | BaseException
    try:
        result = run_chunk(seeds)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        result = error
    with os.fdopen(writing, "wb") as pipe:
        pickle.dump(result, pipe)
    os._exit(0)


def _prepare() -> None:
    logging.disable()
    gc.disable()


def run_seeds(first: int, count: int | None = None, *, seconds: float | None = None, processes: int = PROCESSES) -> Report:
    """Run ``count`` seeds from the first one on, or as many as begin within ``seconds``."""
    report = Report()
    chunks = _chunks(first, count, time.monotonic() + seconds if seconds is not None else None)
    # Not multiprocessing.Pool, which waits without end if one of its processes dies.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _prepare) as pool:
        running = deque(pool.submit(run_forked, chunk) for chunk in islice(chunks, processes))
        while running:
            report.add(running.popleft().result())
            running.extend(pool.submit(run_forked, chunk) for chunk in islice(chunks, 1))
    return report


def _chunks(first: int, count: int | None, deadline: float | None) -> Iterator[range]:
    end = None if count is None else first + count
    while (end is None or first < end) and (deadline is None or time.monotonic() < deadline):
        after = first + CHUNK if end is None else min(first + CHUNK, end)
        yield range(first, after)
        first = after
