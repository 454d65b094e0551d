"""The signals that ask a program to end, as what its main thread waits for."""

from __future__ import annotations

import signal
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Self


class StopSignals:
    """Set by SIGTERM and SIGINT, within ``with``. An Event would not do: its ``set`` may meet the lock of the ``wait`` it interrupts."""

    def __init__(self, *, impatient: bool = False) -> None:
        """``impatient``: a second signal does not wait for an orderly end."""
        self._impatient = impatient
        self._came: SimpleQueue[None] = SimpleQueue()

    def __enter__(self) -> Self:
        """Signals set it from now on."""
        self._before = self.listen()
        return self

    def __exit__(self, *_error: object) -> None:
        """They do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> dict[signal.Signals, Any]:
        """Once more, where a library has set handlers of its own. Gives those that were there."""
        return {number: signal.signal(number, self._asked) for number in (signal.SIGTERM, signal.SIGINT)}

    def set(self) -> None:
        """The program is to end."""
        self._came.put(None)

    def is_set(self) -> bool:
        """Whether the program is to end."""
        return not self._came.empty()

    def wait(self, timeout_s: float) -> bool:
        """Whether the program is to end, at once when it is."""
        with suppress(Empty):
            self._came.get(timeout=timeout_s)
            self.set()
        return self.is_set()

    def _asked(self, _signal: int, _frame: FrameType | None) -> None:
        if self._impatient and self.is_set():
            raise KeyboardInterrupt
        self.set()
