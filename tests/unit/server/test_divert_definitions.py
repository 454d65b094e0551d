# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""Definitions of diverts over HTTP, on the mock cluster: what is stored and refused, and when a request answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any

import pytest

from bascule.broker.coverage import CoverageMark
from bascule.core.errors import Unavailable
from bascule.kafka.control import ControlTopics
from bascule.server import pipeline_definitions
from bascule.threads.background import in_background
from bascule.writer.control import PipelineDefinition, PipelineDeletion
from tests.unit.server.test_pipelines import asked, cluster, topics  # noqa: F401 - fixtures

Request = Callable[..., tuple[int, Any]]
LATE = {"from": "news", "to": "late"}


def create(request: Request, **settings: Any) -> tuple[int, Any]:
    return request("POST", "/diverts", body=json.dumps({"name": "late", "config": {**LATE, **settings}}))


def change(request: Request, **settings: Any) -> tuple[int, Any]:
    return request("PUT", "/diverts/late/config", body=json.dumps({**LATE, **settings}))


def definition(topics: ControlTopics) -> PipelineDefinition | None:
    return topics.wishes(10).definitions.get("divert:late")


@contextmanager
def covering(topics: ControlTopics, *epochs: int) -> Iterator[None]:
    """Let brokers cover each definition of the divert, with the number of the epoch as the offset."""
    over = Event()

    def follow() -> None:
        said: set[tuple[str, int]] = set()
        while not over.wait(0.02):
            found = definition(topics)
            if found is not None and (found.id, found.revision) not in said:
                for epoch in epochs:
                    topics.say_covered("late", epoch, CoverageMark(found.id, found.revision, epoch))
                said.add((found.id, found.revision))

    following = in_background(follow, "covering")
    try:
        yield
    finally:
        over.set()
        following.result(10)


def test_divert_is_created_changed_and_deleted_once_it_is_covered(topics: ControlTopics) -> None:
    def ask(request: Request) -> None:
        assert create(request, selector="x = 1") == (202, {"name": "late", "kind": "divert", "revision": 1})
        shown = request("GET", "/diverts/late")[1]
        assert (shown["origin"], shown["config"]) == ("runtime", {**LATE, "selector": "x = 1"})
        assert request("GET", "/diverts/late/status")[1]["covered_from"] == 5
        assert change(request, key="none")[1]["revision"] == 2
        assert create(request)[0] == 409
        assert request("POST", "/ingresses", body='{"name": "late", "config": {"topics": ["t"]}}')[0] == 409
        assert request("DELETE", "/diverts/late")[0] == 202
        assert topics.wishes(10).covered == {}, "marks of a deleted divert are deleted"
        assert create(request)[1]["revision"] == 1

    with covering(topics, 7, 5):
        asked(topics, ask)


def test_damaged_coverage_mark_is_skipped(topics: ControlTopics) -> None:
    topics.say_covered("late", 5, CoverageMark("id", 1, 5))
    topics._store("covered/divert:late/6", b"damaged")
    topics._store("covered/damaged", b"{}")
    assert topics.wishes(10).covered == {"divert:late": (CoverageMark("id", 1, 5),)}


def test_request_without_an_active_broker_says_that_the_definition_stays(topics: ControlTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_definitions, "COVERED_WITHIN_S", 0.5)

    def ask(request: Request) -> None:
        code, answer = create(request)
        assert code == 503
        assert answer["error"].startswith("divert 'late' is stored (revision 1), but no active broker has confirmed within 0.5 s")
        assert request("GET", "/diverts/late/status")[1]["covered_from"] is None
        found = definition(topics)
        assert found is not None
        topics.say_covered("late", 5, CoverageMark(found.id, 1, 5))
        assert change(request, to="changed")[0] == 503, "the mark of an earlier revision does not count"
        monkeypatch.setattr(pipeline_definitions, "COVERED_WITHIN_S", 30.0)
        with covering(topics, 6):
            assert change(request)[:1] == (202,)
        assert request("GET", "/diverts/late/status")[1]["covered_from"] == 5, "the lowest offset of the marks counts"

    asked(topics, ask)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"exclusive": True}, "'exclusive' cannot be given at run time: the journal names the exclusive diverts where an epoch begins"),
        ({"group": "g"}, "'group' cannot be given at run time: a divert that is defined at run time is carried alone"),
        ({"select": ["value"]}, "'select' cannot be given at run time: a transformation is code that runs in the driver"),
        ({"python": "a:b"}, "'python' cannot be given at run time"),
        ({"enabled": True}, "'enabled' cannot be given at run time"),
        ({"selector": "x ="}, "selector"),
        ({"to": "bascule.journal"}, "is one of Bascule's own topics"),
        ({"from": None}, "from"),
        ({"form": "a"}, "unknown setting"),
    ],
)
def test_settings_that_a_divert_cannot_have_are_refused(topics: ControlTopics, settings: dict[str, Any], reason: str) -> None:
    def ask(request: Request) -> None:
        code, answer = create(request, **settings)
        assert (code, reason in answer["error"]) == (400, True), answer
        assert definition(topics) is None

    asked(topics, ask)


def test_definition_that_cannot_be_read_is_none(topics: ControlTopics) -> None:
    topics.define("divert:late", PipelineDefinition("1", 1, LATE))
    topics._store("definition/divert:new", b'{"version": 99}')
    topics._store("covered/divert:late/3", b"damaged")
    topics.say_covered("late", 4, CoverageMark("1", 1, 9))
    definitions, covered, *_ = topics.controlled_diverts(10, decides=True)
    assert {name: each and each.id for name, each in definitions.items()} == {"late": "1", "new": None}
    assert covered == {"late": [CoverageMark("1", 1, 9)]}


def test_definition_that_is_not_stored_leaves_the_marks_of_another_one(topics: ControlTopics) -> None:
    """Somebody else may have an answer about a divert of the name."""
    topics.define("divert:late", PipelineDefinition("1", 1, LATE))
    topics.say_covered("late", 3, CoverageMark("1", 1, 5))
    before = topics.wishes(10)
    assert not topics.define("divert:late", PipelineDefinition("2", 1, LATE), version=before.version - 1)
    assert topics.wishes(10) == before
    topics.define("divert:late", PipelineDefinition("2", 1, LATE), version=before.version)
    assert topics.wishes(10).covered == {}


def test_request_about_a_divert_that_somebody_deletes_meanwhile_says_so(topics: ControlTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_definitions, "COVERED_WITHIN_S", 0.5)
    covered = pipeline_definitions.DefinitionPages._covered

    async def deleted(pages: pipeline_definitions.DefinitionPages, name: str, revision: int) -> None:
        await pages._pages.beside(partial(topics.undefine, f"divert:{name}", PipelineDeletion()))
        await covered(pages, name, revision)

    monkeypatch.setattr(pipeline_definitions.DefinitionPages, "_covered", deleted)

    def ask(request: Request) -> None:
        assert create(request) == (409, {"error": "another request has deleted divert 'late'"})

    asked(topics, ask)


def test_store_that_fails_answers_503(topics: ControlTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise Unavailable("no Kafka")

    monkeypatch.setattr(topics, "define", away)
    asked(topics, lambda request: check(create(request)))


def check(answer: tuple[int, Any]) -> None:
    assert answer == (503, {"error": "no Kafka"})
