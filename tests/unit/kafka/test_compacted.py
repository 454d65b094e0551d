"""A compacted topic as a table: a deleted key is not in the table, however long the reader was suspended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from bascule.core.errors import TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.kafka import clients, compacted
from bascule.kafka.appender import Appender, OffsetUnknown, await_stored
from bascule.kafka.compacted import DELETIONS_KEPT_S, TableReader
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

SOON_S = 30.0 * SLOWNESS


class Topic:
    """A topic with one partition, its consumer, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = time.time()
        self.read: list[int] = []
        self.reading: Callable[[], None] = lambda: None
        self.held: Callable[[], bool] = lambda: False
        self._records: dict[int, tuple[bytes, bytes | None]] = {}
        self.end = self._next = 0
        self.fetching = self.closed = False
        monkeypatch.setattr("bascule.kafka.clients.consumer", lambda _: self)
        monkeypatch.setattr("bascule.kafka.compacted.PartitionOffsets", lambda *_: self)
        monkeypatch.setattr("bascule.kafka.compacted.time", SimpleNamespace(time=lambda: self.now_s, monotonic=time.monotonic))

    def append(self, key: bytes, value: bytes | None) -> None:
        self._records[self.end] = (key, value)
        self.end += 1

    def compact(self) -> None:
        """Keep only the newest record of each key, and no tombstones."""
        newest = {key: offset for offset, (key, _) in self._records.items()}
        self._records = {at: each for at, each in self._records.items() if newest[each[0]] == at and each[1] is not None}

    def ask(self, spec: OffsetSpec, *_: object) -> Mapping[int, int]:
        return {0: self.end if isinstance(spec, type(OffsetSpec.latest())) else 0}

    def list_topics(self, _topic: str, timeout: float) -> None:
        assert timeout > 0

    def assign(self, at: Sequence[TopicPartition]) -> None:
        self._next, self.fetching = at[0].offset, True

    def unassign(self) -> None:
        assert self.fetching
        assert not self.closed
        self.fetching = False

    def close(self) -> None:
        self.closed = True

    def poll(self, _timeout_s: float) -> Any:
        self.reading()
        if self.held():
            return None
        offset = next((each for each in self._records if each >= self._next), self.end)
        key, value = self._records.get(offset, (b"", None))
        self._next = min(offset + 1, self.end)
        self.read.append(offset)
        error = KafkaError(KafkaError._PARTITION_EOF) if offset == self.end else None
        fields = {"error": error, "partition": 0, "offset": offset, "key": key, "value": value, "headers": None}
        return SimpleNamespace(**{name: lambda each=each: each for name, each in fields.items()})


class Followed:
    """A reader that has read two keys, and the state that its callbacks have built."""

    def __init__(self, topic: Topic) -> None:
        self.state: dict[bytes, bytes | None] = {}
        self.reader = TableReader({}, "table", [0], self.state.__setitem__, begin=self.state.clear)
        topic.append(b"a", b"1")
        topic.append(b"b", b"2")
        assert self.keys() == [b"a", b"b"]

    def keys(self) -> list[bytes]:
        table = self.reader.read(10)
        assert {key: value for key, value in self.state.items() if value is not None} == {key: each.value for key, each in table.items()}
        return sorted(table)


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    return Topic(monkeypatch)


def test_table_reader_continues_where_it_stopped(topic: Topic) -> None:
    followed = Followed(topic)
    topic.append(b"a", None)
    topic.now_s += DELETIONS_KEPT_S / 3
    assert followed.keys() == [b"b"]
    topic.append(b"c", b"3")
    topic.now_s += DELETIONS_KEPT_S / 3
    assert followed.keys() == [b"b", b"c"]
    assert topic.read == [0, 1, 2, 3]


def test_table_reader_notices_that_a_node_knows_less_than_was_read(topic: Topic) -> None:
    followed = Followed(topic)
    followed.keys()
    assert not followed.reader.retreated
    topic.end = 1
    assert followed.keys() == [b"a", b"b"]
    assert followed.reader.retreated
    topic.end = 2
    followed.keys()
    assert not followed.reader.retreated


