"""The driver and its tasks on a real Kafka, with a model of Spark: a batch runs when the test says so."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Message

from bascule.broker.snapshot import Snapshot
from bascule.core.kafka_records import Place, SourceStart, Taken
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.jms.message import decode_message
from bascule.journal.offsets import OffsetMap
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import trim
from bascule.kafka.consumer import received_of
from bascule.kafka.history import TopicHistory
from bascule.pipelines import carry, driver, joining
from bascule.pipelines.jobs import Resident, ResidentTasks
from bascule.pipelines.lineage_sender import PipelineLineage
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import DivertSpec, IngressSpec, PipelinesSpec
from bascule.pipelines.tasks import Batches
from bascule.server.pipeline_holds import PipelineHolds
from bascule.writer.position import Position
from tests.support.journal import SyntheticJournal, text_message
from tests.support.system import wait_for

#: The thresholds of Python's garbage collector in a process that is not a worker.
COLLECT_AFTER = gc.get_threshold()


def history_of(kafka: Mapping[str, Any], topic: str, partition: int = 0) -> TopicHistory:
    """Return the history of a partition. It asks for offsets with the client of the tasks: an own client would have to connect first."""
    kept = carry._kept.readers
    return TopicHistory(kafka, topic, partition, admin=None if kept is None else kept.shared.offsets)


@dataclass(frozen=True)
class Rows:
    """Records of the journal from an offset on, as a task with transformations gets them."""

    pipelines: PipelinesSpec
    start: int

    def run(self, task: Callable[[Batches], Batches], end: int) -> None:
        history = history_of(self.pipelines.kafka, self.pipelines.topics.journal)
        records = [(record.offset(), record.key(), record.value()) for record in history.records(self.start, end)]
        columns = zip(("offset", "key", "value"), zip(*records, strict=True), strict=True)
        batches = [pa.RecordBatch.from_pydict({name: list(values) for name, values in columns})] if records else []
        assert list(task(iter(batches)))


class Job:
    """A job of resident tasks whose tasks run when the test says so, each up to an offset of the journal."""

    def __init__(self, _context: Context, _name: str, shipped: ResidentTasks) -> None:
        self.active = True
        self.error: Exception | None = None
        self.shipped = shipped
        self.job_group = "group"

    def stop(self) -> None:
        self.active = False

    def fail(self, error: Exception) -> None:
        self.active, self.error = False, error

    def failure(self) -> Exception | None:
        return self.error

    def batch(self, end: int) -> None:
        """Takes what there is before ``end``."""
        for task in self.shipped.tasks:
            carry_up_to(Context(), task, self.shipped.kafka, end)


def carry_up_to(_context: Context, task: Resident, kafka: Mapping[str, object], end: int, _pool: object = None) -> None:
    """Carry in this process what a worker of Spark carries when a divert catches up."""
    task.run(lambda start, _: nullcontext(_taken(kafka, start, end)))


def _taken(kafka: Mapping[str, object], start: Mapping[Place, SourceStart], end: int) -> Iterator[Taken]:
    for place, at in start.items():
        history = history_of(kafka, *place)
        yield Taken([received_of(message) for message in history.records(at.offset, end)], [place])


class Context:
    """The part of Spark that the driver needs."""

    _gateway = None

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}

    def stop(self, *_: object) -> None:
        """Do nothing: there is no Spark to stop."""

    addJobTag = setLocalProperty = cancelJobsWithTag = stop  # noqa: N815 - named as in Spark


def without_spark(patch: pytest.MonkeyPatch) -> None:
    """Make later drivers run without Spark."""
    patch.setattr(driver, "spark_context", lambda _: Context())
    patch.setattr(driver, "ResidentJob", Job)
    patch.setattr(driver, "carry_up_to", carry_up_to)
    patch.setattr(joining, "JOIN_WAIT_S", 60.0)
    patch.setattr(driver, "cores", lambda *_: 2)
    patch.setattr(driver, "waiting_stages", lambda *_: [])


def workers_end() -> None:
    """Remove what the tasks of a driver have left in this process, as the end of Spark's workers does."""
    for writer in carry._kept.idle.values():
        writer.close()
    carry._kept.idle.clear()
    if carry._kept.readers is not None:
        carry._kept.readers.close()
    carry._kept.targets = carry._kept.lineages = carry._kept.readers = None
    if (
        gc.get_threshold() != COLLECT_AFTER
    ):  # a worker collects seldom, so clients in a reference cycle would remain until the end of the run
        gc.set_threshold(*COLLECT_AFTER)
        gc.collect()


