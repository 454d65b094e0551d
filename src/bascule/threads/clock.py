"""The clock for leases, fences and sessions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

#: ``time.monotonic`` does not advance while the machine is suspended; on Linux CLOCK_BOOTTIME does.
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: Returns monotonic seconds, which also advance while the process or the machine is suspended. A call of a Python function would cost more
#: than the clock, which the broker reads several times for each message.
elapsed_s: Final[Callable[[], float]] = partial(time.clock_gettime, _CLOCK)
