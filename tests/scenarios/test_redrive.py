"""Dead letters that administrators redrive or discard: each is waiting or done, never both and never lost, whatever is killed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bascule.core.errors import BadRecord
from bascule.core.kafka_records import KafkaRecord, Outgoing
from bascule.jms.message import decode_message
from bascule.jms.record_headers import REDRIVES_HEADER
from bascule.journal.records import Send, decode_send, entries
from bascule.kafka.appender import Appender
from bascule.kafka.consumer import received_of
from bascule.kafka.history import TopicHistory
from bascule.kafka.redriving import RedriveTopics
from bascule.pipelines import redrive
from bascule.pipelines.audit import audit_diverts
from bascule.pipelines.divert import DivertEngine, WantedMessage
from bascule.pipelines.redrive import RedriveRun
from bascule.pipelines.spec import DivertSpec, IngressSpec, PipelinesSpec
from bascule.writer.control import PipelineDefinition
from bascule.writer.dead_letters import LetterFilter, PipelineDeadLetter
from bascule.writer.errors import PositionMoved
from bascule.writer.redrive import DoneLetters, RedriveAction, RedriveJob, RedriveReport, RedriveState, mark_key, mark_place
from tests.scenarios import test_control
from tests.scenarios.operating import KillAt, Killed, Operator
from tests.scenarios.sparkless import Bridge, Running
from tests.support.crash_points import at_crash_points
from tests.support.journal import text_message
from tests.support.system import wait_for

bridge = test_control.bridge
topics = test_control.topics
operator = test_control.operator
#: Where a run is killed, and how often it passes the point before.
PLACES = [
    ("redrive.taken", 0), ("redrive.before", 0), ("redrive.before", 1), ("redrive.after", 0), ("redrive.after", 2),
    ("writer.begin.after", 1), ("writer.produce.after", 1), ("writer.commit.before", 1), ("writer.commit.before", 3),
    ("writer.commit.after", 1), ("writer.commit.after", 2),
]  # fmt: skip
TIMEOUT_S = 30.0
#: The time of the messages: Kafka deletes old records of the dead-letter topic.
BEGIN_MS = int(time.time() * 1000)


class Letters:
    """The dead letters of a bridge, and what has become of them."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.topics = RedriveTopics(bridge.pipelines.kafka, bridge.pipelines.topics)
        self._ids = itertools.count(1)

    def waiting(self) -> list[PipelineDeadLetter]:
        topic = self.topics.letter_topic()
        assert topic is not None
        bounds = {each: (first, topic.ends[each]) for each, first in topic.firsts.items()}
        done = self.topics.table().of(topic.topic_id)
        return list(self.topics.letters(bounds, done, LetterFilter(), self.bridge.pipelines.bridge_id))

    def texts(self) -> list[Any]:
        return [decode_message(letter.value or b"").body for letter in self.waiting()]

    def job(self, action: RedriveAction = RedriveAction.REDRIVE, **chosen: Any) -> RedriveJob:
        topic = self.topics.letter_topic()
        assert topic is not None
        number = next(self._ids)
        return RedriveJob(f"job-{number}", action, topic.topic_id, topic.ends, LetterFilter(**chosen), "ann", number)

    def run(self, job: RedriveJob, *diverts: DivertSpec, **more: Any) -> RedriveReport:
        return RedriveRun(replace(self.bridge.pipelines, diverts=diverts, **more), self.topics, job, lambda: False).carry_out()


@pytest.fixture
def letters(bridge: Bridge) -> Iterator[Letters]:
    bridge.positions.prepare_topics()
    found = Letters(bridge)
    yield found
    found.topics.close()


