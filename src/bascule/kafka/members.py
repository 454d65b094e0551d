"""The brokers of a journal: the members of the group that elects the active one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaException

from bascule.core.errors import Unavailable
from bascule.kafka import clients
from bascule.kafka.errors import words

#: Timeout, in seconds, for the description of the group.
ANSWER_S: Final = 5.0


class BrokerMember(NamedTuple):
    """A broker: its name, the address from which it reaches Kafka, and whether the group has elected it."""

    name: str
    host: str
    elected: bool


def broker_members(kafka: Mapping[str, Any], group: str, topic: str) -> list[BrokerMember]:
    """Return the brokers that stand for election, by name. A killed broker stays in the list until its session ends. Raises Unavailable."""
    admin = clients.admin(kafka)  # kept in a variable: without the client the future never ends
    try:
        found = admin.describe_consumer_groups([group], request_timeout=ANSWER_S)[group].result(ANSWER_S)
    except (KafkaException, TimeoutError) as error:
        why = words(error) if isinstance(error, KafkaException) else "Kafka does not answer"
        raise Unavailable(f"could not describe group {group}: {why}") from error
    return sorted(
        BrokerMember(
            each.group_instance_id or each.client_id, each.host.removeprefix("/"),
            any(at.topic == topic for at in each.assignment.topic_partitions),
        )
        for each in found.members
    )  # fmt: skip
