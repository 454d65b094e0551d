"""Brokers, driver, workers and Kafka are killed and suspended at random under load, and the whole history is checked.

    python -m tests.soak --seconds 1800 --faults 100

``plan`` defines a run, ``site`` has the processes, ``faults`` injects the faults, ``clients`` and ``records`` are the load, ``measures``
samples, ``load`` ends the clients, and ``report`` writes the result. docs/internals/soak.md explains how to read it.
"""

from tests.soak.plan import KINDS, Plan
from tests.soak.run import Result, soak

__all__ = ["KINDS", "Plan", "Result", "soak"]
