# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""Definitions of ingresses over HTTP, on the mock cluster: what is stored, refused and audited."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bascule.broker.coverage import CoverageMark
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.kafka import control, own_topics
from bascule.kafka.control import ControlTopics
from bascule.kafka.history import TopicHistory
from bascule.server import pipeline_definitions
from bascule.server.audit import AuditTrail, FileSink
from bascule.server.pipeline_definitions import known_id, replaceable
from bascule.server.pipelines import KnownPipelines
from bascule.writer.control import (
    PipelineDefinition,
    PipelineDeletion,
    PipelineReport,
    PipelineState,
    RestartWish,
    WantedState,
    Wish,
    Wishes,
)
from bascule.writer.position import DEFINED, POSITION_PARTITIONS, defined_mark, position_partition
from tests.unit.server.test_pipelines import NOW_MS, REPORT, asked, cluster, report, topics  # noqa: F401 - fixtures

Request = Callable[..., tuple[int, Any]]
#: Stores the mark that positions of a pipeline belong to the definition with an id; None deletes it.
Positions = Callable[[str, str | None], None]
PRICES = {"topics": ["prices"], "to": "queue://prices", "start": "latest"}
OTHER = PipelineReport(PipelineState.RUNNING, "host-1", NOW_MS, revision=1)


def create(request: Request, name: str = "prices", **settings: Any) -> tuple[int, Any]:
    return request("POST", "/ingresses", body=json.dumps({"name": name, "config": {**PRICES, **settings}}))


def change(request: Request, query: str = "", **settings: Any) -> tuple[int, Any]:
    return request("PUT", f"/ingresses/prices/config{query}", body=json.dumps({**PRICES, **settings}))


def definition(topics: ControlTopics, pipeline: str = "ingress:prices") -> PipelineDefinition:
    return topics.wishes(10).definitions[pipeline]


def test_ingress_is_created_changed_and_deleted(topics: ControlTopics, tmp_path: Path) -> None:
    audit = AuditTrail([lambda done: FileSink(tmp_path / "audit", done)])

    def ask(request: Request) -> None:
        assert create(request) == (202, {"name": "prices", "kind": "ingress", "revision": 1})
        created = definition(topics)
        assert (created.revision, created.settings, created.by, created.at_ms) == (1, PRICES, "manage", NOW_MS)
        shown = request("GET", "/ingresses/prices")[1]
        assert (shown["origin"], shown["revision"], shown["config"], shown["definition"]) == ("runtime", 1, PRICES, None)
        assert [(each["name"], each["origin"]) for each in request("GET", "/ingresses")[1]] == [("prices", "runtime"), ("stock", "file")]
        assert request("PUT", "/ingresses/prices/pause")[0] == 202
        assert change(request, body="bytes")[1]["revision"] == 2
        assert (definition(topics).id, definition(topics).settings["body"]) == (created.id, "bytes")
        report(topics, ingress_prices=PipelineReport(PipelineState.RUNNING, "host-1", NOW_MS, revision=1))
        status = request("GET", "/ingresses/prices/status")[1]
        assert (status["revision"], status["reported_revision"], status["wanted"]) == (2, 1, "paused")
        assert request("DELETE", "/ingresses/prices") == (202, {"name": "prices", "kind": "ingress"})
        wishes = topics.wishes(10)
        assert (dict(wishes.definitions), dict(wishes.states)) == ({}, {})
        status = request("GET", "/ingresses/prices/status")[1]
        assert (status["state"], status["wanted"], status["origin"]) == ("deleting", "deleted", "runtime")
        assert request("PUT", "/ingresses/prices/pause") == (409, {"error": "ingress prices is being deleted"})
        assert request("DELETE", "/ingresses/prices")[0] == 202, "a request may be repeated until the driver has deleted the ingress"
        assert create(request)[0] == 202
        assert definition(topics).id != created.id

    asked(topics, ask, audit)
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["action"].removeprefix("ingress "), line["on"], line["who"], line["allowed"]) for line in lines] == [
        (verb, "prices", "manage", True) for verb in ("create", "pause", "change", "delete", "pause", "delete", "create")
    ]
    given = {line["action"]: json.loads(line["arguments"]) for line in lines if "arguments" in line}
    assert given == {"ingress create": PRICES, "ingress change": {**PRICES, "body": "bytes"}}


