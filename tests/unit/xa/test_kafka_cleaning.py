"""The entry of the log that says how old the messages of branches in Kafka are."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing
from typing import NamedTuple

import pytest

from bascule.core.effects import run_blocking
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_protocol import LIMITS, BranchLimits
from bascule.xa.kafka_records import AGES, STARTED, LogEntry, PreparedBranch, key_of
from bascule.xa.xid import Xid, branch, new_gtrid
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory

CENTURY_MS = 100 * 366 * 24 * 3_600_000


class EarlierReading(NamedTuple):
    """What a process of the version before AGES finds in the log."""

    prepared: list[Xid]
    started: list[Xid]
    deleted: set[bytes]


def read_without_ages(table: Mapping[bytes, LogEntry], now_ms: int) -> EarlierReading:
    """Read as recover(), started() and the cleaning did before AGES: to them, each record of the log is about a branch."""
    begun = {key: json.loads(entry.value) for key, entry in table.items() if key.endswith(STARTED)}
    prepared = {key: PreparedBranch(**json.loads(entry.value)) for key, entry in table.items() if key not in begun}
    told = {key for key, fields in begun.items() if fields.get("rolled_back") or fields.get("committed")}
    started = [key.removesuffix(STARTED) for key in begun if key.removesuffix(STARTED) not in prepared and key not in told]
    old = {key for key, fields in begun.items() if fields["at_ms"] < now_ms - int(LIMITS.unprepared_kept_s * 1000)}
    return EarlierReading([Xid.parse(key.decode()) for key in prepared], [Xid.parse(key.decode()) for key in started], old)


def test_process_of_earlier_version_reads_log_with_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of both versions share the log during a rolling upgrade, and after a return to the earlier version."""
    KafkaInMemory(monkeypatch).create("orders", 1)
    limits = BranchLimits(clean_interval_s=0.0)
    with closing(KafkaResource("kafka", SETTINGS, prefix="xa", instance="one", limits=limits)) as resource:
        begun, prepared = (branch(new_gtrid("test", 0), "kafka") for _ in range(2))
        for xid in (begun, prepared):
            resource.start(xid, timeout_s=30.0).send("orders", b"1")
            resource.end(xid, success=True)
        resource.prepare(prepared)
        resource.recover()
        table, now_ms = run_blocking(resource._calls.table()), time.time_ns() // 1_000_000
        assert AGES in table
        assert read_without_ages(table, now_ms) == EarlierReading([prepared], [begun], set())
        assert read_without_ages(table, now_ms + CENTURY_MS).deleted == {key_of(xid) + STARTED for xid in (begun, prepared)}
        # An earlier version may fence the processes of all transactional ids that the log names. No process has this one.
        slots = {json.loads(entry.value)["slot"] for entry in table.values()}
        assert slots - set(resource._branches.slots) == {"bascule.xa.ages"}
