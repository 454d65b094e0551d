"""What the broker reads of the definitions of diverts, and what it covers for one that it cannot read."""

from __future__ import annotations

from bascule.broker.coverage import CoverageMark, CoveredDivert
from bascule.core.topics import JournalTopics
from bascule.kafka.control import ControlTopics
from bascule.server.coverage import CoverageControl
from bascule.writer.control import DivertCovered, PipelineDefinition
from tests.support.mock_cluster import MockCluster
from tests.unit.server.served import run_async
from tests.unit.server.test_pipelines import cluster, topics  # noqa: F401 - fixtures


@run_async
async def test_definition_that_cannot_be_read_covers_all_addresses(cluster: MockCluster, topics: ControlTopics) -> None:  # noqa: F811
    topics.define("divert:a", PipelineDefinition("1", 2, {"from": "news.*", "to": "t"}))
    topics.define("divert:b", PipelineDefinition("2", 1, {"from": "news", "a setting of a later version": 1}))
    topics._store("definition/divert:c", b"damaged")
    topics.define("ingress:d", PipelineDefinition("3", 1, {"topics": ["news"]}))
    topics.say_covered("a", 4, DivertCovered("1", 1, 9))
    control = CoverageControl(cluster.kafka, JournalTopics())
    try:
        found = await control.controlled()
        await control.store("a", 7, CoverageMark("1", 2, 8))
        assert found.diverts == {"a": CoveredDivert("1", 2, "news.*"), "b": CoveredDivert("2", 1, "#"), "c": CoveredDivert("", 0, "#")}
        assert found.mark_of("a") == CoverageMark("1", 1, 9)
        assert (await control.controlled()).mark_of("a") == CoverageMark("1", 2, 8)
    finally:
        await control.close()
