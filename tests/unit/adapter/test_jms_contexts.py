"""Contexts of a JmsConnectionFactory with a whole broker: inside transactions, outside of them, and in both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from bascule.client import (
    Acknowledge,
    Context,
    IllegalState,
    InvalidDestination,
    Message,
    Queue,
    TemporaryQueue,
    Topic,
)
from bascule.core.errors import InvalidInput
from bascule.threads.background import in_background
from bascule.xa import TransactionTimedOut
from bascule.xa.errors import NoTransaction
from bascule.xa.jms import JmsResource
from tests.support.system import wait_for
from tests.unit.adapter.broker_in_thread import JmsShop, broker, consumers, kafka, shop
from tests.unit.server.broker_process import SOON_S, Broker

__all__ = ["broker", "kafka", "shop"]
ORDERS, BILLS, PRICES = Queue("orders"), Queue("bills"), Topic("prices")


class ApplicationError(Exception):
    """An error of the application."""


def body(message: Message | None) -> object:
    assert message is not None
    return message.body


# -- within a transaction


def test_received_message_returns_on_rollback_and_is_consumed_once_on_commit(shop: JmsShop) -> None:
    def work() -> Message:
        with shop.factory.connect() as context:
            order = context.consumer(ORDERS).receive(SOON_S)
            assert order is not None
            context.send(BILLS, f"bill of {order.body}")
            shop.manager.enlist(shop.database).append("row")
        return order

    shop.send(ORDERS, "one")
    with suppress(ApplicationError), shop.manager.begin():
        work()
        raise ApplicationError
    assert (shop.browse(ORDERS), shop.browse(BILLS), shop.database.durable.committed) == (["one"], [], [])
    with shop.manager.begin():
        assert work().redelivered
        with shop.manager.suspended():
            assert (shop.browse(ORDERS), shop.browse(BILLS)) == ([], [])
    assert (shop.browse(ORDERS), shop.browse(BILLS), shop.database.durable.committed) == ([], ["bill of one"], ["row"])
    with shop.manager.begin(), shop.factory.connect() as context:
        assert context.consumer(ORDERS).receive_no_wait() is None


def test_producer_in_transaction_supports_all_options_and_reports_completion(shop: JmsShop) -> None:
    results: list[tuple[str | None, object]] = []
    with shop.manager.begin(), shop.factory.connect() as context:
        producer = context.producer(ORDERS, persistent=False, priority=7, time_to_live_s=60.0)
        producer.send(Message("plain", properties={"region": "EU"}))
        future = producer.send_async("asked", on_done=lambda message, error: results.append((message.message_id, error)))
        assert producer.send_many(["three", "four"]) == 2
        assert body(future.result(SOON_S)) == "asked"
        context.producer(BILLS, delivery_delay_s=0.01).send("later")
    assert results == [(future.result().message_id, None)]
    with shop.other_client() as other:
        consumer = other.consumer(ORDERS)
        first = consumer.receive(SOON_S)
        assert first is not None
        assert (first.body, first.persistent, first.priority, first.properties) == ("plain", False, 7, {"region": "EU"})
        assert first.expiration_ms - first.timestamp_ms == 60_000
        assert [body(consumer.receive(SOON_S)) for _ in range(3)] == ["asked", "three", "four"]
        late = other.consumer(BILLS).receive(SOON_S)
        assert late is not None
        assert late.delivery_time_ms > late.timestamp_ms


def test_selectors_browsers_and_receive_no_wait_work_in_transaction(shop: JmsShop) -> None:
    with shop.factory.connect() as context:
        for number in range(3):
            context.send(ORDERS, Message(str(number), properties={"number": number}))
    with shop.manager.begin(), shop.factory.connect() as context:
        assert [message.body for message in context.browse(ORDERS, selector="number <> 1")] == ["0", "2"]
        consumer = context.consumer(ORDERS, selector="number = 1")
        assert consumer.selector == "number = 1"
        assert body(consumer.receive_no_wait()) == "1"
        assert consumer.receive_no_wait() is None
        assert [message.body for message in context.consumer(ORDERS, prefetch=10).messages(0.05)] == ["0", "2"]
    assert shop.browse(ORDERS) == []


def test_subscriptions_are_released_at_end_of_transaction_and_queue_consumers_are_kept(shop: JmsShop, broker: Broker) -> None:
    def receive(consumer: Callable[[Context], Any]) -> object:
        with shop.manager.begin(), shop.factory.connect() as context:
            message = consumer(context).receive(0.05)
            return None if message is None else message.body

    durable, shared, named = (
        lambda context: context.durable_consumer(PRICES, "mine", selector="kind = 'p'"),
        lambda context: context.shared_consumer(PRICES, "ours"),
        lambda context: context.shared_durable_consumer(PRICES, "all"),
    )
    assert [receive(each) for each in (durable, shared, named, lambda context: context.consumer(PRICES))] == [None] * 4
    with shop.factory.connect() as context:
        context.send(PRICES, Message("9.99", properties={"kind": "p"}))
    # The subscription that ends with its consumers is empty; the others have the message that was sent between two transactions.
    assert [receive(each) for each in (durable, shared, named)] == ["9.99", None, "9.99"]
    assert [receive(each) for each in (durable, named)] == [None, None]
    with shop.manager.begin(), shop.factory.connect() as context:
        for name in ("mine", "all"):
            context.unsubscribe(name)
        with pytest.raises(InvalidDestination):
            context.unsubscribe("mine")
        context.consumer(ORDERS).close()
    # The only other consumer is that of the transaction manager's temporary queue for answers.
    assert {name: count for name, count in consumers(broker).items() if count and not name.startswith("temp.")} == {ORDERS.name: 1}


def test_subscription_consumer_closed_in_transaction_can_be_taken_by_next_transaction(shop: JmsShop) -> None:
    with shop.manager.begin(), shop.factory.connect() as context:
        with context.durable_consumer(PRICES, "mine") as consumer:
            with shop.manager.suspended():
                shop.send(PRICES, "1")  # type: ignore[arg-type]
            assert body(consumer.receive(SOON_S)) == "1"
        with context.durable_consumer(PRICES, "mine") as again:
            assert again.receive_no_wait() is None
        with pytest.raises(IllegalState, match="closed"):
            consumer.receive(0.0)
    with shop.manager.begin(), shop.factory.connect() as context:
        assert context.durable_consumer(PRICES, "mine").receive_no_wait() is None
    with shop.factory.connect() as context:
        context.unsubscribe("mine")


def test_reply_is_allowed_and_request_is_refused_in_transaction(shop: JmsShop) -> None:
    def answer() -> None:
        with shop.manager.begin(), shop.factory.connect() as context:
            request = context.consumer(ORDERS).receive(SOON_S)
            assert request is not None
            context.reply(request, f"re: {request.body}")

    answering = in_background(answer, "test-answer")
    with shop.factory.connect() as context:
        assert body(context.request(ORDERS, "one", timeout_s=SOON_S)) == "re: one"
    answering.result(SOON_S)
    with shop.manager.begin(), shop.factory.connect() as context, pytest.raises(IllegalState, match="only after the commit"):
        context.request(ORDERS, "two")


def test_reply_to_transactional_request_arrives_on_temporary_queue_of_outside_context(shop: JmsShop) -> None:
    with shop.factory.connect() as outside:
        answers = outside.temporary_queue()
        with shop.manager.begin(), shop.factory.connect() as context:
            context.send(ORDERS, Message("one", reply_to=answers))
        with shop.other_client() as other:
            request = other.consumer(ORDERS).receive(SOON_S)
            assert request is not None
            other.reply(request, "two")
        with shop.manager.begin(), shop.factory.connect() as context:
            assert body(context.consumer(answers).receive(SOON_S)) == "two"
        assert outside.consumer(answers).receive_no_wait() is None


def test_temporary_destination_is_deleted_at_end_of_its_transaction(shop: JmsShop, broker: Broker) -> None:
    made: list[TemporaryQueue] = []
    with shop.manager.begin(), shop.factory.connect() as context:
        made.append(context.temporary_queue())
        topic = context.temporary_topic()
        context.delete(topic)
        with pytest.raises(IllegalState, match="by a context outside of the transaction"):
            context.send(ORDERS, Message("?", reply_to=made[0]))
        with shop.manager.suspended(), shop.factory.connect() as outside:
            outside.send(made[0], "at once")
        assert body(context.consumer(made[0]).receive(SOON_S)) == "at once"
        assert made[0].name in consumers(broker)
    assert made[0].name not in consumers(broker)
    with suppress(ApplicationError), shop.manager.begin(), shop.factory.connect() as context:
        made.append(context.temporary_queue())
        raise ApplicationError
    assert made[1].name not in consumers(broker)


REFUSED: list[tuple[str, Callable[[Context], object]]] = [
    ("commit", lambda context: context.commit()),
    ("rollback", lambda context: context.rollback()),
    ("transaction", lambda context: context.transaction()),
    ("create_context", lambda context: context.create_context(Acknowledge.CLIENT)),
    ("stop", lambda context: context.stop()),
    ("listeners", lambda context: setattr(context.consumer(ORDERS), "listener", print)),
]


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[name for name, _ in REFUSED])
def test_calls_reserved_for_the_container_are_refused_inside_and_outside_of_transactions(
    shop: JmsShop, name: str, call: Callable[[Context], object]
) -> None:
    with shop.factory.connect() as context:
        with pytest.raises(IllegalState, match=rf"{name}(\(\) is refused|; call receive)"):
            call(context)
        context.start()
        context.acknowledge()
        context.recover()
        context.send(ORDERS, "works")
    with shop.manager.begin(), shop.factory.connect() as context:
        with pytest.raises(IllegalState, match=rf"{name}(\(\) is refused|; call receive)"):
            call(context)
        context.start()
        context.acknowledge()
        with pytest.raises(IllegalState, match="recover"):
            context.recover()
        assert body(context.consumer(ORDERS).receive(SOON_S)) == "works"
        assert (context.acknowledge_mode, context.client_id, context.connected) == (Acknowledge.TRANSACTED, "shop", True)


@pytest.mark.parametrize("mode", [Acknowledge.CLIENT, Acknowledge.INDIVIDUAL, Acknowledge.TRANSACTED])
def test_other_acknowledge_modes_than_auto_are_refused(shop: JmsShop, mode: Acknowledge) -> None:
    with pytest.raises(InvalidInput, match=f"acknowledge={mode}"):
        shop.factory.connect(mode)
    with shop.manager.begin(), pytest.raises(InvalidInput, match=f"acknowledge={mode}"):
        shop.factory.connect(mode)
    with shop.factory.connect(Acknowledge.DUPS_OK) as context:
        assert context.acknowledge_mode is Acknowledge.AUTO


def test_jms_resource_refuses_on_exception_callback() -> None:
    with pytest.raises(InvalidInput, match="on_exception"):
        JmsResource("broker", "amqp://127.0.0.1:1", on_exception=print)


# -- the end of a context


def test_objects_of_finished_transaction_are_refused_in_the_next_transaction(shop: JmsShop) -> None:
    shop.send(ORDERS, "one", "two")
    with shop.manager.begin():
        context = shop.factory.connect()
        producer, consumer, browser = context.producer(BILLS), context.consumer(ORDERS), context.browse(ORDERS)
        assert next(browser).body == "one"
        assert body(consumer.receive(SOON_S)) == "one"
    calls: list[Callable[[], object]] = [
        partial(producer.send, "late"),
        partial(producer.send_async, "late"),
        partial(producer.send_many, ["late"]),
        producer.flush,
        partial(context.send, BILLS, "late"),
        partial(consumer.receive, 0.0),
        consumer.receive_no_wait,
        lambda: next(context.browse(ORDERS)),
        partial(context.consumer, ORDERS),
        context.temporary_queue,
        partial(setattr, consumer, "prefetch", 100),
        context.start,
    ]
    for call in [partial(next, browser), *calls]:
        with pytest.raises(IllegalState, match="transaction has ended"):
            call()
    with shop.manager.begin(), shop.factory.connect() as following:
        following.send(BILLS, "in time")
        for call in calls:
            with pytest.raises(IllegalState, match="transaction has ended"):
                call()
    context.close()
    consumer.close()
    assert (shop.browse(ORDERS), shop.browse(BILLS)) == (["two"], ["in time"])


def test_contexts_of_one_transaction_share_its_branch_and_close_independently(shop: JmsShop) -> None:
    with shop.manager.begin():
        first, second = shop.factory.connect(), shop.factory.connect()
        first.send(ORDERS, "one")
        first.close()
        first.close()
        with pytest.raises(IllegalState, match="the context is closed"):
            first.send(ORDERS, "late")
        second.send(ORDERS, "two")
    assert shop.browse(ORDERS) == ["one", "two"]


def test_context_works_only_inside_or_outside_of_transaction_where_it_was_opened(shop: JmsShop) -> None:
    with shop.factory.connect() as outside:
        with shop.manager.begin() as transaction:
            inside = shop.factory.connect()
            with pytest.raises(IllegalState, match="taken outside of transactions"):
                outside.send(ORDERS, "not in a transaction")
            with shop.manager.suspended():
                outside.send(ORDERS, "at once")
                with pytest.raises(IllegalState, match=f"belongs to transaction {transaction.id}, which is not the current transaction"):
                    inside.send(ORDERS, "from outside")
                with shop.manager.begin(), pytest.raises(IllegalState, match="not the current transaction"):
                    inside.send(ORDERS, "from another transaction")
            inside.send(ORDERS, "in its transaction")
        outside.send(ORDERS, "afterwards")
    assert shop.browse(ORDERS) == ["at once", "in its transaction", "afterwards"]


def test_context_in_ended_transaction_block_sends_nothing(shop: JmsShop) -> None:
    with shop.manager.begin() as transaction:
        transaction.rollback()
        with pytest.raises(NoTransaction, match="is rolled back"):
            shop.factory.connect()
        with shop.manager.aside(), shop.factory.connect() as context:
            context.send(ORDERS, "on purpose")
    transaction = shop.manager.begin(timeout_s=0.05)
    with suppress(TransactionTimedOut), transaction:
        context = shop.factory.connect()
        wait_for(lambda: transaction.status.value == "rolled back", "the end of its time")
        with pytest.raises(IllegalState):
            context.send(ORDERS, "late")
        with pytest.raises(TransactionTimedOut):
            shop.factory.connect()
    assert shop.browse(ORDERS) == ["on purpose"]
