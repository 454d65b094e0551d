"""``spark.readStream.format("bascule")``: JMS traffic as a streaming DataFrame of message rows (rows.ROW_SCHEMA)."""

from __future__ import annotations

from bascule.core.extras import require

require("pipelines")

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from bascule.core.defaults import DATA_DIR, DATA_DIR_VARIABLE, MAX_OFFSETS_PER_TRIGGER
from bascule.core.effects import run_blocking
from bascule.core.errors import BadRecord, BasculeError, InvalidInput, Unavailable
from bascule.core.log import get_log
from bascule.core.topics import PREFIX, JournalTopics
from bascule.embedded.protection import own_access
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory, content_of, known_offset
from bascule.kafka.lineage import PartitionLineage
from bascule.pipelines.arrow_rows import arrow_batches
from bascule.pipelines.divert import JournalReader, WantedMessage
from bascule.pipelines.registry import journal_position, offset_of
from bascule.pipelines.rows import ROW_SCHEMA, malformed_row, message_row
from bascule.pipelines.sink import DestinationWriter
from bascule.pipelines.spec import DivertSpec, StartPosition
from bascule.writer.position import EARLIEST, LATEST, UNKNOWN_EPOCH, Position, PositionLost

_KAFKA = "kafka."
_START_OVER = "To read the records that exist, give the query a new checkpoint"
_ANOTHER = f"the topic was recreated. {_START_OVER}"

#: Modes for a message that is no JMS message, named as in Spark's own sources.
PERMISSIVE, DROPMALFORMED, FAILFAST = MODES = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")

_log = get_log(__name__)


def register(session: SparkSession) -> None:
    """Make ``format("bascule")`` known to a session."""
    session.dataSource.register(BasculeDataSource)


