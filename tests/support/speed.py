"""The slowness of this machine, compared with the machine for which the limits of the tests were chosen.

A limit of a test shows that it hangs, or does much more work than it should. A slow machine alone must not cause this, so limits are
multiplied by ``SLOWNESS``. It is measured once for a run, in processor time, so that other load on the machine has little influence.
"""

from __future__ import annotations

import os
import random
import time
from typing import Final

#: In the environment of the processes of a run, so that all have the same limits.
SLOWNESS_VARIABLE: Final = "BASCULE_TEST_SLOWNESS"
#: Processor time of the walk below on the machine for which the limits were chosen.
USUAL_S: Final = 0.040
#: Objects that the walk visits in random order: more than a processor's cache holds. A loop within the cache runs at full speed even on a
#: machine on which the tests take four times as long.
OBJECTS: Final = 60_000
WALKS: Final = 3
ATTEMPTS: Final = 2
#: A slower machine than this exceeds the limits.
SLOWNESS_MAX: Final = 4.0


def _walk_s(objects: list[dict[str, int]]) -> float:
    began_s, total = time.process_time(), 0
    for _ in range(WALKS):
        for each in objects:
            total += each["number"] + len(each)
    return time.process_time() - began_s


def _measured() -> float:
    objects = [{"number": number} for number in range(OBJECTS)]
    random.Random(1).shuffle(objects)
    return min(max(1.0, min(_walk_s(objects) for _ in range(ATTEMPTS)) / USUAL_S), SLOWNESS_MAX)


def _of_run() -> float:
    """Return the slowness of the run. Its first process measures, since a measurement takes as long as the start of a short process."""
    if SLOWNESS_VARIABLE not in os.environ:
        os.environ[SLOWNESS_VARIABLE] = f"{_measured():.2f}"
    return float(os.environ[SLOWNESS_VARIABLE])


SLOWNESS: Final = _of_run()
