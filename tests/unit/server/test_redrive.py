"""Dead letters of the pipelines over HTTP, on the mock cluster: lists, content, jobs for the driver, roles and audit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bascule.config.settings import Settings
from bascule.core.errors import BadRecord, Unavailable
from bascule.core.kafka_records import KafkaRecord, Outgoing
from bascule.core.masking import MASK, PropertyMask
from bascule.core.topics import JournalTopics
from bascule.kafka import own_topics
from bascule.kafka.appender import Appender
from bascule.kafka.control import ControlTopics
from bascule.kafka.history import TopicHistory, content_of
from bascule.kafka.redriving import RedriveTopics
from bascule.pipelines import redrive as module
from bascule.pipelines.ingress import IngressEngine
from bascule.pipelines.redrive import RedriveJobs, RedriveRun
from bascule.pipelines.spec import DivertSpec, IngressSpec, PipelinesSpec
from bascule.server import redrive
from bascule.server.admin_access import AdminRole
from bascule.server.audit import AuditTrail, FileSink
from bascule.server.pipelines import PipelinePages
from bascule.writer.control import DRIVER_KEY, DriverReport
from bascule.writer.redrive import RedriveAction, mark_key
from tests.scenarios.test_redrive import BEGIN_MS, bury
from tests.support.flow_ends import NO_FLOW_ENDS
from tests.support.mock_cluster import MockCluster, product_on
from tests.support.system import wait_for
from tests.unit.server.test_admin import Broker, served
from tests.unit.server.test_admin_access import send
from tests.unit.server.test_pipelines import ACCESS, GUIDE, PLANNING

NOW_MS = 1_000_000
NAMES = JournalTopics()


class Place:
    """A broker's admin server on the mock cluster."""

    def __init__(self, cluster: MockCluster) -> None:
        self.cluster = cluster
        self.kafka = cluster.kafka
        wanted = {
            NAMES.control: own_topics.CONTROL, NAMES.reports: own_topics.CONTROL, NAMES.redrive: own_topics.REDRIVE,
            NAMES.positions: own_topics.POSITIONS, NAMES.dead_letters: own_topics.DEAD_LETTERS,
        }  # fmt: skip
        own_topics.ensure(self.kafka, wanted)
        self.control = ControlTopics(self.kafka, NAMES)
        self.masked: tuple[str, ...] = ()
        self.pipelines = PipelinesSpec("bascule", dict(self.kafka), (DivertSpec("orders", "#", "orders"),))

    def redriving(self) -> RedriveTopics:
        return RedriveTopics(self.kafka, NAMES)

    def pages(self, audit: AuditTrail | None = None) -> PipelinePages:
        return PipelinePages(
            self.control, Settings(), audit or AuditTrail(), lambda: NOW_MS, lambda: PLANNING, self.redriving,
            lambda: PropertyMask(self.masked), NO_FLOW_ENDS,
        )  # fmt: skip

    def asked(self, ask: Callable[[Callable[..., tuple[int, Any]]], None], audit: AuditTrail | None = None) -> None:
        def run(port: int) -> None:
            def request(method: str, path: str, role: str = "manage", body: Any = None) -> tuple[int, Any]:
                text = None if body is None else json.dumps(body)
                code, _, answer = send(port, method, path, {"authorization": f"Bearer {role}"}, text)
                return code, json.loads(answer)

            ask(request)

        served(Broker(), run, access=ACCESS, pipelines=self.pages(audit))

    def carry_out(self) -> None:
        """Carry out the jobs as the driver does."""
        for job in self.control.wishes(10).redrives.values():
            RedriveRun(self.pipelines, self.redriving(), job, lambda: False).carry_out()

    def lose_marks(self) -> None:
        """Replace the topic of the marks by an empty one."""
        self.cluster.delete_records(NAMES.redrive, TopicHistory(self.kafka, NAMES.redrive, 0).latest())
        self.cluster.ids[NAMES.redrive] = "another"


def fail(*_: object) -> None:
    raise Unavailable("Kafka does not answer")


def reasons(found: Any) -> list[str]:
    return [each["reason"] for each in found["letters"]]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with product_on(monkeypatch) as cluster:
        found = Place(cluster)
        yield found
        found.control.close()


