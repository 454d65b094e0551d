"""The account of memory: the use of each part, and the producers that wait when memory is short."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from functools import partial
from sys import getsizeof
from typing import Any

import pytest

from bascule.broker import memory
from bascule.broker.branches import prepare
from bascule.broker.errors import JournalUnavailable, MemoryLow, ResourceLimit
from bascule.broker.memory import BLOCK_AT, FREE_AT, MemoryAccount, MemoryPart
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import Policy
from bascule.broker.schedule import CANCELLED_MAX
from bascule.broker.subscription_names import subscription_queue
from bascule.core.caches import forget_peers
from bascule.core.destination import Routing
from bascule.core.errors import TransactionRolledBack
from bascule.core.xid import Xid
from bascule.jms.selector import compile_selector
from bascule.journal.offsets import OffsetMap
from bascule.testing.broker import BrokerInMemory
from tests.unit.broker.conftest import Bench

LIMIT_BYTES = 1 << 20
BODY = b"x" * 20_000


@pytest.fixture
def small(policy: Policy) -> Bench:
    """Return a broker with little memory and without spill files."""
    forget_peers()
    bench = Bench(policy)
    bench.broker = BrokerInMemory(clock=lambda: bench.now_ms, policy=policy, memory_bytes=LIMIT_BYTES)
    return bench


@pytest.fixture(autouse=True)
def _no_peers() -> None:
    """Empty the caches, since caches of other tests' peers count, too."""
    forget_peers()


def fill_up(bench: Bench, to: str = "q") -> None:
    """Send until producers are blocked."""
    while not bench.engine.memory.blocked:
        bench.put(BODY, to=to)
        bench.broker.settle()


def parts(bench: Bench) -> dict[MemoryPart, int]:
    account = bench.engine.memory
    found: dict[MemoryPart, int] = {}
    for _ in memory.measuring(bench.engine, found):
        pass
    account.measured(found)
    return account.parts()


def counted(bench: Bench) -> int:
    """Return the account's bytes of waiting messages."""
    return sum(parts(bench)[part] for part in (MemoryPart.BODIES, MemoryPart.MESSAGES, MemoryPart.QUEUES))


def filled(bench: Bench, count: int, **options: Any) -> tuple[int, int]:
    """Send waiting messages. Return the bytes that they take, and the bytes that they are counted as."""
    before_bytes = counted(bench)
    bench.broker.log.append = lambda key, value: 0  # type: ignore[method-assign]
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(count):
            bench.fill("x" * 100, **options)
            bench.sender.answers.clear()
        bench.broker.offsets = OffsetMap()
        gc.collect()
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return taken_bytes, counted(bench) - before_bytes


def empty(bench: Bench) -> dict[MemoryPart, int]:
    """Return the parts of a broker with its queue."""
    bench.queue()
    bench.broker.settle()
    return parts(bench)


def test_each_part_returns_to_its_initial_value_when_all_messages_are_gone(small: Bench) -> None:
    before = empty(small)
    small.fill("a", "b", "c", durable=False)
    consumer = small.consumer(credit=2)
    transaction = small.engine.begin(b"1")
    small.put("d", transaction=transaction)
    small.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    during = parts(small)
    small.engine.rollback(transaction)
    small.engine.detach(consumer.consumer)
    consumer = small.consumer()
    small.acknowledge(consumer)
    small.engine.detach(consumer.consumer)
    small.broker.settle()
    after = parts(small)
    for part in (MemoryPart.BODIES, MemoryPart.MESSAGES, MemoryPart.UNSETTLED, MemoryPart.TRANSACTIONS):
        assert during[part] > before[part], part
    assert after == before | {MemoryPart.CACHES: after[MemoryPart.CACHES]}


def test_memory_account_counts_duplicate_windows_branches_selector_views_and_queues(small: Bench) -> None:
    before = empty(small)
    small.fill("a", message_id="ID:1")
    small.consumer(credit=0, selector="JMSPriority = 4")
    small.queue("another")
    transaction = small.engine.begin(b"1")
    small.put("b", transaction=transaction)
    prepare(small.engine, transaction, Xid(1, b"g", b"b"), "client", lambda _: None)
    small.put("c")
    during = parts(small)
    assert during[MemoryPart.TRANSACTIONS] == 0, "the transaction is a branch now"
    for part in (MemoryPart.DUPLICATES, MemoryPart.BRANCHES, MemoryPart.QUEUES, MemoryPart.JOURNAL, MemoryPart.CACHES):
        assert during[part] > before[part], part


