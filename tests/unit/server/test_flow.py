# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""The flow over HTTP, on the mock cluster: pipelines of the file, of the driver's file, and those that are defined at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bascule.broker.coverage import CoverageMark
from bascule.kafka.control import ControlTopics
from bascule.server.answers import AddressDepth
from bascule.server.flow import NodeFlowEnds
from bascule.server.status import RetentionHoldStatus
from bascule.writer.control import PipelineDefinition, PipelineDeletion, PipelineReport, PipelineState, WantedState, Wish
from tests.unit.server.test_administrator import Node
from tests.unit.server.test_pipelines import NOW_MS, REPORT, Gone, asked, cluster, report, topics  # noqa: F401 - fixtures

Request = Callable[..., tuple[int, Any]]
PIN: RetentionHoldStatus = {
    "keeper": "pipeline", "name": "divert:late", "offset": 7, "records": 12, "bytes": 34, "reason": "new", "released": False,
}  # fmt: skip
LATE = PipelineDefinition("d1", 1, {"from": "news.#", "to": "late", "selector": "x = 1"})
PRICES = PipelineDefinition("i1", 2, {"topics": ["prices"], "to": "queue://quotes"})


class Ends:
    """A broker with two queues, which keeps its journal for one divert."""

    def holds(self) -> Mapping[str, RetentionHoldStatus]:
        return {"divert:late": PIN}

    def depth(self, address: str) -> AddressDepth | None:
        return AddressDepth(messages=len(address), consumers=1) if address in ("orders", "quotes") else None


def flow_of(topics: Any) -> Any:
    found: list[Any] = []

    def ask(request: Request) -> None:
        code, answer = request("GET", "/flow", "view")
        assert code == 200
        found.append(answer)
        assert request("GET", "/flow?unknown=1")[0] == 400

    asked(topics, ask, ends=Ends())
    return found[0]


def states(found: Any, kind: str) -> dict[str, tuple[str, str, str]]:
    return {each["name"]: (each["origin"], each["state"], each["wanted"]) for each in found[kind]}


def test_pipelines_of_file_and_driver_and_those_defined_at_run_time_have_ends_states_and_rates(topics: ControlTopics) -> None:
    topics.define("divert:late", LATE)
    topics.define("ingress:prices", PRICES)
    topics.say_covered("late", 4, CoverageMark("d1", 1, 4))
    own = PipelineReport(
        PipelineState.PAUSED, "host-1", NOW_MS, lag=9, records_per_s=2.5, error="broken", revision=1, definition_id="d1"
    )  # fmt: skip
    failed = replace(own, state=PipelineState.FAILED, revision=2, definition_id="i1")
    elsewhere = replace(REPORT, definition={"from": "a", "to": "b", "exclusive": True, "group": "g"})
    report(topics, divert_orders=REPORT, divert_late=own, divert_elsewhere=elsewhere, ingress_prices=failed)
    topics.want("divert:late", Wish(WantedState.PAUSED))
    found = flow_of(topics)
    assert states(found, "diverts") == {
        "orders": ("file", "running", "running"), "off": ("file", "unassigned", "running"), "elsewhere": ("file", "running", "running"),
        "late": ("runtime", "paused", "paused"),
    }  # fmt: skip
    assert states(found, "ingresses") == {"stock": ("file", "unassigned", "running"), "prices": ("runtime", "failed", "running")}
    by_name = {each["name"]: each for each in (*found["diverts"], *found["ingresses"])}
    assert by_name["late"] == {
        "name": "late", "from": "news.#", "selector": "x = 1", "to": "late", "exclusive": False, "group": "", "pin": PIN,
        "origin": "runtime", "enabled": True, "state": "paused", "wanted": "paused", "lag": 9, "records_per_s": 2.5, "error": "broken",
    }  # fmt: skip
    assert [by_name["elsewhere"][name] for name in ("from", "to", "exclusive", "group", "pin")] == ["a", "b", True, "g", None]
    assert [by_name[name]["enabled"] for name in ("orders", "off")] == [True, False]
    assert by_name["prices"] | {"error": ""} == {
        "name": "prices", "topics": ["prices"], "pattern": "", "to": "queue://quotes", "routing": "multicast", "origin": "runtime",
        "enabled": True, "state": "failed", "wanted": "running", "lag": 9, "records_per_s": 2.5, "error": "",
    }  # fmt: skip
    assert found["addresses"] == {
        "orders": {"messages": 6, "consumers": 1}, "x": None, "a": None, "news.#": None, "${topic}": None,
        "queue://quotes": {"messages": 6, "consumers": 1},
    }  # fmt: skip
    assert found["trouble"] == ""


def test_divert_that_no_broker_covers_waits_and_one_that_is_deleted_is_shown_until_it_is_gone(topics: ControlTopics) -> None:
    topics.define("divert:late", LATE)
    topics.want("divert:nobody", Wish(WantedState.PAUSED))
    report(topics, divert_orders=REPORT)
    assert states(flow_of(topics), "diverts")["late"] == ("runtime", "waiting for coverage", "running")
    topics.say_covered("late", 4, CoverageMark("d1", 1, 4))
    found = flow_of(topics)
    assert states(found, "diverts")["late"] == ("runtime", "unassigned", "running")
    assert "nobody" not in states(found, "diverts"), "nobody knows the ends of a pipeline that only a wish names"
    topics.undefine("divert:late", PipelineDeletion())
    assert "late" not in states(flow_of(topics), "diverts")
    own = PipelineReport(PipelineState.RUNNING, "host-1", NOW_MS, {"from": "news.#", "to": "late"}, revision=1, definition_id="d1")
    report(topics, divert_late=own)
    assert states(flow_of(topics), "diverts")["late"] == ("runtime", "deleting", "deleted")


def test_definition_of_another_version_is_shown_as_far_as_it_can_be_read(topics: ControlTopics) -> None:
    topics.define("divert:late", replace(LATE, settings={"from": None, "selector": 7, "further": {}}))
    topics.define("ingress:prices", replace(PRICES, settings={"topics": "one", "pattern": ["x"], "to": 3}))
    topics.define("join:later", LATE)
    found = flow_of(topics)
    late, prices = found["diverts"][-1], found["ingresses"][-1]
    assert (late["name"], late["from"], late["selector"], late["to"]) == ("late", "", "7", "${address}")
    assert (prices["name"], prices["topics"], prices["pattern"], prices["to"]) == ("prices", ["one"], "['x']", "3")
    assert len(found["ingresses"]) == 2


def test_flow_without_kafka_has_the_pipelines_of_the_configuration_and_the_reason() -> None:
    found = flow_of(Gone())
    assert states(found, "diverts") == {"orders": ("file", "", "running"), "off": ("file", "", "running")}
    assert found["trouble"] == "Kafka is away"
    assert found["addresses"]["orders"] == {"messages": 6, "consumers": 1}


def test_ends_at_a_broker_are_its_queues_and_what_it_keeps_for_pipelines() -> None:
    node = Node()
    node.fill("q", 2)
    any_node: Any = node
    ends = NodeFlowEnds(any_node)
    assert (ends.depth("q"), ends.depth("nowhere")) == ({"messages": 2, "consumers": 0}, None)
    assert dict(ends.holds()) == {}
