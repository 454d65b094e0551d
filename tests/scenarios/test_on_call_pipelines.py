"""Failures of pipelines in the on-call guide: a real broker and its console, and a driver without Spark in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bascule.client import Queue, connect
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.control import ControlTopics
from bascule.kafka.history import TopicHistory
from bascule.pipelines import control, driver
from bascule.pipelines.metrics import PipelineMetrics
from bascule.pipelines.spec import EARLIEST, DivertSpec, IngressSpec, PipelinesSpec, StartPosition
from bascule.writer.control import Wish
from tests.scenarios.operating import PAUSED
from tests.scenarios.sparkless import without_spark, workers_end
from tests.scenarios.test_positions import delete_records
from tests.scenarios.topics import create
from tests.support.alerts import Watch
from tests.support.console import Console
from tests.support.system import System, wait_for

SNAPSHOT_RECORDS = 100
CONFIG = f"""
[journal]
snapshot_records = {SNAPSHOT_RECORDS}

[[divert]]
name = "orders"
from = "#"
to = "${{address}}"
start = "earliest"
"""
#: Records of 5 GiB together, of which Kafka stores little, because they are compressed.
RECORDS, RECORD_BYTES = 512, 10 << 20
#: The broker takes a driver for dead if it has not reported for a minute and a half.
SILENT_S = 150.0


class Night:
    """A broker with a divert, and drivers of its pipelines."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str, directory: Path) -> None:
        self.system = System(kafka.bootstrap, directory, prefix=prefix, config=CONFIG)
        self.console = Console.of(self.system)
        self.watch = Watch()
        self.topics = JournalTopics(prefix)
        spec = DivertSpec("orders", "#", "${address}", start=StartPosition(EARLIEST))
        self.spec = PipelinesSpec(prefix, {"bootstrap.servers": kafka.bootstrap, "log_level": 2}, (spec,), topics=self.topics)

    def send(self, queue: str, *texts: str) -> None:
        with connect(self.system.url) as context:
            for text in texts:
                context.send(Queue(queue), text)

    def end(self) -> int:
        return TopicHistory(self.spec.kafka, self.topics.journal, 0).latest()

    @contextmanager
    def driven(self) -> Iterator[Driven]:
        found = Driven(self)
        try:
            found.driver.start()
            yield found
        finally:
            found.driver.stop()
            workers_end()


class Driven:
    """A driver, and the metrics that its port would serve."""

    def __init__(self, night: Night) -> None:
        self._night = night
        metrics = PipelineMetrics()
        self._registry = CollectorRegistry()
        self._registry.register(metrics)
        self.driver = driver.Driver(night.spec, metrics)

    def carry(self) -> None:
        """Run a batch of each query up to the end of the journal."""
        for query in self.driver.queries.values():
            query.running.batch(self._night.end())  # type: ignore[union-attr]  # of the model of Spark

    def fires(self, alert: str) -> bool:
        """Let the driver look and report, and return whether an alert fires."""
        self.driver.poll()
        self._night.watch.read(broker=self._night.system.metrics(), driver=generate_latest(self._registry).decode())
        return bool(self._night.watch.fires(alert))


@pytest.fixture
def night(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Night]:
    without_spark(monkeypatch)
    monkeypatch.setattr(control, "LOOK_S", 0.0)
    found = Night(kafka, topic_prefix, tmp_path)
    with found.system:
        yield found


@pytest.mark.slow
def test_pipelines_of_a_killed_driver_are_unassigned(night: Night) -> None:
    with night.driven() as driven:
        assert not driven.fires("BasculeNoActiveDriver")
        night.console.shows("Pipelines", "orders running in the file")
        # The driver does nothing from here on, as if it were killed.
        night.watch.read(broker=night.system.metrics(), driver=None)
        assert night.watch.fires("BasculeNoActiveDriver")
        wait_for(lambda: night.system.ask("diverts")[0]["state"] == "unassigned", "the broker to notice", SILENT_S)
        night.console.shows("Pipelines", "orders unassigned, running wanted")


def test_pipelines_whose_driver_prometheus_does_not_read_are_noticed_by_the_records_that_wait_for_them(night: Night) -> None:
    with night.driven() as driven:
        driven.carry()
    night.send("waiting", *map(str, range(2 * SNAPSHOT_RECORDS)))

    def watched() -> Watch:
        found = Watch()
        found.read(broker=night.system.metrics())
        return found

    wait_for(lambda: watched().fires("BasculePipelinesUnwatched"), "a snapshot that counts the records")


def test_pipeline_whose_unread_records_were_deleted_stops(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    night.send("read", "1")
    with night.driven() as driven:
        driven.carry()
        assert not driven.fires("BasculePipelineFailed")
    night.send("unread", "2", "3", "4")
    delete_records(night.system.bootstrap, night.topics.journal, night.end() - 1)
    with night.driven() as driven:
        wait_for(lambda: driven.fires("BasculePipelineFailed"), "the alert")
        assert "pipeline stopped" in caplog.text
        night.console.shows("Pipelines", "orders failed, running wanted", "were deleted before the pipeline read them")


def test_divert_writes_a_message_that_it_cannot_carry_to_the_dead_letter_topic(night: Night) -> None:
    with night.driven() as driven:
        assert not driven.fires("BasculePipelineDeadLetters")
        night.send("carried", "1")
        night.send(night.topics.positions, "2")  # Bascule's own topic is no target
        driven.carry()
        wait_for(lambda: driven.fires("BasculePipelineDeadLetters"), "the alert")
        night.console.shows("Pipelines", "orders running in the file")
        night.console.shows("Pipeline dead letters", "divert:orders", "is one of Bascule's own topics", path="undelivered")


def test_paused_pipeline_falls_gigabytes_behind(night: Night, topic_prefix: str) -> None:
    kafka, source = night.spec.kafka, f"{topic_prefix}.large"
    create(night.system.bootstrap, source)
    night.spec = replace(night.spec, ingresses=(IngressSpec("large", "queue", (source,)),))
    with night.driven() as driven, closing(ControlTopics(kafka, night.topics)) as topics:
        assert not driven.fires("BasculePipelineLagLarge")
        topics.want("ingress:large", Wish(PAUSED, "ann", 1))
        producer = clients.producer({**kafka, "compression.type": "lz4", "message.max.bytes": 2 * RECORD_BYTES, "linger.ms": 0})
        for _ in range(RECORDS):
            producer.produce(source, bytes(RECORD_BYTES))
            assert producer.flush(30) == 0
        wait_for(lambda: driven.fires("BasculePipelineLagLarge"), "the alert")
        night.console.shows("Pipelines", "large paused", "512 (5.0 GiB)")