def bury(pipelines: PipelinesSpec, divert: str, *texts: str, first: int = 1) -> None:
    """Write dead letters of messages of a divert, as its engine makes them."""
    engine = DivertEngine(pipelines.bridge_id, (pipelines.topics.journal, 0), pipelines.topics.dead_letters)
    spec, appender = DivertSpec(divert, "#"), Appender(pipelines.kafka)
    for number, text in enumerate(texts, first):
        send = Send(0, 0, 4, BEGIN_MS + number, 0, 0, "flights", (), (), (), None, text_message(text))
        output = engine.dead_letter(
            WantedMessage(number, 0, number, 0, send, [spec], {}), spec, "VALUE_CONVERTER", BadRecord(f"bad {text}")
        )
        headers: Any = output.headers
        appender.append(Outgoing(output.topic, None, output.value, headers, 0, output.timestamp_ms)).result(TIMEOUT_S)
    appender.close()


def unroutable(bridge: Bridge, name: str = "x") -> DivertSpec:
    """Return a divert that fails for messages to the address of one of Bascule's topics."""
    return DivertSpec(name, "#", "${address}")


def send_in_vain(bridge: Bridge, *texts: str) -> None:
    for text in texts:
        bridge.journal.send(text_message(text), address=bridge.pipelines.topics.positions)
    bridge.journal.flush()


def finished(operator: Operator, running: Running, letters: Letters, job: RedriveJob) -> RedriveReport:
    """Ask for a job, and return its report when it is finished."""

    def reported() -> bool:
        running.driver.poll()
        report = letters.topics.table().reports.get(job.id)
        return report is not None and report.state is not RedriveState.PENDING

    operator.topics.ask(job)
    wait_for(reported, f"{job.id} to be finished")
    return letters.topics.table().reports[job.id]


def counts(report: RedriveReport) -> tuple[int, int, int, int]:
    return report.redriven, report.failed, report.discarded, report.left


@pytest.mark.on_mock_cluster
def test_messages_that_a_divert_could_not_carry_are_redriven_once_it_can(bridge: Bridge, operator: Operator, letters: Letters) -> None:
    bridge.journal.start_epoch()
    with bridge.running(unroutable(bridge)) as running:
        running.settle()
        send_in_vain(bridge, "1", "2")
        running.batch()
        assert letters.texts() == ["1", "2"]
        again = finished(operator, running, letters, letters.job())
        assert counts(again) == (0, 2, 0, 0)
        assert letters.texts() == ["1", "2"]
        assert [letter.redrives for letter in letters.waiting()] == [1, 1]
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
        bridge.send("3")
        running.batch()
        job = letters.job()
        assert counts(finished(operator, running, letters, job)) == (2, 0, 0, 0)
        assert bridge.carried("x") == ["3", "1", "2"]
        assert letters.waiting() == []
        finished(operator, running, letters, letters.job())
        assert bridge.carried("x") == ["3", "1", "2"]
        outcomes = running.driver._control._redrives.outcomes
        assert outcomes == {"redriven": 2, "failed": 0, "discarded": 0, "left": 0}, "a job of an earlier driver counts again"
    (verified,) = audit_diverts(replace(bridge.pipelines, diverts=(bridge.divert("x"),)))
    assert (verified.exact, verified.expected, verified.found, verified.dead_lettered) == (True, 3, 3, 0), verified
    assert verified.journal_digest == verified.topic_digest
    records = [received_of(record) for record in bridge.records("x")]
    assert [dict(record.headers).get(REDRIVES_HEADER) for record in records] == [None, b"2", b"2"]
    assert [dict(record.headers)["bascule.id"] for record in records][1:] == [b"0-1-0", b"0-2-0"]


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize(("place", "passes"), PLACES)
def test_run_killed_anywhere_leaves_each_dead_letter_waiting_or_redriven_once(
    bridge: Bridge, letters: Letters, monkeypatch: pytest.MonkeyPatch, place: str, passes: int
) -> None:
    monkeypatch.setattr(redrive, "LETTERS_MAX", 2)
    bury(bridge.pipelines, "x", "1", "2", "3", "4", "5")
    job = letters.job()
    with monkeypatch.context() as patched:
        at_crash_points(patched, KillAt(place, passes=passes))
        with pytest.raises(Killed):
            letters.run(job, bridge.divert("x"))
    bridge.positions.end_transactions()  # as the next driver does at its start
    done, waiting = bridge.carried("x"), letters.texts()
    assert sorted([*done, *waiting]) == ["1", "2", "3", "4", "5"]
    assert counts(letters.run(job, bridge.divert("x"))) == (5, 0, 0, 0)
    assert bridge.carried("x") == ["1", "2", "3", "4", "5"]
    assert letters.waiting() == []


