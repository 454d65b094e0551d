"""The name of a member of a consumer group (``group.instance.id``), and the case that Kafka gives the name to another client."""

from __future__ import annotations

from confluent_kafka import KafkaError

from bascule.core.errors import BasculeError, Scope
from bascule.kafka.errors import FENCED_MEMBER
from bascule.threads.clock import elapsed_s

#: A client that repeats its request to join during a pause of Kafka is fenced by itself, once. Twice within this time, in seconds, means
#: another client.
FENCED_BY_ITSELF_S = 60.0


class SameInstance(BasculeError):
    """Another process is a member of the group under the same name."""

    retriable = False
    scope = Scope.PROCESS


def fenced(error: KafkaError) -> bool:
    """Return True if the client can no longer be used because another client has its name."""
    return error.code() in FENCED_MEMBER


class InstanceFence:
    """A fence for one thread, over all clients that the thread makes under the name."""

    def __init__(self) -> None:
        self._last_s = -FENCED_BY_ITSELF_S

    def meet(self) -> None:
        """Record that a client was fenced, before the caller makes another one. Raises SameInstance if a client was fenced just before."""
        now_s = elapsed_s()
        last_s, self._last_s = self._last_s, now_s
        if now_s - last_s < FENCED_BY_ITSELF_S:
            raise SameInstance("another process is a member of the group under the same name (group.instance.id); give each its own name")
