"""What the broker reads of the definitions of diverts, and what it covers for one that it cannot read."""

from __future__ import annotations

import pytest

from bascule.broker.coverage import ControlledDiverts, CoverageMark, CoveredDivert
from bascule.core.topics import JournalTopics
from bascule.kafka.admin import Topics
from bascule.kafka.control import ControlTopics
from bascule.server import coverage
from bascule.server.coverage import CoverageControl, _divert_of, _FollowedDivert
from bascule.writer.control import PipelineDefinition
from tests.support.mock_cluster import MockCluster
from tests.unit.server.served import run_async
from tests.unit.server.test_pipelines import cluster, topics  # noqa: F401 - fixtures


@run_async
async def test_definition_that_cannot_be_read_covers_all_addresses(cluster: MockCluster, topics: ControlTopics) -> None:  # noqa: F811
    topics.define("divert:a", PipelineDefinition("1", 2, {"from": "news.*", "to": "t"}))
    topics.define("divert:b", PipelineDefinition("2", 1, {"from": "news", "a setting of a later version": 1}))
    topics._store("definition/divert:c", b"damaged")
    topics.define("ingress:d", PipelineDefinition("3", 1, {"topics": ["news"]}))
    topics.say_covered("a", 4, CoverageMark("1", 1, 9))
    control = CoverageControl(cluster.kafka, JournalTopics())
    try:
        found = await control.controlled()
        await control.store("a", 7, CoverageMark("1", 2, 8))
        assert found.diverts == {"a": CoveredDivert("1", 2, "news.*"), "b": CoveredDivert("2", 1, "#"), "c": CoveredDivert("", 0, "#")}
        assert found.mark_of("a") == CoverageMark("1", 1, 9)
        assert (await control.controlled()).mark_of("a") == CoverageMark("1", 2, 8)
    finally:
        await control.close()


@run_async
async def test_topic_that_was_deleted_is_created_so_that_an_epoch_can_begin(
    cluster: MockCluster,  # noqa: F811
) -> None:
    control = CoverageControl(cluster.kafka, JournalTopics())
    try:
        assert await control.controlled() == ControlledDiverts({}, {})
        assert Topics(cluster.kafka).partitions() == {"bascule.control": 1}, "not created by Kafka, with settings of its own"
    finally:
        await control.close()


@run_async
async def test_settings_of_a_definition_are_checked_once(
    cluster: MockCluster,  # noqa: F811
    topics: ControlTopics,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []

    def divert_of(name: str, definition: PipelineDefinition | None) -> _FollowedDivert:
        checked.append(name)
        return _divert_of(name, definition)

    monkeypatch.setattr(coverage, "_divert_of", divert_of)
    topics.define("divert:a", PipelineDefinition("1", 1, {"from": "a", "to": "t"}))
    topics.define("divert:b", PipelineDefinition("2", 1, {"from": "b", "to": "t"}))
    control = CoverageControl(cluster.kafka, JournalTopics())
    try:
        assert await control.controlled() == await control.controlled()
        topics.define("divert:a", PipelineDefinition("1", 2, {"from": "c", "to": "t"}))
        assert (await control.controlled()).diverts["a"] == CoveredDivert("1", 2, "c")
        assert checked == ["a", "b", "a"]
    finally:
        await control.close()