def test_run_that_another_driver_overtakes_writes_nothing_more(bridge: Bridge, letters: Letters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive, "LETTERS_MAX", 2)
    bury(bridge.pipelines, "x", "1", "2", "3", "4")
    job, passed = letters.job(), 0

    def point(name: str) -> None:
        nonlocal passed
        if name == "redrive.before":
            passed += 1
            if passed == 2:  # the first run is before its second transaction, and the second run does all that is left
                assert counts(letters.run(job, bridge.divert("x"))) == (4, 0, 0, 0)

    at_crash_points(monkeypatch, point)
    with pytest.raises(PositionMoved):
        letters.run(job, bridge.divert("x"))
    assert bridge.carried("x") == ["1", "2", "3", "4"]


@pytest.mark.on_mock_cluster
def test_run_that_is_stopped_while_its_filter_matches_nothing_ends_and_is_not_done(bridge: Bridge, letters: Letters) -> None:
    bury(bridge.pipelines, "x", "1", "2", "3", "4")
    job, asked = letters.job(reason="bad 4"), itertools.count(1)
    pipelines = replace(bridge.pipelines, diverts=(bridge.divert("x"),))
    stopped = RedriveRun(pipelines, letters.topics, job, lambda: next(asked) >= 2).carry_out()
    assert (stopped.state, counts(stopped)) == (RedriveState.PENDING, (0, 0, 0, 0))
    assert next(asked) < 6, "the run has read on"
    report = letters.run(job, bridge.divert("x"))
    assert (report.state, counts(report)) == (RedriveState.DONE, (1, 0, 0, 0))


@pytest.mark.on_mock_cluster
def test_run_leaves_the_dead_letters_of_a_divert_that_is_refused_meanwhile(
    bridge: Bridge, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive, "LETTERS_MAX", 2)
    bury(bridge.pipelines, "x", "1", "2", "3", "4")
    refused: dict[str, str] = {}

    def point(name: str) -> None:
        if name == "redrive.after":
            refused["divert:x"] = "its user may not consume"

    pipelines = replace(bridge.pipelines, diverts=(bridge.divert("x"),))
    with monkeypatch.context() as patched:
        at_crash_points(patched, point)
        report = RedriveRun(pipelines, letters.topics, letters.job(), lambda: False, lambda: refused).carry_out()
    assert (report.state, counts(report)) == (RedriveState.DONE, (2, 0, 0, 2))
    assert report.error == "divert:x may not run: its user may not consume"
    assert (bridge.carried("x"), letters.texts()) == (["1", "2"], ["3", "4"])
    discarding = letters.job(RedriveAction.DISCARD)
    discarded = RedriveRun(pipelines, letters.topics, discarding, lambda: False, lambda: refused).carry_out()
    assert counts(discarded) == (0, 0, 2, 0)


@pytest.mark.on_mock_cluster
def test_run_ends_when_the_topic_is_recreated_and_takes_no_record_of_the_new_topic(
    bridge: Bridge, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive, "LETTERS_MAX", 2)
    bury(bridge.pipelines, "x", "1", "2", "3", "4")
    job = letters.job()

    def point(name: str) -> None:
        if name == "redrive.after":  # what is read from now on may be in the new topic
            patched.setattr(letters.topics, "letter_topic_id", lambda: "another")

    with monkeypatch.context() as patched:
        at_crash_points(patched, point)
        report = letters.run(job, bridge.divert("x"))
    assert (report.state, report.error) == (RedriveState.FAILED, redrive.RECREATED)
    assert counts(report) == (2, 0, 0, 0)
    assert bridge.carried("x") == ["1", "2"]
    assert letters.texts() == ["3", "4"]