def test_put_creates_an_ingress_that_does_not_exist(topics: ControlTopics) -> None:
    asked(topics, lambda request: check_created(change(request)))
    assert definition(topics).settings == PRICES


def check_created(answer: tuple[int, Any]) -> None:
    assert (answer[0], answer[1]["revision"]) == (202, 1)


def test_names_of_the_file_and_names_that_exist_are_refused(topics: ControlTopics) -> None:
    report(topics, divert_elsewhere=REPORT)

    def ask(request: Request) -> None:
        for kind, name in (("ingress", "stock"), ("divert", "orders"), ("divert", "elsewhere")):
            reason = f"{kind} {name!r} is defined in the configuration file; change the file and restart the pipelines"
            assert create(request, name) == (409, {"error": reason})
            for settings in ({}, PRICES):
                assert request("PUT", f"/ingresses/{name}/config", body=json.dumps(settings)) == (409, {"error": reason})
            assert request("DELETE", f"/ingresses/{name}") == (409, {"error": reason})
        create(request)
        code, answer = create(request)
        assert (code, "exists already" in answer["error"]) == (409, True)
        assert request("DELETE", "/ingresses/nowhere") == (404, {"error": "there is no ingress 'nowhere'"})

    asked(topics, ask)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"topics": []}, "give either topics or pattern"),
        ({"pattern": "p"}, "give either topics or pattern, not both"),
        ({"topics": ["bascule.journal"]}, "is one of Bascule's own topics"),
        ({"topics": None, "pattern": "("}, "column 1"),
        ({"bodi": "text"}, "unknown setting; did you mean 'body'?"),
        ({"enabled": False}, "'enabled' cannot be given at run time: create the pipeline, and stop it"),
        ({"name": "x"}, "'name' cannot be given at run time"),
        ({"to": "x" * 20_000}, "at most 16384 are allowed"),
    ],
)
def test_settings_are_checked_as_those_of_the_file(topics: ControlTopics, settings: dict[str, Any], reason: str) -> None:
    given = {name: value for name, value in {**PRICES, **settings}.items() if value is not None}

    def ask(request: Request) -> None:
        code, answer = request("POST", "/ingresses", body=json.dumps({"name": "prices", "config": given}))
        assert (code, reason in answer["error"]) == (400, True), answer
        assert create(request, "not a name")[0] == 400
        for body in ("{}", '{"name": "prices"}', '{"name": 1, "config": {}}', '{"name": "a", "config": [], "more": 1}'):
            assert request("POST", "/ingresses", body=body)[0] == 400
        assert request("DELETE", "/ingresses/prices", body='{"a": 1}')[0] == 400

    asked(topics, ask)
    assert topics.wishes(10).definitions == {}


