"""OpenLineage events of pipelines reach a receiver, and a receiver that fails stops and delays nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from bascule.config.openlineage import OpenLineage
from bascule.core.extras import MissingExtra
from bascule.pipelines import lineage_sender
from bascule.pipelines.lineage_runs import LineageDataset, LineageEvent, LineageRuns
from bascule.pipelines.lineage_sender import LineageSender, lineage_of
from bascule.writer.control import PipelineReport, PipelineState
from tests.support.lineage_receiver import LineageReceiver
from tests.support.system import wait_for

DIVERT = {"from": "orders.eu", "to": "kafka.${address}"}
INGRESS = {"topics": ("stock",), "to": "queue://inventory.${topic}"}


def report(state: PipelineState, definition: Mapping[str, Any] = DIVERT, **more: Any) -> PipelineReport:
    return PipelineReport(state, "driver", 0, definition, **more)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may need more time than a driver has for its last events."""
    monkeypatch.setattr(lineage_sender, "LAST_EVENTS_S", 30.0)


class Told:
    """The events of runs that follow reports."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events: list[LineageEvent] = []
        self.runs = LineageRuns(self.events.append, "kafka://k:9092", "jms://demo", 300.0, lambda: self.now_s)

    def after(self, *reports: PipelineReport) -> list[str]:
        """Return the types of the events of a divert with these reports."""
        for each in reports:
            self.runs.follow({"divert:orders": each})
        found, self.events[:] = [event.type for event in self.events], []
        return found


def test_run_begins_continues_and_ends_with_the_state_of_the_pipeline() -> None:
    told, running = Told(), report(PipelineState.RUNNING)
    assert told.after(report(PipelineState.RESTARTING)) == []
    assert told.after(running, running) == ["START"]
    told.now_s += 299
    assert told.after(running) == []
    told.now_s += 1
    assert told.after(running, running) == ["RUNNING"]
    assert told.after(report(PipelineState.RESTARTING), running) == []  # a join stops the task, and is no failure
    assert told.after(report(PipelineState.PAUSED), report(PipelineState.PAUSED)) == ["COMPLETE"]
    assert told.after(running) == ["START"]
    assert told.after(report(PipelineState.FAILED, error="PositionLost: gone")) == ["FAIL"]


def test_failure_between_two_reports_ends_the_run_with_its_reason() -> None:
    told = Told()
    told.runs.follow({"divert:orders": report(PipelineState.RUNNING)})
    told.runs.follow({"divert:orders": report(PipelineState.RUNNING, restarts=1, error="Unavailable: Kafka is away")})
    begun, failed, again = told.events
    assert [each.type for each in told.events] == ["START", "FAIL", "START"]
    assert begun.run_id == failed.run_id != again.run_id
    assert failed.error == "Unavailable: Kafka is away"


def test_deleted_pipeline_and_stopped_or_replaced_driver_end_their_runs() -> None:
    told, running = Told(), report(PipelineState.CATCHING_UP)
    told.runs.follow({"divert:orders": running})
    told.runs.follow({"divert:a": running, "divert:b": running})
    told.runs.end(aborted=False)
    told.runs.follow({"divert:a": running})
    told.runs.end(aborted=True)
    told.runs.end(aborted=True)
    assert [each.type for each in told.events] == ["START", "COMPLETE", "START", "START", "COMPLETE", "COMPLETE", "START", "ABORT"]


@pytest.mark.parametrize(
    ("source", "target", "topic"),
    [
        ("orders.eu", "kafka.${address}", "kafka.orders.eu"),
        ("orders.#", "kafka.${address}", "kafka.${address}"),
        ("orders.#", "orders", "orders"),
    ],
)
def test_output_of_a_divert_is_its_topic_or_the_template(source: str, target: str, topic: str) -> None:
    told = Told()
    told.runs.follow({"divert:orders": report(PipelineState.RUNNING, {"from": source, "to": target})})
    (event,) = told.events
    assert event.inputs == (LineageDataset("jms://demo", source),)
    assert event.outputs == (LineageDataset("kafka://k:9092", topic),)


def test_ingress_has_the_topics_that_it_reads_and_their_addresses() -> None:
    told = Told()
    pattern = {"pattern": "stock.*", "topics": (), "to": "inventory.${topic}"}
    for sources in ((("stock.a", 0, 1, 2),), (("stock.a", 0, 1, 2), ("stock.b", 0, 1, 2), ("stock.b", 1, 1, 2))):
        told.runs.follow({"ingress:stock": report(PipelineState.RUNNING, pattern, sources=sources)})
    first, second = told.events
    assert (first.type, second.type) == ("START", "RUNNING")
    assert [each.name for each in second.inputs] == ["stock.a", "stock.b"]
    assert [each.name for each in second.outputs] == ["inventory.stock.a", "inventory.stock.b"]


# -- with a receiver -------------------------------------------------------------------------------------------------


@contextmanager
def lineage(url: str, **more: Any) -> Iterator[Any]:
    with lineage_of(OpenLineage(url=url, **more), "demo", "kafka-1:9092,kafka-2:9092") as found:
        assert found is not None
        yield found


def test_receiver_gets_runs_with_datasets_and_facets() -> None:
    with LineageReceiver() as receiver:
        with lineage(receiver.url) as found:
            found.runs.follow({"divert:orders": report(PipelineState.RUNNING), "ingress:stock": report(PipelineState.RUNNING, INGRESS)})
            found.runs.follow({"divert:orders": report(PipelineState.FAILED, error="PositionLost: gone")})
        assert found.sender.outcomes == {"sent": 4, "failed": 0, "dropped": 0}
    assert receiver.paths == {"/api/v1/lineage"}
    begun, ingress, completed, failed = receiver.events
    assert [each["eventType"] for each in receiver.events] == ["START", "START", "COMPLETE", "FAIL"]
    assert begun["job"]["namespace"] == "bascule.demo"
    assert [each["job"]["name"] for each in receiver.events] == ["divert.orders", "ingress.stock", "ingress.stock", "divert.orders"]
    assert begun["job"]["facets"].keys() == {"jobType"}
    assert {**begun["job"]["facets"]["jobType"]}["processingType"] == "STREAMING"
    assert names(begun, "inputs") == [("jms://demo", "orders.eu")]
    assert names(begun, "outputs") == [("kafka://kafka-1:9092", "kafka.orders.eu")]
    assert names(ingress, "inputs") == [("kafka://kafka-1:9092", "stock")]
    assert names(ingress, "outputs") == [("jms://demo", "inventory.stock")]
    assert begun["run"]["runId"] == failed["run"]["runId"] != ingress["run"]["runId"] == completed["run"]["runId"]
    assert failed["run"]["facets"]["errorMessage"]["message"] == "PositionLost: gone"


def names(event: dict[str, Any], side: str) -> list[tuple[str, str]]:
    return [(each["namespace"], each["name"]) for each in event[side]]


def test_runs_of_a_driver_that_failed_to_end_them_are_aborted() -> None:
    """A driver whose Spark has ended stops at once."""
    with LineageReceiver() as receiver:
        with lineage(receiver.url) as found:
            found.runs.follow({"divert:orders": report(PipelineState.RUNNING)})
        assert [each["eventType"] for each in receiver.events] == ["START", "ABORT"]


def test_client_that_refuses_the_environment_stops_no_pipeline(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise TypeError("injected")

    monkeypatch.setattr(lineage_sender, "LineageSender", refuse)
    with lineage_of(OpenLineage(url="http://127.0.0.1:9"), "demo", "kafka:9092") as found:
        assert found is None
    assert "lineage events are off reason=injected" in caplog.text


def test_settings_name_the_namespaces_and_the_environment_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__AUTH__TYPE", "api_key")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__AUTH__APIKEY", "secret")
    with (
        LineageReceiver() as receiver,
        lineage(receiver.url, namespace="jobs", jms_namespace="amqp://b", kafka_namespace="kafka://c:1") as found,
    ):
        assert found.sender._client.transport.config.auth.get_bearer() == "Bearer secret"
        assert [name for name in os.environ if name.startswith("OPENLINEAGE")] == [], "transformations inherit the environment"
        found.runs.follow({"divert:orders": report(PipelineState.RUNNING)})
        wait_for(lambda: receiver.events, "an event")
    begun = receiver.events[0]
    assert (begun["job"]["namespace"], names(begun, "inputs"), names(begun, "outputs")) == (
        "jobs", [("amqp://b", "orders.eu")], [("kafka://c:1", "kafka.orders.eu")],
    )  # fmt: skip


def event(number: int = 0) -> LineageEvent:
    told = Told()
    told.runs.follow({f"divert:{number}": report(PipelineState.RUNNING)})
    return told.events[0]


def test_receiver_that_answers_nothing_delays_nobody_and_events_beyond_the_queue_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(lineage_sender, "EVENTS_MAX", 2)
    monkeypatch.setattr(lineage_sender, "LAST_EVENTS_S", 0.2)

    def answer() -> int:
        answers.wait()
        return 201

    with LineageReceiver(answer) as receiver:
        sender = LineageSender(receiver.url, "jobs")
        sender.emit(event())
        wait_for(lambda: sender._waiting.empty(), "the thread to wait for the receiver")
        begun_s = time.monotonic()
        for number in range(10):
            sender.emit(event(number))
        assert time.monotonic() - begun_s < 1
        assert sender.outcomes == {"sent": 0, "failed": 0, "dropped": 8}
        sender.close()
        assert time.monotonic() - begun_s < 5
        assert sender.outcomes["dropped"] == 10
        assert "lineage events lost, the receiver is too slow events=2" in caplog.text
        answers.set()
        sender._thread.join()


def test_receiver_that_fails_is_logged_once_and_asked_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fails = [True]
    with LineageReceiver(lambda: 400 if fails[0] else 201) as receiver:
        sender = LineageSender(receiver.url, "jobs")
        for _ in range(2):
            sender.emit(event())
        wait_for(lambda: sender.outcomes["failed"] == 2, "two failures")
        fails[0] = False
        sender.emit(event())
        sender.close()
        assert sender.outcomes == {"sent": 1, "failed": 2, "dropped": 0}
    assert caplog.text.count("lineage events not taken by the receiver") == 1


def test_failed_thread_ends_the_events_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: LineageSender) -> None:
        raise AssertionError("injected")

    monkeypatch.setattr(LineageSender, "_run", fail)
    sender = LineageSender("http://127.0.0.1:9", "jobs")
    sender._thread.join()
    sender.emit(event())
    sender.close()
    assert sender.outcomes["dropped"] == 1
    assert "lineage events are off reason=injected" in caplog.text


def no_extra(extra: str, otherwise: str) -> None:
    raise MissingExtra(extra, ["openlineage.client"], otherwise)


def test_driver_without_url_or_client_has_no_lineage(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with lineage_of(OpenLineage(), "demo", "kafka:9092") as found:
        assert found is None
    monkeypatch.setattr(lineage_sender, "require", no_extra)
    with lineage_of(OpenLineage(url="http://127.0.0.1:9"), "demo", "kafka:9092") as found:
        assert found is None
    assert "lineage events are off" in caplog.text
    assert "pip install 'bascule[openlineage]'" in caplog.text


@pytest.mark.parametrize(
    ("url", "reason"),
    [("marquez", "'marquez' is not a URL"), ("http:///path", "is not a URL"), ("http://ann:hush@marquez", "a URL with a password")],
)
def test_url_that_cannot_be_used_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OpenLineage(url=url)