@pytest.mark.on_mock_cluster
def test_dead_letters_are_chosen_by_place_pipeline_reason_time_and_header(bridge: Bridge, letters: Letters) -> None:
    bury(bridge.pipelines, "x", "1", "2", "3", "4", "5", "6")
    bury(bridge.pipelines, "y", "7", first=7)
    diverts = bridge.divert("x"), bridge.divert("y")
    place = letters.waiting()[0].place
    for chosen in (
        {"places": (place,)}, {"reason": "BAD 2"}, {"since_ms": BEGIN_MS + 3, "until_ms": BEGIN_MS + 4},
        {"headers": {"bascule.id": "0-4-0"}},
        {"pipeline": "divert:y"},
    ):  # fmt: skip
        assert counts(letters.run(letters.job(**chosen), *diverts)) == (1, 0, 0, 0), chosen
    assert bridge.carried("x") == ["1", "2", "3", "4"]
    assert bridge.carried("y") == ["7"]
    assert counts(letters.run(letters.job(RedriveAction.DISCARD, reason="bad 5"), *diverts)) == (0, 0, 1, 0)
    assert letters.texts() == ["6"]
    assert bridge.carried("x") == ["1", "2", "3", "4"]


@pytest.mark.on_mock_cluster
def test_dead_letters_that_cannot_be_redriven_stay_and_say_why(bridge: Bridge, letters: Letters) -> None:
    bury(bridge.pipelines, "x", "1")
    for diverts, reason in (
        ((), "divert:x is not configured"),
        ((bridge.divert("x", enabled=False),), "divert:x is disabled, or its user may not consume"),
        ((bridge.divert("x", select=("value",)),), "divert:x has a transformation, which a redrive does not run"),
        (
            (bridge.divert("x", selector="color = 'red'"),),
            "divert:x does not take the message now: the address or the selector does not match",
        ),
    ):
        report = letters.run(letters.job(), *diverts)
        assert (counts(report), report.state, report.error) == ((0, 0, 0, 1), RedriveState.DONE, reason)
    report = letters.run(letters.job(), bridge.divert("x"), target_partitions=0)
    assert counts(report) == (0, 0, 0, 1)
    assert "is not created" in report.error
    report = letters.run(letters.job(), unroutable(bridge), stop_on_error=True)
    assert counts(report) == (1, 0, 0, 0), "the address of this message is no topic of Bascule"


@pytest.mark.on_mock_cluster
def test_job_that_fails_does_not_hold_up_the_next_one(bridge: Bridge, operator: Operator, letters: Letters) -> None:
    bury(bridge.pipelines, "x", "1")
    bridge.journal.start_epoch()
    first = letters.job()
    lost = replace(letters.job(), topic_id="another")
    unreadable = Appender(bridge.pipelines.kafka)
    unreadable.append(Outgoing(bridge.pipelines.topics.control, b"redrive/damaged", b"{", partition=0)).result(TIMEOUT_S)
    unreadable.close()
    with bridge.running(bridge.divert("x")) as running:
        operator.topics.ask(lost)
        assert counts(finished(operator, running, letters, first)) == (1, 0, 0, 0)
        report = finished(operator, running, letters, lost)
    assert (report.state, report.error) == (RedriveState.FAILED, redrive.RECREATED)
    assert bridge.carried("x") == ["1"]


