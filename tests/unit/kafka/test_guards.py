"""The guards' findings about the settings of a topic, for each role of a topic."""

from __future__ import annotations

import pytest

from bascule.adapter.inbound.log_topic import LOG_CONFIG, PARTITIONS
from bascule.kafka.admin import Facts
from bascule.kafka.guards import TopicRole, findings, too_few_in_sync

INBOUND = dict(LOG_CONFIG)
WAITING = {"cleanup.policy": "delete", "retention.ms": "-1", "max.message.bytes": "1064960"}


def findings_of(
    role: TopicRole, settings: dict[str, str], partitions: int = PARTITIONS, expected: int | None = PARTITIONS
) -> list[tuple[str, bool]]:
    facts = Facts(settings, partitions, replicas=1, brokers=1)
    return [(each.setting, each.breaks) for each in findings("t", role, facts, expected, record_bytes=1064960)]


@pytest.mark.parametrize("policy", ["compact,delete", "delete,compact", "compact"])
def test_default_settings_of_inbound_log_are_accepted(policy: str) -> None:
    assert findings_of(TopicRole.MARKS, INBOUND | {"cleanup.policy": policy}) == []


@pytest.mark.parametrize(
    ("setting", "value"), [("cleanup.policy", "delete"), ("retention.ms", "604800000"), ("retention.bytes", "1000000")]
)
def test_inbound_log_with_time_or_size_retention_is_refused(setting: str, value: str) -> None:
    assert findings_of(TopicRole.MARKS, INBOUND | {setting: value}) == [(setting, True)]


def test_inbound_log_with_different_partition_count_is_refused() -> None:
    assert findings_of(TopicRole.MARKS, INBOUND, PARTITIONS + 1) == [("partitions", True)]


def test_retention_is_ignored_when_policy_is_compact_only() -> None:
    assert findings_of(TopicRole.MARKS, INBOUND | {"cleanup.policy": "compact", "retention.ms": "604800000"}) == []


def test_compacted_retry_topic_is_refused_and_retention_or_small_record_limit_is_warned() -> None:
    assert findings_of(TopicRole.WAITING, WAITING, 1, None) == []
    assert findings_of(TopicRole.WAITING, WAITING | {"cleanup.policy": "compact"}, 1, None) == [("cleanup.policy", True)]
    assert findings_of(TopicRole.WAITING, WAITING | {"retention.ms": "1000"}, 1, None) == [("retention.ms", False)]
    assert findings_of(TopicRole.WAITING, WAITING | {"max.message.bytes": "1000000"}, 1, None) == [("max.message.bytes", False)]


@pytest.mark.parametrize(
    ("wanted", "partitions", "why"),
    [
        (2, [(3, 3), (3, 2)], ""),
        (2, [(1, 1)], ""),  # Kafka requires no more replicas than the topic has
        (
            2,
            [(3, 2), (3, 1), (3, 0)],
            "has min.insync.replicas=2, but 2 of its 3 partitions have at most 1 replicas in sync; start the missing brokers",
        ),
    ],
)
def test_too_few_in_sync_replicas_for_transactions_are_reported(wanted: int, partitions: list[tuple[int, int]], why: str) -> None:
    found = too_few_in_sync(wanted, partitions)
    assert why in found
    assert bool(why) is bool(found)


@pytest.mark.parametrize(("replicas", "breaks"), [(1, False), (2, True)])
def test_unclean_leader_election_is_unsafe_only_with_replicas(replicas: int, breaks: bool) -> None:
    facts = Facts(INBOUND | {"unclean.leader.election.enable": "true"}, PARTITIONS, replicas=replicas, brokers=3)
    found = {each.setting: each.breaks for each in findings("t", TopicRole.MARKS, facts, PARTITIONS)}
    assert found["unclean.leader.election.enable"] is breaks
