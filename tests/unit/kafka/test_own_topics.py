"""The settings with which Bascule creates its own topics."""

from __future__ import annotations

import pytest

from bascule.core.topics import SHARED
from bascule.kafka import own_topics
from bascule.kafka.admin import Facts
from bascule.kafka.guards import findings
from bascule.kafka.own_topics import OwnTopic

#: Default settings that a cluster may have for new topics. The guards refuse each of them for the topics that it would harm.
UNSAFE_DEFAULTS = {
    "cleanup.policy": "delete",
    "retention.ms": "604800000",
    "retention.bytes": "1000000000",
    "max.message.bytes": "1048588",
    "unclean.leader.election.enable": "true",
    "min.insync.replicas": "2",
}
OWN = [each for each in vars(own_topics).values() if isinstance(each, OwnTopic)]


@pytest.mark.parametrize("own", OWN, ids=lambda own: own.role.name)
def test_created_internal_topics_are_safe_with_any_cluster_defaults(own: OwnTopic) -> None:
    facts = Facts(UNSAFE_DEFAULTS | own.settings, own.partitions or 1, replicas=3, brokers=3)
    assert [str(each) for each in findings("t", own.role, facts, own.partitions)] == []


def test_shared_internal_topics_are_reserved_names() -> None:
    assert own_topics.SHARED.keys() == SHARED
