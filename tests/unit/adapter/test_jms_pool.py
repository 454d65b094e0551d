"""Contexts of a JmsConnectionFactory outside of transactions, with a whole broker: the pool of sessions, and their reuse."""

from __future__ import annotations

import math
import multiprocessing
from contextlib import suppress
from functools import partial
from typing import cast

import pytest

from bascule.adapter.outbound import JmsConnectionFactory, KafkaConnectionFactory, PoolClosed, PoolExhausted, Registry
from bascule.adapter.outbound.contexts import PooledContext
from bascule.client import ConnectionLost, Context, IllegalState, Message, Queue, Refused
from bascule.core.errors import InvalidInput
from bascule.threads.background import in_background
from bascule.xa import TransactionRolledBack
from bascule.xa.jms import JmsResource
from tests.support.system import wait_for
from tests.unit.adapter.broker_in_thread import JmsShop, broker, consumers, kafka, shop
from tests.unit.server.broker_process import SOON_S, Broker

__all__ = ["broker", "kafka", "shop"]
ORDERS, BILLS = Queue("orders"), Queue("bills")


def body(message: Message | None) -> object:
    assert message is not None
    return message.body


def test_message_received_outside_of_transaction_is_acknowledged_at_once(shop: JmsShop) -> None:
    shop.send(ORDERS, "one")
    with shop.factory.connect() as context:
        context.send(BILLS, "sent")
        with shop.other_client() as other:
            assert body(other.consumer(BILLS).receive(SOON_S)) == "sent"
        assert body(context.consumer(ORDERS).receive(SOON_S)) == "one"
        assert shop.browse(ORDERS) == []


def test_session_returned_to_pool_has_no_consumers_or_temporary_destinations(shop: JmsShop, broker: Broker) -> None:
    shop.send(ORDERS, "one", "two", "three")
    with shop.factory.connect() as context:
        consumer = context.consumer(ORDERS, prefetch=10)
        assert body(consumer.receive(SOON_S)) == "one"
        topic, queue = context.temporary_topic(), context.temporary_queue()
        context.delete(topic)
        future = context.producer(ORDERS).send_async("four")
    assert future.done()
    assert consumers(broker)[ORDERS.name] == 0
    assert queue.name not in consumers(broker)
    assert shop.browse(ORDERS) == ["two", "three", "four"]
    for call in (partial(context.send, ORDERS, "late"), partial(consumer.receive, 0.0), context.start):
        with pytest.raises(IllegalState, match="the context is closed"):
            call()
    context.close()
    assert shop.factory.leases() == []


def test_exhausted_pool_names_holders_of_its_sessions(shop: JmsShop) -> None:
    with shop.factory.connect(), shop.factory.connect():
        assert len(shop.factory.leases()) == 2
        with pytest.raises(PoolExhausted, match="test_exhausted_pool_names_holders_of_its_sessions"):
            shop.factory.connect()
        with shop.manager.begin(), shop.factory.connect() as context:
            context.send(ORDERS, "within a transaction")
    shop.factory.close()
    with pytest.raises(PoolClosed):
        shop.factory.connect()


def test_broken_connection_is_replaced_for_pool_and_transactions(shop: JmsShop, broker: Broker) -> None:
    def lose() -> None:
        """Break all connections of the shop at the client."""
        with shop.factory.connect() as context:
            core = context._thread.core
        with suppress(InvalidInput):
            context._thread.call(lambda: core.fail(ConnectionLost("cut")))

    shop.send(ORDERS, "one")
    kept = shop.factory.connect()
    transaction = shop.manager.begin()
    with transaction, shop.factory.connect() as context:
        context.send(ORDERS, "lost")
        shop.manager.enlist(shop.database).append("row")
        with shop.manager.suspended():
            lose()
        with pytest.raises(TransactionRolledBack):
            transaction.commit()
    with pytest.raises(ConnectionLost):
        kept.send(ORDERS, "lost, too")
    with suppress(ConnectionLost):
        kept.close()
    with shop.manager.begin(), shop.factory.connect() as context:
        assert body(context.consumer(ORDERS).receive(SOON_S)) == "one"
        context.send(BILLS, "two")
    shop.send(BILLS, "three")
    assert (shop.browse(ORDERS), shop.browse(BILLS), shop.factory.leases()) == ([], ["two", "three"], [])
    assert len(broker.node.connections) == 1


