"""Takeovers of a journal that is trimmed, and brokers that were replaced, produced on purpose on a real Kafka."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from confluent_kafka import Message

from bascule.broker import snapshot as snapshots
from bascule.broker.administration import purge
from bascule.broker.collecting import Collector
from bascule.broker.epoch import SteppedDown
from bascule.broker.snapshot import Snapshot
from bascule.broker.store_move import stored_record
from bascule.core.errors import Unavailable
from bascule.embedded.kafka import EmbeddedKafka
from bascule.journal.records import Op, json_entry
from bascule.kafka.history import TopicHistory
from bascule.kafka.log import PartitionReader
from bascule.kafka.snapshots import SnapshotStore
from bascule.server import housekeeping
from bascule.server.epoch import Epoch
from bascule.server.housekeeping import StoredMessages
from tests.scenarios.journaled import MESSAGES, Journaled, waiting
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for


def test_takeover_knows_messages_moved_to_the_store_while_the_broker_was_standby(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal may be trimmed after these messages: a snapshot that needs them from there is useless."""
    journal = Journaled(kafka, topic_prefix)
    stands_by = threading.Event()
    read = StoredMessages.read

    def read_once(store: StoredMessages, *, behind_barrier: bool = False) -> Mapping[int, bytes]:
        found = read(store, behind_barrier=behind_barrier)
        stands_by.set()
        return found

    async def take_over() -> None:
        first = await journal.epoch()
        journal.send(first, "first", "failed")
        await journal.answered("first", "failed")
        monkeypatch.setattr(StoredMessages, "read", read_once)
        second = journal.standby()
        assert await asyncio.to_thread(stands_by.wait, 60.0)
        assert first.housekeeping is not None
        old, other = first.engine.queue("q").ready
        queue = first.engine.queue("q")
        StoredMessages(journal.kafka, journal.place.topics.store).write({
            message.mid: stored_record(first.engine, message, queue) for message in (old, other)
        })  # fmt: skip
        StoredMessages(journal.kafka, journal.place.topics.store).write({other.mid: None})
        await second.start()
        assert second.housekeeping is not None
        await second.housekeeping.rounds()
        (snapshot,) = map(snapshots.decode, SnapshotStore(journal.kafka, journal.place.topics.snapshots).read().values())
        assert snapshot.stored == [old.mid]
        assert waiting(second) == [MESSAGES["first"], MESSAGES["failed"]]
        await first.close()
        await second.close()

    asyncio.run(take_over())


class Still:
    """Suspends the first thread that reaches a place, until the test releases it."""

    def __init__(self) -> None:
        self.came, self.go_on = threading.Event(), threading.Event()

    def come(self) -> None:
        if not self.came.is_set():
            self.came.set()
            self.go_on.wait(60 * SLOWNESS)


def before_the_store_is_read(still: Still, monkeypatch: pytest.MonkeyPatch, topic: str) -> None:
    read = StoredMessages.read
    monkeypatch.setattr(StoredMessages, "read", lambda store, **how: (still.come(), read(store, **how))[1])


def before_the_journal_is_read(still: Still, monkeypatch: pytest.MonkeyPatch, topic: str) -> None:
    seek = PartitionReader.seek

    def late(reader: PartitionReader, offset: int) -> None:
        if reader._topic == topic:
            still.come()
        seek(reader, offset)

    monkeypatch.setattr(PartitionReader, "seek", late)


def when_the_journal_has_been_read(still: Still, monkeypatch: pytest.MonkeyPatch, topic: str) -> None:
    read = PartitionReader.read

    def late(reader: PartitionReader, *arguments: Any, **options: Any) -> list[Message]:
        found = read(reader, *arguments, **options)
        if reader._topic == topic and reader.at_end and not still.came.is_set():
            reader._consumer.pause(reader._consumer.assignment())
            still.come()
            reader._consumer.resume(reader._consumer.assignment())
        return found

    monkeypatch.setattr(PartitionReader, "read", late)


@pytest.mark.parametrize("where", [before_the_store_is_read, before_the_journal_is_read, when_the_journal_has_been_read])
def test_standby_reloads_when_the_journal_is_trimmed_past_its_read_offset(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, where: Callable[[Still, pytest.MonkeyPatch, str], None]
) -> None:
    journal, still = Journaled(kafka, topic_prefix), Still()

    async def take_over() -> None:
        first = await journal.epoch()
        assert first.housekeeping is not None
        journal.send(first, "first", "failed")
        await journal.answered("first", "failed")
        await first.housekeeping.rounds()
        where(still, monkeypatch, journal.place.topics.journal)
        second = journal.standby()
        await asyncio.to_thread(still.came.wait)
        read = journal.end()
        assert [progress.done for progress in purge(first.engine, first.engine.queue("q"))] == [2]
        first.flush()
        journal.send(first, "third")
        await journal.answered("first", "failed", "third")
        await first.housekeeping.rounds()
        assert TopicHistory(journal.kafka, journal.place.topics.journal, 0).earliest() > read
        still.go_on.set()
        await second.start()
        assert waiting(second) == [MESSAGES["third"]]
        await first.close()
        await second.close()

    asyncio.run(take_over())


