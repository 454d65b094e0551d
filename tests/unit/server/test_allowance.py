"""The allowance of a user: how many messages a second its producers get credit for, together and in turn."""

from __future__ import annotations

import asyncio
import time

from bascule.amqp.frames import AMQP_HEADER, SASL_FRAME, SASL_HEADER, frame_head, performative_frame
from bascule.amqp.performatives import UINT_MAX, Attach, Begin, Detach, Open, SaslInit, Source, Target, Transfer
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.core.user_limits import LimitRule, LimitRules, UserResource
from bascule.server.allowance import GRANTS_PER_TURN, GRANTS_S, SendAllowance
from bascule.server.links import PRODUCER_CREDIT
from bascule.server.usage import UsageLimits
from bascule.testing.broker import message_bytes
from tests.unit.server.served import QUEUE, Client, Served, Wire
from tests.unit.server.test_usage import run_async

PER_S = 1000
SLICE = PER_S // 10


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


def limited(served: Served, allowance: SendAllowance, name: str = "client") -> Client:
    """Return a client of a user with this allowance."""
    client = Client(served, name)
    client.connection.client.sending = allowance
    return client


def test_credit_of_a_second_is_the_allowance_whatever_the_size_of_the_requests() -> None:
    clock = Clock()
    allowance = SendAllowance(PER_S, clock)
    taken = allowance.take(10_000)
    assert taken == SLICE
    for _ in range(1000):
        clock.now_s += 0.01
        taken += allowance.take(10_000)
    assert abs(taken - 10 * PER_S) <= 2 * SLICE


def test_unused_credit_comes_back_and_never_exceeds_one_second() -> None:
    allowance = SendAllowance(PER_S, Clock())
    assert allowance.take(SLICE) == SLICE
    assert allowance.take(1) == 0
    allowance.put_back(7)
    assert allowance.take(SLICE) == 7
    allowance.put_back(50 * PER_S)
    assert sum(allowance.take(PER_S) for _ in range(20)) == PER_S


def test_user_without_a_limit_gets_all_credit() -> None:
    allowance = SendAllowance(0)
    assert [allowance.take(PRODUCER_CREDIT) for _ in range(3)] == [PRODUCER_CREDIT] * 3


@run_async
async def test_waiting_producers_get_credit_in_turn_and_no_other_overtakes_them() -> None:
    clock = Clock()
    allowance = SendAllowance(PER_S, clock)
    allowance.take(SLICE)
    turns: list[str] = []
    done = asyncio.Event()

    def served(name: str) -> None:
        turns.append(f"{name} {allowance.take(SLICE)}")
        if name == "third":
            done.set()

    for name in ("first", "gone", "third"):
        allowance.when_allowed(name, lambda name=name: served(name))
    allowance.forget("gone")
    clock.now_s += 1
    assert allowance.take(SLICE) == 0
    await asyncio.wait_for(done.wait(), 30)
    assert turns == [f"first {SLICE}", f"third {SLICE}"]
    assert allowance.take(SLICE) == SLICE


@run_async
async def test_one_turn_serves_a_limited_number_of_producers_and_the_next_turns_serve_the_others() -> None:
    clock = Clock()
    allowance = SendAllowance(PER_S, clock)
    allowance.take(SLICE)
    most = 3 * GRANTS_PER_TURN
    turn, turns, done = 0, [], asyncio.Event()

    def served() -> None:
        assert allowance.take(1) == 1
        turns.append(turn)
        if len(turns) == most:
            done.set()

    for number in range(most):
        allowance.when_allowed(number, served)
    clock.now_s += 1
    while not done.is_set():
        turn += 1
        await asyncio.sleep(0)
    assert max(turns.count(each) for each in set(turns)) == GRANTS_PER_TURN