def kafka_settings(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that begin with ``kafka.`` as librdkafka settings, for the embedded Kafka with the login of its owner.

    Raises InvalidInput without ``kafka.bootstrap.servers``.
    """
    kafka = {name.removeprefix(_KAFKA): value for name, value in options.items() if name.startswith(_KAFKA)}
    if "bootstrap.servers" not in kafka:
        raise InvalidInput("option kafka.bootstrap.servers is missing; set the option to the servers of the journal's Kafka")
    return own_access(Path(os.environ.get(DATA_DIR_VARIABLE, DATA_DIR)), kafka)


class BasculeDataSource(DataSource):
    """The data source ``bascule``. docs/internals/pipelines.md lists its options."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format("bascule")``."""
        return "bascule"

    def schema(self) -> str:
        """Return the schema of a message row."""
        return ROW_SCHEMA

    def streamReader(self, schema: StructType) -> JournalStreamReader:  # noqa: N802
        """Return a reader of the journal."""
        del schema
        return JournalStreamReader(dict(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DestinationWriter:  # noqa: N802
        """Return a writer to JMS destinations."""
        del overwrite
        return DestinationWriter(dict(self.options), kafka_settings(self.options), schema)


#: Fields of the stream's offsets beside ``offset``: the id of the journal's topic, and a leader epoch in which the journal reached the
#: offset. Offsets of an earlier version have neither.
_JOURNAL_ID = "journal_id"
_LEADER_EPOCH = "leader_epoch"


class JournalRange(InputPartition):
    """Journal offsets ``start`` up to ``end`` (not included), in the journal with this topic id, if that is known."""

    def __init__(self, start: int, end: int, journal_id: str | None) -> None:
        self.start, self.end, self.journal_id = start, end, journal_id


#: The fence at the end of the last range that this process has read, by topic. The next range begins there.
_reached: dict[str, Position] = {}


class JournalStreamReader(DataSourceStreamReader):
    """Reads the journal; its offsets are the stream's offsets. A range always gives the same rows, so a repeated batch is identical."""

    def __init__(self, options: dict[str, str]) -> None:
        self._kafka = kafka_settings(options)
        topics = JournalTopics(options.get("prefix", PREFIX))
        self._topic, self._partition = topics.journal, topics.partition
        start = options.get("startingoffsets", options.get("startingOffsets", LATEST))
        self._start = StartPosition(start) if start in (EARLIEST, LATEST) else StartPosition("timestamp", int(start))
        self._choice = DivertSpec("bascule-stream", options.get("address", "#"), selector=options.get("selector", ""), from_kafka=True)
        self._max_records = int(options.get("maxoffsetspertrigger", MAX_OFFSETS_PER_TRIGGER))
        self._mode = options.get("mode", PERMISSIVE).upper()
        if self._mode not in MODES:
            raise InvalidInput(f"option mode is {options['mode']!r}; must be one of {', '.join(MODES)}")

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset that the option ``startingOffsets`` selects. Spark asks once in the life of a checkpoint."""
        offset = offset_of(self._start, self._history())
        return {"offset": offset, _JOURNAL_ID: self._journal_id(), _LEADER_EPOCH: self._leader_epoch(self._lineage(), offset)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the option ``maxOffsetsPerTrigger`` as a limit."""
        return ReadMaxRows(self._max_records)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the journal, or an offset within the limit.

        Raises PositionLost if the journal has lost records before ``start``.
        """
        begin, lineage = start["offset"], self._lineage()
        end = run_blocking(lineage.end()).offset
        if end < begin:
            self._check_journal(start.get(_JOURNAL_ID), begin)
        leader_epoch = self._leader_epoch(lineage, begin, start.get(_LEADER_EPOCH, UNKNOWN_EPOCH))
        if end < begin:
            raise Unavailable(f"stale end offset {end} of journal {self._topic!r}: the answering Kafka node is cut off from the cluster")
        if isinstance(limit, ReadMaxRows) and not isinstance(limit, ReadAllAvailable):
            end = min(end, begin + limit.max_rows)
        # The offset carries the topic id: the reader checks the journal, not each request for the end.
        return {"offset": end, _JOURNAL_ID: start.get(_JOURNAL_ID) or self._journal_id(), _LEADER_EPOCH: leader_epoch}

    def _lineage(self) -> PartitionLineage:
        return PartitionLineage(self._kafka, self._topic, self._partition)

    def _leader_epoch(self, lineage: PartitionLineage, offset: int, leader_epoch: int = UNKNOWN_EPOCH) -> int:
        """Return a leader epoch in which the journal has all records before ``offset``. Raises PositionLost, Unavailable."""
        try:
            return lineage.check_tail(Position(self._topic, "", self._partition, offset, leader_epoch=leader_epoch))
        except PositionLost as error:
            raise PositionLost(f"{error}. {_START_OVER}") from None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[JournalRange]:
        """Return one partition, because the journal is read in order."""
        return [JournalRange(start["offset"], end["offset"], end.get(_JOURNAL_ID))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages that count and that the options select.

        Raises PositionLost if records of the journal are gone and, in mode FAILFAST, BadRecord for a message that is no JMS message.
        """
        if not isinstance(partition, JournalRange):
            raise InvalidInput(f"{partition!r} is not a range of the journal: Spark gave the reader a partition of another source")
        self._check_journal(partition.journal_id, partition.start)
        history = self._history()
        if partition.start < history.earliest():
            raise PositionLost(f"{self._topic} begins at offset {history.earliest()}: records from offset {partition.start} were trimmed")
        journal_id = partition.journal_id or ""
        at = _reached.get(self._topic)
        if at is None or (at.topic_id, at.offset) != (journal_id, partition.start):
            at = journal_position(self._topic, journal_id, self._partition, partition.start, history)
        reader = JournalReader(at, [self._choice])
        yield from arrow_batches(row for taken in _taken(reader, history, partition) for row in self._rows(taken))
        _reached[self._topic] = replace(at, offset=partition.end, **reader.state())

    def _rows(self, taken: WantedMessage) -> list[tuple[Any, ...]]:
        """Return the row of the message. For a message that is no JMS message, the option ``mode`` decides: a row, no row, or BadRecord."""
        place = (taken.send, taken.offset, taken.epoch, taken.sequence, taken.index)
        try:
            return [message_row(*place)]
        except (BasculeError, ValueError) as error:
            if self._mode == PERMISSIVE:
                return [malformed_row(*place, error)]
            what = f"{self._topic}, offset {taken.offset}: could not decode message {taken.identity} to {taken.send.address!r}: {error}"
            if self._mode == DROPMALFORMED:
                _log.warning("malformed message dropped", reason=what)
                return []
            raise BadRecord(f"{what}. Set option mode to {PERMISSIVE} to read the message as sent, {DROPMALFORMED} to drop it") from None

    def _check_journal(self, journal_id: str | None, offset: int) -> None:
        if journal_id not in (None, self._journal_id()):
            raise PositionLost(f"offset {offset} of this stream is not valid in journal {self._topic!r}: {_ANOTHER}")

    def _journal_id(self) -> str:
        found = Topics(self._kafka).ids([self._topic]).get(self._topic)
        if found is None:
            raise Unavailable(f"topic {self._topic!r} does not exist; start the broker on this Kafka with this prefix first")
        return found

    def _history(self) -> TopicHistory:
        return TopicHistory(self._kafka, self._topic, self._partition)


def _taken(reader: JournalReader, history: TopicHistory, partition: JournalRange) -> Iterator[WantedMessage]:
    for message in history.records(partition.start, partition.end):
        yield from reader.take(known_offset(message), *content_of(message))
