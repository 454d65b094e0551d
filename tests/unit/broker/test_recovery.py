from __future__ import annotations

from collections.abc import Callable

import pytest

from bascule.broker import queue as queue_module
from bascule.broker import reservations as reservations_module
from bascule.broker import snapshot as snapshots
from bascule.broker.queue import RESERVE_AHEAD, RESERVE_SEQUENCES
from bascule.core.destination import Routing
from bascule.jms.sections import VALUE, scan, section_bytes
from bascule.journal.errors import DamagedRecord, NewerRecord
from bascule.journal.records import Kind, encode_record
from bascule.testing.broker import snapshot_of
from tests.unit.broker.conftest import Bench


def test_messages_are_redelivered_in_order_after_a_crash(bench: Bench) -> None:
    for content, priority in ((1, 4), (2, 9), (3, 4)):
        bench.fill(content, priority=priority)
    bench.crash()
    assert bench.got(bench.consumer()) == [2, 1, 3]


def test_a_stored_message_that_would_now_be_refused_is_loaded(bench: Bench) -> None:
    plain = bench.encode("taken", group="g")
    mixed = plain + section_bytes(VALUE, "one body too many")
    bench.engine.send(bench.queue().name, Routing.ANYCAST, mixed, scan(plain), "client", bench.sender, 1, None)
    bench.broker.settle()
    bench.crash()
    consumer = bench.consumer()
    assert bench.got(consumer) == ["taken"]
    assert [message.group for message in consumer.messages] == ["g"]


def test_after_a_crash_only_messages_that_may_have_been_delivered_are_marked_redelivered(bench: Bench) -> None:
    bench.fill("delivered")
    bench.engine.detach(bench.consumer().consumer, failed=False)
    bench.fill("never reserved")
    bench.crash()
    consumer = bench.consumer()
    assert bench.got(consumer) == ["delivered", "never reserved"]
    assert bench.counts(consumer) == [1, 0]


def test_message_is_not_delivered_before_its_reservation_is_stored(bench: Bench) -> None:
    bench.fill(1)
    consumer = bench.broker.attach(bench.queue(), 1)
    bench.broker.flush()
    assert bench.got(consumer) == []
    bench.crash()
    assert bench.counts(bench.consumer()) == [0]


def test_a_stored_but_unanswered_reservation_marks_its_messages(bench: Bench) -> None:
    bench.fill(1)
    bench.broker.attach(bench.queue(), 1)
    bench.broker.flush()
    bench.crash(stored=1)
    assert bench.counts(bench.consumer()) == [1]


def test_messages_of_a_queue_without_consumers_are_never_marked(bench: Bench) -> None:
    bench.fill(*range(10))
    bench.crash()
    bench.crash()
    assert bench.counts(bench.consumer()) == [0] * 10


def test_messages_sent_after_a_crash_are_not_marked_by_an_earlier_reservation(bench: Bench) -> None:
    bench.consumer()
    bench.fill("before")
    bench.crash()
    bench.fill("after")
    bench.crash()
    assert bench.counts(bench.consumer()) == [1, 0]


def test_a_redelivered_mark_survives_many_crashes(bench: Bench) -> None:
    bench.fill(1)
    bench.consumer()
    for _ in range(3):
        bench.crash()
    assert bench.counts(bench.consumer()) == [1]


def test_one_reservation_covers_many_deliveries(bench: Bench) -> None:
    consumer = bench.consumer(credit=10_000)
    records = len(bench.broker.log.records)
    for number in range(RESERVE_SEQUENCES):
        bench.fill(number)
        bench.acknowledge(consumer, -1)
    assert len(bench.broker.log.records) - records <= RESERVE_SEQUENCES + 6


def test_reservations_of_idle_queues_do_not_cause_further_reservations(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "RESERVE_SEQUENCES", 2)
    monkeypatch.setattr(reservations_module, "RESERVE_SEQUENCES", 2)
    for number in range(4):
        bench.fill(number, to=f"q{number}")
    receivers = []
    for number in range(4):
        receivers.append(bench.broker.attach(bench.queue(f"q{number}"), 100))
        bench.broker.flush()
    for _ in range(100):
        bench.broker.confirm(1)
        bench.broker.flush()
    assert not bench.broker.in_flight
    assert [bench.got(receiver) for receiver in receivers] == [[number] for number in range(4)]


def test_the_number_of_marked_messages_of_a_deep_queue_is_limited(bench: Bench) -> None:
    bench.fill(*range(3 * RESERVE_AHEAD))
    bench.consumer(credit=1)
    bench.crash()
    consumer = bench.consumer(credit=10_000)
    assert sum(bench.counts(consumer)) == RESERVE_AHEAD
    assert bench.counts(consumer)[0] == 1