def test_a_message_of_several_subscriptions_is_counted_until_the_last_one_releases_it(small: Bench) -> None:
    queues = [small.subscription(name) for name in ("s1", "s2")]
    before = parts(small)
    small.fill("x", to="t")
    for queue in queues:
        assert parts(small)[MemoryPart.BODIES] > 0
        consumer = small.consumer(queue)
        small.acknowledge(consumer)
        small.engine.detach(consumer.consumer)
    small.broker.settle()
    after = parts(small)
    assert (after[MemoryPart.BODIES], after[MemoryPart.MESSAGES]) == (before[MemoryPart.BODIES], before[MemoryPart.MESSAGES]) == (0, 0)


def test_messages_of_a_deleted_queue_and_its_consumers_are_no_longer_counted(small: Bench) -> None:
    before = empty(small)
    queue = small.queue("deleted")
    small.fill("a", "b", to="deleted")
    small.consumer(queue, credit=1)
    small.engine.delete_queue(queue)
    small.broker.settle()
    assert parts(small) == before | {MemoryPart.CACHES: parts(small)[MemoryPart.CACHES]}


def test_producers_are_blocked_until_memory_falls_below_release_threshold(small: Bench) -> None:
    fill_up(small)
    account = small.engine.memory
    assert account.used_bytes >= BLOCK_AT * LIMIT_BYTES
    consumer = small.consumer(credit=0)
    while account.blocked:
        assert account.used_bytes > FREE_AT * LIMIT_BYTES
        small.broker.give(consumer, 1)
        small.broker.settle()
        small.engine.acknowledge(consumer.consumer, consumer.messages[-1])
        small.broker.settle()
    assert account.used_bytes <= FREE_AT * LIMIT_BYTES


def test_consumers_are_served_while_producers_are_blocked(small: Bench) -> None:
    fill_up(small)
    held = small.queue().held_messages
    consumer = small.consumer(credit=1000)
    assert len(consumer.messages) == held


def test_sends_with_credit_are_accepted_until_memory_is_exhausted_and_then_refused(small: Bench) -> None:
    fill_up(small)
    small.sender.answers.clear()
    while not small.sender.answers or small.sender.answers[-1][1] is None:
        small.put(BODY)
        small.broker.settle()
    account = small.engine.memory
    assert account.used_bytes >= LIMIT_BYTES
    assert len(small.sender.answers) > 5
    error = small.sender.answers[-1][1]
    assert isinstance(error, MemoryLow)
    assert error.condition == "amqp:resource-limit-exceeded"
    assert "broker.memory_bytes" in str(error)


def test_a_duplicate_of_a_stored_message_is_accepted_although_memory_is_exhausted(small: Bench) -> None:
    small.fill(1, message_id="ID:1")
    fill_up(small)
    small.engine.memory.measured({MemoryPart.BUFFERS: LIMIT_BYTES})
    small.sender.answers.clear()
    small.fill(1, message_id="ID:1")
    assert small.sender.answers == [(1, None)]


def test_transactional_send_is_refused_while_producers_are_blocked_and_commit_rolls_back(
    small: Bench,
) -> None:
    outcome: list[Any] = []
    transaction = small.engine.begin(b"1")
    small.put("before", transaction=transaction)
    fill_up(small)
    held = small.queue().held_messages
    small.sender.answers.clear()
    small.put("refused", transaction=transaction)
    small.put("behind", transaction=transaction)
    assert [error.condition for _, error in small.sender.answers if error] == ["amqp:resource-limit-exceeded"] * 2
    assert parts(small)[MemoryPart.TRANSACTIONS] == 0
    small.engine.commit(transaction, outcome.append)
    small.broker.settle()
    (error,) = outcome
    assert isinstance(error, TransactionRolledBack)
    assert "broker.memory_bytes" in str(error)
    assert small.queue().held_messages == held


