"""The entry of the log that says how old the messages of branches in Kafka are."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing
from typing import NamedTuple
from unittest.mock import patch

import pytest

from bascule.core.effects import run_blocking
from bascule.threads.clock import elapsed_s
from bascule.xa import Vote
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


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaInMemory:
    cluster = KafkaInMemory(monkeypatch)
    cluster.create("orders", 1)
    return cluster


@pytest.fixture
def resource(kafka: KafkaInMemory) -> Iterator[KafkaResource]:
    """Each recovery cleans up."""
    with closing(KafkaResource("kafka", SETTINGS, prefix="xa", instance="one", limits=BranchLimits(clean_interval_s=0.0))) as made:
        yield made


def sent(resource: KafkaResource, *values: bytes) -> Xid:
    """Send ``values`` in a branch, and end its work."""
    xid = branch(new_gtrid("test", 0), "kafka")
    handle = resource.start(xid, timeout_s=30.0)
    for value in values:
        handle.send("orders", value)
    resource.end(xid, success=True)
    return xid


def test_process_of_earlier_version_reads_log_with_ages(resource: KafkaResource) -> None:
    """Processes of both versions share the log during a rolling upgrade, and after a return to the earlier version."""
    begun, prepared = sent(resource, b"1"), sent(resource, b"2")
    resource.prepare(prepared)
    resource.recover()
    table, now_ms = run_blocking(resource._calls.table()), time.time_ns() // 1_000_000
    assert AGES in table
    assert read_without_ages(table, now_ms) == EarlierReading([prepared], [begun], set())
    assert read_without_ages(table, now_ms + CENTURY_MS).deleted == {key_of(xid) + STARTED for xid in (begun, prepared)}
    # An earlier version may fence the processes of all transactional ids that the log names. No process has this one.
    slots = {json.loads(entry.value)["slot"] for entry in table.values()}
    assert slots - set(resource._branches.slots) == {"bascule.xa.ages"}


def test_age_of_a_deleted_topic_does_not_count_for_the_topic_created_in_its_place(kafka: KafkaInMemory, resource: KafkaResource) -> None:
    sent(resource, b"old")
    resource.recover()
    replaced = kafka.topics["xa.side"]
    kafka.create("xa.side", len(replaced.partitions), **replaced.config)
    xid = sent(resource, b"1", b"2")
    with later(resource, hours=25):
        resource.recover()
    assert resource.prepare(xid) is Vote.YES
    resource.commit(xid)
    assert kafka.values("orders") == [b"1", b"2"]
    assert on_side(kafka) == {b"1", b"2"}
    with later(resource, hours=51):
        resource.recover()
    assert on_side(kafka) == set()


def test_ends_of_a_topic_that_is_replaced_while_they_are_read_are_not_used(kafka: KafkaInMemory, resource: KafkaResource) -> None:
    sent(resource, b"old")
    ids = iter([kafka.topics["xa.side"].id, "another"])
    with patch.object(resource._calls._open()._topics, "id", lambda _: next(ids)):
        resource.recover()
    assert AGES not in run_blocking(resource._calls.table())
    resource.recover()
    assert AGES in run_blocking(resource._calls.table())


def test_entry_in_the_form_of_another_version_is_measured_again(kafka: KafkaInMemory, resource: KafkaResource) -> None:
    sent(resource, b"old")
    resource.recover()
    written = json.loads(run_blocking(resource._calls.table())[AGES].value)
    foreign = json.dumps({**written, "ages": [[1.0, 2, [[0, 1]], [[0, 1]]]]}).encode()
    kafka.put("xa.log", foreign, AGES)
    assert resource.recover() == []
    with later(resource, hours=25):
        resource.recover()
    with later(resource, hours=51):
        resource.recover()
    assert on_side(kafka) == set()


def later(resource: KafkaResource, *, hours: int) -> AbstractContextManager[object]:
    """Advance the monotonic clock of a process."""
    return patch.object(resource._calls, "monotonic_s", lambda: elapsed_s() + hours * 3600.0)


def on_side(kafka: KafkaInMemory) -> set[bytes | None]:
    """Return the values of the messages on the side topic."""
    return {value for number in range(len(kafka.topics["xa.side"].partitions)) for value in kafka.values("xa.side", number)}
