"""Requests to Kafka that are retried with back-off after retriable errors (``bascule.kafka.errors``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from confluent_kafka import KafkaException

from bascule.kafka.errors import passing

T = TypeVar("T")

#: A leader or coordinator that moves is found again within milliseconds; a node that starts takes seconds.
FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.5


def ask_until(deadline_s: float, ask: Callable[[], T]) -> T:
    """Return the result of ``ask``; retry after retriable errors until ``deadline_s`` of the monotonic clock.

    Raises KafkaException: an error that is not retriable, or the last error.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if not passing(error.args[0]) or time.monotonic() + pause_s > deadline_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
