"""A resident task with transformations, on the mock cluster. Its waiting tasks are threads that use the real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Gather, KafkaRecord, Output, Place, SourceStart, Taken
from bascule.jms.message import decode_message
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines import carry, exchange, transforming_task
from bascule.pipelines.exchange import AskedMessage, MadeRow, NotTransformed, Transformer, answer, asked_messages
from bascule.pipelines.spec import DivertSpec, StartPosition, TransactionLimits
from bascule.pipelines.tasks import DivertTask, ForeignRow
from bascule.pipelines.transforming_task import (
    ASKED_S,
    FIRST_MESSAGES,
    FURTHER_S,
    BatchLimit,
    FurtherRecords,
    TransformingTask,
    batches_of,
)
from bascule.pipelines.waiting import Truncated
from bascule.writer.position import EARLIEST, Position
from tests.scenarios.sparkless import Bridge, workers_end
from tests.support.journal import text_message

#: Returns the records of a message. Raises an error if the transformation fails on it.
Transform = Callable[[AskedMessage], Sequence[MadeRow]]


def body(message: AskedMessage) -> str:
    return str(decode_message(message.body).body)


def made(message: AskedMessage, value: str) -> MadeRow:
    return (message.offset, message.index, None, False, None, value.encode(), None)


def upper(message: AskedMessage) -> list[MadeRow]:
    return [made(message, body(message).upper())]


def wait_for_messages(path: str, divert: str, transform: Transform) -> threading.Thread:
    """Be a waiting task until the resident task ends, or until the transformation fails."""

    def batch() -> None:
        found: SimpleQueue[list[AskedMessage] | None] = SimpleQueue()

        def source() -> None:
            try:
                found.put(asked_messages(path, divert, "job"))
            except (EOFError, OSError):
                found.put(None)

        def parts() -> Iterator[tuple[int, list[MadeRow]]]:
            messages = found.get(timeout=30)
            if messages is None:
                raise EOFError
            for message in messages:
                try:
                    yield 1, list(transform(message))
                except ZeroDivisionError:
                    raise Truncated("the transformation failed") from None

        thread = threading.Thread(target=source)
        thread.start()
        try:
            answer(path, divert, "job", parts())
        finally:
            thread.join()

    def run() -> None:
        try:
            while True:
                batch()
        except (EOFError, OSError, Truncated):
            return

    thread = threading.Thread(target=run)
    thread.start()
    return thread


class Case:
    """A journal, a divert with a transformation and a plain one, and the tasks that carry them."""

    def __init__(self, bridge: Bridge, path: str) -> None:
        self.bridge, self.path = bridge, path
        self.begin = StartPosition(EARLIEST)
        self.at_tail = True  # the source says that no further record is there
        self.diverts: tuple[DivertSpec, ...] = (
            bridge.divert("upper", start=self.begin, select=("upper(text) AS value",)),
            bridge.divert("plain", start=self.begin),
        )

    def task(self, **more: TransactionLimits) -> DivertTask:
        """Claim the common position at the beginning of the journal."""
        bridge, key = self.bridge, self.bridge.positions.common_key
        topic = bridge.pipelines.topics.journal
        names = tuple(sorted(divert.name for divert in self.diverts))
        position = Position(topic, bridge.topics.ids([topic])[topic], 0, 0, epoch=-1, sequence=0, members=names, owner="me")
        bridge.positions.prepare_topics()
        writer = bridge.positions.writer(key)
        writer.write([], writer.current(), position)
        writer.close()
        return DivertTask(replace(bridge.pipelines, **more), bridge.positions.claim(key, position), self.diverts)  # type: ignore[arg-type]

    def run(self, task: DivertTask, transform: Transform, first: int = FIRST_MESSAGES) -> None:
        """Carry the journal up to its end."""
        threads: list[threading.Thread] = []

        @contextmanager
        def opened(start: Mapping[Place, SourceStart], _gather: Gather) -> Iterator[Iterator[Taken]]:
            threads.append(wait_for_messages(self.path, "upper", transform))
            ((place, at),) = start.items()
            yield iter([Taken(self.records(at.offset), [place] if self.at_tail else [])])

        try:
            TransformingTask(task, self.path, first).run(opened)
        finally:
            for thread in threads:
                thread.join()

    def records(self, start: int = 0) -> list[KafkaRecord]:
        topic = self.bridge.pipelines.topics.journal
        found = self.bridge.history(topic).records(start, self.bridge.end())
        return [KafkaRecord(topic, 0, each.offset() or 0, each.key(), each.value(), (), 0) for each in found]

    @property
    def stored(self) -> Position:
        return self.bridge.stored()[self.bridge.positions.common_key]

    @property
    def carried(self) -> tuple[list[str], list[str]]:
        """Return the texts of the transformed and of the plain divert."""
        return self.bridge.carried("upper"), self.bridge.carried("plain")


@pytest.fixture
def case(bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(exchange, "CONNECT_S", 0.0)  # the resident task listens before a waiting one is started
    bridge.journal.start_epoch()
    yield Case(bridge, str(tmp_path / "task"))
    workers_end()


def test_transformed_and_plain_records_are_written_once_in_order_with_their_position(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforming_task, "ASKED_MESSAGES", 2)
    case.bridge.send("a", "b", "c", "d", "e")
    case.run(task := case.task(), upper)
    assert case.carried == (["A", "B", "C", "D", "E"], ["a", "b", "c", "d", "e"])
    assert (case.stored.offset, case.stored.epoch, case.stored.sequence) == (6, 0, 5)
    case.run(task, upper)
    assert case.carried == (["A", "B", "C", "D", "E"], ["a", "b", "c", "d", "e"]), "nothing twice"


def test_messages_left_out_and_messages_with_several_records_are_carried_as_the_transformation_says(case: Case) -> None:
    case.bridge.send("none", "two", "one")

    def transform(message: AskedMessage) -> list[MadeRow]:
        count = ["none", "one", "two"].index(body(message))
        return [made(message, f"{body(message)} {number}") for number in range(count)]

    case.run(case.task(), transform)
    assert case.carried == (["two 0", "two 1", "one 0"], ["none", "two", "one"])


def test_records_of_a_record_with_several_messages_belong_to_their_messages(case: Case) -> None:
    case.bridge.journal.send(text_message("a"), text_message("b"))
    case.bridge.journal.flush()

    def last_first(message: AskedMessage) -> list[MadeRow]:
        seen.append(message)
        return [made(each, body(each).upper()) for each in reversed(seen)] if len(seen) == 2 else []

    seen: list[AskedMessage] = []
    case.run(case.task(), last_first)
    assert case.carried == (["A", "B"], ["a", "b"]), "in the order of the journal, whatever the order of Spark's rows"


@pytest.mark.parametrize(("offset", "index"), [(1, 1), (2, 0), (None, 0)])
def test_row_of_no_message_that_was_handed_over_stops_the_task_before_it_carries_a_message(
    case: Case, offset: int | None, index: int
) -> None:
    case.bridge.send("a")
    row = (offset, index, None, False, None, b"A", None)
    with pytest.raises(ForeignRow, match=f"offset {offset} and index {index}, which belongs to no message"):
        case.run(case.task(), lambda message: [made(message, "A"), row])  # type: ignore[list-item]
    assert case.carried == ([], [])


def test_failure_names_the_records_that_were_not_carried_and_keeps_the_position_of_those_that_were(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transforming_task, "ASKED_MESSAGES", 2)
    case.bridge.send("a", "b", "c", "bad", "e")

    def transform(message: AskedMessage) -> list[MadeRow]:
        _ = 1 / int(body(message) != "bad")
        return upper(message)

    task = case.task(limits=TransactionLimits(records=1))  # each journal record is a transaction
    with pytest.raises(NotTransformed) as raised:
        case.run(task, transform)
    assert case.carried == (["A", "B"], ["a", "b"]), "nothing of the batch that failed"
    assert (case.stored.offset, case.stored.epoch, case.stored.sequence) == (3, 0, 2)
    assert (raised.value.start, raised.value.end) == (3, 5)
    rows = [{"offset": each.offset, "key": each.key, "value": each.value} for each in case.records(3)[:2]]
    failed = {("upper", 4, 0): "division by zero"}
    none = dict.fromkeys(("divert", "index", "topic", "has_key", "headers"))
    own = [{**none, **row} for row in rows]
    made_c = {**none, "divert": "upper", "offset": 3, "index": 0, "has_key": False, "key": None, "value": b"C"}
    assert list(replace(task, failed=failed, start=3)(iter([pa.RecordBatch.from_pylist([made_c, *own], schema=SCHEMA)])))
    assert (case.stored.offset, case.stored.sequence) == (5, 4)
    case.run(task, transform)
    assert case.carried == (["A", "B", "C", "E"], ["a", "b", "c", "bad", "e"])
    assert case.bridge.dead() == ["upper: bad"]


def test_batch_that_begins_behind_a_position_that_was_moved_back_is_refused(case: Case) -> None:
    case.bridge.send("a", "b")
    rows = [{"offset": each.offset, "key": each.key, "value": each.value} for each in case.records(2)]
    with pytest.raises(Unavailable, match="begins at offset 2, and the position was moved back to 0"):
        list(replace(case.task(), start=2)(iter([pa.RecordBatch.from_pylist(rows)])))
    assert case.stored.offset == 0


def test_position_within_a_batch_has_the_fence_and_the_exclusive_diverts_of_its_own_last_record(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.bridge.send("a", "b")
    case.bridge.journal.start_epoch(exclusive=("other",))
    case.bridge.send("c")
    write = TransactionalWriter.write

    def fail_at_last(self: Any, outputs: Sequence[Output], before: Position, after: Position, **more: Any) -> None:
        if after.offset > 2:
            raise Unavailable("no Kafka")
        write(self, outputs, before, after, **more)

    task = case.task(limits=TransactionLimits(records=1))
    with monkeypatch.context() as patch:
        patch.setattr(TransactionalWriter, "write", fail_at_last)
        with pytest.raises(Unavailable):
            case.run(task, upper)
    # The reader had read the whole batch. With its state, the fence would take the rest of the batch for a repetition.
    assert (case.stored.offset, case.stored.epoch, case.stored.sequence, case.stored.exclusive) == (2, 0, 1, ())
    case.run(task, upper)
    assert case.carried == (["A", "B", "C"], ["a", "b", "c"])
    assert case.stored.exclusive == ("other",)


def test_batch_is_committed_while_the_next_one_is_transformed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforming_task, "ASKED_MESSAGES", 2)
    case.bridge.send("a", "b", "c", "d")
    handed_over, committed = threading.Event(), threading.Event()
    write = TransactionalWriter.write

    def after_the_next_batch(self: Any, outputs: Sequence[Output], before: Position, after: Position, **more: Any) -> None:
        if after.offset == 3:
            assert handed_over.wait(30), "the next batch is transformed meanwhile"
        write(self, outputs, before, after, **more)
        committed.set()

    def transform(message: AskedMessage) -> list[MadeRow]:
        if message.offset > 2:
            handed_over.set()
            assert committed.wait(30), "no transaction is open while the task waits for a transformation"
        return upper(message)

    task = case.task()
    with monkeypatch.context() as patch:
        patch.setattr(TransactionalWriter, "write", after_the_next_batch)
        case.run(task, transform)
    assert case.carried == (["A", "B", "C", "D"], ["a", "b", "c", "d"])


def test_commit_that_fails_while_the_next_batch_is_transformed_writes_neither_of_them_and_then_both_once(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transforming_task, "ASKED_MESSAGES", 2)
    case.bridge.send("a", "b", "c", "d")

    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise Unavailable("no Kafka")

    task = case.task()
    with monkeypatch.context() as patch:
        patch.setattr(TransactionalWriter, "write", fail)
        with pytest.raises(Unavailable):
            case.run(task, upper)
    assert (case.carried, case.stored.offset) == (([], []), 0)
    case.run(task, upper)
    assert case.carried == (["A", "B", "C", "D"], ["a", "b", "c", "d"])


def test_records_that_come_while_no_waiting_task_is_ready_are_one_batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task commits, and takes the next records when a waiting task is ready for them."""
    asked: list[int] = []
    committed: list[bool] = []
    records, ready = Transformer.records, Transformer.ready

    def noted(self: Any, messages: Mapping[str, Sequence[AskedMessage]], *more: Any) -> dict[str, list[MadeRow]]:
        asked.append(len(messages["upper"]))
        return records(self, messages, *more)

    def awaited(self: Any, diverts: Sequence[str], within_s: float) -> bool:
        if not within_s:
            return False
        committed.append(case.bridge.carried("plain") != [])
        assert asked == [1], "it waits for the divert that it has just asked"
        return ready(self, diverts, 30)

    monkeypatch.setattr(Transformer, "records", noted)
    monkeypatch.setattr(Transformer, "ready", awaited)
    case.bridge.send("a")
    case.at_tail = False
    case.run(case.task(), upper)
    assert committed == [True]


