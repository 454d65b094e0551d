"""Sequences of events that break naive systems, produced on purpose in the code of the product, on a real Kafka."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Producer

from bascule.broker.epoch import AppendOffsetUnknown, Outcome
from bascule.broker.journaling import RECORD_BYTES_SOFT
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.embedded.kafka import EmbeddedKafka
from bascule.jms.sections import scan
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import TABLE_CONFIG, Stored
from bascule.kafka.journal_writer import journal_writer
from bascule.kafka.log import JournalWriter, PartitionReader
from bascule.kafka.slot import Slot
from bascule.server import epoch as epoch_module
from bascule.testing.broker import message_bytes
from bascule.writer.errors import PositionMoved
from tests.scenarios.journaled import MESSAGES, Journaled, waiting
from tests.scenarios.test_transactional import BEGIN, END, MIDDLE, Place
from tests.support.kafka_proxy import Action, Api, KafkaProxy
from tests.support.system import wait_for


class FalseReports:
    """A Kafka client that reports the record at ``false_offset`` as not stored, although all records are stored.

    It reports this record together with the records up to ``told_with``, and each other record alone.
    """

    false_offset = told_with = -1

    def __init__(self, kafka: Any, topic: str, partition: int, on_outcomes: Callable[[list[Outcome]], None], loop: Any) -> None:
        self.reported = -1  # last offset whose outcome was reported to the epoch
        held: list[Outcome] = []

        def tell(outcomes: list[Outcome]) -> None:
            for offset, error in outcomes:
                held.append((-1, "timed out") if offset == self.false_offset else (offset, error))
                if not self.false_offset <= offset < self.told_with:
                    on_outcomes(held.copy())
                    held.clear()
                    self.reported = offset

        writer = journal_writer(kafka, topic, partition, tell, loop)
        self.append, self.stop, self.close = writer.append, writer.stop, writer.close


@pytest.mark.parametrize("together", [True, False])
def test_append_reported_failed_but_stored_ends_the_epoch_and_message_is_stored_once(
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
        assert journal.end() == failed + 3  # all of them are stored, and no other
        await epoch.close()

    async def go_on() -> None:
        epoch = await journal.epoch()
        assert waiting(epoch) == list(MESSAGES.values())
        # The client sends unconfirmed messages again.
        journal.send(epoch, "failed", "third", "fourth")
        await journal.answered(*MESSAGES)
        await epoch.close()

    async def look() -> None:
        epoch = await journal.epoch()
        assert waiting(epoch) == list(MESSAGES.values())
        await epoch.close()

    with monkeypatch.context() as patched:
        patched.setattr(epoch_module, "journal_writer", FalseReports)
        asyncio.run(fail())
    assert sender.answers == [("first", None)]
    asyncio.run(go_on())
    asyncio.run(look())
    assert sender.answers == [(name, None) for name in MESSAGES]
    assert len(ends) == 1


def test_append_timeout_of_a_large_message_does_not_count_earlier_idle_time(kafka: EmbeddedKafka, topic_prefix: str) -> None:
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


def test_lost_answer_of_a_single_append_ends_the_epoch_and_message_is_stored_once(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    """Kafka's client reports later records first. Without a check, the epoch would confuse the records and wait for ever."""
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
        reason = f"journal {journal.place.topics.journal}, offset {at}: Kafka has acknowledged a later record, but not this one"
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