def test_an_error_that_refuses_many_messages_keeps_none_of_them_in_memory(small: Bench) -> None:
    small.queue()
    transaction = small.engine.begin(b"1")
    small.engine.memory.shortage = "the disk is full"
    small.engine.stalled = JournalUnavailable("Kafka is away")
    small.broker.settle()
    small.sender.answers.clear()
    for number in range(3):
        small.put(BODY + b"%d" % number, transaction=transaction)
        small.put(BODY + b"%d" % number)
    assert len(small.sender.answers) == 6
    for _, error in small.sender.answers:
        assert error is not None
        assert error.__traceback__ is None, "the frames of each send, and with them the messages"


def test_a_transaction_without_sends_is_committed_while_producers_are_blocked(small: Bench) -> None:
    outcome: list[Any] = []
    fill_up(small)
    consumer = small.consumer(credit=1)
    transaction = small.engine.begin(b"1")
    small.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    small.engine.commit(transaction, outcome.append)
    small.broker.settle()
    assert outcome == [None]


def test_open_transactions_together_are_limited_to_their_share_of_memory(small: Bench) -> None:
    account = small.engine.memory
    transactions = [small.engine.begin(b"%d" % number) for number in range(10)]
    for _ in range(20):
        for transaction in transactions:
            small.put(BODY, transaction=transaction)
            assert account.transactions_bytes <= account.transactions_max_bytes
    assert not account.blocked
    doomed = [transaction for transaction in transactions if transaction.doomed]
    assert doomed
    refusals = [error for _, error in small.sender.answers if error]
    assert {error.condition for error in refusals} == {"amqp:resource-limit-exceeded"}
    assert "commit more often" in str(refusals[0])
    for transaction in transactions:
        small.engine.rollback(transaction)
    assert account.transactions_bytes == 0


def test_prepared_branches_are_limited_to_their_share_of_memory(small: Bench) -> None:
    refused = 0
    for number in range(30):
        transaction = small.engine.begin(b"%d" % number)
        small.put(BODY, transaction=transaction)
        try:
            prepare(small.engine, transaction, Xid(1, b"g", b"%d" % number), "client", lambda _: None)
        except TransactionRolledBack:
            refused += 1
        small.broker.settle()
    assert 0 < refused < 30
    assert small.engine.branches.use.size_bytes <= small.engine.memory.branches_max_bytes


def test_selectors_are_limited_to_their_share_of_memory_and_release_it(small: Bench) -> None:
    small.queue()
    selector = compile_selector(" OR ".join(f"name = '{number}'" for number in range(15)))
    consumers = [small.broker.attach(small.queue(), selector=selector)]
    small.subscription("s", selector=selector.text)
    used = parts(small)[MemoryPart.SELECTORS]
    assert used == 2 * memory.SELECTOR_CHAR_BYTES * len(selector.text)
    with pytest.raises(ResourceLimit, match="all selectors together"):
        consumers.extend(small.broker.attach(small.queue(), selector=selector) for _ in range(100))
    with pytest.raises(ResourceLimit, match="all selectors together"):
        small.subscription("t", selector=selector.text)
    for consumer in list(small.queue().consumers):
        small.engine.detach(consumer)
    small.engine.delete_queue(small.engine.addresses.subscriptions["s"])
    assert parts(small)[MemoryPart.SELECTORS] == 0


@pytest.mark.parametrize("selector", [None, "JMSPriority = 4"])
def test_the_counted_size_of_a_waiting_message_matches_its_memory(bench: Bench, selector: str | None) -> None:
    bench.consumer(credit=0, selector=selector)
    bench.fill("warm")
    taken_bytes, counted_bytes = filled(bench, 3_000)
    assert taken_bytes < counted_bytes < 2 * taken_bytes


@pytest.mark.parametrize("commits", [True, False])
def test_messages_received_in_transaction_count_as_unsettled_until_transaction_ends(small: Bench, commits: bool) -> None:
    small.fill("a", "b")
    consumer = small.consumer()
    transaction = small.engine.begin(b"1")
    for message in consumer.messages:
        small.engine.acknowledge_in(transaction, consumer.consumer, message)
    assert parts(small)[MemoryPart.UNSETTLED] == 2 * memory.UNSETTLED_BYTES
    small.engine.detach(consumer.consumer)
    if commits:
        small.engine.commit(transaction, lambda _: None)
    else:
        small.engine.rollback(transaction)
    small.broker.settle()
    assert parts(small)[MemoryPart.UNSETTLED] == 0


