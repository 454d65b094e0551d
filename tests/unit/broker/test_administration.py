"""Actions of an administrator, on a broker with a log in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bascule.amqp.types import Described, Symbol
from bascule.broker import administration
from bascule.broker.administration import (
    NOWHERE,
    OTHER,
    REASONS_MAX,
    InUse,
    Progress,
    create,
    dead_letter,
    delete,
    move,
    purge,
    return_dead_letters,
)
from bascule.broker.engine import Engine
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.core.destination import address_matches
from bascule.core.errors import InvalidInput
from bascule.core.permissions import Permission, Unauthorized
from bascule.jms.annotate import (
    DELIVERIES,
    MOVED_AT,
    ORIGINAL_ADDRESS,
    ORIGINAL_EXPIRY,
    ORIGINAL_QUEUE,
    ORIGINAL_ROUTING,
    REASON,
)  # fmt: skip
from bascule.jms.sections import MESSAGE_ANNOTATIONS, VALUE, header_bytes, section_bytes
from bascule.jms.selector import compile_selector
from bascule.journal.records import Op, decode_send, entries
from tests.unit.broker.conftest import START_MS, Bench


def done(bench: Bench, steps: Iterator[Progress]) -> Progress:
    """Run the whole action, and store everything."""
    progress = [Progress(), *steps][-1]
    bench.broker.settle()
    return progress


def killed(bench: Bench, *contents: str, to: str = "q", **options: Any) -> None:
    """Make dead letters: messages that a consumer rejects."""
    queue = bench.queue(to) if not to.startswith("t") else bench.subscription(f"sub.{to}", to)
    bench.fill(*contents, to=to, **options)
    receiver = bench.consumer(queue)
    for message in receiver.messages:
        bench.engine.reject(receiver.consumer, message)
    bench.engine.detach(receiver.consumer)
    bench.broker.settle()


def test_a_purged_queue_stays_empty_after_a_restart(bench: Bench) -> None:
    bench.fill("a", "b", "c")
    assert done(bench, purge(bench.engine, bench.queue())).done == 3
    bench.crash()
    assert bench.waiting(bench.queue()) == []


def test_a_purge_removes_matching_messages_and_leaves_those_that_consumers_hold(bench: Bench) -> None:
    queue = bench.queue()
    holder = bench.consumer(queue, credit=1)
    bench.fill("held", properties={"n": 1})
    bench.fill("b", properties={"n": 2})
    bench.fill("c", properties={"n": 1})
    assert done(bench, purge(bench.engine, queue, compile_selector("n = 1"))).done == 1
    assert bench.waiting(queue) == ["b"]
    bench.acknowledge(holder)
    bench.broker.settle()
    bench.crash()
    assert bench.waiting(bench.queue()) == ["b"]


def test_messages_delivered_or_sent_during_a_purge_are_left_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "STEP_MESSAGES", 2)
    queue = bench.queue()
    bench.fill("a", "b", "c", "d", "e")
    steps = purge(bench.engine, queue)
    assert next(steps).done == 2
    receiver = bench.consumer(queue, credit=1)
    bench.fill("late")
    assert bench.got(receiver) == ["c"]
    assert done(bench, steps).done == 4
    assert bench.waiting(queue) == ["late"]


def test_moved_messages_are_only_in_the_other_queue_after_a_crash_at_any_point(bench: Bench) -> None:
    bench.fill("a", "b")
    bench.fill("volatile", durable=False)
    for _ in move(bench.engine, bench.queue(), "other"):
        pass
    bench.broker.flush()
    bench.crash(stored=0)
    assert bench.waiting(bench.queue()) == ["a", "b"]
    for _ in move(bench.engine, bench.queue(), "other", compile_selector("JMSDeliveryMode = 'PERSISTENT'")):
        pass
    bench.broker.flush()
    bench.crash(stored=len(bench.broker.in_flight))
    assert bench.waiting(bench.queue()) == []
    assert bench.waiting(bench.queue("other")) == ["a", "b"]


@pytest.mark.parametrize("crashed", [False, True])
def test_moved_delayed_message_is_delivered_at_its_delivery_time(bench: Bench, crashed: bool) -> None:
    bench.fill("later", delivery_time_ms=START_MS + 1_000)
    assert done(bench, move(bench.engine, bench.queue(), "other")).done == 1
    if crashed:
        bench.crash()
    receiver = bench.consumer(bench.queue("other"))
    for by_ms, got in ((999, []), (1, ["later"])):
        bench.now_ms += by_ms
        bench.engine.tick()
        bench.broker.settle()
        assert bench.got(receiver) == got


def test_a_message_with_a_redelivery_delay_is_moved_without_the_delay() -> None:
    bench = Bench(Policy(AddressPolicy(redelivery_delay_ms=1_000)))
    bench.fill("failed")
    receiver = bench.consumer(credit=1)
    bench.engine.give_back(receiver.consumer, receiver.messages[0], failed=True)
    assert done(bench, move(bench.engine, bench.queue(), "other")).done == 1
    assert bench.got(bench.consumer(bench.queue("other"))) == ["failed"]


@pytest.mark.interpreted
@pytest.mark.parametrize("action", [lambda engine, queue: move(engine, queue, "other"), return_dead_letters])
def test_a_message_whose_body_cannot_be_read_is_not_moved(
    bench: Bench, action: Callable[[Engine, BrokerQueue], Iterator[Progress]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(message: BrokerMessage) -> bytes:
        raise OSError("input/output error")

    killed(bench, "a")
    dead = bench.queue("DLQ")
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine.bodies, "read", fails)
        with pytest.raises(OSError, match="input/output"):
            done(bench, action(bench.engine, dead))
    assert bench.waiting(dead) == ["a"]
    assert done(bench, action(bench.engine, dead)).done == 1


def test_move_of_queue_to_itself_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidInput, match="source and target are the same"):
        move(bench.engine, bench.queue(), "q")


def test_dead_letters_return_unchanged_to_their_origin(bench: Bench) -> None:
    killed(bench, "a", properties={"n": 1})
    killed(bench, "b", to="other")
    dead = bench.queue("DLQ")
    letters = [dead_letter(bench.engine, message) for message in dead.waiting()]
    assert [(each["address"], each["queue"], each["routing"], each["reason"]) for each in letters] == [
        ("q", "q", "anycast", "rejected"), ("other", "other", "anycast", "rejected"),
    ]  # fmt: skip
    assert done(bench, return_dead_letters(bench.engine, dead, compile_selector("n = 1"))).done == 1
    assert bench.waiting(dead) == ["b"]
    receiver = bench.consumer()
    assert bench.got(receiver) == ["a"], "the message must keep the bytes that were sent"
    assert bench.counts(receiver) == [0]


def test_a_dead_letter_stays_if_the_administrator_may_not_send_to_its_origin(bench: Bench) -> None:
    killed(bench, "a")
    killed(bench, "b", to="other")

    def check(queue: BrokerQueue) -> None:
        if queue.name == "other":
            raise Unauthorized("ann", Permission.SEND, "other")

    dead = bench.queue("DLQ")
    progress = done(bench, return_dead_letters(bench.engine, dead, check=check))
    assert (progress.done, list(progress.left)) == (1, ["user 'ann' has no permission 'send' on address 'other'"])
    assert bench.waiting(dead) == ["b"]


def test_a_dead_letter_of_a_subscription_returns_only_to_that_subscription(bench: Bench) -> None:
    other = bench.subscription("other", "t")
    killed(bench, "a", to="t")
    done(bench, purge(bench.engine, other))
    done(bench, return_dead_letters(bench.engine, bench.queue("DLQ")))
    for _ in range(2):
        subscriptions = bench.engine.addresses.subscriptions
        assert bench.waiting(subscriptions["sub.t"]) == ["a"]
        assert bench.waiting(subscriptions["other"]) == []
        assert bench.waiting(bench.queue("DLQ")) == []
        bench.crash()


def test_returned_dead_letter_is_not_seen_by_diverts(bench: Bench) -> None:
    killed(bench, "a")
    before = len(bench.values())
    done(bench, return_dead_letters(bench.engine, bench.queue("DLQ")))
    sent = [
        decode_send(value, start, end).address for value in bench.values()[before:] for op, start, end in entries(value) if op == Op.SEND
    ]
    assert sent == [NOWHERE]
    assert not any(address_matches(pattern, NOWHERE) for pattern in ("#", "*", "*.*", "#.#", "q", "*.#"))


def test_reasons_that_clients_have_made_up_are_counted_together() -> None:
    progress = Progress()
    for number in range(2 * REASONS_MAX):
        progress.leave(f"there is no queue 'made up {number}'")
        progress.leave("there is no queue 'made up 0'")
    assert len(progress.left) == REASONS_MAX + 1
    assert progress.left[OTHER] == REASONS_MAX
    assert progress.left["there is no queue 'made up 0'"] == 2 * REASONS_MAX + 1


def test_a_dead_letter_that_cannot_return_stays_and_the_reason_is_reported(bench: Bench) -> None:
    killed(bench, "a", "b", to="t")
    killed(bench, "c")
    bench.engine.delete_queue(bench.engine.addresses.subscriptions["sub.t"])
    bench.fill("stray", to="DLQ")
    progress = done(bench, return_dead_letters(bench.engine, bench.queue("DLQ")))
    assert progress.done == 1
    assert progress.left == {
        "subscription 'sub.t' no longer exists": 2,
        "a client sent the message to this queue; the message has no original address": 1,
    }
    assert bench.waiting(bench.queue("DLQ")) == ["a", "b", "stray"]


def test_return_of_dead_letter_is_atomic_in_crash(bench: Bench) -> None:
    killed(bench, "a")
    for stored, where in ((0, "DLQ"), (1, "q")):
        for _ in return_dead_letters(bench.engine, bench.queue("DLQ")):
            pass
        bench.broker.flush()
        bench.crash(stored=stored)
        assert {name: len(queue.waiting()) for name, queue in bench.engine.addresses.anycast.items() if queue.waiting()} == {where: 1}


def test_a_returned_message_keeps_a_future_expiry_and_loses_a_past_one(bench: Bench) -> None:
    bench.fill("old", ttl_ms=10)
    killed(bench, "young", ttl_ms=100_000, to="other")
    bench.now_ms = START_MS + 5_000
    bench.engine.tick()
    bench.broker.settle()
    for name in ("DLQ", "ExpiryQueue"):
        assert done(bench, return_dead_letters(bench.engine, bench.queue(name))).done == 1
    assert [message.expiry_ms for message in bench.queue().waiting()] == [0]
    assert [message.expiry_ms for message in bench.queue("other").waiting()] == [START_MS + 100_000]


ODD = [b"\xff", [1], {"a": 1}, Described(Symbol("odd"), 1), float("nan"), 1 << 62, True, "x" * 2_000, ""]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_a_dead_letter_forged_by_a_client_is_listed_and_its_return_does_no_harm(bench: Bench, value: Any) -> None:
    names = (
        ORIGINAL_ADDRESS, ORIGINAL_QUEUE, ORIGINAL_ROUTING, ORIGINAL_EXPIRY, REASON, DELIVERIES, MOVED_AT,
    )  # fmt: skip
    annotations = section_bytes(MESSAGE_ANNOTATIONS, {Symbol(name): value for name in names})
    bench.broker.send("DLQ", header_bytes(durable=True) + annotations + section_bytes(VALUE, "odd"), bench.sender, "odd")
    bench.broker.settle()
    dead = bench.queue("DLQ")
    (message,) = dead.waiting()
    json.dumps(dead_letter(bench.engine, message), allow_nan=False)
    progress = done(bench, return_dead_letters(bench.engine, dead))
    assert (progress.done, sum(progress.left.values())) == (0, 1)
    bench.crash()
    assert bench.waiting(bench.queue("DLQ")) == ["odd"]


def test_a_dead_letter_that_is_no_jms_message_is_listed(bench: Bench) -> None:
    bench.fill("a", to="DLQ")
    (message,) = bench.queue("DLQ").waiting()
    message.body = b"\x00\x53"
    assert dead_letter(bench.engine, message)["address"] is None


def test_queue_with_messages_is_deleted_only_by_force(bench: Bench) -> None:
    bench.fill("a")
    with pytest.raises(InUse, match="has 1 messages and 0 consumers"):
        delete(bench.engine, bench.queue())
    delete(bench.engine, bench.queue(), force=True)
    bench.broker.settle()
    bench.crash()
    assert "q" not in bench.engine.addresses.anycast


def test_a_queue_with_a_message_in_flight_to_the_journal_is_deleted_by_force_only(bench: Bench) -> None:
    bench.fill("a")
    bench.put("b")
    bench.broker.flush()
    with pytest.raises(InUse, match="has 2 messages"):
        delete(bench.engine, bench.queue())
    bench.broker.settle()
    assert bench.sender.accepted_tokens == ["a", "b"]
    assert bench.waiting(bench.queue()) == ["a", "b"]


def test_a_queue_created_by_an_administrator_stays(bench: Bench) -> None:
    queue = create(bench.engine, "new")
    bench.broker.settle()
    bench.crash()
    assert not bench.engine.addresses.anycast["new"].auto_created
    assert queue.durable
    with pytest.raises(InvalidInput, match="already exists"):
        create(bench.engine, "new")