def test_record_stored_at_unknown_offset_ends_the_epoch_and_is_not_duplicated(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    journal = Journaled(kafka, topic_prefix)
    unknown = f"journal {journal.place.topics.journal}: Kafka has stored a record and has not reported its offset"

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


@pytest.mark.slow
def test_epoch_with_unanswered_appends_ends_when_kafka_answers_a_new_client(
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
        assert ended == f"{stalled}; Kafka answers a new client, so a new epoch starts with a new producer"
        await epoch.close()

    async def go_on() -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "first")
        await journal.answered("first")
        await epoch.close()

    asyncio.run(stall())
    asyncio.run(go_on())


def test_failed_effect_of_a_stored_record_ends_the_epoch_and_next_epoch_has_all_messages(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    """Without a check, the next confirmed record would count as this one."""
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
        reason = "the effects of a stored record could not be applied: ZeroDivisionError('division by zero')"
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


def test_append_refused_by_the_writer_ends_the_epoch(kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_record_is_stored_after_a_record_that_kafka_refuses(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    """The sequence of the journal would have a gap, and no broker could load it."""
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


def test_ended_epoch_appends_nothing(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    journal = Journaled(kafka, topic_prefix)

    async def end() -> None:
        epoch = await journal.epoch()
        journal.send(epoch, "first")
        await journal.answered("first")
        stored = journal.end()
        epoch.end(BasculeError("the end"))
        journal.decide(epoch, "failed")
        epoch.engine.journaling.flush()  # errors that a closing connection may cause
        await asyncio.to_thread(wait_for, lambda: len(epoch.writer._producer) == 0, "the reports of all records")
        assert journal.end() == stored
        await epoch.close()

    asyncio.run(end())


#: How long a process may be suspended, and how long it is.
STILL_MAX_S, STILL_S = 0.8, 1.0


@pytest.mark.parametrize("sent", [[], ["first"]], ids=["only time passed", "a record was stored"])
def test_epoch_of_a_suspended_process_ends_and_does_nothing_more(kafka: EmbeddedKafka, topic_prefix: str, sent: list[str]) -> None:
    journal = Journaled(kafka, topic_prefix)
    done: list[str] = []

    async def stand_still() -> None:
        epoch = await journal.epoch()
        epoch.engine.schedule.at(time.time_ns() // 1_000_000 + 100, done.append, "the work that was due meanwhile")
        journal.send(epoch, *sent)
        # A pause of the machine before this moment does not count.
        epoch.protocol._limits = replace(epoch.protocol._limits, still_max_s=STILL_MAX_S)
        time.sleep(STILL_S)  # the process is suspended
        await asyncio.to_thread(wait_for, lambda: epoch.ended, "the end of the epoch")
        await asyncio.to_thread(wait_for, lambda: journal.end() == 1 + len(sent), "what had been appended")
        await epoch.close()

    asyncio.run(stand_still())
    assert [str(error).rpartition(" for ")[0] for error in journal.ends] == ["this process was suspended"]
    assert done == []
    assert journal.sender.answers == []


def just_before_init(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call ``act`` once, at the last moment before the next producer ends the open transactions of its id."""
    acts = [act]

    class Late(Producer):
        def init_transactions(self, *arguments: Any) -> None:
            if acts:
                acts.pop()()
            super().init_transactions(*arguments)

    monkeypatch.setattr(clients, "producer", Late)


def test_writer_detects_commit_by_its_twin_just_before_init(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(kafka, topic_prefix)
    with closing(place.writer()) as twin, closing(place.writer()) as writer:
        twin.write(place.outputs("1"), BEGIN, MIDDLE)
        just_before_init(monkeypatch, lambda: twin.write(place.outputs("2"), MIDDLE, END))
        with pytest.raises(PositionMoved) as moved:
            writer.write(place.outputs("2"), MIDDLE, END)
        assert moved.value.found == END
        writer.write(place.outputs("last"), END, BEGIN)
    assert place.values("last") == ["1", "2", "last"]


def test_writer_that_its_twin_has_fenced_finds_its_transaction_written(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(kafka, topic_prefix)
    with closing(place.writer()) as writer, closing(place.writer()) as twin:
        writer.write(place.outputs("1"), BEGIN, MIDDLE)
        assert twin.current() == MIDDLE  # now the producer that the writer has kept is fenced
        just_before_init(monkeypatch, lambda: twin.write(place.outputs("2"), MIDDLE, END))
        writer.write(place.outputs("2"), MIDDLE, END)
        writer.write(place.outputs("last"), END, BEGIN)
    assert place.values("last") == ["1", "2", "last"]


def test_slot_detects_commit_by_its_twin_just_before_init(kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