def test_resting_table_reader_fetches_nothing_until_its_next_read(topic: Topic) -> None:
    followed = Followed(topic)
    assert topic.fetching
    followed.reader.rest()
    followed.reader.rest()
    assert not topic.fetching
    assert followed.keys() == [b"a", b"b"], "nothing is new"
    assert not topic.fetching
    topic.append(b"c", b"3")
    assert followed.keys() == [b"a", b"b", b"c"]
    assert topic.fetching
    assert topic.read == [0, 1, 2]
    followed.reader.close()
    followed.reader.rest()
    assert topic.closed


def test_table_reader_that_is_not_used_rests_by_itself(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacted, "REST_AFTER_S", 0.01)
    followed = Followed(topic)
    wait_for(lambda: not topic.fetching, "the reader to rest")
    topic.append(b"c", b"3")
    assert followed.keys() == [b"a", b"b", b"c"]
    wait_for(lambda: not topic.fetching, "the reader to rest again")
    assert topic.read == [0, 1, 2]
    followed.reader.close()
    wait_for(lambda: all(each.name != "table-rest" for each in threading.enumerate()), "its thread to end")


@pytest.mark.parametrize("by_offset", [False, True])
def test_deleted_key_is_gone_when_its_deletion_was_compacted_meanwhile(topic: Topic, by_offset: bool) -> None:
    followed = Followed(topic)
    topic.append(b"a", None)
    topic.append(b"c", b"3")
    topic.compact()
    topic.now_s += DELETIONS_KEPT_S + 1
    if by_offset:
        assert sorted(followed.reader.reach(0, 3, 10)) == [b"b", b"c"]
    assert followed.keys() == [b"b", b"c"]


def test_table_read_is_refused_when_process_was_suspended_during_it(topic: Topic) -> None:
    followed = Followed(topic)
    topic.append(b"c", b"3")
    topic.append(b"a", None)

    def suspend() -> None:
        topic.reading = lambda: None
        topic.now_s += DELETIONS_KEPT_S + 1
        topic.append(b"d", b"4")
        topic.compact()

    topic.reading = suspend
    with pytest.raises(Unavailable, match="was suspended"):
        followed.reader.read(10)
    assert followed.keys() == [b"b", b"c", b"d"]


class Producer:
    """A producer that refuses each record, at once or in its delivery report."""

    def __init__(self, error: KafkaError, *, late: bool) -> None:
        self._error, self._late = error, late

    def list_topics(self, _topic: str, timeout: float) -> None: ...

    def produce(self, *_record: object, on_delivery: Callable[[KafkaError, None], None], **_rest: object) -> None:
        if not self._late:
            raise KafkaException(self._error)
        on_delivery(self._error, None)

    def poll(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def flush(self, _timeout_s: float) -> None: ...


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("code", "large"), [(KafkaError.MSG_SIZE_TOO_LARGE, True), (KafkaError.INVALID_MSG_SIZE, True), (KafkaError._MSG_TIMED_OUT, False)]
)
def test_too_large_record_raises_too_large(monkeypatch: pytest.MonkeyPatch, code: int, large: bool, late: bool) -> None:
    monkeypatch.setattr("bascule.kafka.clients.producer", lambda _: Producer(KafkaError(code), late=late))
    appender = Appender({})
    error = appender.append(Outgoing("topic", None, b"value")).exception()
    appender.close()
    assert isinstance(error, Unavailable)
    assert isinstance(error, TooLarge) is large