def test_dead_letters_are_listed_shown_and_redriven(place: Place, tmp_path: Path) -> None:
    bury(place.pipelines, "orders", "1", "2")
    audit = AuditTrail([lambda done: FileSink(tmp_path / "audit", done)])

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        code, found = request("GET", "/redrive/letters", "edit")
        assert (code, found["complete"], [each["reason"] for each in found["letters"]]) == (
            200,
            True,
            ["BadRecord: bad 1", "BadRecord: bad 2"],
        )
        first = found["letters"][0]
        assert first["source"] == {"topic": NAMES.journal, "partition": 0, "offset": 1}
        assert (first["pipeline"], first["time_ms"], first["address"]) == ("divert:orders", BEGIN_MS + 1, "flights")
        shown = request("GET", f"/redrive/letters/{first['place'].replace(':', '/')}", "edit")[1]
        assert (shown["value"], shown["state"]) == ("1", "waiting")
        bury(place.pipelines, "orders", "3", first=3)
        assert len(request("GET", "/redrive/letters?count=2", "edit")[1]["letters"]) == 2
        assert not request("GET", "/redrive/letters?count=2", "edit")[1]["complete"]
        assert [
            each["reason"] for each in request("GET", "/redrive/letters?reason=bad+3&header=bascule.id:0-3-0", "edit")[1]["letters"]
        ] == ["BadRecord: bad 3"]
        code, asked = request("POST", "/redrive/run", body={"all": True, "upto": found["upto"]})
        assert (code, asked["action"]) == (202, "redrive")
        (job,) = request("GET", "/redrive/jobs", "view")[1]
        assert (job["job"], job["state"], job["by"], job["at_ms"]) == (asked["job"], "pending", "manage", NOW_MS)
        place.carry_out()
        (job,) = request("GET", "/redrive/jobs", "view")[1]
        assert (job["state"], job["redriven"]) == ("done", 2)
        left = request("GET", "/redrive/letters", "edit")[1]
        assert reasons(left) == ["BadRecord: bad 3"], "it was not there when the list was made"
        assert request("GET", f"/redrive/letters/{first['place'].replace(':', '/')}", "edit")[1]["state"] == "done"

    place.asked(ask, audit)
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["action"], line["who"]) for line in lines if line["action"] == "redrive run"] == [("redrive run", "manage")]
    assert [json.loads(line["arguments"])["all"] for line in lines if line["action"] == "redrive run"] == [True]
    assert {line["action"] for line in lines} == {"redrive list", "redrive show", "redrive run"}


def test_list_continues_where_an_answer_has_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    bury(place.pipelines, "orders", "1", "2", "3", "4", "5")

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        def pages(parameters: str) -> list[list[str]]:
            found, start = [], ""
            while True:
                answer = request("GET", f"/redrive/letters?{parameters}{start and f'&from={start}'}", "edit")[1]
                found.append([reason[-1] for reason in reasons(answer)])
                start = answer["next"]
                assert answer["complete"] == (start == "")
                if not start:
                    return found

        assert pages("count=2") == [["1", "2"], ["3", "4"], ["5"]]
        assert pages("count=2&reason=bad+4") == [["4"]]
        # An answer ends in the middle when its time is over, and has gone on by one record at least.
        monkeypatch.setattr(redrive, "READ_S", 0.0)
        assert [each for each in pages("reason=bad+4") if each] == [["4"]]
        assert len(pages("reason=bad+4")) > 3
        assert request("GET", "/redrive/letters?from=x", "edit")[1]["error"] == "place 'x' must be PARTITION:OFFSET"
        assert request("GET", "/redrive/letters?from=7:0", "edit")[1]["letters"] == []

    place.asked(ask)


def test_recreated_topic_of_the_marks_is_noticed_before_a_dead_letter_is_done_a_second_time(place: Place) -> None:
    bury(place.pipelines, "orders", "1", "2")

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        def carried() -> list[bytes | None]:
            history = TopicHistory(place.kafka, "orders", 0)
            return [content_of(message)[1] for message in history.records(history.earliest(), history.latest(), committed=True)]

        assert request("POST", "/redrive/run", body={"places": ["0:0"]})[0] == 202
        place.carry_out()
        assert carried() == [b"1"]
        job = request("POST", "/redrive/run", body={"all": True})[1]["job"]
        place.lose_marks()
        code, answer = request("POST", "/redrive/run", body={"all": True})
        assert (code, "was deleted or recreated" in answer["error"]) == (409, True)
        place.carry_out()
        (found,) = (each for each in request("GET", "/redrive/jobs", "view")[1] if each["job"] == job)
        assert (found["state"], found["error"]) == ("failed", answer["error"])
        assert carried() == [b"1"]
        assert request("POST", "/redrive/discard", body={"all": True, "confirm": True})[0] == 409, "a job that fails accepts nothing"
        assert request("POST", "/redrive/discard", body={"places": ["0:0"], "confirm": True, "accept_lost_marks": True})[0] == 202
        assert request("POST", "/redrive/run", body={"all": True})[0] == 409, "no driver has carried out the other one yet"
        place.carry_out()
        assert request("POST", "/redrive/run", body={"all": True})[0] == 202
        place.carry_out()
        assert carried() == [b"1", b"2"]

    place.asked(ask)


