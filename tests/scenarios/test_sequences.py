"""Sequences that make systems fail, brought about on purpose in the code that is shipped, on a real Kafka."""

from __future__ import annotations

import asyncio
import operator
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Message, Producer

from bascule.broker import snapshot as snapshots
from bascule.broker.addresses import Diverts
from bascule.broker.administration import purge
from bascule.broker.epoch import AppendOffsetUnknown, Outcome, SteppedDown
from bascule.broker.journaling import RECORD_BYTES_SOFT
from bascule.broker.policy import Policy
from bascule.config.settings import Journal
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.jms.sections import scan
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import TABLE_CONFIG, Stored
from bascule.kafka.history import TopicHistory
from bascule.kafka.log import JournalWriter, PartitionReader
from bascule.kafka.slot import Slot
from bascule.kafka.snapshots import SnapshotStore
from bascule.server import epoch as epoch_module
from bascule.server import housekeeping, topics
from bascule.server.epoch import Epoch, JournalPlace
from bascule.server.housekeeping import StoredMessages
from bascule.testing.broker import Sender, message_bytes
from bascule.writer.errors import PositionMoved
from tests.scenarios.test_transactional import BEGIN, END, MIDDLE, Place
from tests.support.kafka_proxy import Action, Api, KafkaProxy
from tests.support.system import wait_for

MESSAGES = {name: message_bytes(name, message_id=f"ID:{name}") for name in ("first", "failed", "third", "fourth")}


# -- an append is reported failed, but was stored, and later ones succeed ----------------------------------------------------


class FalseReports(JournalWriter):
    """Kafka's client, all of whose records are stored, and which says of the one at ``false_offset`` that it is not.

    That is told together with what comes up to ``told_with``, and each other outcome alone.
    """

    false_offset = told_with = -1

    def __init__(self, kafka: Any, topic: str, partition: int, on_outcomes: Callable[[list[Outcome]], None]) -> None:
        self.reported = -1  # the last offset whose outcome the epoch was told
        held: list[Outcome] = []

        def tell(outcomes: list[Outcome]) -> None:
            for offset, error in outcomes:
                held.append((-1, "timed out") if offset == self.false_offset else (offset, error))
                if not self.false_offset <= offset < self.told_with:
                    on_outcomes(held.copy())
                    held.clear()
                    self.reported = offset

        super().__init__(kafka, topic, partition, tell)


