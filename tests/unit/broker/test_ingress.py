from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

from bascule.broker import snapshot as snapshots
from bascule.broker.addresses import Diverts, ExclusiveDivert
from bascule.broker.dropping import DROPPED_AT_ONCE
from bascule.broker.errors import ResourceLimit
from bascule.broker.ingress_access import Arrival
from bascule.broker.policy import BLOCK, REJECT, AddressPolicy, Policy
from bascule.broker.policy import DROP as DROP_OLDEST
from bascule.broker.queue import BrokerQueue
from bascule.core.destination import Routing
from bascule.journal.records import KafkaOrigin, Send, SendFlag
from bascule.testing.broker import snapshot_of
from tests.unit.broker.conftest import START_MS, Bench

KEEP, DROP = True, False


def taken(bench: Bench, content: Any, *, to: str = "q", routing: Routing = Routing.ANYCAST, **properties: Any) -> Send:
    body = bench.encode(content, properties=properties)
    return Send(SendFlag.SOURCE, routing, 4, 0, 0, 0, to, (), (), (), KafkaOrigin("topic", 0, 7), body)


def test_ingress_message_reaches_queue_when_its_record_is_stored(bench: Bench) -> None:
    consumer = bench.consumer()
    bench.engine.take_in(0, 1, [Arrival(taken(bench, "from Kafka"), KEEP)])
    bench.broker.flush()
    assert bench.got(consumer) == []
    bench.broker.settle()
    assert bench.got(consumer) == ["from Kafka"]


@pytest.mark.parametrize("stored", [0, 1])
def test_records_read_again_after_a_crash_are_taken_once(bench: Bench, stored: int) -> None:
    bench.queue()
    bench.broker.settle()
    step = (0, 10, [Arrival(taken(bench, number), KEEP) for number in (1, 2)])
    bench.engine.take_in(*step)
    bench.broker.flush()
    bench.crash(stored)
    assert bench.engine.ingress_positions.get(0, 0) == (10 if stored else 0)
    bench.engine.take_in(*step)
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == [1, 2]


def test_source_record_that_an_ingress_sends_again_is_a_message_again(bench: Bench) -> None:
    bench.queue()
    send = taken(bench, "again")
    bench.engine.take_in(0, 1, [Arrival(send, KEEP)])
    bench.engine.take_in(0, 2, [Arrival(send, KEEP)])
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["again", "again"]


def test_each_ingress_partition_has_its_own_position(bench: Bench) -> None:
    bench.engine.take_in(0, 5, [Arrival(taken(bench, "a"), KEEP)])
    bench.engine.take_in(1, 3, [Arrival(taken(bench, "b"), KEEP)])
    bench.broker.settle()
    bench.crash()
    assert bench.engine.ingress_positions == {0: 5, 1: 3}


def test_ingress_messages_and_position_are_one_record(bench: Bench) -> None:
    bench.queue()
    bench.broker.settle()
    records = len(bench.broker.log.records)
    bench.engine.take_in(0, 2, [Arrival(taken(bench, number), KEEP) for number in range(100)])
    bench.broker.settle()
    assert len(bench.broker.log.records) == records + 1


def test_the_position_moves_past_records_without_messages(bench: Bench) -> None:
    bench.engine.take_in(0, 9, [])
    bench.broker.settle()
    bench.crash()
    assert bench.engine.ingress_positions == {0: 9}


def test_a_message_without_a_queue_is_dropped_or_kept_as_its_pipeline_says(bench: Bench) -> None:
    bench.engine.take_in(0, 2, [Arrival(taken(bench, "dropped", to="a"), DROP), Arrival(taken(bench, "kept", to="b"), KEEP)])
    bench.broker.settle()
    assert "a" not in bench.engine.addresses
    assert bench.waiting(bench.queue("b")) == ["kept"]


def test_subscriptions_receive_ingress_messages_that_match_their_selectors(bench: Bench) -> None:
    unfiltered, red = bench.subscription("all"), bench.subscription("red", selector="colour = 'red'")
    sends = [taken(bench, colour, to="t", routing=Routing.MULTICAST, colour=colour) for colour in ("red", "blue")]
    bench.engine.take_in(0, 2, [Arrival(send, DROP) for send in sends])
    bench.broker.settle()
    assert bench.waiting(unfiltered) == ["red", "blue"]
    assert bench.waiting(red) == ["red"]


