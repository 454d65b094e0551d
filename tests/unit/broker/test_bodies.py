from __future__ import annotations

import pytest

from bascule.broker.message import Bodies, BodyOwner, BrokerMessage
from tests.unit.broker.conftest import Bench


class Store:
    """A store of spilled bodies in a dict."""

    def __init__(self) -> None:
        self.bodies: dict[int, bytes] = {}
        self.roomy = True

    def put(self, body: bytes, owner: BodyOwner) -> int:
        handle = len(self.bodies)
        self.bodies[handle] = body
        return handle

    def get(self, handle: int, size_bytes: int) -> bytes:
        assert len(self.bodies[handle]) == size_bytes
        return self.bodies[handle]

    def free(self, handle: int, size_bytes: int) -> None:
        assert len(self.bodies.pop(handle)) == size_bytes


@pytest.fixture
def store() -> Store:
    return Store()


def held(bodies: Bodies, body: bytes) -> BrokerMessage:
    message = BrokerMessage(body)
    bodies.hold(message)
    return message


#: Bodies may use a quarter of this memory: one body of 8 bytes.
MEMORY_BYTES = 40


def test_bodies_beyond_memory_share_are_spilled_to_store_and_read_back(store: Store) -> None:
    bodies = Bodies(store, MEMORY_BYTES)
    first, second = held(bodies, b"x" * 8), held(bodies, b"y" * 8)
    assert (bodies.memory_bytes, bodies.stored_bytes) == (8, 8)
    assert second.body is None
    assert (bodies.read(first), bodies.read(second)) == (b"x" * 8, b"y" * 8)


def test_a_released_body_frees_room_in_memory_and_in_the_store(store: Store) -> None:
    bodies = Bodies(store, MEMORY_BYTES)
    messages = [held(bodies, b"x" * 8), held(bodies, b"y" * 8)]
    for message in messages:
        bodies.release(message)
    assert (bodies.memory_bytes, bodies.stored_bytes, store.bodies) == (0, 0, {})
    assert held(bodies, b"z" * 8).body == b"z" * 8


def test_without_a_store_all_bodies_stay_in_memory() -> None:
    bodies = Bodies(None, 0)
    assert held(bodies, b"x").body == b"x"


def test_spilled_message_is_selected_delivered_and_dead_lettered(bench: Bench, store: Store) -> None:
    bench.engine.bodies.store, bench.engine.memory.bodies_max_bytes = store, 0
    bench.fill("red", properties={"colour": "red"})
    consumer = bench.consumer(selector="colour = 'red'")
    assert bench.got(consumer) == ["red"]
    bench.engine.reject(consumer.consumer, consumer.messages[0])
    bench.broker.settle()
    assert bench.waiting(bench.queue("DLQ")) == ["red"]
    assert len(store.bodies) == 1


def test_bodies_behind_the_first_messages_of_a_queue_are_spilled_before_memory_is_short(bench: Bench, store: Store) -> None:
    bench.engine.bodies.store, bench.engine.memory.first_bodies_max_bytes = store, 3 * len(bench.encode(0))
    bench.fill(*range(9))
    assert [message.body is None for message in bench.queue().ready] == [False] * 4 + [True] * 5
    bench.fill("other queue", to="other")
    assert [message.body is None for message in bench.queue("other").ready] == [False]
    assert bench.got(bench.consumer()) == [*range(9)]


def test_bodies_stay_in_memory_that_is_free_if_the_store_has_little_room(bench: Bench, store: Store) -> None:
    bench.engine.bodies.store, bench.engine.memory.first_bodies_max_bytes = store, 3 * len(bench.encode(0))
    store.roomy = False
    bench.fill(*range(9))
    assert [message.body is None for message in bench.queue().ready] == [False] * 9


def test_body_stays_in_memory_if_one_of_its_subscriptions_delivers_it_soon(bench: Bench, store: Store) -> None:
    bench.engine.bodies.store, bench.engine.memory.first_bodies_max_bytes = store, 3 * len(bench.encode(0))
    deep = bench.subscription("deep")
    bench.fill(*range(9), to="t")
    short = bench.subscription("short")
    bench.fill("last", to="t")
    (message,) = short.ready
    assert message.body is not None
    assert bench.waiting(deep) == [*range(9), "last"]
