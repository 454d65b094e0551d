"""Spark's own Kafka sink, which bench/bridge.py compares with Bascule's pipelines.

    python -m bench.carry sink|copy SERVERS PREFIX TARGET CHECKPOINTS

Both programs read the journal PREFIX.journal with the Spark settings of the pipelines. ``sink`` maps messages with the code of the divert
in a mapInArrow, and writes them with Spark's at-least-once Kafka sink: no fence, no position, no transaction. ``copy`` is that sink with
unchanged journal values and without Python: the least that a Kafka record costs in Spark.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from bascule.core.signals import StopSignals
from bascule.core.topics import JournalTopics
from bascule.jms.record_headers import DIVERT_HEADER, ID_HEADER, ORIGIN_HEADER
from bascule.jms.to_kafka import record_of, target_topic
from bascule.journal.records import KEY_OF_KIND, Kind, Op, decode_header, decode_send, entries
from bascule.pipelines.spark import journal_rows, kafka_stream, spark_context, sql_session
from bascule.pipelines.spec import EARLIEST, DivertSpec, PipelinesSpec, StartPosition

ADDRESS = "flights"
DIVERT = "all"
SINK_SCHEMA = "topic string, key binary, value binary, headers array<struct<key:string,value:binary>>"
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ARROW = pa.schema([("topic", pa.string()), ("key", pa.binary()), ("value", pa.binary()), ("headers", _HEADERS)])


def pipelines(servers: str, prefix: str, target: str, checkpoints: str) -> PipelinesSpec:
    """Return one plain divert of everything, from the start of the journal."""
    divert = DivertSpec(DIVERT, ADDRESS, target, start=StartPosition(EARLIEST))
    return PipelinesSpec("bench", {"bootstrap.servers": servers}, (divert,), topics=JournalTopics(prefix), checkpoint_dir=checkpoints)


def mapped_rows(journal: DataFrame, options: PipelinesSpec) -> DataFrame:
    """Return the records that the divert would write for journal rows."""
    (divert,) = options.diverts
    bridge, name = options.bridge_id.encode(), divert.name.encode()

    def mapped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = []
            for value in batch.column("value").to_pylist():
                header = decode_header(value)
                for index, (op, start, end) in enumerate(entries(value)):
                    if op == Op.SEND:
                        send = decode_send(value, start, end)
                        identity = f"{header.epoch}-{header.sequence}-{index}".encode()
                        marks = [(ORIGIN_HEADER, bridge), (ID_HEADER, identity), (DIVERT_HEADER, name)]
                        topic = target_topic(divert.target, send.address)
                        output = record_of(send.body, topic, divert.key, list(marks), send.timestamp_ms)
                        rows.append((*output[:3], [{"key": key, "value": octets} for key, octets in output.headers]))
            columns = list(zip(*rows, strict=True)) or [()] * len(_ARROW)
            yield pa.RecordBatch.from_arrays(
                [pa.array(column, field.type) for column, field in zip(columns, _ARROW, strict=True)], schema=_ARROW
            )

    return journal.mapInArrow(mapped, SINK_SCHEMA)


def copied_rows(journal: DataFrame, options: PipelinesSpec) -> DataFrame:
    """Return journal rows unchanged."""
    topic = sql.lit(options.diverts[0].target).alias("topic")
    return journal.where(sql.col("key") == sql.lit(KEY_OF_KIND[Kind.DATA])).select(topic, "key", "value")


def run_sink(options: PipelinesSpec, rows: Callable[[DataFrame, PipelinesSpec], DataFrame]) -> None:
    """Copy the journal to the target with Spark's Kafka sink, until SIGTERM."""
    session = sql_session(spark_context(options))
    with StopSignals() as stop:
        journal = journal_rows(kafka_stream(session, options, {(options.topics.journal, 0): 0}))
        query = (
            rows(journal, options)
            .writeStream.format("kafka")
            .option("kafka.bootstrap.servers", options.kafka["bootstrap.servers"])
            .option("checkpointLocation", f"{options.checkpoint_dir}/sink")
            .start()
        )
        print("ready", flush=True)
        while query.isActive and not stop.wait(0.25):
            pass
        if not stop.is_set():
            raise SystemExit(str(query.exception()))
        query.stop()
        session.stop()


def main() -> None:
    """Run the command."""
    what, *rest = sys.argv[1:]
    run_sink(pipelines(*rest), mapped_rows if what == "sink" else copied_rows)


if __name__ == "__main__":
    main()
