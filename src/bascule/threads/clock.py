"""The clock that leases, fences and sessions are measured by."""

from __future__ import annotations

import time
from typing import Final

#: ``time.monotonic`` stands still while the machine is suspended; on Linux this one goes on.
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed_s() -> float:
    """Return seconds that never go back, and that pass while the process, or its machine, is stopped."""
    return time.clock_gettime(_CLOCK)
