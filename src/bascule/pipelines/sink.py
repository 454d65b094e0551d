"""``df.writeStream.format("bascule")``: writes rows as JMS messages, through ``bascule.ingress``.

The sink writes exactly once, because one Kafka transaction contains the batch's messages and the number of the next batch: if Spark repeats
a batch after a crash, the sink finds its number taken and writes nothing. This requires that the query keeps its checkpoint, which gives a
repeated batch the same rows under the same number. The writer knows the query by the id in the checkpoint. It refuses another query, and a
repeated batch with another number of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from bascule.core import crash
from bascule.core.destination import Routing
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.kafka_records import Output
from bascule.core.log import get_log
from bascule.core.topics import BRIDGE_ID, PREFIX, UNBOUND_HEADER, JournalTopics
from bascule.jms.message import JmsMessage, encode_message
from bascule.journal.records import KafkaOrigin, Send, SendFlag
from bascule.kafka import own_topics
from bascule.kafka.transactional import TransactionalWriter, end_open_transactions
from bascule.pipelines.ingress import ingress_record
from bascule.writer.errors import Unwritable
from bascule.writer.position import Position, PositionLost, position_key

log = get_log(__name__)

#: The property of a task that names its query. It stays the same as long as the checkpoint does.
_QUERY_ID = "sql.streaming.queryId"
_ROUTINGS = {"queue": Routing.ANYCAST, "topic": Routing.MULTICAST}
#: The remedy that always works. Depending on where the job starts, rows are written twice or not at all.
_START_OVER = "To start over, give the writer another id and the query a new checkpoint"
_NAMES = frozenset({"value", "address", "message_id", "correlation_id", "type", "group_id", "reply_to", "priority", "properties"})


@dataclass(frozen=True, slots=True)
class Encoded(WriterCommitMessage):
    """The messages of a task, as values for ``bascule.ingress``, and the id of its query."""

    values: tuple[bytes, ...]
    query: str


class DestinationWriter(DataSourceStreamWriter):
    """Tasks encode the rows; the driver writes each batch in one transaction. A batch must therefore fit into the driver's memory."""

    def __init__(self, options: Mapping[str, str], kafka: Mapping[str, Any], schema: StructType) -> None:
        """Read the options. Raises InvalidInput for a missing option or an unknown column."""
        lowered = {name.lower(): value for name, value in options.items()}
        self._id = lowered.get("id", "")
        if not self._id:
            raise InvalidInput("option id is missing; set id to a name of this writer that stays the same after a restart")
        routing = lowered.get("routing", "queue")
        if routing not in _ROUTINGS:
            raise InvalidInput(f"option routing is {routing!r}; must be 'queue' or 'topic'")
        _check_columns(schema, lowered)
        self._address, self._routing, self._kind = lowered.get("address"), _ROUTINGS[routing], routing
        self._unbound = lowered.get("unbound", "keep")
        self._topics, self._bridge = JournalTopics(lowered.get("prefix", PREFIX)), lowered.get("bridge", BRIDGE_ID)
        self._kafka = dict(kafka)

    def write(self, iterator: Iterator[Row]) -> Encoded:
        """Encode a task's rows.

        Raises InvalidInput for a row that is no JMS message, BadRecord for a message that the broker could not take.
        """
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY_ID) if context else None
        if not query:
            raise InvalidInput("Spark does not name the streaming query; the writer needs the query id to recognise repeated batches")
        return Encoded(tuple(self._encoded(row.asDict()) for row in iterator), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Write the batch unless it was written before. Raises PositionLost if the checkpoint is not that of the earlier batches."""
        encoded = [message for message in messages if isinstance(message, Encoded)]
        query = encoded[0].query  # an empty batch has a task, too
        if batchId == 0:
            # A user's job may run where no pipeline ever ran. Only the cluster's default knows the number of replicas.
            wanted = {self._topics.positions: own_topics.POSITIONS, self._topics.ingress: own_topics.INGRESS}
            for finding in own_topics.ensure(self._kafka, wanted):
                log.warning("weak topic setting", finding=str(finding))
        key = position_key(f"sink:{self._id}", "batches", 0)
        transactional_id = self._topics.transactional_id(self._bridge, key)
        writer = TransactionalWriter(self._kafka, transactional_id, self._topics.positions, key)
        try:
            before = writer.current()
            values = [value for message in encoded for value in message.values]
            if is_written(self._id, before, query, batchId, len(values)):
                return
            headers: Any = [(UNBOUND_HEADER, self._unbound.encode())]
            outputs = [Output(self._topics.ingress, None, value, headers) for value in values]
            after = replace(before or Position("batches", query, 0, 0), offset=batchId + 1, sequence=len(values))
            crash.point("sink.commit.before")
            try:
                writer.write(outputs, before, after)
            except (Unavailable, Unwritable):
                # No later writer may come to abort it, and the broker's readers wait until it is aborted.
                end_open_transactions(self._kafka, [transactional_id])
                raise
            crash.point("sink.commit.after")
        finally:
            writer.close()

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: nothing was written."""

    def _encoded(self, row: dict[str, Any]) -> bytes:
        address = row.get("address") or self._address
        if not address:
            raise InvalidInput("a row has no address; set column `address` or option address")
        body = row["value"]
        binary = isinstance(body, bytes | bytearray)
        message = JmsMessage(
            message_id=row.get("message_id"), correlation_id=row.get("correlation_id"), destination=address,
            destination_kind=self._kind, reply_to=row.get("reply_to"), type=row.get("type"), group_id=row.get("group_id"),
            priority=4 if row.get("priority") is None else row["priority"], properties=dict(row.get("properties") or {}),
            body_kind="bytes" if binary else "text", body=bytes(body) if binary else body,
        )  # fmt: skip
        flags = SendFlag.DURABLE | SendFlag.FROM_KAFKA | SendFlag.SOURCE | (SendFlag.GROUPED if message.group_id else 0)
        send = Send(
            flags, self._routing, message.priority, 0, 0, 0, address, (), (), (),
            KafkaOrigin(f"sink:{self._id}", 0, 0), encode_message(message),
        )  # fmt: skip
        return ingress_record(send)


def is_written(writer: str, before: Position | None, query: str, batch: int, messages: int) -> bool:
    """Return True if a writer with the position ``before`` has written a batch with this number of messages.

    Raises PositionLost if the batch is neither a repeat of the last batch nor the one after it.
    """
    if before is None:
        if batch == 0:
            return False
        raise PositionLost(
            f"writer {writer!r} has no position, and its query is at batch {batch}: the position was lost, or a new id is used with"
            f" an old checkpoint. {_START_OVER}"
        )
    if before.topic_id != query:
        raise PositionLost(
            f"writer {writer!r} belongs to query {before.topic_id!r}, and this checkpoint belongs to query {query!r}:"
            f" restore the checkpoint. {_START_OVER}"
        )
    if batch < before.offset - 1:
        raise PositionLost(
            f"writer {writer!r} has written batch {before.offset - 1}, and Spark repeats batch {batch}: the checkpoint is too old."
            f" Restore the newest checkpoint. {_START_OVER}"
        )
    # The position of an earlier version does not contain the number of messages.
    if batch == before.offset - 1 and before.sequence not in (-1, messages):
        raise PositionLost(
            f"writer {writer!r} has written batch {batch} with {before.sequence} messages, and Spark repeats the batch with {messages}:"
            f" the checkpoint is too old, or the job does not produce the same rows again. {_START_OVER}"
        )
    return batch < before.offset


def _check_columns(schema: StructType, options: Mapping[str, str]) -> None:
    names = set(schema.fieldNames())
    if "value" not in names:
        raise InvalidInput("column `value` is missing; add the column (string: a text message, binary: a bytes message)")
    if not isinstance(schema["value"].dataType, StringType | BinaryType):
        raise InvalidInput(f"column `value` is {schema['value'].dataType.simpleString()}; it must be string or binary")
    if unknown := sorted(names - _NAMES):
        raise InvalidInput(f"unknown columns: {', '.join(unknown)}; known columns are {', '.join(sorted(_NAMES))}")
    if "address" not in names and "address" not in options:
        raise InvalidInput("no destination address; set column `address` or option address")
