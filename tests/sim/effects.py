"""Effects that several protocols have in common, performed in the simulated world."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from bascule.core.effects import Severity
from bascule.core.errors import Unavailable
from bascule.journal.reading import Trimmed
from bascule.xa.effects import AtOnce
from tests.sim.kafka import TRIMMED, KafkaFault
from tests.sim.world import TROUBLE, Process, Promise, TimeOut

T = TypeVar("T")


async def answered(promise: Promise[T]) -> T:
    """What Kafka says. Raises Unavailable, or Trimmed, in place of a fault of the model."""
    try:
        return await promise
    except KafkaFault as fault:
        raise (Trimmed if fault.code == TRIMMED else Unavailable)(str(fault)) from fault


def at_once(process: Process) -> AtOnce:
    """Steps that a process takes at the same time, in virtual time."""

    async def take(steps: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T | BaseException]:
        promises = [process.spawn(step()) for step in steps]
        results: list[T | BaseException] = []
        for each in promises:
            try:
                results.append(await each)
            except Exception as error:
                results.append(error)
        return results

    return take


class PromiseWaiter(Generic[T]):
    """A value that comes later: see bascule.core.effects.Waiter."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._promise: Promise[T] = Promise()
        self.keep = self._promise.keep
        self.fail = self._promise.fail

    async def wait(self, timeout_s: float) -> T:
        """The value. Raises the error, or TimeoutError."""
        try:
            return await self._process.within(timeout_s * 1000, self._promise)
        except TimeOut as error:
            raise TimeoutError from error


class SimulatedTimer:
    """Something that a process will do later."""

    def __init__(self, process: Process, delay_s: float, action: Callable[[], None]) -> None:
        self._action = action
        self._cancelled = False
        process.sleep(delay_s * 1000).then(lambda: process.do(self._fire))

    def cancel(self) -> None:
        """Do not do it."""
        self._cancelled = True

    def _fire(self) -> None:
        if not self._cancelled:
            self._action()


class ProcessEffects:
    """Time, timers, and protocols beside what is being done, in one process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def now_s(self) -> float:
        """The time of the process's monotonic clock."""
        return self.process.monotonic_ms / 1000

    def soon(self, action: Callable[[], None]) -> None:
        """After what is being done."""
        self.process.after(0, action)

    def after(self, delay_s: float, action: Callable[[], None]) -> SimulatedTimer:
        """Later."""
        return SimulatedTimer(self.process, delay_s, action)

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        """Beside what is being done. What it raises ends the run."""
        done = self.process.spawn(protocol)
        done.then(done.result)

    def waiter(self) -> PromiseWaiter[Any]:
        """A value that comes later."""
        return PromiseWaiter(self.process)

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Trouble is counted; anything else is for whoever reads the run."""
        text = f"{self.process.name}, {detail}"
        if event in TROUBLE:
            self.process.world.note(event, text)
        else:
            self.process.world.say(f"{event}: {text}")
