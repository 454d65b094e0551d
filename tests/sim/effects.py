"""The common effects of several protocols, performed in the simulated world."""

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
    """Return what Kafka answers. Raises Unavailable, or Trimmed, in place of a fault of the model."""
    try:
        return await promise
    except KafkaFault as fault:
        raise (Trimmed if fault.code == TRIMMED else Unavailable)(str(fault)) from fault


def at_once(process: Process) -> AtOnce:
    """Return a function that runs steps of a process concurrently, in virtual time."""

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
        """Return the value. Raises the error, or TimeoutError."""
        try:
            return await self._process.within(timeout_s * 1000, self._promise)
        except TimeOut as error:
            raise TimeoutError from error


class SimulatedTimer:
    """A timer of a process."""

    def __init__(self, process: Process, delay_s: float, action: Callable[[], None]) -> None:
        self._action = action
        self._cancelled = False
        process.sleep(delay_s * 1000).then(lambda: process.do(self._fire))

    def cancel(self) -> None:
        """Cancel the timer."""
        self._cancelled = True

    def _fire(self) -> None:
        if not self._cancelled:
            self._action()


class ProcessEffects:
    """Time, timers and concurrent protocols of one process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def now_s(self) -> float:
        """Return the time of the process's monotonic clock."""
        return self.process.monotonic_ms / 1000

    def soon(self, action: Callable[[], None]) -> None:
        """Call an action after the current one."""
        self.process.after(0, action)

    def after(self, delay_s: float, action: Callable[[], None]) -> SimulatedTimer:
        """Call an action later."""
        return SimulatedTimer(self.process, delay_s, action)

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        """Run a protocol concurrently. Its errors end the run."""
        done = self.process.spawn(protocol)
        done.then(done.result)

    def waiter(self) -> PromiseWaiter[Any]:
        """Return a waiter for a later value."""
        return PromiseWaiter(self.process)

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Count troubles; say everything else for people who read the run."""
        text = f"{self.process.name}, {detail}"
        if event in TROUBLE:
            self.process.world.note(event, text)
        else:
            self.process.world.say(f"{event}: {text}")


class Clock:
    """The clocks of a process, in virtual time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def now_ms(self) -> int:
        """See bascule.xa.effects.Clock."""
        return int(self._process.wall_ms)

    def monotonic_s(self) -> float:
        """See bascule.xa.effects.Clock."""
        return self._process.monotonic_ms / 1000
