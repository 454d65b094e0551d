"""The signals that ask a program to end, for its main thread to wait for."""

from __future__ import annotations

import signal
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Self


class StopSignals:
    """Set by SIGTERM and SIGINT within ``with``.

    An Event cannot be used: its ``set`` in a signal handler may need the lock that the interrupted ``wait`` holds.
    """

    def __init__(self, *, impatient: bool = False) -> None:
        """``impatient``: a second signal ends the process at once."""
        self._impatient = impatient
        self._came: SimpleQueue[None] = SimpleQueue()

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        self._before = self.listen()
        return self

    def __exit__(self, *_error: object) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> dict[signal.Signals, Any]:
        """Install the signal handlers again after a library has replaced them. Return the replaced handlers."""
        return {number: signal.signal(number, self._asked) for number in (signal.SIGTERM, signal.SIGINT)}

    def set(self) -> None:
        """Ask the program to end."""
        self._came.put(None)

    def is_set(self) -> bool:
        """Return whether the program should end."""
        return not self._came.empty()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds; return whether the program should end."""
        with suppress(Empty):
            self._came.get(timeout=timeout_s)
            self.set()
        return self.is_set()

    def _asked(self, _signal: int, _frame: FrameType | None) -> None:
        if self._impatient and self.is_set():
            raise KeyboardInterrupt
        self.set()
