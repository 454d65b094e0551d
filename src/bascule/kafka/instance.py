"""The name of a consumer group's member (``group.instance.id``), and what it means when Kafka has given it to another client."""

from __future__ import annotations

from confluent_kafka import KafkaError

from bascule.core.errors import BasculeError, Scope
from bascule.kafka.errors import FENCED_MEMBER
from bascule.threads.clock import elapsed_s

#: A client that repeats its request to join over a pause of Kafka is fenced by itself, once. Twice within so long, it is by another one.
FENCED_BY_ITSELF_S = 60.0


class SameInstance(BasculeError):
    """Another process is a member of the group under this one's name."""

    retriable = False
    scope = Scope.PROCESS


def fenced(error: KafkaError) -> bool:
    """Whether the client that says so is of no more use: another one has its name."""
    return error.code() in FENCED_MEMBER


class InstanceFence:
    """For one thread, over all clients that it makes under the name."""

    def __init__(self) -> None:
        self._last_s = -FENCED_BY_ITSELF_S

    def meet(self) -> None:
        """A client is fenced, and one more is to be made. Raises SameInstance where that was done just now."""
        now_s = elapsed_s()
        last_s, self._last_s = self._last_s, now_s
        if now_s - last_s < FENCED_BY_ITSELF_S:
            raise SameInstance("another process is a member of the group under the same name (group.instance.id)")