@pytest.mark.parametrize(("from_kafka", "local"), [(True, []), (False, ["x"])])
def test_an_exclusive_divert_takes_messages_from_kafka_only_if_configured(bench: Bench, from_kafka: bool, local: list[str]) -> None:
    bench.use(Diverts((ExclusiveDivert("all", "#", lambda body: True, from_kafka),), ("#",)))
    bench.queue()
    bench.engine.take_in(0, 1, [Arrival(taken(bench, "x"), KEEP)])
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == local


def test_a_snapshot_has_only_the_stored_position(bench: Bench) -> None:
    bench.engine.take_in(0, 1, [Arrival(taken(bench, "stored"), KEEP)])
    bench.broker.settle()
    bench.engine.take_in(0, 2, [Arrival(taken(bench, "on its way"), KEEP)])
    bench.broker.take_snapshot()
    bench.broker.settle()
    bench.crash()
    assert bench.waiting(bench.queue()) == ["stored", "on its way"]
    (data,) = bench.broker.snapshots.values()
    assert snapshots.decode(data).ingress == {0: 1}


def test_the_topic_id_of_positions_survives_a_crash_and_is_in_snapshots(bench: Bench) -> None:
    bench.engine.take_in(0, 5, [Arrival(taken(bench, "a"), KEEP)])
    bench.engine.ingress_is("first", dict(bench.engine.ingress_positions))
    bench.broker.settle()
    bench.engine.ingress_is("created again", {0: 2})
    bench.broker.take_snapshot()
    bench.broker.settle()
    (data,) = bench.broker.snapshots.values()
    found = snapshots.decode(data)
    assert (found.ingress_topic_id, found.ingress) == ("first", {0: 5})
    bench.crash()
    assert (bench.engine.ingress_topic_id, bench.engine.ingress_positions) == ("created again", {0: 2})
    bench.engine.take_in(0, 3, [Arrival(taken(bench, "b"), KEEP)])
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["a", "b"]


def test_snapshot_contains_ingress_position_taken_before_topic_id_is_stored(bench: Bench) -> None:
    bench.engine.ingress_is("first", dict(bench.engine.ingress_positions))
    bench.broker.flush()
    bench.engine.take_in(0, 2, [Arrival(taken(bench, "from Kafka"), KEEP)])
    bench.broker.settle()
    assert snapshot_of(bench.engine, bench.broker.offsets).ingress == {0: 2}


def test_a_snapshot_of_an_earlier_version_has_no_topic_id_of_positions(bench: Bench) -> None:
    bench.engine.take_in(0, 5, [Arrival(taken(bench, "a"), KEEP)])
    bench.broker.settle()
    data = snapshots.encode(snapshot_of(bench.engine, bench.broker.offsets)).joined()
    field = b'"ingress_topic_id":"",'
    assert field in data
    size = int.from_bytes(data[:4], "big") - len(field)
    found = snapshots.decode(size.to_bytes(4, "big") + data[4:].replace(field, b""))
    assert (found.ingress_topic_id, found.ingress) == ("", {0: 5})