class Journaled:
    """A journal, and epochs of it that answer ``sender``."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.kafka = {"bootstrap.servers": kafka.bootstrap}
        names = JournalTopics(prefix)
        topics.ensure(self.kafka, names, Journal())
        self.place = JournalPlace(
            self.kafka, names, "sequences", append_timeout_s=15, snapshot_records=1000,
            session_timeout_s=60, retention_s=0, pinned_bytes_max=0,
        )  # fmt: skip
        self.sender = Sender()
        self.ends: list[BasculeError] = []

    def standby(self) -> Epoch:
        return Epoch(
            self.place, Policy(), Diverts(), None, 1 << 30,
            on_ended=self.ends.append, on_confirmed=lambda: None, on_ticked=lambda: None, on_stalled=self.ends.append,
        )  # fmt: skip

    async def epoch(self) -> Epoch:
        epoch = self.standby()
        await epoch.start()
        return epoch

    def end(self) -> int:
        """Where the next record will be."""
        with closing(PartitionReader(self.kafka, self.place.topics.journal, 0)) as reader:
            return reader.range()[1]

    def send(self, epoch: Epoch, *names: str) -> None:
        """Each in a record of its own; not waited for."""
        for name in names:
            self.decide(epoch, name)
            epoch.flush()

    def decide(self, epoch: Epoch, name: str) -> None:
        body = MESSAGES[name]
        epoch.engine.send("q", Routing.ANYCAST, body, scan(body), "client", self.sender, name)

    async def answered(self, *names: str) -> None:
        await asyncio.to_thread(wait_for, lambda: self.sender.accepted_tokens == list(names), "the answers")


def waiting(epoch: Epoch) -> list[bytes]:
    return [epoch.engine.bodies.read(message) for message in epoch.engine.queue("q").ready]


@pytest.mark.parametrize("together", [True, False])
def test_an_append_that_is_reported_failed_but_was_stored_ends_the_epoch_and_its_message_is_there_once(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    journal = Journaled(kafka, topic_prefix)
    sender, ends = journal.sender, journal.ends

    async def fail() -> None:
        epoch = await journal.epoch()
        writer = epoch.writer
        assert isinstance(writer, FalseReports)
        journal.send(epoch, "first")
        await journal.answered("first")
        failed = journal.end()
        writer.false_offset, writer.told_with = failed, failed + 2 if together else failed
        journal.send(epoch, "failed", "third", "fourth")
        await asyncio.to_thread(wait_for, lambda: writer.reported == failed + 2, "the outcome of the last one")
        assert epoch.ended
        assert [str(error) for error in ends] == [f"journal {journal.place.topics.journal}: append failed: timed out"]
        journal.send(epoch, "third")
        assert journal.end() == failed + 3  # all of them are stored, and nothing more
        await epoch.close()

    async def go_on() -> None:
        epoch = await journal.epoch()
        assert waiting(epoch) == list(MESSAGES.values())
        # What was not answered is sent again by its client.
        journal.send(epoch, "failed", "third", "fourth")
        await journal.answered(*MESSAGES)
        await epoch.close()

    async def look() -> None:
        epoch = await journal.epoch()
        assert waiting(epoch) == list(MESSAGES.values())
        await epoch.close()

    with monkeypatch.context() as patched:
        patched.setattr(epoch_module, "JournalWriter", FalseReports)
        asyncio.run(fail())
    assert sender.answers == [("first", None)]
    asyncio.run(go_on())
    asyncio.run(look())
    assert sender.answers == [(name, None) for name in MESSAGES]
    assert len(ends) == 1


# -- nothing is sent for long, and then more than a record takes in ---------------------------------------------------------


def test_a_message_that_fills_a_record_has_all_its_time_however_long_nothing_was_sent(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    journal = Journaled(kafka, topic_prefix)
    large = message_bytes(b"x" * 2 * RECORD_BYTES_SOFT)

    async def look() -> None:
        epoch = await journal.epoch()
        epoch.protocol._oldest_since_s -= 3600
        epoch.engine.send("q", Routing.ANYCAST, large, scan(large), "client", journal.sender, "large")
        assert epoch.engine.journaling.in_flight
        epoch.protocol._look()
        assert epoch.engine.stalled is None
        await journal.answered("large")
        await epoch.close()

    asyncio.run(look())
    assert not journal.ends


# -- the answer to an append is lost, and those to later ones are not ---------------------------------------------------------


def test_an_append_whose_answer_is_lost_alone_ends_the_epoch_at_once_and_its_message_is_there_once(
    kafka: EmbeddedKafka, topic_prefix: str
) -> None:
    """Kafka's client tells of the later ones first: they would be taken for it, and it for something that never comes."""
    journal = Journaled(kafka, topic_prefix)

    async def lose(proxy: KafkaProxy) -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "first")
        await journal.answered("first")
        lost = proxy.inject(Api.PRODUCE, Action.MUTE_REPLY)
        at = journal.end()
        journal.send(epoch, "failed")
        await asyncio.to_thread(wait_for, lambda: lost.hit, "the append")
        journal.send(epoch, "third")
        await asyncio.to_thread(wait_for, lambda: epoch.ended, "the end of the epoch", 20)
        reason = f"journal {journal.place.topics.journal}, offset {at}: Kafka has answered for a later record, not for this one"
        assert [str(error) for error in journal.ends] == [reason]
        assert journal.sender.accepted_tokens == ["first"]
        await epoch.close()

    async def go_on() -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "failed", "third", "fourth")
        await journal.answered(*MESSAGES)
        assert waiting(epoch) == list(MESSAGES.values())
        await epoch.close()

    with KafkaProxy(kafka.port) as proxy:
        direct = journal.place
        journal.place = replace(direct, kafka={"bootstrap.servers": proxy.bootstrap, "log_level": 0})
        asyncio.run(lose(proxy))
    journal.place = direct
    asyncio.run(go_on())