def test_reply_queue_of_pooled_session_is_deleted_with_factory(shop: JmsShop, broker: Broker) -> None:
    def answer() -> None:
        with shop.other_client() as other:
            request = other.consumer(ORDERS).receive(SOON_S)
            assert request is not None
            other.reply(request, "!")

    def temporary() -> set[str]:
        return {name for name in consumers(broker) if name.startswith("temp.")}

    before = temporary()  # the transaction manager has a temporary queue, too
    answering = in_background(answer, "test-answer")
    with shop.factory.connect() as context:
        assert body(context.request(ORDERS, "?", timeout_s=SOON_S)) == "!"
    answering.result(SOON_S)
    assert len(temporary() - before) == 1  # the pool keeps the queue for the next request
    shop.factory.close()
    wait_for(lambda: temporary() == before, "the end of the queue of answers", 5)


def test_session_in_use_by_other_thread_is_not_lent_to_others(shop: JmsShop) -> None:
    context = shop.factory.connect()
    consumer = context.consumer(ORDERS)
    receiving = in_background(partial(consumer.receive, math.inf), "test-receive")
    wait_for(lambda: consumer.state.waiting, "the other thread to wait")
    context.close()
    assert receiving.result(SOON_S) is None
    with shop.factory.connect() as following:
        assert following._session is not context._session  # type: ignore[attr-defined]
        following.send(ORDERS, "one")
    assert shop.browse(ORDERS) == ["one"]


def test_session_of_context_closed_by_two_threads_is_returned_once(shop: JmsShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread must not return the session again, because another context may already use it."""
    context = cast("PooledContext", shop.factory.connect())
    end = context._end
    taken: list[Context] = []

    def end_late(why: str) -> bool:
        monkeypatch.setattr(context, "_end", end)
        in_background(context.close, "test-close").result(SOON_S)
        taken.append(shop.factory.connect())
        return end(why)

    monkeypatch.setattr(context, "_end", end_late)
    context.close()
    with taken[0], shop.factory.connect() as following:
        assert following._session is not taken[0]._session


def test_forked_child_uses_its_own_connections(broker: Broker) -> None:
    with JmsShop(f"amqp://127.0.0.1:{broker.ready[-1]}") as shop:
        shop.send(ORDERS, "parent")
        with shop.factory.connect() as kept:
            child = multiprocessing.get_context("fork").Process(target=shop.send, args=(ORDERS, "child"))
            child.start()
            child.join(SOON_S)
            assert child.exitcode == 0
            kept.send(ORDERS, "parent again")
        assert shop.browse(ORDERS) == ["parent", "child", "parent again"]
        assert shop.factory.leases() == []


# -- factories


def test_factory_without_manager_is_independent_of_transactions(shop: JmsShop) -> None:
    factory = JmsConnectionFactory(shop.broker)
    with shop.manager.begin() as transaction, factory.connect() as context:
        context.send(ORDERS, "at once")
        transaction.set_rollback_only()
        transaction.rollback()
    factory.close()
    assert shop.browse(ORDERS) == ["at once"]


def test_factory_refuses_resource_of_other_manager(shop: JmsShop) -> None:
    with pytest.raises(InvalidInput, match="resource 'broker' does not belong to transaction manager 'shop'"):
        JmsConnectionFactory(JmsResource("broker", shop.url), shop.manager)


def test_registry_binds_jms_and_kafka_factories_and_checks_type_at_lookup(shop: JmsShop) -> None:
    registry = Registry()
    registry.bind("jms/orders", shop.factory)
    assert registry.lookup("jms/orders") is shop.factory
    assert registry.lookup("jms/orders", JmsConnectionFactory) is shop.factory
    with pytest.raises(InvalidInput, match="is bound to a JmsConnectionFactory, not to a KafkaConnectionFactory"):
        registry.lookup("jms/orders", KafkaConnectionFactory)


def test_broker_errors_are_raised_as_client_errors(shop: JmsShop) -> None:
    with shop.manager.begin(), shop.factory.connect() as context, pytest.raises(Refused):
        context.consumer(ORDERS, selector="not a selector ==")
    with shop.factory.connect() as context, pytest.raises(Refused):
        context.consumer(ORDERS, selector="not a selector ==")