def test_ingress_chunk_with_more_messages_than_record_allows_is_refused_without_effect(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bascule.broker.intake.MESSAGES_PER_RECORD_MAX", 2)
    with pytest.raises(ResourceLimit, match="3 ingress messages before offset 3"):
        bench.engine.take_in(0, 3, [Arrival(taken(bench, number), KEEP) for number in range(3)])
    assert bench.engine.ingress_positions == {}


def test_expiry_settings_apply_to_messages_from_kafka() -> None:
    bench = Bench(Policy(AddressPolicy(expiry_ms=5_000, expiry_max_ms=8_000), (("free", {"expiry_ms": 0, "expiry_max_ms": 0}),)))
    long = taken(bench, "long")._replace(expiry_ms=START_MS + 60_000)
    bench.engine.take_in(0, 3, [Arrival(taken(bench, "none"), KEEP), Arrival(long, KEEP), Arrival(long._replace(address="free"), KEEP)])
    bench.broker.settle()
    for _ in range(2):
        assert [message.expiry_ms - START_MS for message in bench.queue().ready] == [5_000, 8_000]
        assert [message.expiry_ms - START_MS for message in bench.queue("free").ready] == [60_000]
        bench.crash()


@pytest.mark.parametrize("policy", [Policy(AddressPolicy(max_messages=2, when_full=when)) for when in (BLOCK, REJECT, DROP_OLDEST)])
def test_a_full_queue_is_reported_to_the_intake(bench: Bench) -> None:
    sends = [Arrival(taken(bench, "x", to=to), KEEP) for to in ("missing", "q")]
    bench.fill(1)
    assert bench.engine.lacks_room(sends) is None
    bench.fill(2)
    assert bench.engine.lacks_room(sends) is bench.queue()
    bench.acknowledge(bench.consumer(credit=1))
    assert bench.engine.lacks_room(sends) is None


def test_non_persistent_messages_are_dropped_for_messages_from_kafka_if_configured() -> None:
    bench = Bench(Policy(AddressPolicy(max_messages=2, when_full=DROP_OLDEST)))
    bench.fill("old", "new", durable=False)
    assert bench.engine.lacks_room([Arrival(taken(bench, "x"), KEEP)]) is None
    assert bench.waiting(bench.queue()) == ["new"]


def overfull_subscriptions(bench: Bench, count: int, messages: int) -> list[BrokerQueue]:
    """Return subscriptions of a topic that have to drop all of their messages to make room for another one."""
    queues = [bench.subscription(f"s{number}") for number in range(count)]
    bench.fill(*range(messages), to="t", durable=False)
    for queue in queues:
        queue.settings = dataclasses.replace(queue.settings, max_messages=1)
    bench.engine.addresses.forget_routes()
    return queues


def test_queue_that_makes_room_at_once_blocks_no_messages_from_kafka() -> None:
    bench = Bench(Policy(AddressPolicy(max_messages=1_000, when_full=DROP_OLDEST)))
    queues = overfull_subscriptions(bench, 3, 2 * DROPPED_AT_ONCE)
    assert bench.engine.lacks_room([Arrival(taken(bench, "x", to="t", routing=Routing.MULTICAST), KEEP)]) is None
    assert [queue.held_messages for queue in queues] == [0, 0, 0]


def test_messages_from_kafka_wait_while_many_subscriptions_drop_messages_and_each_piece_is_short() -> None:
    bench = Bench(Policy(AddressPolicy(max_messages=1_000, when_full=DROP_OLDEST)))
    queues = overfull_subscriptions(bench, 20, 50)
    bench.engine.turns.steps = 100
    bench.engine.turns.begin_turn()
    rounds = 0
    while (full := bench.engine.lacks_room([Arrival(taken(bench, "x", to="t", routing=Routing.MULTICAST), KEEP)])) is not None:
        rounds += 1
        woken: list[int] = []
        full.blocked["intake"] = partial(woken.append, rounds)
        held = sum(queue.held_messages for queue in queues)
        bench.broker.settle()
        assert woken == [rounds]
        assert held - sum(queue.held_messages for queue in queues) <= 50
    assert rounds > 2
    assert {queue.held_messages for queue in queues} == {0}


def test_a_full_subscription_blocks_only_messages_that_its_selector_matches() -> None:
    bench = Bench(Policy(AddressPolicy(max_messages=1, when_full=DROP_OLDEST)))
    eu = bench.subscription("eu", selector="region = 'EU'")
    everything = bench.subscription("all", "t2")
    bench.fill("old", to="t", properties={"region": "EU"}, durable=False)
    bench.fill("stays", to="t2")

    def lacking(region: str, to: str = "t") -> BrokerQueue | None:
        return bench.engine.lacks_room([Arrival(taken(bench, "new", to=to, routing=Routing.MULTICAST, region=region), KEEP)])

    assert lacking("US") is None
    assert bench.waiting(eu) == ["old"]
    assert lacking("EU") is None  # the queue drops the old message for the new one
    bench.fill("stored", to="t", properties={"region": "EU"})
    assert lacking("EU") is eu
    assert lacking("US") is None
    assert lacking("US", "t2") is everything


@pytest.mark.parametrize("from_kafka", [True, False])
def test_a_full_queue_does_not_block_messages_that_an_exclusive_divert_takes(from_kafka: bool) -> None:
    bench = Bench(Policy(AddressPolicy(max_messages=1)))
    bench.fill("stored")
    bench.use(Diverts(exclusive=(ExclusiveDivert("x", "q", lambda _: True, from_kafka),)))
    assert (bench.engine.lacks_room([Arrival(taken(bench, "new"), KEEP)]) is None) is from_kafka
