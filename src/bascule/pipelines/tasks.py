"""The functions that Spark calls on batches: one object per query, picklable, called once per task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from bascule.pipelines.carry import Carrier, Claim, held_position
from bascule.pipelines.divert import DivertEngine, JournalReader
from bascule.pipelines.spec import Divert, Pipelines

#: What a task reports; Spark needs some row, nobody reads it but the driver's progress.
REPORT_SCHEMA = "records long, written long, offset long"


def _report(records: int, carrier: Carrier) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"records": [records], "written": [carrier.written], "offset": [carrier.position.offset]})


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
        dead_letters = None if self.pipelines.stop_on_error else self.pipelines.dead_letter_topic
        engine = DivertEngine(self.pipelines.bridge_id, (self.claim.topic, self.claim.partition), dead_letters)
        records = 0
        for batch in batches:
            records += batch.num_rows
            for offset, key, value in zip(*(batch.column(name).to_pylist() for name in ("offset", "key", "value")), strict=True):
                if offset < position.offset:
                    continue
                for taken in reader.take(offset, key, value):
                    for divert, output in engine.outputs(taken):
                        carrier.add(output, partial(engine.dead_letter, taken, divert, "KAFKA_PRODUCE"))
                carrier.reach(offset + 1)
        carrier.commit()
        yield _report(records, carrier)
