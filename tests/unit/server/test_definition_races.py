# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""Definitions of ingresses while other brokers change them at the same time, on the mock cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bascule.kafka.control import ControlTopics
from bascule.server import pipeline_definitions
from bascule.writer.control import PipelineDefinition, Wishes
from tests.unit.server.test_pipeline_definitions import PRICES, Request, change, create, definition
from tests.unit.server.test_pipelines import asked, cluster, topics  # noqa: F401 - fixtures


class Crowded:
    """Topics into which another broker writes after each of the first decisive reads of this one."""

    def __init__(self, topics: ControlTopics, *others: Callable[[], object]) -> None:
        self._topics, self._others = topics, list(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topics, name)

    def wishes(self, timeout_s: float, *, decides: bool = False) -> Wishes:
        found = self._topics.wishes(timeout_s, decides=decides)
        if decides and self._others:
            self._others.pop(0)()
        return found


def other(topics: ControlTopics, **settings: Any) -> Callable[[], object]:
    """Return a change of the ingress by another broker, which may create it."""

    def write() -> None:
        before = topics.wishes(10, decides=True).definitions.get("ingress:prices") or PipelineDefinition("other", 0, PRICES)
        topics.define("ingress:prices", replace(before, revision=before.revision + 1, settings={**before.settings, **settings}))

    return write


def test_of_two_brokers_that_create_an_ingress_at_the_same_time_one_does(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        code, answer = create(request)
        assert (code, "exists already" in answer["error"]) == (409, True)

    asked(Crowded(topics, other(topics)), ask)
    assert definition(topics).id == "other"


def test_changes_by_two_brokers_at_the_same_time_are_both_kept(topics: ControlTopics) -> None:
    other(topics)()

    def ask(request: Request) -> None:
        code, answer = request("PATCH", "/ingresses/prices/config", body=json.dumps({"body": "map"}))
        assert (code, answer["revision"]) == (202, 4)

    asked(Crowded(topics, other(topics, routing="anycast"), other(topics, key_as="group-id")), ask)
    assert definition(topics).settings == {**PRICES, "body": "map", "routing": "anycast", "key_as": "group-id"}


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_change_of_a_revision_that_another_broker_replaces_at_the_same_time_is_a_conflict(topics: ControlTopics, method: str) -> None:
    other(topics)()

    def ask(request: Request) -> None:
        code, answer = request(method, "/ingresses/prices/config?revision=1", body=json.dumps({**PRICES, "body": "map"}))
        assert (code, "no longer has the revision '1'" in answer["error"]) == (409, True)

    asked(Crowded(topics, other(topics, routing="anycast")), ask)
    assert definition(topics).settings == {**PRICES, "routing": "anycast"}


def test_ingress_that_another_broker_changes_while_it_is_deleted_is_deleted(topics: ControlTopics) -> None:
    other(topics)()

    def ask(request: Request) -> None:
        assert request("DELETE", "/ingresses/prices")[0] == 202

    asked(Crowded(topics, other(topics, routing="anycast")), ask)
    assert topics.wishes(10).definitions == {}


def test_request_ends_if_other_brokers_change_definitions_all_the_time(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        code, answer = create(request, "another")
        assert (code, "other requests have changed definitions" in answer["error"]) == (409, True)

    asked(Crowded(topics, *[other(topics)] * pipeline_definitions.TRIES), ask)


def test_limit_on_definitions_holds_for_two_brokers_at_the_same_time(topics: ControlTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_definitions, "DEFINITIONS_MAX", 1)

    def ask(request: Request) -> None:
        code, answer = create(request, "another")
        assert (code, "1 pipelines are defined at run time" in answer["error"]) == (409, True)

    asked(Crowded(topics, other(topics)), ask)


class Former(Crowded):
    """Topics whose former leader knows no definitions yet."""

    def wishes(self, timeout_s: float, *, decides: bool = False) -> Wishes:
        return self._topics.wishes(timeout_s, decides=decides) if decides else Wishes()


def test_ingress_that_a_former_leader_does_not_know_is_not_replaced(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        assert create(request)[0] == 202
        created = definition(topics)
        assert create(request)[0] == 409
        assert definition(topics) == created
        assert change(request, body="bytes")[1]["revision"] == 2

    asked(Former(topics), ask)