def test_a_load_from_a_snapshot_equals_a_load_of_the_whole_journal(bench: Bench) -> None:
    bench.fill(1, 2, 3, message_id="a")
    bench.subscription("s")
    bench.fill(4, 5, to="t")
    consumer = bench.consumer(credit=1)
    bench.engine.give_back(consumer.consumer, consumer.messages[0], failed=True)
    bench.broker.settle()
    bench.broker.take_snapshot()
    bench.fill(6)
    bench.acknowledge(bench.consumer(bench.engine.addresses.subscriptions["s"], credit=1))
    bench.broker.settle()
    whole, short = (
        {queue.name: [(message.mid, queue.delivery_count(message)) for message in queue.ready] for queue in queues}
        for queues in (bench.broker.replay(data).engine.addresses.queues.values() for data in (None, *bench.broker.snapshots.values()))
    )
    assert short == whole
    assert len(whole["s"]) == 1


def test_a_standby_forgets_failed_deliveries_and_delays_of_removed_messages(bench: Bench) -> None:
    standby = bench.broker.replay(None)
    read = len(bench.broker.log.records)
    for name in ("acknowledged", "dead", "deleted"):
        bench.fill(name, to=name, delivery_delay_ms=10)
    bench.fill("deleted before its time", to="deleted", delivery_delay_ms=1_000)
    bench.now_ms += 10
    bench.engine.tick()
    for name, failures in (("acknowledged", 1), ("dead", 3), ("deleted", 1)):
        receiver = bench.consumer(bench.queue(name))
        for _ in range(failures):
            bench.engine.give_back(receiver.consumer, receiver.messages[-1], failed=True)
            bench.broker.settle()
        if name == "acknowledged":
            bench.acknowledge(receiver)
    bench.engine.delete_queue(bench.queue("deleted"))
    bench.broker.settle()
    for offset, (_, value) in enumerate(bench.broker.log.records[read:], start=read):
        standby.apply(offset, value)
    assert sum(len(queue.held) for queue in standby.engine.addresses.queues.values()) == 1, "the dead letter"
    assert not any(standby._counts.values())
    assert not standby._delayed


def test_load_from_a_snapshot_counts_the_removed_messages_of_a_record(bench: Bench) -> None:
    """A message is found by its number among all messages of its record."""
    for content in ("gone", "waits", "gone, too", "waits, too"):
        bench.put(content)
    bench.broker.settle()
    bench.acknowledge(bench.consumer(), 0, 2)
    bench.broker.settle()
    bench.broker.take_snapshot()
    bench.crash()
    assert bench.got(bench.consumer()) == ["waits", "waits, too"]


def test_snapshot_without_announcement_is_not_used(bench: Bench) -> None:
    bench.fill(1)
    bench.broker.take_snapshot()
    bench.acknowledge(bench.consumer())  # with the announcement in flight
    bench.crash()
    assert bench.waiting(bench.queue()) == [1]


def test_acknowledgements_in_flight_at_a_snapshot_are_undone_by_a_crash(bench: Bench) -> None:
    bench.fill(1)
    consumer = bench.consumer()
    bench.broker.take_snapshot()
    bench.broker.flush()
    bench.acknowledge(consumer)
    bench.broker.flush()
    bench.crash(stored=1)
    assert bench.counts(bench.consumer()) == [1]


def test_snapshot_contains_messages_of_open_transaction_with_delivery_counts(bench: Bench) -> None:
    bench.fill(1)
    consumer = bench.consumer(credit=3)
    for number in range(2):
        bench.engine.give_back(consumer.consumer, consumer.messages[number], failed=True)
        bench.broker.settle()
    bench.engine.acknowledge_in(bench.engine.begin(b"1"), consumer.consumer, consumer.messages[2])
    bench.broker.take_snapshot()
    bench.broker.settle()
    bench.crash()
    assert bench.counts(bench.consumer()) == [2]


def test_an_unstored_delivery_count_is_lost_in_a_crash_and_the_mark_stays(bench: Bench) -> None:
    bench.fill(1)
    consumer = bench.consumer(credit=3)
    bench.engine.give_back(consumer.consumer, consumer.messages[0], failed=True)
    bench.broker.settle()
    bench.engine.give_back(consumer.consumer, consumer.messages[1], failed=True)
    bench.engine.dispatch()
    assert bench.counts(consumer) == [0, 1, 2]
    bench.crash()
    assert bench.counts(bench.consumer()) == [1]


def test_snapshot_of_empty_broker_is_loaded(bench: Bench) -> None:
    bench.broker.take_snapshot()
    bench.broker.settle()
    bench.crash()
    bench.fill(1)
    bench.crash()
    assert bench.waiting(bench.queue()) == [1]