class Slow(Producer):
    """A producer that reports a purged record after two seconds, like a producer whose threads are starved of CPU."""

    def __init__(self) -> None:
        self.purged = False
        self.report: Callable[[KafkaError, None], None] | None = None

    def produce(self, *_record: object, on_delivery: Callable[[KafkaError, None], None], **_rest: object) -> None:
        self.report = on_delivery

    def purge(self) -> None:
        self.purged = True

    def flush(self, timeout_s: float) -> int:  # type: ignore[override]
        if self.purged and timeout_s >= 2 and self.report is not None:
            report, self.report = self.report, None
            report(KafkaError(KafkaError._PURGE_QUEUE), None)
        return int(self.report is not None)


def test_close_of_appender_fails_pending_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the close, no client could complete the future."""
    monkeypatch.setattr("bascule.kafka.clients.producer", lambda _: Slow())
    appender = Appender({})
    future = appender.append(Outgoing("topic", None, b"value"))
    appender.close()
    assert isinstance(future.exception(0), Unavailable)


class Reporting(Producer):
    """A producer that reports each record as stored at the result of ``offset``. Its poll raises ``failure``."""

    failure: BaseException | None = None

    def __init__(self, offset: Callable[[], int | None]) -> None:
        self._offset = offset

    def produce(self, *_record: object, on_delivery: Callable[[Any, Any], None], **_rest: object) -> None:
        on_delivery(None, SimpleNamespace(offset=self._offset))

    def poll(self, timeout_s: float) -> None:
        if self.failure is not None:
            raise self.failure
        time.sleep(timeout_s)

    def flush(self, _timeout_s: float) -> None: ...


def reported(monkeypatch: pytest.MonkeyPatch, offset: Callable[[], int | None]) -> Future[int]:
    monkeypatch.setattr("bascule.kafka.clients.producer", lambda _: Reporting(offset))
    appender = Appender({})
    future = appender.append(Outgoing("topic", None, b"value"))
    appender.close()
    return future


@pytest.mark.parametrize("offset", [None, -1, -1001])
def test_record_stored_at_unknown_offset_raises_offset_unknown_and_counts_as_stored(
    monkeypatch: pytest.MonkeyPatch, offset: int | None
) -> None:
    future = reported(monkeypatch, lambda: offset)
    with pytest.raises(OffsetUnknown, match="'topic' has stored a record"):
        future.result(0)
    await_stored(future, 0)


def test_stored_record_has_its_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(monkeypatch, lambda: 0).result(0) == 0


def test_unreadable_delivery_report_fails_append(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise ValueError("bad report")

    future = reported(monkeypatch, fail)
    assert isinstance(future.exception(0), Unavailable)
    with pytest.raises(Unavailable, match="bad report"):
        await_stored(future, 0)


def test_appender_with_failed_thread_uses_new_client(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Reporting] = []

    def make(_settings: object) -> Reporting:
        made.append(Reporting(lambda: len(made)))
        made[-1].failure = KafkaException(KafkaError(KafkaError._FATAL)) if len(made) == 1 else None
        return made[-1]

    monkeypatch.setattr("bascule.kafka.clients.producer", make)
    appender = Appender({})
    appender._client("topic")
    wait_for(lambda: appender._producer is None, "the first client to be given up")
    assert appender.append(Outgoing("topic", None, b"value")).result(SOON_S) == 2
    appender.close()


#: Nothing listens at this address.
NO_KAFKA = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


@pytest.fixture
def _short_append_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.kafka.appender.APPEND_TIMEOUT_S", 0.3)


@pytest.mark.usefixtures("_short_append_timeout")
def test_appender_waits_when_client_queue_is_full() -> None:
    appender = Appender({**NO_KAFKA, "queue.buffering.max.messages": 2})
    futures = [appender.append(Outgoing("table", b"key", b"value")) for _ in range(5)]
    assert {str(future.exception(SOON_S)) for future in futures} == {"table: Local: Message timed out"}
    appender.close()


@pytest.mark.usefixtures("_short_append_timeout")
def test_every_append_future_is_done_after_close() -> None:
    """The client fails a record some time after its timeout. Nobody polls the client then, so a waiter would never wake up."""
    appender = Appender(NO_KAFKA)
    future = appender.append(Outgoing("table", b"key", b"value"))
    appender.close()
    assert isinstance(future.exception(SOON_S), Unavailable)


def test_repeated_drop_of_failed_client_keeps_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads see the failure. The second thread has seen it before the first one replaced the client."""
    monkeypatch.setattr(clients, "producer", lambda _: Broken())
    appender = Appender({})
    first = appender._client("table")
    appender._drop(first)
    second = appender._client("table")
    appender._drop(first)
    assert appender._client("table") is second
    appender.close()


