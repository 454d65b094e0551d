"""Requests to Kafka that are retried with back-off after retriable errors (``bascule.kafka.errors``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from confluent_kafka import KafkaError, KafkaException

from bascule.kafka.errors import passing

T = TypeVar("T")

#: A leader or coordinator that moves is found again within milliseconds; a node that starts takes seconds.
FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.5
#: Timeout of the first request, in seconds. A healthy node answers within milliseconds. A request to a node that is down or frozen waits
#: until it times out although the partition has a new leader, and an admin client of librdkafka 2.16 uses up to 0.8 processors meanwhile.
FIRST_ANSWER_S: Final = 1.0
#: A request gets all of the time that is left if that is less than this multiple of its timeout, and at most LAST_S seconds. Kafka needs
#: about this time to replace a leader that is frozen (broker.session.timeout.ms, 9 s by default), so a shorter request would not help.
LAST_TRY: Final = 4
LAST_S: Final = 10.0
#: Least timeout of a request at the end of the available time, in seconds.
LEAST_ANSWER_S: Final = 0.1


def ask_until(deadline_s: float, ask: Callable[[], T], *, retriable: Callable[[KafkaError], bool] = passing) -> T:
    """Return the result of ``ask``; retry after retriable errors until ``deadline_s`` of the monotonic clock.

    Raises KafkaException: an error that is not retriable, or the last error.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if not retriable(error.args[0]) or time.monotonic() + pause_s > deadline_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def ask_in_tries(
    deadline_s: float, ask: Callable[[float], T], *, first_s: float = FIRST_ANSWER_S, retriable: Callable[[KafkaError], bool] = passing
) -> T:
    """Return the result of ``ask``, which gets the timeout of its request in seconds. Retry as ``ask_until`` does.

    The first request gets ``first_s``. The timeout doubles with each request, and the last request gets all of the time that is left, so
    that a slow cluster can answer too. If the caller has less than four times ``first_s``, the first request is the last one.
    Raises KafkaException.
    """
    answer_s = first_s

    def attempt() -> T:
        nonlocal answer_s
        left_s = deadline_s - time.monotonic()
        timeout_s = left_s if left_s < min(LAST_TRY * answer_s, LAST_S) else min(answer_s, left_s)
        answer_s *= 2
        return ask(max(LEAST_ANSWER_S, timeout_s))

    return ask_until(deadline_s, attempt, retriable=retriable)
