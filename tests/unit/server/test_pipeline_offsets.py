"""Offsets of pipelines over HTTP, on the mock cluster: what a plan says, what may be confirmed, and what is stored for the driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from bascule.config.settings import Settings
from bascule.core.kafka_records import Outgoing
from bascule.core.masking import PropertyMask
from bascule.core.topics import JournalTopics
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.appender import Appender
from bascule.kafka.bounds import Place
from bascule.kafka.control import ControlTopics
from bascule.kafka.planned_moves import OffsetTarget
from bascule.pipelines import offset_plans
from bascule.pipelines.offset_plans import OffsetPlans
from bascule.server import pipeline_offsets
from bascule.server.admin_access import AdminAccess, AdminRole
from bascule.server.audit import AuditTrail, FileSink
from bascule.server.pipeline_offsets import PLAN_MS
from bascule.server.pipelines import PipelinePages
from bascule.writer.control import (
    DRIVER_KEY,
    DriverReport,
    OffsetMove,
    PipelineDefinition,
    PipelineReport,
    PipelineState,
    WantedState,
    Wish,
)
from bascule.writer.position import COMMON, MOVED, MovedMark, Position, position_key, position_partition
from tests.support.flow_ends import NO_FLOW_ENDS
from tests.support.journal import SyntheticJournal, text_message
from tests.support.mock_cluster import MockCluster, product_on
from tests.unit.server.test_admin import Broker, served
from tests.unit.server.test_admin_access import send
from tests.unit.server.test_pipelines import no_redriving

NOW_MS = 1_000_000
#: Kafka's number of the request for offsets.
LIST_OFFSETS = 2
NAMES = JournalTopics()
JOURNAL = NAMES.journal
ACCESS = AdminAccess(restricted=True, tokens={role.word: (role.word, role) for role in AdminRole})
SETTINGS = {
    "divert": [{"name": "orders", "from": "orders"}, {"name": "off", "from": "x", "enabled": False}],
    "ingress": [{"name": "stock", "topics": ["s"]}],
}
Request = Callable[..., tuple[int, Any]]


class World:
    """A Kafka with a journal, positions and reports, and an admin server on it."""

    def __init__(self, cluster: MockCluster) -> None:
        self.cluster = cluster
        self.kafka = cluster.kafka
        wanted = {NAMES.control: own_topics.CONTROL, NAMES.reports: own_topics.CONTROL, NAMES.positions: own_topics.POSITIONS}
        own_topics.ensure(cluster.kafka, wanted)
        self.control = ControlTopics(cluster.kafka, NAMES)
        self.topics = Topics(cluster.kafka)
        self.topics.create(JOURNAL, 1, {})
        self.journal = SyntheticJournal(cluster.bootstrap, JOURNAL)
        self.now_ms = NOW_MS

    def close(self) -> None:
        self.control.close()

    def put(self, key: str, at: Position) -> None:
        appender = Appender(self.kafka)
        appender.append(Outgoing(NAMES.positions, key.encode(), at.encode(), partition=position_partition(key))).result()
        appender.close()

    def stand(self, offset: int, *, pipeline: str = "divert:orders", members: tuple[str, ...] = ("orders",)) -> None:
        """Put the position of a divert, or of its group."""
        self.put(position_key(pipeline, JOURNAL, 0), Position(JOURNAL, self.topics.id(JOURNAL), 0, offset, members=members, owner="d"))

    def report(self, state: PipelineState, pipeline: str = "divert:orders", **more: Any) -> None:
        definition = {"from": "orders", "selector": "", "from_kafka": False}
        reports: dict[str, PipelineReport | DriverReport | None] = {pipeline: PipelineReport(state, "d", NOW_MS, definition, **more)}
        reports[DRIVER_KEY] = DriverReport("d", NOW_MS)
        for future in self.control.report(reports):
            future.result()

    def stop(self, pipeline: str = "divert:orders") -> None:
        self.control.want(pipeline, Wish(WantedState.STOPPED))
        self.report(PipelineState.STOPPED, pipeline)

    def asked(self, ask: Callable[[Request], None], audit: AuditTrail | None = None) -> None:
        planning = OffsetPlans(self.kafka, NAMES)
        pages = PipelinePages(
            self.control, Settings.model_validate(SETTINGS), audit or AuditTrail(), lambda: self.now_ms, lambda: planning, no_redriving,
            PropertyMask, NO_FLOW_ENDS,
        )  # fmt: skip

        def run(port: int) -> None:
            def request(method: str, path: str, role: str = "manage", **arguments: Any) -> tuple[int, Any]:
                code, _, text = send(port, method, path, {"authorization": f"Bearer {role}"}, json.dumps(arguments))
                return code, json.loads(text)

            ask(request)

        served(Broker(), run, access=ACCESS, pipelines=pages)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with product_on(monkeypatch) as cluster:
        found = World(cluster)
        yield found
        found.close()


def with_messages(world: World) -> int:
    """Write a journal of three messages, of which the exclusive divert took the second. Return the offset of the first."""
    first = world.journal.start_epoch(["orders"]) + 1
    for text, diverts in (("1", ()), ("2", ("orders",)), ("3", ())):
        world.journal.send(text_message(text), address="orders", diverts=diverts)
    world.journal.flush()
    return first


@pytest.mark.parametrize("pipeline", [COMMON, "divert:orders"])
def test_positions_are_shown_with_the_offsets_that_exist_and_the_last_request(world: World, pipeline: str) -> None:
    first = with_messages(world)
    world.stand(first + 1, pipeline=pipeline)
    world.report(PipelineState.RUNNING)

    def ask(request: Request) -> None:
        assert request("GET", "/diverts/orders/offsets", "view") == (200, {
            "name": "orders", "kind": "divert", "request": None,
            "offsets": [{"topic": JOURNAL, "partition": 0, "offset": first + 1, "first": 0, "end": first + 3}],
        })  # fmt: skip
        assert request("GET", "/ingresses/stock/offsets", "view")[1]["offsets"] == []
        assert request("GET", "/diverts/nowhere/offsets")[0] == 404

    world.asked(ask)


def test_plan_counts_what_is_skipped_and_repeated_and_is_stored_once_it_is_confirmed(world: World, tmp_path: Path) -> None:
    audit = AuditTrail([lambda done: FileSink(tmp_path / "audit", done)])
    first = with_messages(world)
    world.stand(first + 3)
    world.stop()

    def ask(request: Request) -> None:
        code, plan = request("PATCH", "/diverts/orders/offsets", to="earliest")
        assert code == 200
        shown = {
            "topic": JOURNAL, "partition": 0, "offset": first + 3, "to": 0, "first": 0, "end": first + 3, "skipped": 0,
            "repeated": first + 3, "messages": 1, "taken": 1, "counted": True,
        }  # fmt: skip
        assert plan == {"name": "orders", "kind": "divert", "moves": [shown], "discards": False, "token": plan["token"]}
        assert world.control.wishes(10).offsets == {}, "a plan changes nothing"
        for _ in range(2):  # a client repeats a request that it has no answer to
            answer = {"name": "orders", "kind": "divert", "request": plan["token"]}
            assert request("PATCH", "/diverts/orders/offsets", token=plan["token"]) == (202, answer)
        wish = world.control.wishes(10).offsets["divert:orders"]
        assert (wish.id, wish.by) == (plan["token"], "manage")
        assert wish.moves == (OffsetMove(JOURNAL, world.topics.id(JOURNAL), 0, first + 3, 0),)

        def shown_request() -> Any:
            found = request("GET", "/diverts/orders/offsets")[1]["request"]
            return {name: found[name] for name in ("state", "error")}

        assert shown_request() == {"state": "pending", "error": ""}
        world.put(f"{MOVED}divert:orders", MovedMark(wish.id, 1, 1).position())
        assert shown_request() == {"state": "done", "error": ""}
        world.put(f"{MOVED}divert:orders", replace(MovedMark(wish.id).position(), sequence=-1))  # of an earlier version
        assert shown_request() == {"state": "refused", "error": "see the log of the pipelines"}
        world.report(PipelineState.STOPPED, offsets_request=wish.id, offsets_error="it has moved")
        assert shown_request() == {"state": "refused", "error": "it has moved"}
        world.put(f"{MOVED}divert:orders", MovedMark(wish.id, 0, 2, "the reason that is stored").position())
        assert shown_request() == {"state": "refused", "error": "the reason that is stored"}

    world.asked(ask, audit)
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["action"], line["on"], line["result"], line["repeated"]) for line in lines] == [
        ("divert offsets", "orders", "ok", first + 3)
    ] * 2  # fmt: skip


@pytest.mark.parametrize(
    ("start", "to"), [("earliest", 0), ("latest", None), (4_102_444_800_000, None), ("2100-01-01T00:00:00Z", None)], ids=repr
)
def test_reset_plans_a_move_to_the_start_and_is_stored_once_it_is_confirmed(world: World, start: object, to: int | None) -> None:
    first = with_messages(world)
    world.stand(first + 1)
    world.stop()
    reported = {"from": "orders", "selector": "", "from_kafka": False, "start": start}
    world.control.report({"divert:orders": PipelineReport(PipelineState.STOPPED, "d", NOW_MS, reported)})[0].result()

    def ask(request: Request) -> None:
        code, plan = request("DELETE", "/diverts/orders/offsets")
        assert (code, plan["moves"][0]["to"]) == (200, first + 3 if to is None else to)
        assert world.control.wishes(10).offsets == {}, "a plan changes nothing"
        discard = "&discard=true" if plan["discards"] else ""
        if discard:
            assert request("DELETE", f"/diverts/orders/offsets?token={plan['token']}")[0] == 409
        assert request("DELETE", f"/diverts/orders/offsets?token={plan['token']}{discard}")[0] == 202
        assert world.control.wishes(10).offsets["divert:orders"].id == plan["token"]

    world.asked(ask)


def test_reset_of_a_pipeline_takes_the_start_of_its_definition_or_of_the_configuration(world: World) -> None:
    first = with_messages(world)
    world.stand(first + 1, pipeline="divert:late")
    world.stand(first + 1)
    world.control.define("divert:late", PipelineDefinition("d", 1, {"from": "orders", "to": "t", "start": "earliest"}))
    for name in ("late", "orders"):
        world.control.want(f"divert:{name}", Wish(WantedState.STOPPED))

    def ask(request: Request) -> None:
        assert request("DELETE", "/diverts/late/offsets")[1]["moves"][0]["to"] == 0
        plan = request("DELETE", "/diverts/orders/offsets")[1]
        assert plan["moves"][0]["to"] == first + 3, "the default of a divert is latest"
        assert plan["discards"], "no driver has reported what the divert selects"
        world.control.want("divert:gone", Wish(WantedState.STOPPED))
        code, refused = request("DELETE", "/diverts/gone/offsets")
        assert (code, refused["error"]) == (409, "the start of divert:gone is unknown: no driver has reported its settings")

    world.asked(ask)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("to=latest", "unknown parameter 'to'"), ("token=x&topic=t", "unknown parameter 'topic'"), ("partition=0", "partition needs topic"),
        ("topic=t&partition=-1", "partition '-1' must be a number"), ("token=x&discard=1", "discard '1' must be true or false"),
    ],
)  # fmt: skip
def test_parameters_of_a_reset_that_mean_nothing_are_refused(world: World, query: str, text: str) -> None:
    def ask(request: Request) -> None:
        code, answer = request("DELETE", f"/diverts/orders/offsets?{query}")
        assert (code, text in answer["error"]) == (400, True), answer
        code, answer = request("DELETE", "/diverts/orders/offsets", token="x")
        assert (code, "takes parameters in its query" in answer["error"]) == (400, True)
        assert request("DELETE", "/diverts/orders/offsets")[0] == 409, "the divert is not stopped"

    world.asked(ask)


def test_plan_that_was_stored_is_not_stored_again_and_names_the_request_that_was_handled_before(world: World) -> None:
    first = with_messages(world)
    world.stand(first + 3)
    world.stop()

    def confirmed(request: Request, **arguments: Any) -> str:
        token: str = request("PATCH", "/diverts/orders/offsets", **arguments)[1]["token"]
        assert request("PATCH", "/diverts/orders/offsets", token=token, discard=True)[0] == 202
        return token

    def ask(request: Request) -> None:
        earlier = confirmed(request, to="earliest")
        assert world.control.wishes(10).offsets["divert:orders"].after == 0
        world.put(f"{MOVED}divert:orders", MovedMark(earlier, 1, 1).position())
        later = confirmed(request, shift_by=-1)
        assert world.control.wishes(10).offsets["divert:orders"].after == 1
        assert request("PATCH", "/diverts/orders/offsets", token=earlier)[0] == 202
        assert world.control.wishes(10).offsets["divert:orders"].id == later, "a repeated request has replaced a later one"
        world.control.want("divert:orders", Wish(WantedState.RUNNING))
        assert request("PATCH", "/diverts/orders/offsets", token=later)[0] == 202, "the answer of a repeated request is another"

    world.asked(ask)


def test_messages_that_only_an_exclusive_divert_has_are_not_skipped_without_the_word_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = with_messages(world)
    world.stand(first)
    world.stop()

    def ask(request: Request) -> None:
        plan = request("PATCH", "/diverts/orders/offsets", shift_by=1)[1]
        assert (plan["discards"], plan["moves"][0]["taken"]) == (False, 0)
        plan = request("PATCH", "/diverts/orders/offsets", shift_by=2)[1]
        assert (plan["discards"], plan["moves"][0]["taken"], plan["moves"][0]["skipped"]) == (True, 1, 2)
        code, refused = request("PATCH", "/diverts/orders/offsets", token=plan["token"])
        assert code == 409
        assert "messages that only it has would be lost" in refused["error"]
        assert world.control.wishes(10).offsets == {}
        assert request("PATCH", "/diverts/orders/offsets", token=plan["token"], discard=True)[0] == 202
        monkeypatch.setattr(offset_plans, "COUNTED_RECORDS_MAX", 1)
        plan = request("PATCH", "/diverts/orders/offsets", to="latest")[1]
        assert (plan["discards"], plan["moves"][0]["counted"]) == (True, False), "nobody has counted the rest"

    world.asked(ask)


def test_pipeline_that_is_not_stopped_and_plan_that_is_unknown_old_or_of_another_pipeline_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_offsets, "PLANS_MAX", 1)
    first = with_messages(world)
    world.stand(first)

    def refused(request: Request, text: str, code: int = 409, **arguments: Any) -> None:
        found, answer = request("PATCH", "/diverts/orders/offsets", **arguments)
        assert (found, text in answer["error"]) == (code, True), answer

    def ask(request: Request) -> None:
        for state in (WantedState.RUNNING, WantedState.PAUSED):
            world.control.want("divert:orders", Wish(state))
            refused(request, "divert 'orders' is not stopped; stop it first (bascule divert stop orders)", to="latest")
        world.control.want("divert:orders", Wish(WantedState.STOPPED))
        world.report(PipelineState.RUNNING)
        refused(request, "divert 'orders' is still running", to="latest")
        world.report(PipelineState.STOPPED)
        refused(request, "this broker has no plan 'x'", token="x")
        assert request("PATCH", "/diverts/off/offsets", to="latest")[0] == 409
        token = request("PATCH", "/diverts/orders/offsets", shift_by=1)[1]["token"]
        world.control.want("ingress:stock", Wish(WantedState.STOPPED))
        assert request("PATCH", "/ingresses/stock/offsets", token=token)[0] == 409
        world.now_ms += PLAN_MS + 1
        world.control.report({DRIVER_KEY: DriverReport("d", world.now_ms)})[0].result()
        refused(request, "a plan can be confirmed for 10 minutes", token=token)
        token = request("PATCH", "/diverts/orders/offsets", shift_by=1)[1]["token"]
        request("PATCH", "/diverts/orders/offsets", shift_by=1)
        refused(request, "this broker has no plan", token=token)
        world.control.want("divert:orders", Wish(WantedState.RUNNING))
        refused(request, "is not stopped", token=token)
        assert world.control.wishes(10).offsets == {}

    world.asked(ask)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, 'exactly one of "to" and "shift_by" is needed'),
        ({"to": "latest", "shift_by": 1}, 'exactly one of "to" and "shift_by" is needed'),
        (
            {"to": "yesterday"},
            "cannot move to 'yesterday'; use 'earliest', 'latest', an offset, a period before now (90s, 30m, 2h, 7d) or a time",
        ),
        ({"to": True}, '"to" must be'),
        ({"to": -1}, "cannot move to '-1'"),
        ({"to": 2**63}, "cannot move to '9223372036854775808'"),
        ({"to": "9" * 400}, "cannot move to '999"),
        ({"to": "\u0663"}, "cannot move to"),
        ({"shift_by": "1"}, '"shift_by" must be a number of records'),
        ({"shift_by": 1.5}, '"shift_by" must be a number of records'),
        ({"to": "latest", "topic": 1}, '"topic" must be the name of a topic'),
        ({"to": "latest", "partition": 0}, '"partition" must be a number, and needs "topic"'),
        ({"to": "latest", "topics": "x"}, "unknown argument 'topics'"),
        ({"token": "x", "to": "latest"}, "unknown argument 'to'"),
    ],
    ids=repr,
)
def test_arguments_that_mean_nothing_are_refused(world: World, arguments: dict[str, Any], text: str) -> None:
    def ask(request: Request) -> None:
        code, answer = request("PATCH", "/diverts/orders/offsets", **arguments)
        assert (code, text in answer["error"]) == (400, True), answer

    world.asked(ask)


def test_positions_of_an_ingress_move_by_topic_and_partition_within_the_records_that_exist(world: World) -> None:
    source = "s"
    world.topics.create(source, 3, {})
    appender = Appender(world.kafka)
    for partition in range(3):
        for number in range(4):
            appender.append(Outgoing(source, None, str(number).encode(), partition=partition)).result()
    appender.close()
    ids = {source: world.topics.id(source)}
    for partition, (topic_id, offset) in enumerate([(ids[source], 2), (ids[source], 4), ("earlier", 900)]):
        world.put(position_key("ingress:stock", source, partition), Position(source, topic_id, partition, offset, owner="d"))
    world.put("ingress:stock", Position("", "", 0, 0, owner="d"))
    world.put(position_key("ingress:stock", "left", 0), Position("left", "x", 0, 7))
    world.stop("ingress:stock")

    def moves(request: Request, **arguments: Any) -> list[tuple[int, ...]]:
        code, plan = request("PATCH", "/ingresses/stock/offsets", **arguments)
        assert code == 200, plan
        return [tuple(each[name] for name in ("partition", "offset", "to", "skipped", "repeated")) for each in plan["moves"]]

    def ask(request: Request) -> None:
        assert moves(request, to="earliest") == [(0, 2, 0, 0, 2), (1, 4, 0, 0, 4), (2, 900, 0, 0, 0)]
        assert moves(request, to="latest") == [(0, 2, 4, 2, 0), (2, 900, 4, 4, 0)]
        assert moves(request, to=3, topic=source, partition=1) == [(1, 4, 3, 0, 1)]
        assert moves(request, to="3", topic=source, partition=0) == [(0, 2, 3, 1, 0)]
        assert moves(request, shift_by=100, topic=source, partition=0) == [(0, 2, 4, 2, 0)]
        assert moves(request, shift_by=-100, topic=source, partition=0) == [(0, 2, 0, 0, 2)]
        assert moves(request, to="2100-01-01", topic=source, partition=0) == [(0, 2, 4, 2, 0)]
        code, refused = request("PATCH", "/ingresses/stock/offsets", to="latest", topic="left")
        assert (code, refused["error"]) == (409, "ingress:stock has no position in topic 'left' as given")

    world.asked(ask)


def with_source(world: World) -> str:
    """Write a topic of two partitions with four records each, and stop an ingress at offset 2 of each."""
    world.topics.create("s", 2, {})
    appender = Appender(world.kafka)
    for partition in range(2):
        for number in range(4):
            appender.append(Outgoing("s", None, str(number).encode(), partition=partition)).result()
        at = Position("s", world.topics.id("s"), partition, 2, owner="d")
        world.put(position_key("ingress:stock", "s", partition), at)
    appender.close()
    world.stop("ingress:stock")
    return "/ingresses/stock/offsets"


def test_time_for_which_kafka_does_not_answer_is_an_error_and_never_means_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_source(world)
    asked = offset_plans.offsets_at

    def failing(kafka: Mapping[str, Any], places: Collection[Place], timestamp_ms: int, _: float) -> dict[Place, int | None]:
        world.cluster.fail(LIST_OFFSETS, *[KafkaError.KAFKA_STORAGE_ERROR] * 20)
        return asked(kafka, places, timestamp_ms, 0.2)

    def ask(request: Request) -> None:
        monkeypatch.setattr(offset_plans, "offsets_at", failing)
        code, answer = request("PATCH", path, to="2026-01-31")
        assert (code, "offsets of partitions cannot be read" in answer["error"]) == (503, True), answer

    world.asked(ask)


def test_position_in_a_recreated_topic_does_not_move_by_a_number_of_records(world: World) -> None:
    path = with_source(world)
    world.put(position_key("ingress:stock", "s", 1), Position("s", "earlier", 1, 900, owner="d"))

    def ask(request: Request) -> None:
        code, answer = request("PATCH", path, shift_by=-10)
        assert code == 409
        assert answer["error"] == "topic 's' was recreated, so its old offsets say nothing: move to an offset or a time instead"
        assert request("PATCH", path, shift_by=-1, topic="s", partition=0)[1]["moves"][0]["to"] == 1

    world.asked(ask)


def test_messages_of_a_divert_that_no_driver_has_reported_may_be_lost_by_a_skip(world: World) -> None:
    first = with_messages(world)
    world.stand(first)
    world.control.want("divert:orders", Wish(WantedState.STOPPED))

    def ask(request: Request) -> None:
        plan = request("PATCH", "/diverts/orders/offsets", shift_by=1)[1]
        assert (plan["moves"][0]["counted"], plan["discards"]) == (False, True), "nobody knows what the divert selects"
        refused = request("PATCH", "/diverts/orders/offsets", token=plan["token"])[1]["error"]
        assert "may be or have been exclusive, and not all messages were counted" in refused

    world.asked(ask)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("0" * 20 + "12", OffsetTarget("offset", 12)),
        (str(2**63 - 1), OffsetTarget("offset", 2**63 - 1)),
        ("1970-01-01T00:00:01.0025", OffsetTarget("time", 1_003)),
        ("2026-01-31T08:00:00.003+00:00", OffsetTarget("time", 1_769_846_400_003)),
        ("1960-01-01", OffsetTarget("time", 0)),
    ],
)
def test_text_names_exactly_the_offset_or_the_first_millisecond_that_is_not_earlier(text: str, target: OffsetTarget) -> None:
    assert OffsetTarget.parsed(text) == target