@pytest.mark.on_mock_cluster
def test_records_that_an_ingress_could_not_take_are_redriven_as_it_takes_others(
    bridge: Bridge, operator: Operator, letters: Letters
) -> None:
    topic = f"{bridge.pipelines.topics.prefix}.source"
    bridge.topics.create(topic, 1, {})
    ingress = IngressSpec("in", "queue", (topic,), tasks=1)
    appender = Appender(bridge.pipelines.kafka)
    appender.append(Outgoing(topic, b"k", b"\xff", [("color", b"red"), ("bascule.divert", b"other")], 0, 1234)).result(TIMEOUT_S)
    appender.close()
    with bridge.running(ingresses=(ingress,)) as running:
        running.query("ingress:in").batch(1)
        (letter,) = letters.waiting()
        assert (letter.pipeline, letter.source, letter.key, letter.value) == ("ingress:in", (topic, 0, 0), b"k", b"\xff")
        assert letter.headers == (("color", b"red"), ("bascule.divert", b"other"))
        assert counts(finished(operator, running, letters, letters.job())) == (0, 1, 0, 0)
        (letter,) = letters.waiting()
        assert (letter.redrives, letter.headers) == (1, (("color", b"red"), ("bascule.divert", b"other")))
    with bridge.running(ingresses=(replace(ingress, body="bytes"),)) as running:
        running.query("ingress:in").batch(1)
        assert counts(finished(operator, running, letters, letters.job(pipeline="ingress:in"))) == (1, 0, 0, 0)
    assert letters.waiting() == []
    (send,) = taken_in(bridge)
    message = decode_message(send.body)
    assert (message.body, message.properties["color"], send.source) == (b"\xff", "red", (topic, 0, 0))


@pytest.mark.on_mock_cluster
def test_records_of_an_ingress_that_was_defined_at_run_time_are_redriven(bridge: Bridge, operator: Operator, letters: Letters) -> None:
    topic = f"{bridge.pipelines.topics.prefix}.source"
    bridge.topics.create(topic, 1, {})
    appender = Appender(bridge.pipelines.kafka)
    appender.append(Outgoing(topic, None, b"\xff", [], 0, BEGIN_MS)).result(TIMEOUT_S)
    appender.close()
    settings: dict[str, Any] = {"topics": [topic], "to": "queue"}
    with bridge.running() as running:
        for revision, body in enumerate(("text", "bytes"), 1):
            operator.topics.define("ingress:in", PipelineDefinition("1", revision, {**settings, "body": body}, "ann", 1))
            wait_for(lambda count=revision: running.driver.poll() or defined(operator) == count, "the driver to follow")
            if body == "text":
                # The definition may be reported before its task is started.
                wait_for(lambda: running.query("ingress:in") or running.driver.poll(), "the task of the ingress")
                running.query("ingress:in").batch(1)
        assert [letter.pipeline for letter in letters.waiting()] == ["ingress:in"]
    job = letters.job()
    operator.topics.ask(job)  # the next driver must start the ingress first
    with bridge.running() as running:
        assert counts(finished(operator, running, letters, job)) == (1, 0, 0, 0)
    assert [decode_message(send.body).body for send in taken_in(bridge)] == [b"\xff"]


def defined(operator: Operator) -> int:
    """Return the revision of the ingress that the driver reports."""
    report = operator.topics.reports(TIMEOUT_S).pipelines.get("ingress:in")
    return 0 if report is None else report.revision


def taken_in(bridge: Bridge) -> list[Send]:
    """Return the messages for the broker."""
    history = TopicHistory(bridge.pipelines.kafka, bridge.pipelines.topics.ingress, 0)
    records = [bytes(record.value() or b"") for record in history.records(0, history.latest(), committed=True)]
    return [decode_send(value, start, end) for value in records for _, start, end in entries(value)]


@pytest.mark.on_mock_cluster
def test_marks_cover_the_offsets_of_their_runs_only() -> None:
    done = DoneLetters()
    done.add(0, [(5, 7)])
    done.add(0, [(1, 1), (9, 9)])
    assert [offset for offset in range(12) if done.has((0, offset))] == [1, 5, 6, 7, 9]
    assert not done.has((1, 5))


def test_key_of_a_mark_names_a_topic_id_with_any_character() -> None:
    assert mark_place(mark_key("a/b+c==", 3, 17)) == ("a/b+c==", 3)


def test_record_that_no_pipeline_wrote_is_no_dead_letter() -> None:
    from bascule.writer.dead_letters import dead_letter_of

    assert dead_letter_of(KafkaRecord("dead", 0, 0, None, b"x", [("bascule.divert", b"x")], 0)) is None
