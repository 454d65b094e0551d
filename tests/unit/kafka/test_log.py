"""The outcomes of appends that the journal's client reports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from queue import Queue

import pytest
from confluent_kafka import KafkaError, Message

from bascule.broker.epoch import Outcome
from bascule.journal.offsets import UNKNOWN_OFFSET
from bascule.kafka.log import JournalWriter, PartitionReader
from tests.support.mock_cluster import MockCluster

NOBODY = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
#: Kafka's API key of a fetch.
FETCH = 1
#: Pause between two fetches of a reader that waits at the end of a partition.
FETCH_PAUSE_S = 0.4
HELD_AND_CLOSED = f"""
import os
from bascule.kafka.log import JournalWriter

threads = lambda: set(os.listdir("/proc/self/task"))
before = threads()
writer = JournalWriter({NOBODY}, "journal", 0, lambda outcomes: None)
writer.append(b"D", b"value")
print(threads() > before)
writer.close()
print(sorted(threads() - before))
"""


@pytest.fixture
def outcomes() -> Queue[list[Outcome]]:
    return Queue()


@pytest.fixture
def writer(outcomes: Queue[list[Outcome]]) -> Iterator[JournalWriter]:
    with closing(JournalWriter(NOBODY, "journal", 0, outcomes.put)) as made:
        yield made


def test_delivery_report_without_offset_has_unknown_offset_outcome(writer: JournalWriter, outcomes: Queue[list[Outcome]]) -> None:
    writer._delivered(None, Message(topic="journal", partition=0))
    assert outcomes.get(timeout=10) == [(UNKNOWN_OFFSET, None)]


def test_closed_journal_writer_leaves_no_thread() -> None:
    """The test uses its own process, because clients of other tests start and end threads in this one."""
    done = subprocess.run([sys.executable, "-c", HELD_AND_CLOSED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr) == (["True", "[]"], "")


def test_failed_delivery_report_contains_reason(writer: JournalWriter, outcomes: Queue[list[Outcome]]) -> None:
    writer._delivered(KafkaError(KafkaError._MSG_TIMED_OUT, "too late"), Message(topic="journal", partition=0))
    ((offset, reason),) = outcomes.get(timeout=10)
    assert offset == -1
    assert "too late" in str(reason)


def test_error_in_delivery_report_is_failed_append(outcomes: Queue[list[Outcome]], monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable(*_: object) -> None:
        raise ZeroDivisionError("no report")

    monkeypatch.setattr(JournalWriter, "_delivered", unusable)
    with closing(JournalWriter(NOBODY, "journal", 0, outcomes.put)) as writer:
        writer.append(b"D", b"value")
        writer._producer.purge()
        assert outcomes.get(timeout=10) == [(-1, "the delivery report cannot be used: ZeroDivisionError('no report')")]


def test_reader_of_idle_topic_fetches_rarely() -> None:
    with MockCluster() as cluster:
        cluster.create("t")
        with closing(PartitionReader(cluster.kafka, "t", 0, following=True)) as reader:
            reader.seek(0)
            cluster.count_requests()
            begun_s = time.monotonic()
            while cluster.requests(FETCH) < 3:
                assert reader.read(timeout_s=0.05) == []
            assert time.monotonic() - begun_s > 2 * FETCH_PAUSE_S
