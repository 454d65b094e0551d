"""How many messages a second the producers of one user may send. Their credit is limited, so no message is refused."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

#: The part of a second for which one producer gets credit at once: credit that an idle producer holds is not there for the others.
SLICE_S: Final = 0.1
#: Producers that get credit in one turn of the event loop; each costs a frame.
GRANTS_PER_TURN: Final = 100
#: Processor time after which no further producer of a turn gets credit: each producer looks for room in all subscriptions of its topic.
GRANTS_S: Final = 0.005


class SendAllowance:
    """A token bucket with the allowance of one second. A token is credit for one message; 0 messages a second stands for no limit."""

    __slots__ = ("_at_s", "_clock", "_per_s", "_serving", "_slice", "_timer", "_tokens", "_waiting")

    def __init__(self, per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._at_s = clock()
        self._slice = max(1, math.ceil(per_s * SLICE_S))
        self._tokens = float(self._slice)  # not the whole second, so that a user who reconnects gains little
        self._waiting: dict[object, Callable[[], object]] = {}  # in the order of their turns
        self._serving = False  # it is the turn of a producer that has waited
        self._timer: asyncio.Handle | None = None

    @property
    def limited(self) -> bool:
        """Return whether there is a limit."""
        return bool(self._per_s)

    def take(self, wanted: int) -> int:
        """Take credit for at most ``wanted`` messages. Return 0 if there is none now, or if it is the turn of others."""
        if not self._per_s:
            return wanted
        if self._waiting and not self._serving:
            return 0
        taken = min(wanted, self._slice, int(self._filled()))
        self._tokens -= taken
        return taken

    def change(self, per_s: int) -> None:
        """Set another number of messages a second. Credit that producers hold stays."""
        if per_s == self._per_s:
            return
        self._tokens = min(self._filled(), float(per_s)) if self._per_s else 0.0
        self._at_s = self._clock()
        self._per_s = per_s
        self._slice = max(1, math.ceil(per_s * SLICE_S))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._wait()

    def put_back(self, unused: int) -> None:
        """Return credit that a producer has not used."""
        if self._per_s:
            self._tokens = min(self._tokens + unused, float(self._per_s))

    def when_allowed(self, producer: object, go_on: Callable[[], object]) -> None:
        """Call ``go_on`` when there is credit and it is the turn of ``producer``."""
        self._waiting[producer] = go_on
        self._wait()

    def forget(self, producer: object) -> None:
        """Cancel a call of ``when_allowed``."""
        self._waiting.pop(producer, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _filled(self) -> float:
        now_s = self._clock()
        self._tokens = min(self._tokens + (now_s - self._at_s) * self._per_s, float(self._per_s))
        self._at_s = now_s
        return self._tokens

    def _wait(self) -> None:
        if self._timer is None:
            missing_s = (1.0 - self._filled()) / self._per_s if self._per_s else 0.0
            self._timer = asyncio.get_running_loop().call_later(max(0.0, missing_s), self._serve)

    def _serve(self) -> None:
        self._timer, self._serving = None, True
        end_s = time.thread_time() + GRANTS_S
        try:
            for number in range(min(len(self._waiting), GRANTS_PER_TURN)):
                if (self._per_s and self._filled() < 1.0) or (number and time.thread_time() >= end_s):
                    break
                self._waiting.pop(next(iter(self._waiting)))()
        finally:
            self._serving = False
            if self._waiting:
                self._wait()


#: The allowance of a client that has not opened its connection.
UNLIMITED_SENDING: Final = SendAllowance(0)
