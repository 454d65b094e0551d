"""The functions that Spark calls on batches: one object per query, picklable, called once per task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from bascule.pipelines.carry import Carrier, Claim, held_position
from bascule.pipelines.divert import DivertEngine, JournalReader
from bascule.pipelines.ingress import IngressEngine, KafkaRecord
from bascule.pipelines.spec import Divert, Ingress, Pipelines

#: What a task reports; Spark needs some row, nobody reads it but the driver's progress.
REPORT_SCHEMA = "records long, written long"


_JOURNAL_COLUMNS = ("offset", "key", "value")
_KAFKA_COLUMNS = ("topic", "partition", "offset", "timestamp_ms", "key", "value", "headers")


def _report(records: int, carriers: Iterable[Carrier]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"records": [records], "written": [sum(carrier.written for carrier in carriers)]})


def _rows(batch: pa.RecordBatch, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    return zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def _dead_letter_topic(pipelines: Pipelines) -> str | None:
    return None if pipelines.stop_on_error else pipelines.dead_letter_topic


@dataclass(frozen=True, slots=True)
class DivertTask:
    """Journal rows (offset, key, value) to target topics, for all diverts that share a position."""

    pipelines: Pipelines
    claim: Claim
    diverts: tuple[Divert, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Takes the rows of one journal partition in order."""
        position = held_position(self.pipelines, self.claim)
        reader = JournalReader(position, self.diverts)
        carrier = Carrier(self.pipelines, self.claim, position, reader.state)
        source = (self.claim.topic, self.claim.partition)
        engine = DivertEngine(self.pipelines.bridge_id, source, _dead_letter_topic(self.pipelines))
        records = 0
        for batch in batches:
            records += batch.num_rows
            for offset, key, value in _rows(batch, _JOURNAL_COLUMNS):
                if offset < carrier.begun_at:
                    continue
                for taken in reader.take(offset, key, value):
                    for divert, output in engine.outputs(taken):
                        carrier.add(output, partial(engine.dead_letter, taken, divert, "KAFKA_PRODUCE"))
                carrier.reach(offset + 1)
        carrier.commit()
        yield _report(records, [carrier])


@dataclass(frozen=True, slots=True)
class IngressTask:
    """Kafka rows to ``bascule.ingress``. A task may hold several source partitions; each has its own position and transactions."""

    pipelines: Pipelines
    claims: tuple[Claim, ...]
    ingress: Ingress

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Takes the rows of each source partition in order."""
        pipelines = self.pipelines
        claims = {(claim.topic, claim.partition): claim for claim in self.claims}
        engine = IngressEngine(self.ingress, pipelines.bridge_id, pipelines.ingress_topic, _dead_letter_topic(pipelines))
        carriers: dict[tuple[str, int], Carrier] = {}
        records = 0
        for batch in batches:
            records += batch.num_rows
            for row in _rows(batch, _KAFKA_COLUMNS):
                source = row[:2]
                carrier = carriers.get(source)
                if carrier is None:
                    carrier = Carrier(pipelines, claims[source], held_position(pipelines, claims[source]))
                    carriers[source] = carrier
                if row[2] < carrier.begun_at:
                    continue
                record = KafkaRecord._make((*row[:6], [(header["key"], header["value"]) for header in row[6] or ()]))
                output = engine.output(record)
                if output is not None:
                    carrier.add(output, partial(engine.dead_letter, record, "KAFKA_PRODUCE"))
                carrier.reach(record.offset + 1)
        for carrier in carriers.values():
            carrier.commit()
        yield _report(records, carriers.values())