def test_batch_is_committed_though_records_that_ask_nothing_of_a_transformation_keep_coming(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.diverts = (replace(case.diverts[0], source="wanted"),)
    case.bridge.journal.send(text_message("a"), address="wanted")
    case.bridge.send("1", "2", "3", "4")
    first, others = case.records()[:2], case.records()[2:]
    threads: list[threading.Thread] = []
    committed_after: list[int] = []

    @contextmanager
    def opened(_start: Mapping[Place, SourceStart], _gather: Gather) -> Iterator[Iterator[Taken]]:
        threads.append(wait_for_messages(case.path, "upper", upper))

        def without_a_tail() -> Iterator[Taken]:
            yield Taken(first)
            for number, record in enumerate(others):
                if case.bridge.carried("upper"):
                    committed_after.append(number)
                    return
                yield Taken([record])

        yield without_a_tail()

    monkeypatch.setattr(Transformer, "ready", lambda *_: True)
    TransformingTask(case.task(), case.path).run(opened)
    for thread in threads:
        thread.join()
    assert committed_after == [1]


def test_time_of_a_batch_is_counted_from_its_hand_over(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until a waiting task is ready says nothing about the transformation."""
    clock, late_s, took_s = time.monotonic, 0.0, list[float]()
    handed_over = Transformer._handed_over

    def late(self: Any, *more: Any) -> Any:
        nonlocal late_s
        late_s += 5 * ASKED_S
        return handed_over(self, *more)

    monkeypatch.setattr(time, "monotonic", lambda: clock() + late_s)
    monkeypatch.setattr(Transformer, "_handed_over", late)
    monkeypatch.setattr(BatchLimit, "took", lambda _self, _messages, duration_s: took_s.append(duration_s))
    case.bridge.send("a")
    case.run(case.task(), upper)
    assert case.carried == (["A"], ["a"])
    assert len(took_s) == 1
    assert 0 < took_s[0] < ASKED_S


def test_records_behind_a_batch_are_looked_for_before_it_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(transforming_task.time, "monotonic", lambda: now_s)
    further, place = FurtherRecords(), ("journal", 0)
    record = KafkaRecord("journal", 0, 0, None, b"", (), 0)
    now_s = 10.0
    assert further.gathers_s(place) > 0, "the first record is no tail: others may come while it is transformed"
    now_s = 11.0
    further.carried(Taken([record]))
    assert further.gathers_s(place) > 0
    now_s += 2 * FURTHER_S
    assert further.gathers_s(place) <= 0, "nothing has come: the batch is committed"
    further.carried(Taken([], [place]))
    now_s = 20.0
    assert further.gathers_s(place) > 0
    further.carried(Taken([]))
    assert further.gathers_s(place) > 0, "the source says that it has come to its end, and still gathers"
    now_s += 2 * FURTHER_S
    assert further.gathers_s(place) <= 0


def test_batches_are_bounded_by_messages_and_bytes_and_end_with_a_record(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.bridge.send("a", "b", "c")
    records, task = case.records(), case.task()

    def sizes() -> list[list[int]]:
        batches = batches_of(records, task.reader(case.stored), 0, BatchLimit())
        return [[record.offset for record, _, _ in batch.records] for batch in batches]

    assert sizes() == [[0, 1, 2, 3]]
    monkeypatch.setattr(transforming_task, "ASKED_MESSAGES", 2)
    assert sizes() == [[0, 1, 2], [3]]
    monkeypatch.setattr(transforming_task, "ASKED_BYTES", 1)
    assert sizes() == [[0, 1], [2], [3]]


def test_batches_grow_while_they_are_fast_and_shrink_to_those_that_a_slow_transformation_can_answer() -> None:
    limit = BatchLimit()
    limit.took(FIRST_MESSAGES // 10, 0.1)
    assert limit.messages == FIRST_MESSAGES, "a small batch says nothing about a large one"
    limit.took(limit.messages, 0.1)
    assert limit.messages == 10 * FIRST_MESSAGES
    limit.took(limit.messages, 0.1)
    assert limit.messages == transforming_task.ASKED_MESSAGES
    limit.took(limit.messages, 10 * ASKED_S)
    assert limit.messages == transforming_task.ASKED_MESSAGES // 10
    limit.took(limit.messages, ASKED_S / 2)
    assert limit.messages == transforming_task.ASKED_MESSAGES // 5, "as many as would take ASKED_S"
    limit.took(1, 10 * ASKED_S)
    assert limit.messages == 1
    limit.took(1, 0.9 * ASKED_S)
    assert limit.messages == 2


def test_first_batch_has_the_size_that_was_asked_for_and_the_next_one_follows_the_time_that_it_took(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transforming_task, "GROWTH_MAX", 2)
    case.bridge.send("a", "b", "c", "d")
    sizes: list[int] = []
    asked = Transformer.records

    def records(self: Any, messages: Mapping[str, Sequence[AskedMessage]], *more: Any) -> dict[str, list[MadeRow]]:
        sizes.append(len(messages["upper"]))
        return asked(self, messages, *more)

    monkeypatch.setattr(Transformer, "records", records)
    case.run(case.task(), upper, first=1)
    assert sizes == [1, 2, 1]


def test_message_that_no_transformation_takes_asks_nobody(case: Case) -> None:
    case.diverts = (DivertSpec("upper", "elsewhere", case.diverts[0].target, select=("text AS value",)), case.diverts[1])
    case.bridge.send("a")
    case.run(case.task(), lambda message: pytest.fail(f"asked for {message}"))
    assert case.carried == ([], ["a"])


SCHEMA = pa.schema(
    [
        ("divert", pa.string()), ("offset", pa.int64()), ("index", pa.int32()), ("topic", pa.string()), ("has_key", pa.bool_()),
        ("key", pa.binary()), ("value", pa.binary()), ("headers", pa.map_(pa.string(), pa.string())),
    ]
)  # fmt: skip


def test_records_that_a_former_leader_returned_are_read_and_transformed_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.bridge.send("1", "2", "3")
    # The leader changes before the first transaction, and has the records that were read until then.
    changed = SimpleNamespace(leader_epoch=lambda: 0, confirms=lambda leader_epoch, *_: leader_epoch == 1, check_read=lambda *_: 1)
    monkeypatch.setattr(carry, "lineage_of", lambda *_: changed)
    starts: list[SourceStart] = []
    threads: list[threading.Thread] = []

    @contextmanager
    def opened(start: Mapping[Place, SourceStart], _gather: Gather) -> Iterator[Iterator[Taken]]:
        if not starts:
            threads.append(wait_for_messages(case.path, "upper", upper))
        ((place, at),) = start.items()
        starts.append(at)
        yield iter([Taken([record], [place]) for record in case.records(at.offset)])

    TransformingTask(case.task(), case.path).run(opened)
    for thread in threads:
        thread.join()
    assert [(at.offset, at.leader_epoch) for at in starts] == [(0, 0), (2, 1)]
    assert case.carried == (["1", "2", "3"], ["1", "2", "3"])
