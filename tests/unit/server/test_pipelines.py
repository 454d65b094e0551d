"""Control of pipelines over HTTP, on the mock cluster: paths, roles, audit, and what is stored for the driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from confluent_kafka.admin import OffsetSpec

from bascule.config.settings import Settings
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.masking import PropertyMask
from bascule.core.topics import JournalTopics
from bascule.kafka import own_topics
from bascule.kafka.control import ControlTopics
from bascule.kafka.planned_moves import OffsetPlan, PipelineOffsets
from bascule.server.admin_access import AdminAccess, AdminRole
from bascule.server.audit import AuditTrail, FileSink
from bascule.server.flow import FlowEnds
from bascule.server.pipelines import SILENT_MS, PipelinePages
from bascule.writer.control import DRIVER_KEY, DriverReport, PipelineReport, PipelineState, RestartWish, WantedState, Wish, Wishes
from tests.support.flow_ends import NO_FLOW_ENDS
from tests.support.mock_cluster import MockCluster, product_on
from tests.unit.server.test_admin import Broker, served
from tests.unit.server.test_admin_access import PAGE, send

NOW_MS = 1_000_000
REPORT = PipelineReport(
    PipelineState.RUNNING, "host-1", NOW_MS, {"from": "orders", "to": "t"}, "g", (("bascule.journal", 0, 3, 9),), 1, 6, 1.5, 2,
    "an error", 4, latency_p50_s=0.02, lag_bytes=600,
)  # fmt: skip
SETTINGS = {
    "divert": [{"name": "orders", "from": "orders"}, {"name": "off", "from": "x", "enabled": False}],
    "ingress": [{"name": "stock", "topics": ["s"]}],
}


class NoPlanning:
    """Knows no positions: test_pipeline_offsets.py has the tests with positions."""

    def offsets(self, pipeline: str) -> PipelineOffsets:
        return PipelineOffsets((), {})

    def plan(self, *arguments: object) -> OffsetPlan:
        return OffsetPlan((), 0)


PLANNING = NoPlanning()


def no_redriving() -> NoReturn:
    """Know no dead letters: test_redrive.py has the tests with dead letters."""
    raise AssertionError("no test here asks for dead letters")


#: A token for each role.
ACCESS = AdminAccess(restricted=True, tokens={role.word: (role.word, role) for role in AdminRole})
#: Paths that define an ingress, and what they answer without arguments for an ingress of the file.
DEFINING = {
    (method, f"{collection}{path}"): code
    for collection in ("/diverts", "/ingresses")
    for method, path, code in (
        ("POST", "", 400),
        ("PUT", "/{name}/config", 409),
        ("PATCH", "/{name}/config", 409),
        ("DELETE", "/{name}", 409),
    )
}
GUIDE = PAGE.parent / "pipelines.md"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockCluster]:
    with product_on(monkeypatch) as found:
        yield found


@pytest.fixture
def topics(cluster: MockCluster) -> Iterator[ControlTopics]:
    names = JournalTopics()
    own_topics.ensure(cluster.kafka, {names.control: own_topics.CONTROL, names.reports: own_topics.CONTROL})
    found = ControlTopics(cluster.kafka, names)
    yield found
    found.close()


def report(topics: ControlTopics, *, at_ms: int = NOW_MS, running: bool = True, **pipelines: PipelineReport) -> None:
    reports = {name.replace("_", ":"): each for name, each in pipelines.items()}
    for future in topics.report({**reports, DRIVER_KEY: DriverReport("host-1", at_ms, running)}):
        future.result()


def asked(
    topics: Any,
    ask: Callable[[Callable[..., tuple[int, Any]]], None],
    audit: AuditTrail | None = None,
    ends: FlowEnds = NO_FLOW_ENDS,
    lists_user: Callable[[str], bool] = lambda _: True,
) -> None:
    """Let ``ask`` send requests, as an administrator with the role manage if it does not name a role."""
    pages = PipelinePages(
        topics, Settings.model_validate(SETTINGS), audit or AuditTrail(), lambda: NOW_MS, lambda: PLANNING, no_redriving, PropertyMask,
        ends, lists_user,
    )  # fmt: skip

    def run(port: int) -> None:
        def request(method: str, path: str, role: str = "manage", body: str | None = None) -> tuple[int, Any]:
            code, _, text = send(port, method, path, {"authorization": f"Bearer {role}"}, body)
            return code, json.loads(text)

        ask(request)

    served(Broker(), run, access=ACCESS, pipelines=pages)


def test_pipelines_are_listed_with_what_is_wanted_and_what_the_driver_reports(topics: ControlTopics) -> None:
    report(topics, divert_orders=REPORT)
    topics.want("divert:orders", Wish(WantedState.PAUSED, "ann", 7))

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        code, found = request("GET", "/diverts", "view")
        assert code == 200
        assert [(each["name"], each["state"], each["wanted"]) for each in found] == [
            ("off", "unassigned", "running"), ("orders", "running", "paused"),
        ]  # fmt: skip
        assert request("GET", "/diverts/orders/status", "view") == (200, {
            "name": "orders", "kind": "divert", "origin": "file", "revision": None, "state": "running", "wanted": "paused",
            "wanted_by": "ann", "wanted_at_ms": 7, "covered_from": None, "group": "g", "lag": 6, "lag_bytes": 600,
            "records_per_s": 1.5, "restarts": 2,
            "latency_p50_s": 0.02, "latency_p99_s": None,
            "error": "an error", "error_at_ms": 4, "partitions": 1, "driver": "host-1",
            "sources": [{"topic": "bascule.journal", "partition": 0, "offset": 3, "end": 9}],
            "reported_at_ms": NOW_MS, "reported_revision": None,
        })  # fmt: skip
        assert request("GET", "/diverts/orders", "view") == (200, {
            "name": "orders", "kind": "divert", "origin": "file", "definition": {"from": "orders", "to": "t"}, "config": None,
            "revision": None,
        })  # fmt: skip
        assert request("GET", "/ingresses/stock", "view")[1]["definition"] is None
        assert [each["name"] for each in request("GET", "/ingresses", "view")[1]] == ["stock"]
        for path in ("/diverts/stock", "/ingresses/orders/status"):
            assert request("GET", path)[0] == 404
        assert request("PUT", "/diverts/nowhere/pause") == (404, {"error": "there is no divert 'nowhere'"})

    asked(topics, ask)


@pytest.mark.parametrize("silent", [{"running": False}, {"at_ms": NOW_MS - SILENT_MS}])
def test_pipelines_without_a_driver_are_unassigned(topics: ControlTopics, silent: dict[str, Any]) -> None:
    report(topics, **silent, divert_orders=REPORT)
    asked(topics, lambda request: check_unassigned(request("GET", "/diverts/orders/status")[1]))


def check_unassigned(status: Any) -> None:
    assert (status["state"], status["wanted"], status["lag"]) == ("unassigned", "running", 6)


def test_verbs_store_the_wanted_state_for_the_driver_and_are_audited(topics: ControlTopics, tmp_path: Path) -> None:
    audit = AuditTrail([lambda done: FileSink(tmp_path / "audit", done)])
    states = {"pause": "paused", "stop": "stopped", "resume": "running"}

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        for verb, state in states.items():
            assert request("PUT", f"/diverts/orders/{verb}") == (202, {"name": "orders", "kind": "divert", "wanted": state})
            assert topics.wishes(10).states == {"divert:orders": Wish(WantedState(state), "manage", NOW_MS)}
        code, first = request("POST", "/ingresses/stock/restart", body="{}")
        assert (code, first["kind"]) == (202, "ingress")
        assert topics.wishes(10).restarts == {"ingress:stock": RestartWish(first["restart"], "manage", NOW_MS)}
        assert request("POST", "/ingresses/stock/restart")[1]["restart"] != first["restart"]
        assert request("PUT", "/diverts/orders/pause", body='{"name": "x"}') == (
            400, {"error": "PUT /diverts/orders/pause takes no arguments"},
        )  # fmt: skip
        code, refused = request("PUT", "/diverts/off/pause")
        assert code == 409
        assert "divert 'off' has enabled = false" in refused["error"]
        report(topics, divert_off=REPORT)
        assert request("PUT", "/diverts/off/pause")[0] == 202, "the driver has another configuration, in which the divert is enabled"

    asked(topics, ask, audit)
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["action"], line["on"], line["who"]) for line in lines][:4] == [
        *((f"divert {verb}", "orders", "manage") for verb in states),
        ("ingress restart", "stock", "manage"),
    ]  # fmt: skip
    assert sum("PipelineDisabled" in line["result"] for line in lines) == 1


def test_each_path_needs_its_role_and_the_guide_names_it(topics: ControlTopics) -> None:
    report(topics, divert_orders=REPORT, ingress_orders=REPORT)
    pages = PipelinePages(topics, Settings(), AuditTrail(), lambda: NOW_MS, lambda: PLANNING, no_redriving, PropertyMask, NO_FLOW_ENDS)
    paths = [path for path in pages.paths() if not path.path.startswith("/redrive")]
    assert len(paths) == 32

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        for path in paths:
            assert path.role is not None
            for role in AdminRole:
                code, _ = request(path.method, path.path.replace("{name}", "orders"), role.word)
                wanted = {"GET": 200, "PATCH": 400}.get(path.method, 202)  # a PATCH needs arguments
                wanted = DEFINING.get((path.method, path.path), wanted)
                if (path.method, path.path.rpartition("/")[2]) == ("DELETE", "offsets"):
                    wanted = 409  # the pipeline is not stopped
                wanted = wanted if role >= path.role else 403
                assert code == wanted, (path, role)
            assert request(path.method, path.path.replace("{name}", "orders"), "nobody")[0] == 401

    asked(topics, ask)
    text = GUIDE.read_text()
    for path in paths:
        assert path.role is not None
        if not path.path.startswith("/ingresses") or (path.method, path.path) in DEFINING:
            assert f"| `{path.method} {path.path.replace('{name}', 'NAME')}` | `{path.role.word}` |" in text


class Gone:
    """Topics that no Kafka answers for."""

    def wishes(self, timeout_s: float, *, decides: bool = False) -> Wishes:
        raise Unavailable("Kafka is away")

    reports = wishes


def test_requests_without_kafka_answer_503_with_the_reason() -> None:
    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        for method, path in (("GET", "/diverts"), ("PUT", "/diverts/orders/pause"), ("POST", "/ingresses/stock/restart")):
            assert request(method, path) == (503, {"error": "Kafka is away"})

    asked(Gone(), ask)


def test_damaged_record_of_a_pipeline_is_shown_and_the_next_verb_replaces_it(topics: ControlTopics) -> None:
    report(topics, divert_orders=REPORT, ingress_stock=REPORT)
    for key in ("wanted/divert:orders", "wanted/divert:unknown", "offsets/ingress:stock", "restart/ingress:stock", "wanted/nobody"):
        topics._store(key, b"x")

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        found = {each["name"]: each for each in [*request("GET", "/diverts")[1], *request("GET", "/ingresses")[1]]}
        assert {name: each["wanted"] for name, each in found.items()} == {
            "off": "running", "orders": "unreadable", "unknown": "unreadable", "stock": "running",
        }  # fmt: skip
        assert {name for name, each in found.items() if "unreadable record b'x'" in each["error"]} == {"orders", "unknown", "stock"}
        assert request("GET", "/flow")[1]["trouble"] == ""
        for path in ("/diverts/orders", "/diverts/unknown", "/ingresses/stock"):
            assert request("PUT", f"{path}/resume")[0] == 202
        assert dict(topics.wishes(10).unreadable) == {}
        assert request("GET", "/diverts/orders/status")[1]["error"] == "an error"

    asked(topics, ask)


def test_damaged_reports_are_left_out(topics: ControlTopics) -> None:
    report(topics, divert_orders=REPORT)
    for key in (DRIVER_KEY, "ingress:stock"):
        topics._shared.appender.append(Outgoing(JournalTopics().reports, key.encode(), b"x", partition=0)).result()

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        assert {each["name"]: each["state"] for each in request("GET", "/diverts")[1]} == {"off": "unassigned", "orders": "unassigned"}
        assert request("GET", "/diverts/orders/status")[1]["lag"] == 6
        assert request("GET", "/ingresses/stock/status")[1]["reported_at_ms"] is None

    asked(topics, ask)


def test_reports_that_were_recreated_are_read_from_their_beginning_and_nothing_is_written_to_them(topics: ControlTopics) -> None:
    report(topics, ingress_stock=REPORT)
    topics.reports(10)
    end = topics._readers["bascule.pipelines"]._offsets.ask(OffsetSpec.latest(), 10)[0]
    topics._readers["bascule.pipelines"]._reached[0] = 100  # as if the topic had had more records before somebody recreated it
    topics._readers["bascule.pipelines"]._table.clear()
    assert topics.reports(10).pipelines == {"ingress:stock": REPORT}
    assert topics._readers["bascule.pipelines"]._offsets.ask(OffsetSpec.latest(), 10)[0] == end


def test_topic_that_was_recreated_is_read_from_its_beginning(topics: ControlTopics) -> None:
    topics.want("divert:orders", Wish(WantedState.PAUSED, "ann", 7))
    assert topics.wishes(10).states
    topics._readers["bascule.control"]._reached[0] = 100  # as if the topic had had more records before somebody recreated it
    topics._readers["bascule.control"]._table.clear()
    with pytest.raises(Unavailable, match="it was recreated, or has lost records"):
        topics.wishes(10)
    assert topics.wishes(10).of("divert:orders") is WantedState.PAUSED


def test_settings_alone_are_those_of_the_definition_otherwise_those_that_the_driver_reports(topics: ControlTopics) -> None:
    settings = {"topics": ["prices"], "to": "queue://prices"}

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        assert request("GET", "/diverts/orders/config")[0] == 404, "no driver has reported them"
        report(topics, divert_orders=REPORT)
        assert request("GET", "/diverts/orders/config") == (200, {"from": "orders", "to": "t"})
        assert request("PUT", "/ingresses/prices/config", body=json.dumps(settings))[0] == 202
        code, shown = request("GET", "/ingresses/prices/config")
        assert (code, shown) == (200, settings)
        assert request("PUT", "/ingresses/prices/config?revision=1", body=json.dumps(shown))[1]["revision"] == 2
        assert request("GET", "/ingresses/none/config")[0] == 404
        report(topics, ingress_prices=replace(REPORT, revision=2))
        for lost in (b"x", None):
            topics._store("definition/ingress:prices", lost)
            code, refused = request("GET", "/ingresses/prices/config")
            assert (code, refused["error"]) == (404, request("GET", "/ingresses/prices/status")[1]["error"])
        assert refused["error"].startswith("bascule.control has lost the definition, and nobody has deleted it")

    asked(topics, ask)


def test_restart_of_failed_tasks_only_leaves_a_running_one_alone(topics: ControlTopics) -> None:
    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        for state, restarted in ((PipelineState.RUNNING, False), (PipelineState.FAILED, True), (PipelineState.RESTARTING, True)):
            report(topics, divert_orders=replace(REPORT, state=state))
            before = topics.wishes(10).restarts.get("divert:orders")
            code, answer = request("POST", "/diverts/orders/restart?includeTasks=true&onlyFailed=true")
            assert (code, answer["restart"] is not None) == (202, restarted)
            assert (topics.wishes(10).restarts.get("divert:orders") != before) == restarted
        report(topics, divert_orders=REPORT)
        assert request("POST", "/diverts/orders/restart?onlyFailed=false")[1]["restart"]
        code, refused = request("POST", "/diverts/orders/restart?onlyFailed=1")
        assert (code, refused["error"]) == (400, "onlyFailed '1' must be true or false")

    asked(topics, ask)


def test_list_is_expanded_as_in_kafka_connect(topics: ControlTopics) -> None:
    report(topics, divert_orders=REPORT)

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        alone = {"status": request("GET", "/diverts/orders/status")[1], "info": request("GET", "/diverts/orders")[1]}
        for parts in (("status",), ("info",), ("status", "info"), ("info", "status", "info")):
            code, found = request("GET", f"/diverts?{'&'.join(f'expand={part}' for part in parts)}")
            assert (code, found["orders"]) == (200, {part: alone[part] for part in parts}), parts
            assert found.keys() == {each["name"] for each in request("GET", "/diverts")[1]}
        assert request("GET", "/ingresses?expand=info")[1].keys() == {"stock"}
        for query in ("expand=statuses", "expand=", "expand=status&expand=all"):
            code, refused = request("GET", f"/diverts?{query}")
            assert (code, "must be status or info" in refused["error"]) == (400, True), query

    asked(topics, ask)


def test_parameter_that_nobody_knows_is_refused(topics: ControlTopics) -> None:
    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        for method, path in (
            ("GET", "/diverts"), ("GET", "/diverts/orders"), ("GET", "/diverts/orders/status"), ("GET", "/diverts/orders/config"),
            ("PUT", "/diverts/orders/pause"),
            ("POST", "/diverts/orders/restart"), ("POST", "/diverts"), ("PUT", "/diverts/new/config"), ("DELETE", "/diverts/new"),
            ("PATCH", "/diverts/new/config"),
        ):  # fmt: skip
            code, refused = request(method, f"{path}?expands=status")
            known = {
                ("GET", "/diverts"): "known are expand", ("PUT", "/diverts/new/config"): "known are revision",
                ("PATCH", "/diverts/new/config"): "known are revision",
                ("POST", "/diverts/orders/restart"): "known are includeTasks, onlyFailed",
            }  # fmt: skip
            text = f"unknown parameter 'expands'; {known.get((method, path), 'the request takes none')}"
            assert (code, refused["error"]) == (400, text), (method, path)

    asked(topics, ask)
    assert topics.wishes(10) == Wishes()
