"""The writer of the journal whose reports the event loop itself reads."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from confluent_kafka import KafkaException

from bascule.broker.epoch import Outcome
from bascule.core.errors import Unavailable
from bascule.kafka import clients, event_producer
from bascule.kafka.event_producer import EventProducer
from bascule.kafka.journal_writer import Appends, LoopJournalWriter, journal_writer
from bascule.kafka.log import GAPLESS_SETTINGS, JournalWriter
from tests.support.mock_cluster import MockCluster

NOBODY = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
#: Kafka's API key of a produce request, and an error after which the client may not store later records.
PRODUCE, MESSAGE_TOO_LARGE = 0, 10
DEADLINE_S = 60.0
HELD_AND_CLOSED = f"""
import asyncio, os
from bascule.kafka.journal_writer import journal_writer

held = lambda kind: set(os.listdir(f"/proc/self/{{kind}}"))

async def run():
    loop = asyncio.get_running_loop()
    before = held("task"), len(held("fd"))
    writer = journal_writer({NOBODY}, "journal", 0, print, loop)
    writer.append(b"D", b"value")
    print(held("task") > before[0], type(writer).__name__)
    writer.stop()
    writer.close()
    print(sorted(held("task") - before[0]), len(held("fd")) - before[1])

asyncio.run(run())
"""


class Outcomes:
    """The outcomes of a writer; ``count`` of them can be awaited."""

    def __init__(self) -> None:
        self.all: list[Outcome] = []
        self.threads: set[int] = set()
        self.calls = 0
        self._changed = asyncio.Event()

    def __call__(self, outcomes: list[Outcome]) -> None:
        self.all += outcomes
        self.calls += 1
        self.threads.add(threading.get_ident())
        self._changed.set()

    async def first(self, count: int) -> list[Outcome]:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.all) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.all[:count]


@pytest.fixture(scope="module")
def cluster() -> Iterator[MockCluster]:
    with MockCluster() as started:
        yield started


@asynccontextmanager
async def writing(kafka: dict[str, Any], topic: str, outcomes: Callable[[list[Outcome]], None]) -> AsyncIterator[Appends]:
    writer = journal_writer(kafka, topic, 0, outcomes, asyncio.get_running_loop())
    try:
        yield writer
    finally:
        writer.stop()
        await asyncio.to_thread(writer.close)


async def until_refused(writer: Appends) -> None:
    while True:
        writer.append(b"D", b"third")
        await asyncio.sleep(0)


def test_reports_come_in_order_on_the_thread_of_the_loop(cluster: MockCluster) -> None:
    cluster.create("ordered")

    async def run() -> None:
        outcomes = Outcomes()
        async with writing(cluster.kafka, "ordered", outcomes) as writer:
            assert isinstance(writer, LoopJournalWriter)
            for _ in range(200):
                writer.append(b"D", b"x" * 100)
            assert await outcomes.first(200) == [(offset, None) for offset in range(200)]
            assert outcomes.threads == {threading.get_ident()}

    asyncio.run(run())


def test_each_of_many_single_appends_wakes_the_loop(cluster: MockCluster) -> None:
    """One lost wake-up would stop this chain: each append follows the report of the one before."""
    cluster.create("chained")

    async def run() -> None:
        outcomes = Outcomes()
        async with writing(cluster.kafka, "chained", outcomes) as writer:
            for number in range(300):
                writer.append(b"D", b"x" * (number % 7))
                await outcomes.first(number + 1)
            assert outcomes.calls == 300

    asyncio.run(run())


def test_appends_of_other_threads_wake_the_loop(cluster: MockCluster) -> None:
    cluster.create("threads")

    async def run() -> None:
        outcomes = Outcomes()
        async with writing(cluster.kafka, "threads", outcomes) as writer:

            def append() -> None:
                for _ in range(100):
                    writer.append(b"D", b"x" * (128 << 10))  # copied without the interpreter lock

            await asyncio.gather(*(asyncio.to_thread(append) for _ in range(3)))
            assert await outcomes.first(300) == [(offset, None) for offset in range(300)]

    asyncio.run(run())


def test_refused_record_fails_with_reason_and_no_later_record_is_stored(cluster: MockCluster) -> None:
    cluster.create("refused")

    async def run() -> None:
        outcomes = Outcomes()
        async with writing(cluster.kafka, "refused", outcomes) as writer:
            writer.append(b"D", b"first")
            await outcomes.first(1)
            cluster.fail(PRODUCE, MESSAGE_TOO_LARGE)
            writer.append(b"D", b"second")
            assert (await outcomes.first(2))[0] == (0, None)
            offset, reason = outcomes.all[1]
            assert offset == -1
            assert "too large" in str(reason)
            with pytest.raises(Unavailable, match=r"journal refused: append of 5 bytes refused: .*"):
                await until_refused(writer)
        assert all(failure is not None for _, failure in outcomes.all[1:])

    asyncio.run(run())


def test_large_record_is_refused_with_the_reason() -> None:
    async def run() -> None:
        async with writing({**NOBODY, "client.id": "large"}, "journal", Outcomes()) as writer:
            with pytest.raises(Unavailable, match=r"append of \d+ bytes refused: .*too large"):
                writer.append(b"D", bytes((100 << 20) + 1))

    asyncio.run(run())


def test_closed_writer_leaves_no_thread_and_no_descriptor() -> None:
    """The test uses its own process, because clients of other tests start and end threads in this one."""
    done = subprocess.run([sys.executable, "-c", HELD_AND_CLOSED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split("\n")[:2], done.stderr) == (["True LoopJournalWriter", "[] 0"], "")


def test_append_after_close_is_refused_and_stopped_writer_reports_nothing(cluster: MockCluster) -> None:
    cluster.create("closed")

    async def run() -> None:
        outcomes = Outcomes()
        async with writing(cluster.kafka, "closed", outcomes) as writer:
            writer.append(b"D", b"value")
            await outcomes.first(1)
            writer.append(b"D", b"value")
            writer.stop()
        with pytest.raises(Unavailable, match="the writer is closed"):
            writer.append(b"D", b"value")
        assert outcomes.all == [(0, None)]

    asyncio.run(run())


def test_client_ends_only_after_a_thread_that_still_appends(cluster: MockCluster) -> None:
    """A large record is appended in another thread, which may outlive its epoch."""
    cluster.create("outlived")
    producer = EventProducer({**cluster.kafka, **GAPLESS_SETTINGS}, "outlived")
    ended: list[bool] = []
    weakref.finalize(producer, ended.append, True)

    async def write(producer: EventProducer) -> None:
        writer = LoopJournalWriter(producer, "outlived", 0, Outcomes(), asyncio.get_running_loop())
        writer.stop()
        writer.close()

    asyncio.run(write(producer))
    gc.collect()
    assert ended == []
    producer.produce(0, b"D", b"value")  # uses a client that still exists
    del producer
    gc.collect()
    assert ended == [True]


def test_error_of_a_refused_append_does_not_keep_the_client() -> None:
    """The client would end on the loop otherwise, where its end blocks all connections."""
    producer = EventProducer({**NOBODY, **GAPLESS_SETTINGS, "queue.buffering.max.messages": 1}, "journal")
    ended: list[bool] = []
    weakref.finalize(producer, ended.append, True)

    async def refused(writer: LoopJournalWriter) -> Unavailable:
        with pytest.raises(Unavailable, match=r"append of 5 bytes refused: .*full") as caught:
            await until_refused(writer)
        writer.stop()
        await asyncio.to_thread(writer.close)
        return caught.value

    async def run(producer: EventProducer) -> Unavailable:
        return await refused(LoopJournalWriter(producer, "journal", 0, Outcomes(), asyncio.get_running_loop()))

    kept = asyncio.run(run(producer))
    del producer
    gc.collect()
    assert ended == [True]
    assert kept.__traceback__ is not None


def test_refused_settings_leave_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KafkaException, match="acks"):
        EventProducer({**NOBODY, "acks": "many"}, "journal")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_unusable_report_is_failed_append(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.create("unusable")

    def unusable(producer: EventProducer) -> None:
        os.eventfd_read(producer.descriptor)
        raise ZeroDivisionError("no report")

    async def run() -> None:
        outcomes = Outcomes()
        monkeypatch.setattr(EventProducer, "reports", unusable)
        async with writing(cluster.kafka, "unusable", outcomes) as writer:
            writer.append(b"D", b"value")
            assert await outcomes.first(1) == [(-1, "the delivery report cannot be used: ZeroDivisionError('no report')")]

    asyncio.run(run())


@pytest.mark.parametrize("reason", ["no functions", "a function as a setting", "no eventfd"])
def test_thread_takes_reports_if_the_client_has_no_descriptor(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    cluster.create("thread")
    kafka = cluster.kafka
    if reason == "no functions":
        monkeypatch.setattr(event_producer, "_library", lambda: None)
    elif reason == "no eventfd":
        monkeypatch.delattr(os, "eventfd")
    else:
        kafka["error_cb"] = lambda _: None
    assert clients.event_producer({**kafka, **GAPLESS_SETTINGS}, "thread") is None

    async def run() -> None:
        outcomes = Outcomes()
        async with writing(kafka, "thread", outcomes) as writer:
            assert isinstance(writer, JournalWriter)
            writer.append(b"D", b"value")
            await outcomes.first(1)
            assert outcomes.threads == {threading.get_ident()}

    asyncio.run(run())
