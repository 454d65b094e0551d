"""The page of Kafka's ACLs agrees with its data, and the data with the topics and groups of the product."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

import bascule
from bascule.core.topics import SHARED, JournalTopics
from tests.support.rights_page import BROKER, PAGE, PIPELINES, PROCESSES, Process, page

NAMES = {
    "PREFIX": "p", "BRIDGE": "b", "DEAD-LETTERS": "p.dead-letter", "AUDIT": "lines", "XA": "bascule.xa", "GROUP": "g", "TARGET": "out",
    "SOURCE": "in", "JOB": "j", "FACTORY": "f",
}  # fmt: skip
TOPICS = JournalTopics("p")
#: A group that a client must name although no member of it exists.
UNUSED_GROUP = re.compile(r"""["']group\.id["']: "([^"]+)",""")


def allowed(process: Process, kind: ResourceType, name: str) -> set[AclOperation]:
    bindings = [each for each in process.bindings("User:u", NAMES) if each.restype is kind]
    return {
        each.operation
        for each in bindings
        if each.name == name or (each.resource_pattern_type.name == "PREFIXED" and name.startswith(each.name))
    }


def test_page_equals_the_generated_page() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.support.rights_page` to regenerate the page"


@pytest.mark.parametrize("topic", sorted(TOPICS.own))
def test_broker_or_pipelines_create_and_write_each_own_topic(topic: str) -> None:
    found = allowed(BROKER, ResourceType.TOPIC, topic) | allowed(PIPELINES, ResourceType.TOPIC, topic)
    assert found >= {AclOperation.CREATE, AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE_CONFIGS}


def test_some_process_creates_each_shared_topic_and_no_process_changes_the_cluster() -> None:
    for topic in SHARED:
        assert any(AclOperation.CREATE in allowed(each, ResourceType.TOPIC, topic) for each in PROCESSES), topic
    assert {right.resource for process in PROCESSES for right in process.rights} == {
        ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID,
    }  # fmt: skip


def test_elections_and_transactional_ids_of_a_bridge_are_covered() -> None:
    assert AclOperation.READ in allowed(BROKER, ResourceType.GROUP, TOPICS.brokers)
    assert AclOperation.READ in allowed(PIPELINES, ResourceType.GROUP, TOPICS.drivers("b"))
    assert AclOperation.WRITE in allowed(PIPELINES, ResourceType.TRANSACTIONAL_ID, TOPICS.transactional_id("b", "divert"))


def test_broker_may_describe_each_group_that_clients_only_name() -> None:
    sources = (Path(bascule.__file__).parent / "kafka").glob("*.py")
    groups = {group for source in sources for group in UNUSED_GROUP.findall(source.read_text())}
    assert len(groups) > 3
    assert [group for group in groups if AclOperation.DESCRIBE not in allowed(BROKER, ResourceType.GROUP, group)] == []
