"""Everything at once: brokers, driver, workers and Kafka are killed and stopped at random under load, and the whole history is judged.

    python -m tests.soak --seconds 1800 --faults 100

``plan`` says what is done, ``site`` has the processes, ``faults`` strikes them, ``clients`` and ``records`` are the load, ``measures``
looks on, ``load`` ends it all, ``report`` tells. docs/internals/soak.md shows how to read it.
"""

from tests.soak.plan import KINDS, Plan
from tests.soak.run import Result, soak

__all__ = ["KINDS", "Plan", "Result", "soak"]