def test_broker_replaced_while_loading_does_not_report_the_trimmed_journal_as_damaged(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot that is announced after the start of its own epoch covers the trimmed records."""
    journal, still = Journaled(kafka, topic_prefix), Still()

    async def replace_it() -> None:
        first = await journal.epoch()
        journal.send(first, "first", "failed")
        await journal.answered("first", "failed")
        await first.close()
        before_the_journal_is_read(still, monkeypatch, journal.place.topics.journal)
        old, start = journal.standby(), journal.end()
        loading = asyncio.create_task(old.start())
        await asyncio.to_thread(still.came.wait)
        await asyncio.to_thread(wait_for, lambda: journal.end() == start + 1, "its start")
        new = await journal.epoch()
        assert [progress.done for progress in purge(new.engine, new.engine.queue("q"))] == [2]
        new.flush()
        journal.send(new, "third")
        await journal.answered("first", "failed", "third")
        assert new.housekeeping is not None
        await new.housekeeping.rounds()
        assert TopicHistory(journal.kafka, journal.place.topics.journal, 0).earliest() > start
        still.go_on.set()
        with pytest.raises(Unavailable, match="another broker has started a newer epoch"):
            await loading
        await new.close()
        await old.close()

    asyncio.run(replace_it())


def collected(epoch: Epoch) -> Snapshot:
    """Read the state of an epoch in one turn: the epoch may end in the next one."""
    collector = Collector(epoch.engine, epoch.offsets)
    for _ in collector.walk():
        pass
    return collector.finish().snapshot()


def test_decisions_appends_and_snapshot_of_a_replaced_broker_do_not_count(
    kafka: EmbeddedKafka, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journaled(kafka, topic_prefix)

    async def replace_it() -> None:
        old = await journal.epoch()
        journal.send(old, "first", "failed")
        await journal.answered("first", "failed")
        new = await journal.epoch()
        journal.send(new, "third")
        await journal.answered("first", "failed", "third")
        assert [progress.done for progress in purge(old.engine, old.engine.queue("q"))] == [2]
        journal.decide(old, "fourth")
        # Its snapshot is the newest of all, needs no message, and the journal would be trimmed up to it.
        taken = collected(old)
        SnapshotStore(journal.kafka, journal.place.topics.snapshots).write(taken.id, snapshots.encode(taken))
        old.engine.journaling.add(json_entry(Op.SNAPSHOT, {"id": taken.id}))
        old.flush()
        await asyncio.to_thread(wait_for, lambda: old.ended, "it to find out")
        assert [type(error) for error in journal.ends] == [SteppedDown]
        assert TopicHistory(journal.kafka, journal.place.topics.journal, 0).earliest() == 0
        await new.close()
        await old.close()

    async def load() -> None:
        epoch = await journal.epoch()
        assert waiting(epoch) == [MESSAGES[name] for name in ("first", "failed", "third")]
        await epoch.close()

    asyncio.run(replace_it())
    assert len(SnapshotStore(journal.kafka, journal.place.topics.snapshots).read()) == 1
    asyncio.run(load())
    assert "was never announced; not used" in caplog.text
    assert journal.sender.answers == [(name, None) for name in ("first", "failed", "third")]


def test_late_trim_by_a_replaced_broker_deletes_no_record_that_its_successor_needs(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, still = Journaled(kafka, topic_prefix), Still()
    history = TopicHistory(journal.kafka, journal.place.topics.journal, 0)
    trim = housekeeping.trim
    monkeypatch.setattr(housekeeping, "trim", lambda *arguments: (still.come(), trim(*arguments)))

    async def replace_it() -> None:
        old = await journal.epoch()
        journal.send(old, "first", "failed")
        await journal.answered("first", "failed")
        assert [progress.done for progress in purge(old.engine, old.engine.queue("q"))] == [2]
        old.flush()
        journal.send(old, "third")
        await journal.answered("first", "failed", "third")
        assert old.housekeeping is not None
        rounds = asyncio.create_task(old.housekeeping.rounds())
        await asyncio.to_thread(still.came.wait)
        assert history.earliest() == 0
        new = await journal.epoch()
        journal.send(new, "fourth")
        await journal.answered(*MESSAGES)
        still.go_on.set()
        await rounds
        assert 0 < history.earliest() < journal.end() - 2
        await new.close()
        await old.close()

    async def load() -> None:
        epoch = await journal.epoch()
        assert waiting(epoch) == [MESSAGES["third"], MESSAGES["fourth"]]
        await epoch.close()

    asyncio.run(replace_it())
    asyncio.run(load())
