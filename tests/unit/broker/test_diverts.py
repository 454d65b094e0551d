from __future__ import annotations

import pytest

from bascule.amqp.codec import decode
from bascule.broker.addresses import Diverts, ExclusiveDivert
from bascule.broker.journaling import RECORD_BYTES_SOFT
from bascule.broker.matching import wants
from bascule.jms.sections import VALUE, places
from bascule.jms.selector import compile_selector
from bascule.journal.records import Op, Send, SendFlag, decode_send, entries
from tests.unit.broker.conftest import Bench


def sends(bench: Bench) -> list[Send]:
    return [decode_send(value, start, end) for value in bench.values() for op, start, end in entries(value) if op == Op.SEND]


def text_of(body: bytes) -> str:
    return next(decode(body, start)[0] for section, start, _ in places(body) if section == VALUE)


@pytest.fixture
def big(bench: Bench) -> ExclusiveDivert:
    divert = ExclusiveDivert("big", "orders.#", lambda body: b"big" in body)
    bench.use(Diverts((divert,), ("orders.#",)))
    return divert


def test_exclusive_divert_takes_messages_from_local_queues_and_is_named_in_record(bench: Bench, big: ExclusiveDivert) -> None:
    bench.fill("big order", "small order", to="orders.uk")
    assert bench.waiting(bench.queue("orders.uk")) == ["small order"]
    assert [(send.diverts, send.queues != ()) for send in sends(bench)] == [(("big",), False), ((), True)]
    assert len(bench.sender.accepted_tokens) == 2


def test_a_replay_follows_the_journaled_decision_whatever_is_configured(bench: Bench, big: ExclusiveDivert) -> None:
    bench.fill("big order", to="orders.uk")
    bench.use(Diverts())
    bench.fill("big but late", to="orders.uk")
    bench.crash()
    assert bench.waiting(bench.queue("orders.uk")) == ["big but late"]


def test_exclusive_divert_does_not_take_messages_of_other_addresses(bench: Bench, big: ExclusiveDivert) -> None:
    bench.fill("big", to="q")
    assert bench.waiting(bench.queue()) == ["big"]


def test_a_diverted_non_persistent_message_is_journaled_only_for_the_pipelines(bench: Bench, big: ExclusiveDivert) -> None:
    consumer = bench.consumer(bench.queue("orders.uk"))
    bench.put("small", to="orders.uk", durable=False)
    bench.engine.dispatch()
    assert bench.got(consumer) == ["small"]
    bench.broker.settle()
    (send,) = sends(bench)
    assert send.flags & SendFlag.PIPELINES_ONLY
    assert not send.flags & SendFlag.DURABLE
    assert send.queues == ()
    bench.crash()
    assert bench.waiting(bench.queue("orders.uk")) == []


@pytest.mark.parametrize("durable", [True, False])
def test_open_record_is_closed_when_it_is_large_also_by_non_persistent_messages(bench: Bench, big: ExclusiveDivert, durable: bool) -> None:
    size_bytes = 100_000
    for number in range(10):
        bench.put(f"{number}" + "x" * size_bytes, to="orders.uk", durable=durable)
    assert len(bench.broker.in_flight) == 3
    bench.broker.settle()
    assert max(map(len, bench.values())) < RECORD_BYTES_SOFT + size_bytes + 1_000
    assert [text_of(send.body)[:1] for send in sends(bench)] == [str(number) for number in range(10)]


def test_non_persistent_message_without_matching_divert_is_not_journaled(bench: Bench, big: ExclusiveDivert) -> None:
    bench.fill("light", durable=False)
    assert sends(bench) == []


def test_an_exclusive_divert_takes_non_persistent_messages_too(bench: Bench, big: ExclusiveDivert) -> None:
    bench.fill("big", to="orders.uk", durable=False)
    assert bench.waiting(bench.queue("orders.uk")) == []
    assert [send.diverts for send in sends(bench)] == [("big",)]


def test_a_selector_does_not_match_an_unreadable_message() -> None:
    assert not wants(compile_selector("region IS NULL"), b"\x00\x53\x74\xc1\x7f")


def test_message_number_in_record_counts_messages_without_queue(bench: Bench, big: ExclusiveDivert) -> None:
    bench.put("light", to="orders.uk", durable=False)
    bench.put("big order", to="orders.uk")
    bench.put("kept", to="orders.uk")
    bench.broker.settle()
    assert len(sends(bench)) == 3
    receiver = bench.consumer(bench.queue("orders.uk"))
    assert bench.got(receiver) == ["light", "kept"]
    bench.acknowledge(receiver)
    bench.broker.settle()
    bench.crash()
    assert bench.queue("orders.uk").held_messages == 0, "the acknowledgement names another message"
