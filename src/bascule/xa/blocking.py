"""The effects of the XA protocols, performed by the calling thread. None of these methods suspends: see ``run_blocking``."""

from __future__ import annotations

import contextvars
import functools
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeGuard, TypeVar, cast

from bascule.core.effects import run_blocking
from bascule.threads.background import in_background
from bascule.xa.log import Decision, DecisionLog, Heuristic, LogState, Outcome
from bascule.xa.resource import Decides, Resource, TellsOutcome, Vote, priority_of
from bascule.xa.xid import Xid

T = TypeVar("T")
#: The answer of a step that was not run.
_NOT_TAKEN: Final = RuntimeError("not begun")


def directly(_resource: str, call: Callable[[], T]) -> T:
    """Call a resource, and wait for its answer without a timeout."""
    return call()


async def in_threads(steps: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T | BaseException]:
    """See AtOnce. The calling thread runs the first step, and those for which no thread can be started.

    If the calling thread is interrupted (KeyboardInterrupt), the interrupt is raised after every step that has begun has ended: no call on
    a resource outlives the decision that the transaction makes because of the interrupt. If it comes before all threads are started, no
    step begins.
    """
    parallel = _ParallelSteps(steps)
    try:  # twice: an interrupt may come between any two lines
        try:
            parallel.take()
        finally:
            parallel.wait()
    finally:
        parallel.wait()
    return parallel.answers