@run_async
async def test_producers_whose_search_for_room_takes_long_get_credit_over_several_turns() -> None:
    clock = Clock()
    allowance = SendAllowance(PER_S, clock)
    allowance.take(SLICE)
    turn, turns, done = 0, list[int](), asyncio.Event()

    def served() -> None:
        end_s = time.thread_time() + GRANTS_S / 2
        while time.thread_time() < end_s:
            pass
        turns.append(turn)
        if len(turns) == 10:
            done.set()

    for number in range(10):
        allowance.when_allowed(number, served)
    clock.now_s += 1
    while not done.is_set():
        turn += 1
        await asyncio.sleep(0)
    assert max(turns.count(each) for each in set(turns)) <= 3


@run_async
async def test_producers_of_one_user_share_its_allowance_and_another_user_is_not_held_up() -> None:
    served, clock = Served(), Clock()
    allowance = SendAllowance(PER_S, clock)
    one, two = (limited(served, allowance, name) for name in ("one", "two"))
    assert (one.producer("q").credit, two.producer("q").credit) == (SLICE, 0)
    assert limited(served, SendAllowance(PER_S, clock), "of another user").producer("q").credit == SLICE
    one.connection.connection_lost(None)
    assert allowance.take(SLICE) == 0  # it is the turn of the second one
    two.connection.connection_lost(None)
    assert allowance.take(PER_S) == SLICE


@run_async
async def test_producer_that_has_used_its_credit_gets_more_when_the_allowance_permits() -> None:
    served, clock = Served(), Clock()
    client = limited(served, SendAllowance(PER_S, clock))
    producer = client.producer("q")
    for number in range(SLICE):
        producer.send(message_bytes(number), settled=True)
    served.settle(client)
    assert producer.credit == 0
    clock.now_s += 1
    while not producer.credit:
        await asyncio.sleep(0)
        served.settle(client)
    assert producer.credit == SLICE
    assert served.engine.addresses.anycast["q"].ready.count == SLICE


@run_async
async def test_producer_that_closes_or_is_lost_leaves_its_unused_credit_to_the_next() -> None:
    served, allowance = Served(), SendAllowance(10, Clock())
    for number in range(5):
        client = limited(served, allowance, f"client {number}")
        producer = client.producer("q")
        assert producer.credit == 1
        if number % 2:
            client.connection.connection_lost(None)
        else:
            producer.detach()
            client.run()
    assert allowance.take(10) == 1


@run_async
async def test_requests_to_the_management_node_do_not_use_the_allowance() -> None:
    client = limited(Served(), SendAllowance(1, Clock()))
    client.producer("q", name="one")
    assert client.producer(MANAGEMENT_ADDRESS, name="two").credit == PRODUCER_CREDIT


@run_async
async def test_limits_of_a_user_apply_to_its_connections() -> None:
    limits = LimitRules(
        {}, [LimitRule(frozenset({"anonymous"}), frozenset(), {UserResource.MESSAGES_PER_S: 30, UserResource.MESSAGE_BYTES: 2048})]
    )
    client = Client(Served(usage=UsageLimits(of_users=limits)))
    producer = client.producer("q")
    assert producer.credit == 3
    assert producer.remote.max_message_size == 2048


@run_async
async def test_end_of_a_link_whose_delivery_count_has_wrapped_returns_only_unused_credit() -> None:
    served = Served()
    allowance = SendAllowance(PER_S, Clock())
    connection, wire = served.connection(), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]

    def say(*said: bytes) -> None:
        connection.data_received(b"".join(said))
        while connection.behind:
            connection.handle_some()

    login = performative_frame(0, SaslInit("ANONYMOUS", b""), SASL_FRAME)
    say(SASL_HEADER, login, AMQP_HEADER, performative_frame(0, Open("raw")), performative_frame(0, Begin(None, 0, 100, 100)))
    connection.client.sending = allowance
    target, body = Target("q", capabilities=QUEUE), message_bytes("x")
    attach = Attach("p", 0, False, source=Source(), target=target, initial_delivery_count=UINT_MAX)
    say(performative_frame(0, attach))
    say(*(frame_head(0, Transfer(0, number, b"t", settled=True), len(body)) + body for number in range(2)))
    served.broker.settle()
    assert served.engine.queue("q").held_messages == 2
    say(performative_frame(0, Detach(0, True)))
    assert sum(allowance.take(PER_S) for _ in range(20)) == SLICE - 2
    connection.connection_lost(None)
