"""The ACLs of the embedded Kafka: which names of Bascule they keep from clients without a login."""

from __future__ import annotations

import inspect

import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from bascule.core.topics import PREFIX, JournalTopics
from bascule.kafka.acls import allowed, denied, own_names

BRIDGE = "b"
AUDIT = "audit.lines"
#: Each topic of `JournalTopics`: a property of this class that returns a name.
NAMES = [name for name, each in inspect.getmembers(JournalTopics, lambda each: isinstance(each, property)) if not name.startswith("_")]
TOPICS = [name for name in NAMES if isinstance(getattr(JournalTopics(), name), str)]
#: The only topic of a journal that everybody may read.
SHOWN = "dead_letters"


def _denies(bindings: list[AclBinding], kind: ResourceType, name: str, operation: AclOperation) -> bool:
    return any(
        each.permission_type is AclPermissionType.DENY and each.restype is kind and each.operation is operation
        and (name.startswith(each.name) if each.resource_pattern_type is ResourcePatternType.PREFIXED else name == each.name)
        for each in bindings
    )  # fmt: skip


@pytest.mark.parametrize("prefix", [PREFIX, "orders"])
@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_of_a_journal_is_closed_to_clients_without_a_login(topic: str, prefix: str) -> None:
    topics = JournalTopics(prefix, audit_topic=AUDIT)
    bindings, name = list(denied(own_names(topics, BRIDGE))), getattr(topics, topic)
    for operation in (AclOperation.WRITE, AclOperation.CREATE, AclOperation.DELETE, AclOperation.ALTER, AclOperation.ALTER_CONFIGS):
        assert _denies(bindings, ResourceType.TOPIC, name, operation), operation
    assert _denies(bindings, ResourceType.TOPIC, name, AclOperation.READ) is (topic != SHOWN)


@pytest.mark.parametrize("prefix", [PREFIX, "orders"])
def test_groups_transactional_ids_and_audit_of_a_bridge_are_closed(prefix: str) -> None:
    topics = JournalTopics(prefix, audit_topic=AUDIT)
    bindings = list(denied(own_names(topics, BRIDGE)))
    for group in (topics.brokers, topics.drivers(BRIDGE), f"{prefix}.{BRIDGE}.divert"):
        assert _denies(bindings, ResourceType.GROUP, group, AclOperation.READ), group
        assert _denies(bindings, ResourceType.GROUP, group, AclOperation.DELETE), group
    assert _denies(bindings, ResourceType.TRANSACTIONAL_ID, topics.transactional_id(BRIDGE, "divert"), AclOperation.WRITE)
    assert _denies(bindings, ResourceType.TOPIC, AUDIT, AclOperation.READ)


def test_clients_without_a_login_may_change_nothing_of_the_cluster() -> None:
    found = {each.operation for each in allowed() if each.restype is ResourceType.BROKER}
    assert found == {AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS}