def test_job_that_cannot_be_carried_out_fails_with_the_reason_and_can_be_repeated(place: Place) -> None:
    bury(place.pipelines, "orders", "1")
    topic = place.redriving().letter_topic()
    assert topic is not None
    damaged = mark_key(topic.topic_id, 0, 7).encode()

    def store(value: bytes | None) -> None:
        with closing(Appender(place.kafka)) as appender:
            appender.append(Outgoing(NAMES.redrive, damaged, value, partition=0)).result(30)

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        first = request("POST", "/redrive/run", body={"all": True})[1]["job"]
        store(b"{")
        place.carry_out()
        store(None)
        found = {each["job"]: each for each in request("GET", "/redrive/jobs", "view")[1]}
        assert found[first]["state"] == "failed"
        assert "UnreadableRedrive" in found[first]["error"]
        second = request("POST", "/redrive/run", body={"all": True})[1]["job"]
        place.carry_out()
        found = {each["job"]: each for each in request("GET", "/redrive/jobs", "view")[1]}
        assert (found[second]["state"], found[second]["redriven"], found[first]["redriven"]) == ("done", 1, 0)

    place.asked(ask)


def test_job_whose_attempts_fail_shows_why_while_it_is_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    bury(place.pipelines, "orders", "1")
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        def followed(*, done: bool) -> bool:
            driver.follow(place.control.wishes(10).redrives, ())
            return bool(sum(driver.outcomes.values()) if done else driver.errors)

        job = request("POST", "/redrive/run", body={"all": True})[1]["job"]
        driver = RedriveJobs(place.pipelines)
        with monkeypatch.context() as patched:
            patched.setattr(RedriveTopics, "letter_topic", fail)
            wait_for(lambda: followed(done=False), "an attempt to fail")
        place.control.report({DRIVER_KEY: DriverReport("d", NOW_MS, redrives=driver.errors)})[0].result(30)
        (found,) = request("GET", "/redrive/jobs", "view")[1]
        assert (found["job"], found["state"], found["error"]) == (job, "pending", "Unavailable: Kafka does not answer")
        wait_for(lambda: followed(done=True), "the next attempt")
        assert driver.errors == {}
        assert request("GET", "/redrive/jobs", "view")[1][0]["state"] == "done"
        driver.stop(30)

    place.asked(ask)


def test_masked_headers_are_hidden_under_each_name_of_their_property(place: Place, tmp_path: Path) -> None:
    secrets = [("pin", b"11"), ("jms.pin", b"22"), ("jms.long.pin", b"33"), ("card-number", b"44")]
    record = KafkaRecord("stock", 0, 0, None, b"hello", [("color", b"red"), *secrets], BEGIN_MS)
    engine = IngressEngine(IngressSpec("in", "queue", ("stock",)), place.pipelines.bridge_id, NAMES.ingress, NAMES.dead_letters)
    output = engine.dead_letter(record, "VALUE_CONVERTER", BadRecord("bad"))
    headers: Any = output.headers
    appender = Appender(place.kafka)
    appender.append(Outgoing(output.topic, None, output.value, headers, 0, output.timestamp_ms)).result(30)
    appender.close()
    audit = AuditTrail([lambda done: FileSink(tmp_path / "audit", done)])

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        (letter,) = request("GET", "/redrive/letters?header=pin:11", "edit")[1]["letters"]
        path = f"/redrive/letters/{letter['place'].replace(':', '/')}"
        shown = request("GET", path, "edit")[1]
        assert shown["headers"][:5] == [["color", "red"], *([name, value.decode()] for name, value in secrets)]
        place.masked = ("PIN", "card_*")  # as after a reload of the settings
        shown = request("GET", path, "edit")[1]
        assert shown["headers"][:5] == [["color", "red"], *([name, MASK] for name, _ in secrets)]
        for name, value in secrets:
            code, found = request("GET", f"/redrive/letters?header={name}:{value.decode()}", "edit")
            assert (code, found["error"]) == (
                400, f"header: admin.masked_properties hides the values of {name!r}; choose by another header",
            )  # fmt: skip
        assert len(request("GET", "/redrive/letters?header=color:red", "edit")[1]["letters"]) == 1
        assert request("POST", "/redrive/run", body={"headers": {"jms.long.pin": "33", "color": "red"}})[0] == 202

    place.asked(ask, audit)
    audit.close()
    (line,) = [line for line in map(json.loads, (tmp_path / "audit").read_text().splitlines()) if line["action"] == "redrive run"]
    assert json.loads(line["arguments"]) == {"headers": {"jms.long.pin": MASK, "color": "red"}}