def test_start_cannot_change_and_a_change_of_an_old_revision_is_refused(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        create(request)
        code, answer = change(request, start="earliest")
        assert (code, "'start' cannot be changed: a pipeline begins once" in answer["error"]) == (400, True)
        begin = {"name": "begin", "config": {"topics": ["a"]}}
        assert request("POST", "/ingresses", body=json.dumps(begin))[0] == 202
        same = {"topics": ["a"], "start": "earliest"}
        assert request("PUT", "/ingresses/begin/config", body=json.dumps(same))[0] == 202, "the default may be given"
        assert change(request, "?revision=1", body="bytes")[0] == 202
        code, answer = change(request, "?revision=1", body="map")
        assert (code, "read the definition again" in answer["error"]) == (409, True)

    asked(topics, ask)
    assert (definition(topics).revision, definition(topics).settings["body"]) == (2, "bytes")


def test_number_of_definitions_is_limited(topics: ControlTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_definitions, "DEFINITIONS_MAX", 1)

    def ask(request: Request) -> None:
        assert create(request)[0] == 202
        code, answer = create(request, "more")
        assert (code, "1 pipelines are defined at run time" in answer["error"]) == (409, True)
        assert change(request, body="bytes")[0] == 202
        request("DELETE", "/ingresses/prices")
        assert create(request, "more")[0] == 202

    asked(topics, ask)


def test_report_about_an_earlier_ingress_of_the_name_has_no_revision_of_the_new_one(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        assert create(request)[0] == 202
        for reported, revision in (("an earlier one", None), (definition(topics).id, 1), ("", 1)):
            report(topics, ingress_prices=PipelineReport(PipelineState.RUNNING, "host-1", NOW_MS, revision=1, definition_id=reported))
            assert request("GET", "/ingresses/prices/status")[1]["reported_revision"] == revision

    asked(topics, ask)


def test_what_a_broken_request_has_left_is_deleted(topics: ControlTopics) -> None:
    for wish in (Wish(WantedState.PAUSED), RestartWish("1")):
        topics.want("ingress:prices", wish)

    def ask(request: Request) -> None:
        assert create(request)[0] == 202
        wishes = topics.wishes(10)
        assert (wishes.states, wishes.restarts) == ({}, {}), "a new ingress has no wishes of an earlier one"
        topics.undefine("ingress:prices", PipelineDeletion())
        topics.want("ingress:prices", Wish(WantedState.PAUSED))
        assert request("DELETE", "/ingresses/prices")[0] == 202
        assert topics.wishes(10).states == {}
        assert request("DELETE", "/ingresses/prices")[0] == 404

    asked(topics, ask)


def test_user_of_a_definition_must_be_listed(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        code, answer = request("POST", "/ingresses", body=json.dumps({"name": "in", "config": {"topics": ["t"], "user": "bob"}}))
        assert (code, "'user': there is no user 'bob' with a password or a role" in answer["error"]) == (400, True)
        assert topics.wishes(10).definitions == {}
        code, _ = request("POST", "/ingresses", body=json.dumps({"name": "in", "config": {"topics": ["t"], "user": "ann"}}))
        assert (code, topics.wishes(10).definitions["ingress:in"].settings["user"]) == (202, "ann")
        assert request("PUT", "/ingresses/in/config", body=json.dumps({"topics": ["t"], "user": ["bob"]}))[0] == 400

    asked(topics, ask, lists_user="ann".__eq__)


def damage(topics: ControlTopics, key: str) -> None:
    topics._store(key, b"x")


@pytest.mark.parametrize("reported", [False, True])
def test_definition_that_cannot_be_read_is_shown_and_can_be_changed_and_deleted(topics: ControlTopics, reported: bool) -> None:
    def ask(request: Request) -> None:
        create(request)
        before = definition(topics)
        if reported:
            report(topics, ingress_prices=replace(OTHER, revision=7, definition_id=before.id))
        damage(topics, "definition/ingress:prices")
        status = request("GET", "/ingresses/prices/status")[1]
        assert (status["origin"], status["revision"], status["wanted"]) == ("runtime", None, "running")
        assert "key b'definition/ingress:prices': unreadable record b'x'" in status["error"]
        assert {each["name"] for each in request("GET", "/ingresses")[1]} == {"prices", "stock"}
        assert request("GET", "/flow")[0] == 200
        code, answer = create(request)
        assert (code, "exists already; change it" in answer["error"]) == (409, True)
        assert change(request, body="bytes") == (202, {"name": "prices", "kind": "ingress", "revision": 8 if reported else 2})
        assert (definition(topics).id == before.id, definition(topics).settings["body"]) == (reported, "bytes")
        assert request("GET", "/ingresses/prices/status")[1]["error"] == ""
        damage(topics, "definition/ingress:prices")
        assert request("DELETE", "/ingresses/prices")[0] == 202
        assert dict(topics.wishes(10).unreadable) == {}

    asked(topics, ask)


def test_damaged_definition_of_a_covered_divert_keeps_its_id_and_a_higher_revision(topics: ControlTopics) -> None:
    topics.say_covered("orders2", 5, CoverageMark("id", 3, 9))
    damage(topics, "definition/divert:orders2")
    known = KnownPipelines(topics.reports(10), topics.wishes(10))
    assert known_id(known, "divert:orders2") == "id"
    assert replaceable(known, "divert:orders2", "id") == PipelineDefinition("id", 3, {})


def test_name_of_a_definition_that_cannot_be_read_is_not_free_for_another_kind(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        damage(topics, "definition/divert:prices")
        code, answer = create(request)
        assert (code, "divert 'prices' exists already" in answer["error"]) == (409, True)
        assert request("DELETE", "/diverts/prices")[0] == 202
        assert create(request)[0] == 202

    asked(topics, ask)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_pipeline_whose_definition_is_lost_can_be_created_with_its_id_or_deleted(topics: ControlTopics, method: str) -> None:
    def ask(request: Request) -> None:
        create(request)
        before = definition(topics)
        topics._store("definition/ingress:prices", None)
        report(topics, ingress_prices=replace(OTHER, state=PipelineState.FAILED, revision=4, definition_id=before.id))
        status = request("GET", "/ingresses/prices/status")[1]
        assert (status["state"], status["origin"], status["wanted"]) == ("failed", "runtime", "running")
        assert status["error"].startswith("bascule.control has lost the definition, and nobody has deleted it. Create the pipeline again")
        if method == "DELETE":
            assert request("DELETE", "/ingresses/prices")[0] == 202
            assert request("GET", "/ingresses/prices/status")[1]["state"] == "deleting"
            assert create(request)[1]["revision"] == 1, "a new one"
            assert definition(topics).id != before.id
            return
        again = create(request) if method == "POST" else change(request)
        assert (again[0], again[1]["revision"], definition(topics).id) == (202, 5, before.id)
        assert create(request)[0] == 409

    asked(topics, ask)


@pytest.fixture
def positions(topics: ControlTopics) -> Positions:
    own_topics.ensure(topics._kafka, {"bascule.positions": own_topics.POSITIONS})

    def store(pipeline: str, id: str | None) -> None:
        mark = f"{DEFINED}{pipeline}"
        value = None if id is None else defined_mark(id).encode()
        topics._shared.appender.append(Outgoing("bascule.positions", mark.encode(), value, partition=position_partition(mark))).result(10)

    return store


@pytest.mark.parametrize("found", ["damaged", "lost"])
def test_definition_that_only_positions_know_is_replaced_with_their_id(topics: ControlTopics, positions: Positions, found: str) -> None:
    """A driver of an earlier version reports no id, and the definition is lost, or cannot be read."""

    def ask(request: Request) -> None:
        create(request)
        before = definition(topics)
        positions("ingress:prices", before.id)
        report(topics, ingress_prices=replace(OTHER, state=PipelineState.FAILED, revision=4))
        topics._store("definition/ingress:prices", None if found == "lost" else b"x")
        assert (change(request)[0], definition(topics).id, definition(topics).revision) == (202, before.id, 5)

    asked(topics, ask)


def test_pipeline_that_only_its_positions_know_is_created_with_their_id_unless_it_was_deleted(
    topics: ControlTopics, positions: Positions
) -> None:
    def ask(request: Request) -> None:
        create(request)
        first = definition(topics).id
        positions("ingress:prices", first)
        topics._store("definition/ingress:prices", None)  # as if somebody had recreated both topics of the control
        assert create(request)[1]["revision"] == 1
        assert definition(topics).id == first
        assert request("DELETE", "/ingresses/prices")[0] == 202
        assert create(request)[0] == 202
        assert definition(topics).id != first, "the driver has not deleted the positions yet"

    asked(topics, ask)


def test_positions_of_other_pipelines_are_not_asked_for_the_id_of_one(topics: ControlTopics, positions: Positions) -> None:
    positions("ingress:prices", "1")

    def ends() -> list[int]:
        return [TopicHistory(topics._kafka, "bascule.positions", each).latest() for each in range(POSITION_PARTITIONS)]

    before = ends()
    assert (topics.begun("ingress:prices", 10), topics.begun("ingress:stock", 10)) == ("1", "")
    asked = [position_partition(f"{DEFINED}ingress:{name}") for name in ("prices", "stock")]
    assert [each for each, (end, old) in enumerate(zip(ends(), before, strict=True)) if end > old] == sorted(asked), "barrier records"


def test_deletion_is_stored_with_its_author(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        create(request)
        assert request("DELETE", "/ingresses/prices")[0] == 202

    asked(topics, ask)
    stored = topics._table("bascule.control", 10)["deleted/ingress:prices"]
    assert json.loads(stored.value) == {"version": 1, "by": "manage", "at_ms": NOW_MS}
    topics._store("deleted/ingress:prices", b"damaged")
    assert topics.wishes(10) == Wishes(), "a damaged deletion deletes nothing, and holds nothing"


def test_oldest_deletions_are_forgotten_unless_the_driver_has_a_report_or_positions(
    topics: ControlTopics, positions: Positions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "DELETIONS_MAX", 2)

    def delete(*names: str) -> set[str]:
        for name in names:
            topics.undefine(f"ingress:{name}", PipelineDeletion("ann", NOW_MS))
        return {pipeline.removeprefix("ingress:") for pipeline in topics.wishes(10).deleted}

    report(topics, ingress_reported=OTHER)
    positions("ingress:begun", "1")
    first = ["reported", "begun", "third", "fourth"]
    assert delete(*first, "third") == {*first}, "only more than twice as many are reduced"
    assert delete("fifth") == {"reported", "begun", "third", "fifth"}
    assert delete("sixth") == {"reported", "begun", "fifth", "sixth"}
    report(topics, ingress_reported=None)  # type: ignore[arg-type]  # the driver has deleted its positions
    positions("ingress:begun", None)
    assert delete("seventh") == {"sixth", "seventh"}


def test_deletion_is_confirmed_if_old_deletions_cannot_be_forgotten_then(
    topics: ControlTopics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reported(*_: object) -> None:
        raise Unavailable("the topic of the reports has no leader")

    monkeypatch.setattr(control, "DELETIONS_MAX", 0)
    monkeypatch.setattr(ControlTopics, "reported", reported)

    def ask(request: Request) -> None:
        create(request)
        assert request("DELETE", "/ingresses/prices") == (202, {"name": "prices", "kind": "ingress"})

    asked(topics, ask)
    assert topics.wishes(10).deleted == {"ingress:prices"}
    assert [each.levelname for each in caplog.records if "could not forget old deletions" in each.getMessage()] == ["WARNING"]


def test_definition_that_is_lost_after_an_earlier_one_was_deleted_does_not_look_deleted(topics: ControlTopics) -> None:
    topics.define("ingress:prices", PipelineDefinition("1", 1, PRICES))
    topics.undefine("ingress:prices", PipelineDeletion("manage", NOW_MS))
    assert topics.wishes(10).losing(["ingress:prices"], "topic").lost == frozenset()
    topics.define("ingress:prices", PipelineDefinition("2", 1, PRICES))
    assert topics._table("bascule.control", 10).keys() == {"definition/ingress:prices"}
    topics._store("definition/ingress:prices", None)
    assert topics.wishes(10).losing(["ingress:prices"], "topic").lost == {"ingress:prices"}