class _ParallelSteps(Generic[T]):
    """Runs steps in threads at the same time. The threads use queues: unlike a lock, a queue cannot stay locked after an interrupt."""

    def __init__(self, steps: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> None:
        self.answers: list[T | BaseException] = [_NOT_TAKEN] * len(steps)
        self._steps = steps
        self._at_work: set[int] = set()  # the places of steps that have threads of their own
        self._may_begin: SimpleQueue[bool] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()

    def take(self) -> None:
        """Run all steps. When this returns, those in other threads may begin."""
        own = [*range(len(self._steps))[:1], *self._start_threads()]
        for _ in self._steps:
            self._may_begin.put(True)
        for place in own:
            self.answers[place] = _ended(self._steps[place])

    def _start_threads(self) -> Sequence[int]:
        """Start a thread for each step but the first. Return the places of those for which none can be started."""
        for place in range(1, len(self._steps)):
            run = contextvars.copy_context().run
            try:
                in_background(partial(run, self._take_in_thread, place), "bascule-xa-phase")
            except RuntimeError:  # the process has its maximum number of threads
                return range(place, len(self._steps))
            self._at_work.add(place)  # before the thread may begin
        return ()

    def _take_in_thread(self, place: int) -> None:
        if self._may_begin.get():
            self.answers[place] = _ended(self._steps[place])
        self._at_work.discard(place)
        self._ended.put(None)

    def wait(self) -> None:
        """Return when no step is running, and let no further step begin. An interrupt is raised after that."""
        interrupt: BaseException | None = None
        while self._at_work:
            try:
                self._may_begin.put(False)
                self._ended.get()
            except BaseException as error:
                interrupt = error
        self._may_begin.put(False)  # for a thread whose start was interrupted
        if interrupt is not None:
            raise interrupt


def _ended(step: Callable[[], Coroutine[Any, Any, T]]) -> T | BaseException:
    try:
        return run_blocking(step())
    except BaseException as error:
        return error


@functools.cache
def _has(kind: Hashable, *names: str) -> bool:
    """Return whether a class has all attributes. ``isinstance`` with a protocol looks at each of them again in every call."""
    return all(hasattr(kind, name) for name in names)


def _decides(resource: object) -> TypeGuard[Decides]:
    return _has(cast("Hashable", type(resource)), "decides", "commit_deciding", "decide", "decisions", "forget_decisions")


def _tells_outcome(resource: object) -> TypeGuard[TellsOutcome]:
    return _has(cast("Hashable", type(resource)), "token", "outcome")


class BlockingParticipant:
    """A resource. ``within`` makes each call; it gets the name of the resource and the call."""

    def __init__(self, resource: Resource[Any], within: Callable[[str, Callable[[], Any]], Any] = directly) -> None:
        self.name = resource.name
        self.priority = priority_of(resource)
        self._resource = resource
        self._within = within

    @property
    def decider(self) -> BlockingDecider | None:
        """See Participant."""
        resource = self._resource
        return BlockingDecider(self.name, resource, self._within) if _decides(resource) else None

    @property
    def decides(self) -> bool:
        """See Participant."""
        return _decides(self._resource) and bool(self._resource.decides)

    async def start(self, xid: Xid, *, timeout_s: float) -> Any:
        """See Participant."""
        return self._within(self.name, lambda: self._resource.start(xid, timeout_s=timeout_s))

    async def end(self, xid: Xid, *, success: bool) -> None:
        """See Participant."""
        self._within(self.name, lambda: self._resource.end(xid, success=success))

    async def prepare(self, xid: Xid) -> Vote:
        """See Participant."""
        vote: Vote = self._within(self.name, lambda: self._resource.prepare(xid))
        return vote

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Participant."""
        if one_phase:
            self._within(self.name, lambda: self._resource.commit(xid, one_phase=True))
        else:
            self._within(self.name, lambda: self._resource.commit(xid))

    async def rollback(self, xid: Xid) -> None:
        """See Participant."""
        self._within(self.name, lambda: self._resource.rollback(xid))

    async def recover(self) -> Sequence[Xid]:
        """See Participant."""
        found: Sequence[Xid] = self._within(self.name, self._resource.recover)
        return found

    async def forget(self, xid: Xid) -> None:
        """See Participant."""
        self._within(self.name, lambda: self._resource.forget(xid))

    async def token(self, xid: Xid) -> str:
        """See Participant. No IO: the resource has the token from the prepare."""
        return self._resource.token(xid) if _tells_outcome(self._resource) else ""

    async def outcome(self, xid: Xid, token: str) -> Outcome | None:
        """See Participant."""
        resource = self._resource
        if not _tells_outcome(resource):
            return None
        found: Outcome | None = self._within(self.name, lambda: resource.outcome(xid, token))
        return found


class BlockingDecider:
    """The table of decisions of a resource."""

    def __init__(self, name: str, resource: Decides, within: Callable[[str, Callable[[], Any]], Any]) -> None:
        self._name, self._resource, self._within = name, resource, within

    async def commit_deciding(self, xid: Xid, decision: Decision) -> None:
        """See Decider."""
        self._within(self._name, lambda: self._resource.commit_deciding(xid, decision))

    async def decide(self, decision: Decision) -> Decision:
        """See Decider."""
        stands: Decision = self._within(self._name, lambda: self._resource.decide(decision))
        return stands

    async def decisions(self, manager: str) -> Sequence[Decision]:
        """See Decider."""
        found: Sequence[Decision] = self._within(self._name, lambda: self._resource.decisions(manager))
        return found

    async def forget_decisions(self, gtrids: Iterable[bytes]) -> None:
        """See Decider."""
        self._within(self._name, lambda: self._resource.forget_decisions(gtrids))


class BlockingLog:
    """A decision log."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    async def decide(self, decision: Decision) -> Decision:
        """See Decisions."""
        return self._log.decide(decision)

    async def read(self) -> LogState:
        """See Decisions."""
        return self._log.read()

    async def record(self, heuristic: Heuristic) -> None:
        """See Decisions."""
        self._log.record(heuristic)

    async def forget(self, gtrids: Iterable[bytes]) -> None:
        """See Decisions."""
        self._log.forget(gtrids)

    async def forget_heuristic(self, xid: Xid) -> None:
        """See Decisions."""
        self._log.forget_heuristic(xid)


class SystemClock:
    """The clocks of the machine."""

    def now_ms(self) -> int:
        """See Clock."""
        return now_ms()

    def monotonic_s(self) -> float:
        """See Clock."""
        return time.monotonic()


def now_ms() -> int:
    """Return the time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
