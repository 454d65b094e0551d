"""The clock for leases, fences and sessions."""

from __future__ import annotations

import time
from typing import Final

#: ``time.monotonic`` does not advance while the machine is suspended; on Linux CLOCK_BOOTTIME does.
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed_s() -> float:
    """Return monotonic seconds, which also advance while the process or the machine is suspended."""
    return time.clock_gettime(_CLOCK)