def test_each_duplicate_window_is_counted_even_with_few_ids(small: Bench) -> None:
    small.fill("a", message_id="ID:1")
    before = parts(small)[MemoryPart.DUPLICATES]
    small.fill("b", message_id="ID:2", to="another")
    assert parts(small)[MemoryPart.DUPLICATES] == before + memory.DUPLICATE_BYTES + memory.WINDOW_BYTES


def test_failed_messages_and_messages_set_aside_for_a_group_are_counted_in_their_indexes(small: Bench) -> None:
    small.queue()
    before = parts(small)[MemoryPart.QUEUES]
    consumers = [small.consumer(credit=1), small.consumer(credit=1)]
    small.fill("a", "b", "c", group="g")
    aside = parts(small)[MemoryPart.QUEUES]
    assert aside == before + 3 * memory.VIEW_ENTRY_BYTES  # two messages, and the consumer that holds the group
    (holder,) = (each for each in consumers if each.messages)
    small.engine.give_back(holder.consumer, holder.messages[0], failed=True)
    assert parts(small)[MemoryPart.QUEUES] > aside


def messages_alive() -> int:
    """Count all messages in memory, including those of earlier tests: pytest keeps the frames of a failed test."""
    gc.collect()
    return sum(type(each) is BrokerMessage for each in gc.get_objects())


@pytest.mark.parametrize("options", [{}, {"durable": False}])
def test_removed_delayed_message_leaves_no_scheduled_action(small: Bench, options: dict[str, Any]) -> None:
    before, alive = empty(small), messages_alive()
    waiting = len(small.engine.schedule)
    for number in range(5_000):
        small.put(number, to="later", delivery_delay_ms=10**9, **options)
    small.broker.settle()
    assert parts(small)[MemoryPart.QUEUES] >= before[MemoryPart.QUEUES] + 5_000 * memory.DELAYED_BYTES
    small.engine.delete_queue(small.engine.queue("later"))
    small.broker.settle()
    assert len(small.engine.schedule) <= waiting + 2 * CANCELLED_MAX
    assert parts(small)[MemoryPart.BODIES] == 0
    assert messages_alive() <= alive


def test_delayed_message_of_two_subscriptions_arrives_in_the_remaining_one(small: Bench) -> None:
    gone, left = small.subscription("gone"), small.subscription("left")
    small.fill("later", to="t", delivery_delay_ms=1_000)
    small.engine.delete_queue(gone)
    small.broker.settle()
    small.now_ms += 1_000
    small.engine.tick()
    small.broker.settle()
    assert small.waiting(left) == ["later"]


@pytest.mark.parametrize("options", [{"delivery_delay_ms": 10**9}, {"group": "g"}])
def test_the_counted_size_of_a_delayed_or_grouped_message_covers_its_memory(bench: Bench, options: dict[str, Any]) -> None:
    first, second = bench.consumer(credit=1), bench.consumer(credit=1)
    bench.fill("warm", "warm", **options)
    taken_bytes, counted_bytes = filled(bench, 2_000, **options)
    assert len(first.messages) + len(second.messages) <= 1
    assert taken_bytes < counted_bytes < 2 * taken_bytes


def test_memory_account_counts_cached_routes_with_their_queues(bench: Bench) -> None:
    for number in range(1_000):
        bench.subscription(f"s{number}", "#", durable=False)
    before = parts(bench)[MemoryPart.CACHES]
    bench.put("x", to="t" * 1_000, durable=False)
    assert parts(bench)[MemoryPart.CACHES] - before >= 8 * 1_000 + 1_000
    bench.engine.addresses.forget_routes()
    assert bench.engine.addresses.routes_bytes == 0


def test_memory_account_counts_queue_names(bench: Bench) -> None:
    name = "\N{GRINNING FACE}" * 1_000
    queues = []
    for create in (lambda: bench.queue(name), lambda: bench.subscription(name + name, subscription=name)):
        before = parts(bench)[MemoryPart.QUEUES]
        queues.append(create())
        assert parts(bench)[MemoryPart.QUEUES] - before >= memory.QUEUE_BYTES + 4 * len(queues[-1].name)
    for queue in queues:
        bench.engine.delete_queue(queue)
    assert bench.engine.addresses.names_bytes == 0


