from __future__ import annotations

from bascule.broker.errors import JournalUnavailable
from bascule.broker.journaling import RECORD_BYTES_SOFT
from bascule.journal.records import HEADER_SIZE, Op, decode_ack, decode_header, entries
from tests.unit.broker.conftest import Bench


def ops_of(value: bytes) -> list[str]:
    return [Op(op).name for op, _, _ in entries(value)]


def test_message_is_not_answered_or_delivered_before_its_record_is_stored(bench: Bench) -> None:
    consumer = bench.consumer()
    bench.put(1)
    bench.engine.dispatch()
    assert (bench.sender.answers, bench.got(consumer)) == ([], [])
    bench.broker.flush()
    assert (bench.sender.answers, bench.got(consumer)) == ([], [])
    bench.broker.settle()
    assert (bench.sender.accepted_tokens, bench.got(consumer)) == ([1], [1])


def test_decisions_of_one_turn_are_one_record(bench: Bench) -> None:
    bench.fill(1)
    consumer = bench.consumer()
    for number in range(2, 12):
        bench.put(number)
    bench.acknowledge(consumer)
    bench.broker.flush()
    ((key, value),) = bench.broker.in_flight
    assert key == b"D"
    assert ops_of(value) == ["SEND"] * 10 + ["ACK"]


def test_answers_of_stored_records_count_until_they_are_sent(bench: Bench) -> None:
    journaling = bench.engine.journaling
    bench.queue()
    bench.broker.settle()
    for number in range(30):
        bench.put(number)
    waiting = journaling.actions
    assert waiting >= 60  # the message and its answer
    bench.broker.flush()
    bench.engine.turns.left = 1
    bench.broker.confirm(1)
    assert journaling.pending
    assert journaling.actions == waiting - 1
    bench.broker.settle()
    assert journaling.actions == 0


def test_key_of_record_shows_that_it_has_no_messages(bench: Bench) -> None:
    bench.fill(1)
    bench.acknowledge(bench.consumer())
    bench.broker.flush()
    assert [key for key, _ in bench.broker.in_flight] == [b"S"]


def test_many_records_are_in_flight_and_answered_in_order_as_they_are_stored(bench: Bench) -> None:
    for number in range(1, 4):
        bench.put(number)
        bench.broker.flush()
    assert len(bench.broker.in_flight) == 3
    bench.broker.confirm(2)
    assert bench.sender.accepted_tokens == [1, 2]
    bench.broker.confirm(1)
    assert bench.sender.accepted_tokens == [1, 2, 3]


def test_record_sequences_are_consecutive_and_records_name_epoch(bench: Bench) -> None:
    for number in range(3):
        bench.fill(number)
    epochs, sequences = zip(*((header.epoch, header.sequence) for header in map(decode_header, bench.values())), strict=True)
    assert epochs == (0, 0, 0, 0)
    assert sequences == (0, 1, 2, 3)


def test_record_with_messages_is_closed_at_size_limit(bench: Bench) -> None:
    half = b"x" * (RECORD_BYTES_SOFT // 2)
    for _ in range(5):
        bench.put(half)
    assert len(bench.broker.in_flight) == 2
    assert all(len(value) < 2 * RECORD_BYTES_SOFT for _, value in bench.broker.in_flight)


def test_record_with_acknowledgements_is_closed_at_size_limit(bench: Bench) -> None:
    queues = [bench.queue(name) for name in ("a", "b")]
    bench.broker.settle()
    answered: list[int] = []
    mids = range(RECORD_BYTES_SOFT // 4)
    for mid in mids:
        bench.engine.journaling.add_ack(queues[mid % 2], mid)
        bench.engine.journaling.then(answered.append, mid)
    bench.broker.flush()
    values = [value for _, value in bench.broker.in_flight]
    assert len(values) == 3
    assert all(len(value) <= RECORD_BYTES_SOFT + 100 for value in values)
    acknowledged = [mid for value in values for _, start, end in entries(value) for mid in decode_ack(value, start, end)[1]]
    assert sorted(acknowledged) == list(mids)
    bench.broker.confirm(2)
    assert answered == list(range(len(answered)))
    assert sorted(acknowledged[: len(answered)]) == answered
    bench.broker.settle()
    assert answered == list(mids)


def test_record_with_created_queues_is_closed_at_size_limit(bench: Bench) -> None:
    for number in range(RECORD_BYTES_SOFT // 150):
        bench.queue(f"a queue with a name as long as some people like it {number}")
    assert len(bench.broker.in_flight) == 1
    assert len(bench.broker.in_flight[0][1]) < RECORD_BYTES_SOFT + 1000


def test_entries_of_a_transaction_are_one_record_however_large(bench: Bench) -> None:
    queue = bench.queue()
    bench.broker.settle()
    journaling = bench.engine.journaling
    with journaling.atomic(0):
        for mid in range(RECORD_BYTES_SOFT // 4):
            journaling.add_ack(queue, mid)
        assert bench.broker.in_flight == []
    ((_, value),) = bench.broker.in_flight
    assert ops_of(value) == ["ACK"]


def test_bytes_in_flight_are_counted_until_stored(bench: Bench) -> None:
    bench.put(1)
    bench.broker.flush()
    assert bench.engine.journaling.in_flight_bytes == len(bench.broker.in_flight[0][1]) > HEADER_SIZE
    bench.broker.settle()
    assert bench.engine.journaling.in_flight_bytes == 0


def test_work_is_signalled_once_for_record_and_once_more_for_waiting_sender(bench: Bench) -> None:
    bench.fill(1, 2)
    consumer = bench.consumer()
    urgent: list[bool] = []
    bench.engine.journaling._on_work = urgent.append
    bench.acknowledge(consumer)
    assert urgent == [False]
    bench.put(3)
    bench.put(4)
    assert urgent == [False, True]
    bench.broker.flush()
    bench.put(5)
    assert urgent == [False, True, False, True]


def test_a_turn_without_decisions_appends_nothing(bench: Bench) -> None:
    bench.broker.flush()
    assert bench.broker.in_flight == []


def test_while_the_journal_is_stalled_persistent_sends_are_refused_and_others_accepted(bench: Bench) -> None:
    bench.queue()
    bench.broker.settle()
    bench.engine.stalled = JournalUnavailable("Kafka is away")
    bench.put("heavy")
    bench.put("light", durable=False)
    assert [(token, str(error)) for token, error in bench.sender.answers] == [("heavy", "Kafka is away"), ("light", "None")]


def test_a_new_queue_is_confirmed_when_it_is_stored(bench: Bench) -> None:
    queue = bench.queue("new")
    assert not queue.confirmed
    bench.broker.settle()
    assert queue.confirmed