# -- a record is stored, and nobody says where ---------------------------------------------------------------------------------


def test_a_record_stored_at_an_unknown_offset_ends_the_epoch_and_is_there_once(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    journal = Journaled(kafka, topic_prefix)
    unknown = f"journal {journal.place.topics.journal}: Kafka has stored a record and does not say at which offset"

    async def lose(proxy: KafkaProxy) -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "first")
        await journal.answered("first")
        lost = proxy.inject(Api.PRODUCE, Action.SEQUENCE_KNOWN)
        journal.send(epoch, "failed")
        await asyncio.to_thread(wait_for, lambda: epoch.ended, "the end of the epoch", 20)
        assert lost.hit
        assert [str(error) for error in journal.ends] == [unknown]
        assert journal.sender.accepted_tokens == ["first"]
        await epoch.close()

    async def start_record(proxy: KafkaProxy) -> None:
        proxy.inject(Api.PRODUCE, Action.SEQUENCE_KNOWN)
        epoch = journal.standby()
        with pytest.raises(AppendOffsetUnknown, match=unknown):
            await epoch.start()
        await epoch.close()

    async def go_on() -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "failed", "third", "fourth")
        await journal.answered(*MESSAGES)
        assert waiting(epoch) == list(MESSAGES.values())
        await epoch.close()

    with KafkaProxy(kafka.port) as proxy:
        direct = journal.place
        journal.place = replace(direct, kafka={"bootstrap.servers": proxy.bootstrap, "log_level": 0})
        asyncio.run(lose(proxy))
        asyncio.run(start_record(proxy))
    journal.place = direct
    asyncio.run(go_on())


# -- the producer gets no answer any more, and a new one would -----------------------------------------------------------------


def test_an_epoch_whose_appends_stay_without_an_answer_ends_when_a_new_client_gets_one(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journaled(kafka, topic_prefix)
    journal.place = replace(journal.place, append_timeout_s=2)

    async def stall() -> None:
        epoch = await journal.epoch()
        monkeypatch.setattr(epoch.writer, "append", lambda key, value: None)
        journal.send(epoch, "first")
        await asyncio.to_thread(wait_for, lambda: epoch.ended, "the end of the epoch", 30)
        stalled, ended = map(str, journal.ends)
        assert "Kafka has not stored" in stalled
        assert ended == f"{stalled}; Kafka answers a new client, so a new producer takes over"
        await epoch.close()

    async def go_on() -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "first")
        await journal.answered("first")
        await epoch.close()

    asyncio.run(stall())
    asyncio.run(go_on())


# -- a fault of the broker's own ---------------------------------------------------------------------------------------------


def test_a_stored_record_that_cannot_be_carried_out_ends_the_epoch_and_the_next_one_has_all(
    kafka: EmbeddedKafka, topic_prefix: str
) -> None:
    """Whatever is confirmed after it would be taken for another record."""
    journal = Journaled(kafka, topic_prefix)

    async def fail() -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "first")
        await journal.answered("first")
        journal.decide(epoch, "failed")
        epoch.engine.journaling.then(partial(operator.truediv, 1, 0))
        epoch.flush()
        journal.send(epoch, "third")
        await asyncio.to_thread(wait_for, lambda: epoch.ended, "the end of the epoch")
        await asyncio.to_thread(wait_for, lambda: journal.end() == 4, "all of it to be stored")
        reason = "what a stored record decided could not be done: ZeroDivisionError('division by zero')"
        assert [str(error) for error in journal.ends] == [reason]
        assert journal.sender.accepted_tokens == ["first", "failed"]
        await epoch.close()

    async def go_on() -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "third", "fourth")
        await journal.answered(*MESSAGES)
        assert waiting(epoch) == list(MESSAGES.values())
        await epoch.close()

    asyncio.run(fail())
    asyncio.run(go_on())