class Broken:
    """A client whose records never complete."""

    def list_topics(self, _topic: str, timeout: float) -> None: ...

    def poll(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def flush(self, _timeout_s: float) -> int:
        return 0


def test_read_blocked_by_open_transaction_is_reported_until_it_ends(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HELD_UP_S", "HELD_UP_AGAIN_S"):
        monkeypatch.setattr(f"bascule.kafka.compacted.{name}", 0.0)
    tables: list[dict[bytes, compacted.Stored]] = []
    topic.append(b"a", b"1")
    reader = TableReader({}, "table", [0])
    reader.read(SOON_S)
    topic.append(b"b", b"2")
    topic.held = lambda: len(tables) < 3  # the callback fails twice
    assert sorted(reader.read(SOON_S, lambda table: tables.append(dict(table)))) == [b"a", b"b"]
    assert [sorted(table) for table in tables] == [[b"a"]] * 3


class Acknowledging(Producer):
    """A producer that appends to a topic. The first barrier of each batch gets no offset."""

    def __init__(self, topic: Topic, *, unknown: int) -> None:
        super().__init__(KafkaError(KafkaError._FAIL), late=True)
        self._topic, self._unknown = topic, unknown

    def produce(self, *record: object, on_delivery: Callable[..., None], **_rest: object) -> None:
        self._topic.append(compacted.BARRIER_KEY, None)
        assert record[1:3] == (None, compacted.BARRIER_KEY)
        offset = None if self._unknown else self._topic.end - 1
        self._unknown = max(0, self._unknown - 1)
        on_delivery(None, SimpleNamespace(offset=lambda: offset))


@pytest.mark.parametrize("unknown", [0, 2])
def test_read_behind_barrier_includes_barrier_when_stale_end_is_reported(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, unknown: int
) -> None:
    followed = Followed(topic)
    monkeypatch.setattr("bascule.kafka.clients.producer", lambda _: Acknowledging(topic, unknown=unknown))
    topic.append(b"c", b"3")
    monkeypatch.setattr(topic, "ask", lambda *_: {0: 0})  # the end that a former leader reports
    assert sorted(followed.reader.read(10)) == [b"a", b"b"]
    assert sorted(followed.reader.read_behind_barrier(10)) == [b"a", b"b", b"c"]
    assert followed.reader.reached() == {0: topic.end}


def test_read_behind_barrier_fails_when_barrier_is_not_stored(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Producer):
        def produce(self, *_record: object, **_rest: object) -> None: ...

    monkeypatch.setattr("bascule.kafka.clients.producer", lambda _: Silent(KafkaError(KafkaError._FAIL), late=False))
    with pytest.raises(Unavailable, match="barrier"):
        Followed(topic).reader.read_behind_barrier(0.05)


def test_closed_reader_creates_no_client_for_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr("bascule.kafka.compacted.Appender", made.append)
    reader = TableReader({"bootstrap.servers": "127.0.0.1:9"}, "table", [0])
    reader.close()
    with pytest.raises(Unavailable, match="the reader was closed"):
        reader.write_barriers([0])
    assert made == []


def test_read_of_a_reader_that_another_thread_has_closed_is_refused(topic: Topic) -> None:
    followed = Followed(topic)
    followed.reader.close()
    topic.append(b"c", b"3")
    with pytest.raises(Unavailable, match="the reader was closed"):
        followed.reader.read(10)
    followed.reader.close()
    assert topic.read == [0, 1]