def test_snapshot_needs_journal_from_oldest_waiting_message(bench: Bench) -> None:
    for number in range(5):
        bench.fill(number)
    consumer = bench.consumer()
    bench.acknowledge(consumer, 0, 1, 2)
    bench.broker.settle()
    taken = snapshot_of(bench.engine, bench.broker.offsets)
    assert taken.first_offset() == 4  # one epoch, then one record for each of the first three
    bench.acknowledge(consumer, 3, 4)
    bench.broker.settle()
    assert snapshot_of(bench.engine, bench.broker.offsets).first_offset() == len(bench.broker.log.records)


def test_message_with_missing_body_stops_load_from_snapshot(bench: Bench) -> None:
    bench.fill(1)
    data = snapshots.encode(snapshot_of(bench.engine, bench.broker.offsets)).joined()
    bench.broker.log.records[1] = (b"", encode_record(Kind.DATA, 0, 1, b""))
    with pytest.raises(DamagedRecord, match="1 messages of snapshot 0-1 are not in the journal"):
        bench.broker.replay(data)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:3], lambda data: b"\0\0\0\1{"])
def test_a_damaged_snapshot_is_refused(bench: Bench, damage: Callable[[bytes], bytes]) -> None:
    bench.fill(1, message_id="a")
    data = snapshots.encode(snapshot_of(bench.engine, bench.broker.offsets)).joined()
    assert snapshots.decode(data).id == "0-1"
    with pytest.raises(DamagedRecord, match="snapshot"):
        snapshots.decode(damage(data))


def test_records_of_a_fenced_broker_are_ignored(bench: Bench) -> None:
    bench.fill(1)
    old_key, old_value = bench.broker.log.records[-1]
    zombie = bench.broker.engine
    bench.crash()
    body = bench.encode("zombie")
    zombie.send("q", Routing.ANYCAST, body, scan(body), "client", bench.sender, "zombie")
    zombie.journaling.flush()
    bench.broker.log.append(*bench.broker.in_flight.pop())
    bench.fill(2)
    bench.broker.log.append(old_key, old_value)
    bench.crash()
    assert bench.waiting(bench.queue()) == [1, 2]


def test_after_two_starts_only_the_last_epoch_counts(bench: Bench) -> None:
    bench.fill(1)
    first = bench.broker.engine
    bench.crash()
    bench.crash()
    assert bench.engine.journaling.epoch > first.journaling.epoch
    bench.fill(2)
    bench.crash()
    assert bench.waiting(bench.queue()) == [1, 2]


def test_a_gap_in_the_sequences_stops_the_load(bench: Bench) -> None:
    for number in range(3):
        bench.fill(number)
    del bench.broker.log.records[2]
    with pytest.raises(DamagedRecord, match="sequence 3 follows 1: records are missing"):
        bench.crash()


def test_a_foreign_record_is_skipped(bench: Bench) -> None:
    bench.fill(1)
    bench.broker.log.append(b"", b"hello")
    bench.crash()
    bench.fill(2)
    bench.crash()
    assert bench.waiting(bench.queue()) == [1, 2]


def test_a_damaged_record_stops_the_load(bench: Bench) -> None:
    bench.fill(1)
    key, value = bench.broker.log.records[-1]
    bench.broker.log.records[-1] = (key, value[:-1] + bytes([value[-1] ^ 1]))
    with pytest.raises(DamagedRecord, match="checksum"):
        bench.crash()


def test_a_record_of_a_newer_version_stops_the_load(bench: Bench) -> None:
    bench.fill(1)
    key, value = bench.broker.log.records[-1]
    bench.broker.log.records[-1] = (key, value[:2] + b"\x02" + value[3:])
    with pytest.raises(NewerRecord, match="journal format 2; this version of Bascule reads up to 1"):
        bench.crash()


def test_an_unknown_operation_stops_the_load(bench: Bench) -> None:
    bench.broker.log.append(b"S", encode_record(Kind.STATE, 0, 1, b"\xfe\0\0\0\0"))
    with pytest.raises(DamagedRecord, match="unknown operation 254"):
        bench.crash()


def test_queues_created_after_a_crash_get_new_names_and_ids(bench: Bench) -> None:
    one = bench.queue("one")
    bench.broker.settle()
    bench.crash()
    two = bench.queue("two")
    assert two.id > one.id
    bench.broker.settle()
    bench.crash()
    assert sorted(queue.name for queue in bench.engine.addresses.queues.values()) == ["one", "two"]


def test_a_snapshot_written_late_has_the_offsets_of_its_sequence(bench: Bench) -> None:
    bench.fill(1)
    taken = snapshot_of(bench.engine, bench.broker.offsets)
    bench.fill(2)
    bench.broker.log.append(b"", b"somebody else's")
    bench.fill(3)
    loader = bench.broker.replay(snapshots.encode(taken).joined())
    assert loader.offsets == bench.broker.replay(None).offsets