def test_a_record_that_the_log_does_not_take_ends_the_epoch_whoever_closed_it(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journaled(kafka, topic_prefix)

    async def fail() -> None:
        epoch = await journal.epoch()

        def full(key: bytes, value: bytes) -> None:
            raise Unavailable("append not taken")

        monkeypatch.setattr(epoch.writer, "append", full)
        epoch.engine.queue("q")
        with pytest.raises(Unavailable):
            epoch.engine.journaling.flush()
        assert [str(error) for error in journal.ends] == ["append not taken"]
        await epoch.close()

    asyncio.run(fail())


# -- a standby takes over behind a journal that was trimmed while it stood by -------------------------------------------------


def test_a_broker_that_takes_over_knows_what_was_moved_to_the_store_while_it_stood_by(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal may be trimmed behind these messages: a snapshot that looks for them there is of no use."""
    journal = Journaled(kafka, topic_prefix)
    stands_by = threading.Event()
    read = StoredMessages.read

    def read_once(store: StoredMessages, *, behind_barrier: bool = False) -> dict[int, bytes]:
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
            message.mid: snapshots.stored_record(first.engine, message, queue) for message in (old, other)
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
    """Whoever comes to a place first stands still there until it is let go."""

    def __init__(self) -> None:
        self.came, self.go_on = threading.Event(), threading.Event()

    def come(self) -> None:
        if not self.came.is_set():
            self.came.set()
            self.go_on.wait(60)


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
def test_a_standby_behind_which_the_journal_is_trimmed_loads_anew(
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


def test_a_broker_that_was_replaced_while_it_loads_does_not_take_the_trimmed_journal_for_a_damaged_one(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was trimmed is covered by a snapshot that is announced behind its own epoch's start."""
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
        with pytest.raises(Unavailable, match="another broker has begun a newer epoch"):
            await loading
        await new.close()
        await old.close()

    asyncio.run(replace_it())


# -- a broker that was replaced, and does not know it, appends, takes a snapshot and trims --------------------------------------


def test_what_a_replaced_broker_decides_appends_and_has_in_a_snapshot_does_not_count(
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
        assert old.housekeeping is not None
        # Its snapshot is the newest of all, needs no message, and the journal would be trimmed behind it.
        await old.housekeeping.rounds()
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
    assert "was never announced: not used" in caplog.text
    assert journal.sender.answers == [(name, None) for name in ("first", "failed", "third")]


def test_a_replaced_broker_that_goes_on_with_a_trim_takes_away_nothing_that_its_successor_needs(
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


# -- a record that Kafka refuses for good, with others behind it ---------------------------------------------------------


def test_behind_a_record_that_kafka_refuses_nothing_is_stored(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    """The sequence would have a hole, and no broker could load the journal."""
    client = {"bootstrap.servers": kafka.bootstrap, "batch.num.messages": 1}
    Topics(client).create(topic_prefix, 1, {"max.message.bytes": "1000"})
    Topics(client).await_visible([topic_prefix])
    outcomes: list[Outcome] = []
    with closing(JournalWriter(client, topic_prefix, 0, outcomes.extend)) as writer:
        for size_bytes in (10, 2000, 20, 30):
            writer.append(b"S", b"x" * size_bytes)
        wait_for(lambda: len(outcomes) == 2, "the refusal")
        with pytest.raises(Unavailable):
            writer.append(b"S", b"")
    assert [offset for offset, _ in outcomes] == [0, -1]
    assert "Message size too large" in str(outcomes[1][1])
    with closing(PartitionReader(client, topic_prefix, 0)) as reader:
        assert reader.range()[1] == 1


def test_an_epoch_that_has_ended_appends_nothing(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    journal = Journaled(kafka, topic_prefix)

    async def end() -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "first")
        await journal.answered("first")
        stored = journal.end()
        epoch.end(BasculeError("the end"))
        journal.decide(epoch, "failed")
        epoch.engine.journaling.flush()  # what a connection that is being closed may lead to
        assert await asyncio.to_thread(epoch.writer._producer.flush, 10) == 0
        assert journal.end() == stored
        await epoch.close()

    asyncio.run(end())


# -- a process that stood still wakes up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [[], ["first"]], ids=["only time passed", "a record was stored"])
def test_an_epoch_whose_process_stood_still_ends_and_does_nothing_more(kafka: EmbeddedKafka, topic_prefix: str, sent: list[str]) -> None:
    journal = Journaled(kafka, topic_prefix)
    journal.place = replace(journal.place, session_timeout_s=1)
    done: list[str] = []

    async def stand_still() -> None:
        epoch = await journal.epoch()
        epoch.engine.schedule.at(time.time_ns() // 1_000_000 + 100, done.append, "what was due meanwhile")
        journal.send(epoch, *sent)
        time.sleep(epoch.place.session_timeout_s)  # the process does nothing
        await asyncio.to_thread(wait_for, lambda: epoch.ended, "the end of the epoch")
        await asyncio.to_thread(wait_for, lambda: journal.end() == 1 + len(sent), "what had been appended")
        await epoch.close()

    asyncio.run(stand_still())
    assert [str(error).rpartition(" for ")[0] for error in journal.ends] == ["this process stood still"]
    assert done == []
    assert journal.sender.answers == []


# -- a writer reads its position before it has ended what an earlier one had open --------------------------------------------


def just_before_init(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """``act`` happens once, at the last moment before the next producer ends what others have begun under its id."""
    acts = [act]

    class Late(Producer):
        def init_transactions(self, *arguments: Any) -> None:
            if acts:
                acts.pop()()
            super().init_transactions(*arguments)

    monkeypatch.setattr(clients, "producer", Late)


def test_a_writer_whose_twin_commits_at_the_last_moment_before_init_knows_it(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(kafka, topic_prefix)
    with closing(place.writer()) as writer, closing(place.writer()) as twin:
        assert writer.current() == BEGIN
        writer.write(place.outputs("1"), BEGIN, MIDDLE)
        assert twin.current() == MIDDLE
        just_before_init(monkeypatch, lambda: twin.write(place.outputs("2"), MIDDLE, END))
        with pytest.raises(PositionMoved) as moved:
            writer.write(place.outputs("2"), MIDDLE, END)
        assert moved.value.found == END
        writer.write(place.outputs("last"), END, BEGIN)
    assert place.values("last") == ["1", "2", "last"]


def test_a_slot_whose_twin_commits_at_the_last_moment_before_init_knows_it(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(kafka, topic_prefix)
    table = f"{topic_prefix}.table"
    Topics(place.pipelines.kafka).create(table, 1, TABLE_CONFIG)

    def slot() -> Slot:
        return Slot(place.pipelines.kafka, topic_prefix, table, 0, ahead=False)

    def once(name: bytes) -> Callable[[Any], list[Outgoing]]:
        def make(found: dict[bytes, Stored]) -> list[Outgoing]:
            return [] if b"done" in found else [Outgoing(place.topic, None, name), Outgoing(table, b"done", name, partition=0)]

        return make

    with closing(slot()) as late, closing(slot()) as twin:
        just_before_init(monkeypatch, lambda: twin.transact(once(b"twin")))
        late.transact(once(b"late"))
    with closing(place.writer()) as writer:
        writer.write(place.outputs("last"), BEGIN, MIDDLE)
    assert place.values("last") == ["twin", "last"]