def test_memory_account_counts_each_client_id_with_durable_subscriptions_once(bench: Bench) -> None:
    client = "\N{GRINNING FACE}" * 1_000
    before = bench.engine.addresses.names_bytes
    queues, grown = [], []
    for name in ("one", "two"):
        queue_name = subscription_queue(client, name, durable=True)
        queues.append(bench.engine.create_queue(queue_name, "news", Routing.MULTICAST, subscription=name, user="ann"))
        names = sum(map(getsizeof, {queue_name, "news", name}))
        grown.append(bench.engine.addresses.names_bytes - before - names)
        before = bench.engine.addresses.names_bytes
    assert grown == [memory.CLIENT_ID_BYTES + getsizeof(client), 0]
    for queue in queues:
        bench.engine.delete_queue(queue)
    assert bench.engine.addresses.names_bytes == 0


def test_caches_beyond_their_share_of_memory_are_emptied(small: Bench) -> None:
    for number in range(200):
        small.put("x", to=f"t{number}")
    assert parts(small)[MemoryPart.CACHES] <= memory.CACHES_SHARE * LIMIT_BYTES


def test_waiting_producers_are_resumed_over_several_turns_in_order_and_cancelled_ones_are_forgotten(small: Bench) -> None:
    account, resumed = small.engine.memory, list[int]()
    account.shortage = "the disk is full"
    small.engine.dispatch()
    for number in range(500):
        account.when_free(number, partial(resumed.append, number))
    account.forget(1)
    small.engine.dispatch()
    assert resumed == []
    account.shortage = ""
    small.engine.turns.steps = 1_000
    small.engine.turns.begin_turn()
    small.engine.dispatch()
    assert 0 < len(resumed) < 100
    small.engine.go_on()
    assert len(resumed) < 200
    small.broker.settle()
    assert resumed == [0, *range(2, 500)]
    assert account.waiting == 0


def test_producers_wait_again_if_memory_becomes_short_while_they_are_resumed(small: Bench) -> None:
    account, resumed = small.engine.memory, list[int]()
    account.shortage = "the disk is full"
    small.engine.dispatch()
    for number in range(500):
        account.when_free(number, partial(resumed.append, number))
    account.shortage = ""
    small.engine.turns.steps = 1_000
    small.engine.turns.begin_turn()
    small.engine.dispatch()
    account.shortage = "the disk is full"
    small.broker.settle()
    assert 0 < len(resumed) < 200
    account.shortage = ""
    small.broker.settle()
    small.engine.dispatch()
    small.broker.settle()
    assert resumed == [*range(500)]


def test_memory_account_counts_producers_that_wait(small: Bench) -> None:
    queue = small.subscription("s")
    queue.settings = dataclasses.replace(queue.settings, max_messages=1)
    small.fill(1, to="t")
    before = parts(small)[MemoryPart.QUEUES]
    small.engine.when_room("t", Routing.MULTICAST, "producer", lambda: None)
    assert parts(small)[MemoryPart.QUEUES] == before + memory.WAITING_BYTES
    small.engine.memory.when_free("producer", lambda: None)
    assert parts(small)[MemoryPart.QUEUES] == before + 2 * memory.WAITING_BYTES
    small.engine.forget_waiting("t", Routing.MULTICAST, "producer")
    small.engine.memory.forget("producer")
    assert parts(small)[MemoryPart.QUEUES] == before


def test_disk_shortage_blocks_producers_until_it_ends() -> None:
    account, changes = MemoryAccount(1000), []
    account.on_change = lambda: changes.append(account.blocked)
    account.shortage = "the disk is full"
    account.look()
    account.look()
    account.shortage = ""
    account.look()
    assert changes == ["the disk is full", ""]


def test_all_producers_share_the_credit_that_fits_into_memory() -> None:
    account = MemoryAccount(1 << 20)
    account.producers = 1
    assert 100 < account.credit(1000) < 1000
    account.bodies_bytes = account.block_at_bytes * 9 // 10
    assert account.credit(1000) < 200, "the credit shrinks towards the limit"
    account.producers = 10_000
    assert account.credit(1000) == 1
    assert MemoryAccount(1 << 30).credit(1000) == 1000