def test_content_is_not_shown_if_it_cannot_be_audited(place: Place, tmp_path: Path) -> None:
    bury(place.pipelines, "orders", "1")
    audit = AuditTrail([lambda done: FileSink(tmp_path / "missing" / "audit", done)], required=True)

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        audit.record("login", "", who="", peer="")  # fails
        for method, path in (("GET", "/redrive/letters"), ("GET", "/redrive/letters/0/0"), ("POST", "/redrive/run")):
            code, found = request(method, path, body={"all": True} if method == "POST" else None)
            assert (code, found["error"]) == (503, audit.blocked), path

    place.asked(ask, audit)
    audit.close()


def test_discard_needs_a_confirmation_and_a_request_says_which_dead_letters_it_means(place: Place) -> None:
    bury(place.pipelines, "orders", "1", "2")

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        code, found = request("POST", "/redrive/discard", body={"all": True})
        assert (code, found["error"]) == (400, 'discarded dead letters are never carried; repeat the request with "confirm": true')
        bodies: list[dict[str, Any]] = [
            {}, {"all": True, "reason": "x"}, {"places": []}, {"places": ["1"]}, {"places": ["0:x"]}, {"reason": 1}, {"headers": {"a": 1}},
            {"since_ms": "1"}, {"what": 1},
        ]  # fmt: skip
        for body in bodies:
            assert request("POST", "/redrive/run", body=body)[0] == 400, body
        for wrong in ("count=0x", "since_ms=x", "header=x", "other=1"):
            assert request("GET", f"/redrive/letters?{wrong}", "edit")[0] == 400, wrong
        assert request("GET", "/redrive/letters/0/99", "edit")[0] == 404
        place_of_first = request("GET", "/redrive/letters", "edit")[1]["letters"][0]["place"]
        assert request("POST", "/redrive/discard", body={"places": [place_of_first], "confirm": True})[0] == 202
        (job,) = place.control.wishes(10).redrives.values()
        assert job.action is RedriveAction.DISCARD
        place.carry_out()
        assert reasons(request("GET", "/redrive/letters", "edit")[1]) == ["BadRecord: bad 2"]

    place.asked(ask)


def test_broker_refuses_jobs_that_nobody_finishes_and_forgets_old_ones(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive, "JOBS_MAX", 1)
    monkeypatch.setattr(redrive, "KEPT_MS", -(2**60))

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        first = request("POST", "/redrive/run", body={"all": True})[1]["job"]
        assert request("POST", "/redrive/run", body={"all": True})[0] == 409
        place.carry_out()
        second = request("POST", "/redrive/run", body={"all": True})[1]["job"]
        assert [job["job"] for job in request("GET", "/redrive/jobs")[1]] == [second] != [first]
        place.carry_out()
        with monkeypatch.context() as patched:
            patched.setattr(place.control, "forget", fail)
            assert request("POST", "/redrive/run", body={"all": True})[0] == 503
        assert [job["job"] for job in request("GET", "/redrive/jobs")[1]] == [second], "a refused job was stored"

    place.asked(ask)


def test_each_path_needs_its_role_and_the_guide_names_it(place: Place) -> None:
    paths = [page for page in place.pages().paths() if page.path.startswith("/redrive")]
    assert len(paths) == 5

    def ask(request: Callable[..., tuple[int, Any]]) -> None:
        for path in paths:
            assert path.role is not None
            for role in AdminRole:
                body = {"all": True, "confirm": True} if path.method == "POST" and path.path.endswith("discard") else {"all": True}
                code, _ = request(
                    path.method, path.path.format(partition=0, offset=0), role.word, body if path.method == "POST" else None
                )  # fmt: skip
                assert code == (403 if role < path.role else {"POST": 202}.get(path.method, 404 if "{" in path.path else 200)), (path, role)

    place.asked(ask)
    text = GUIDE.read_text()
    for path in paths:
        shown = path.path.replace("{partition}", "PARTITION").replace("{offset}", "OFFSET")
        assert path.role is not None
        assert f"| `{path.method} {shown}` | `{path.role.word}` |" in text
