"""Removal of a member from a consumer group before its session ends: another client joins under the name of the member, and leaves.

Kafka gives the place of a named member (``group.instance.id``) to the client that joined last under the name, without waiting for the
session, and fences the earlier client. A named member does not leave the group when it closes, so the client leaves explicitly.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from bascule.core.errors import Unavailable
from bascule.kafka import clients
from bascule.kafka.election import leave, member_settings
from bascule.kafka.errors import words

#: Timeout, in seconds, for the description of the group, for joining it, and for leaving it.
ANSWER_S: Final = 5.0
_POLL_S: Final = 0.02


def evict(kafka: Mapping[str, Any], group: str, topic: str, instance: str, member: str, session_timeout_s: float) -> bool:
    """Remove ``member``, whose name is ``instance``, from a group; blocks. Return False if it is no member any more.

    A process that was restarted under the name has another member id, and stays. Raises Unavailable.
    """
    try:
        admin = clients.admin(kafka)
        description = admin.describe_consumer_groups([group], request_timeout=ANSWER_S)[group].result(ANSWER_S)
        if member not in (each.member_id for each in description.members):
            return False
        consumer = clients.consumer({**member_settings(kafka, group, instance, session_timeout_s), "reconnect.backoff.ms": 10})
        try:
            _join(consumer, topic)
            if not leave(consumer, ANSWER_S):
                raise TimeoutError
        finally:
            consumer.close()
    except (KafkaException, TimeoutError) as error:
        why = words(error) if isinstance(error, KafkaException) else "Kafka does not answer"
        raise Unavailable(f"{instance} could not be removed from group {group}: {why}") from error
    return True


def _join(consumer: Consumer, topic: str) -> None:
    """Return when the client is a member. Raises KafkaException, TimeoutError."""
    joined: list[list[TopicPartition]] = []
    consumer.subscribe([topic], on_assign=lambda _, partitions: joined.append(partitions))
    deadline_s = time.monotonic() + ANSWER_S
    while not joined:
        if time.monotonic() > deadline_s:
            raise TimeoutError
        message = consumer.poll(_POLL_S)
        error = message.error() if message is not None else None
        if error is not None and error.fatal():
            raise KafkaException(error)
