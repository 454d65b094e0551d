# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""Changes of some settings of an ingress over HTTP, on the mock cluster: what stays, what goes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bascule.kafka.control import ControlTopics
from bascule.server.audit import AuditTrail, FileSink
from tests.unit.server.test_pipeline_definitions import PRICES, Request, change, create, definition
from tests.unit.server.test_pipelines import asked, cluster, topics  # noqa: F401 - fixtures


def merge(request: Request, query: str = "", **settings: Any) -> tuple[int, Any]:
    return request("PATCH", f"/ingresses/prices/config{query}", body=json.dumps(settings))


def test_patch_changes_some_settings_and_null_removes_one(topics: ControlTopics, tmp_path: Path) -> None:
    audit = AuditTrail([lambda done: FileSink(tmp_path / "audit", done)])

    def ask(request: Request) -> None:
        create(request, body="bytes", tasks=None)
        id = definition(topics).id
        assert merge(request, body="map", routing="anycast") == (202, {"name": "prices", "kind": "ingress", "revision": 2})
        now = definition(topics)
        assert (now.id, now.settings) == (id, {**PRICES, "body": "map", "tasks": None, "routing": "anycast"})
        assert merge(request, body=None, reply_to=None)[1]["revision"] == 3
        assert definition(topics).settings == {**PRICES, "tasks": None, "routing": "anycast"}, "a null that is absent changes nothing"
        assert request("GET", "/ingresses/prices/config")[1] == definition(topics).settings

    asked(topics, ask, audit)
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["action"], line["on"], json.loads(line["arguments"])) for line in lines[1:]] == [
        ("ingress patch", "prices", {"body": "map", "routing": "anycast"}), ("ingress patch", "prices", {"body": None, "reply_to": None}),
    ]  # fmt: skip


def test_patch_is_checked_as_a_whole_definition(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        code, answer = merge(request, body="map")
        assert (code, answer["error"]) == (404, "there is no ingress 'prices'"), "a patch creates nothing"
        code, answer = request("PATCH", "/ingresses/stock/config", body='{"body": "map"}')
        assert (code, "is defined in the configuration file" in answer["error"]) == (409, True)
        create(request)
        for settings, reason in (
            ({"topics": None}, "give either topics or pattern"), ({"start": None}, "'start' cannot be changed"),
            ({"bodi": "map"}, "did you mean 'body'?"), ({"enabled": False}, "'enabled' cannot be given at run time"),
            ({"to": "x" * 20_000}, "at most 16384 are allowed"),
        ):  # fmt: skip
            code, answer = merge(request, **settings)
            assert (code, reason in answer["error"]) == (400, True), answer
        topics._store("definition/ingress:prices", b"x")
        code, answer = merge(request, body="map")
        assert (code, "replace it" in answer["error"]) == (409, True), "nobody knows the settings that would stay"
        assert change(request)[0] == 202

    asked(topics, ask)
    assert definition(topics).settings == PRICES


def test_patch_of_a_revision_that_was_changed_meanwhile_is_refused(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        create(request)
        assert merge(request, "?revision=1", body="map")[1]["revision"] == 2
        code, answer = merge(request, "?revision=1", routing="anycast")
        assert (code, "no longer has the revision '1'" in answer["error"]) == (409, True)
        assert merge(request, "?revision=2", routing="anycast")[1]["revision"] == 3

    asked(topics, ask)
    assert definition(topics).settings == {**PRICES, "body": "map", "routing": "anycast"}