class Bridge:
    """A journal that the test writes, diverts that are added and removed, and the fate of the messages."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.pipelines = PipelinesSpec(
            prefix, {"bootstrap.servers": kafka.bootstrap, "log_level": 2}, topics=JournalTopics(prefix, f"{prefix}.dead")
        )
        self.topics = Topics(self.pipelines.kafka)
        self.topics.create(self.pipelines.topics.journal, 1, {})
        self.journal = SyntheticJournal(kafka.bootstrap, self.pipelines.topics.journal)
        self.positions = Positions(self.pipelines, "")

    def history(self, topic: str) -> TopicHistory:
        """Return the history of a topic of one partition. It asks for offsets with a client that all histories share."""
        return TopicHistory(self.pipelines.kafka, topic, 0, admin=self.positions.shared.offsets)

    def divert(self, name: str, **more: Any) -> DivertSpec:
        """Return a divert of all messages, into a topic of its own name."""
        return DivertSpec(name, "#", f"{self.pipelines.topics.prefix}.{name}", **more)

    def send(self, *texts: str, taken_by: Sequence[str] = (), flags: int = 1) -> None:
        for text in texts:
            self.journal.send(text_message(text), diverts=taken_by, flags=flags)
        self.journal.flush()

    def renew(self) -> None:
        """Replace the journal by another one of the same name."""
        admin, name = clients.admin(self.pipelines.kafka), self.pipelines.topics.journal
        admin.delete_topics([name])[name].result()
        wait_for(lambda: name not in self.topics.partitions(), "the journal to be deleted")
        self.topics.create(name, 1, {})
        wait_for(lambda: self.topics.ids([name]), "the new journal")
        self.journal.sequence = 0

    def trim(self, before: int) -> None:
        """Delete the records of the journal before an offset."""
        trim(self.pipelines.kafka, self.pipelines.topics.journal, {0: before})

    def end(self) -> int:
        return self.history(self.pipelines.topics.journal).latest()

    @contextmanager
    def running(
        self, *diverts: DivertSpec, ingresses: tuple[IngressSpec, ...] = (), lineage: PipelineLineage | None = None
    ) -> Iterator[Running]:
        """Return a driver with these diverts, and with ingresses whose queries run no batch."""
        found = driver.Driver(replace(self.pipelines, diverts=diverts, ingresses=ingresses), lineage=lineage)
        try:
            found.start()
            yield Running(self, found)
        finally:
            found.stop()
            workers_end()

    def stored(self) -> dict[str, Position]:
        return self.positions.stored()

    def counted(self, divert: str) -> int:
        """Return how many records of a divert all stored positions together have counted."""
        return sum(at.carried.pipelines[divert].records for at in self.stored().values() if divert in at.carried.pipelines)

    def keepers(self) -> PipelineHolds:
        """Return what a broker keeps the journal for."""
        place: Any = SimpleNamespace(
            kafka=self.pipelines.kafka, topics=self.pipelines.topics, bridge=self.pipelines.bridge_id, pinned_bytes_max=0,
        )  # fmt: skip
        return PipelineHolds(place)

    def snapshot(self) -> Snapshot:
        """Return an empty snapshot at the end of the journal."""
        return Snapshot(0, 0, self.end(), 1, OffsetMap(), [], {})

    def pins(self) -> dict[str, int]:
        """Return what a broker that has just started keeps of the journal, by pipeline."""
        return {pin.name: pin.offset for pin in self.keepers().found(self.snapshot())}

    def records(self, name: str) -> list[Message]:
        topic = f"{self.pipelines.topics.prefix}.{name}"
        if topic not in self.topics.partitions():
            return []
        history = self.history(topic)
        return list(history.records(history.earliest(), history.latest(), committed=True))

    def carried(self, name: str) -> list[str]:
        """Return the records in the topic of a divert."""
        return [(record.value() or b"").decode() for record in self.records(name)]

    def dead(self) -> list[str]:
        """Return the dead letters, each with its divert."""
        return [
            f"{_header(record, 'bascule.divert')}: {decode_message(bytes(record.value() or b'')).body}" for record in self.records("dead")
        ]


class Running:
    """A running driver."""

    def __init__(self, bridge: Bridge, running: driver.Driver) -> None:
        self.bridge, self.driver = bridge, running

    def query(self, name: str) -> Any:
        """Run a task as Spark runs it."""
        return self.driver.queries[name].running

    def batch(self, *names: str, end: int | None = None) -> None:
        """Run one batch of the named queries, or of all."""
        for name in names or list(self.driver.queries):
            query = self.query(name)
            if query is not None:
                query.batch(self.bridge.end() if end is None else end)

    def _all_started(self) -> bool:
        failed = [query for query in self.driver.queries.values() if query.restarts and query.running is None and query.stopped is None]
        if failed:
            self.driver.poll()
        return not failed

    def settle(self) -> None:
        """Let all diverts read the journal to its end, and join. Restart queries that failed because Kafka did not answer in time."""
        wait_for(self._all_started, "queries that failed to start again")
        self.batch()
        self.driver.poll()
        self.batch()


def _header(record: Message, name: str) -> str:
    return next((bytes(value or b"").decode() for key, value in record.headers() or [] if key == name), "")
