"""The Python client with a failover URL, while its broker is killed and its connections are cut."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from bascule.client import (
    Acknowledge,
    Context,
    InvalidDestination,
    Message,
    Queue,
    Topic,
    TransactionError,
    TransactionInDoubt,
    TransactionRolledBack,
    connect,
    connect_async,
)
from bascule.core.errors import BasculeError
from tests.support.client import SOON_S, all_bodies_async, all_in
from tests.support.proxy import Proxy
from tests.support.system import PYTHON_FAILOVER, System, paused, wait_for

#: Kills in one test: each happens in the middle of the sends.
KILLS = 3


def client(url: str, acknowledge: Acknowledge = Acknowledge.AUTO, **options: Any) -> Context:
    return connect(PYTHON_FAILOVER.format(url), acknowledge=acknowledge, timeout_s=60.0, **options)


def test_sends_survive_broker_kills_without_loss_duplicates_or_reordering(system: System, name: str) -> None:
    queue = Queue(name)
    stored: list[str] = []
    enough = threading.Event()

    def send() -> None:
        with client(system.url) as context:
            producer = context.producer(queue)
            for number in itertools.count():
                producer.send_async(str(number), on_done=lambda message, error: stored.append(str(error or message.body)))
                if enough.is_set():
                    break

    sender = threading.Thread(target=send)
    sender.start()
    for round_ in range(1, KILLS + 1):
        wait_for(lambda least=200 * round_: len(stored) > least, "sends that are answered")
        system.broker.restart()
    wait_for(lambda: len(stored) > 200 * (KILLS + 1), "sends after the last kill")
    enough.set()
    sender.join(SOON_S)
    assert stored == list(map(str, range(len(stored))))
    with client(system.url) as context:
        assert all_in(context, queue, len(stored)) == stored


def test_blocking_send_with_lost_answer_is_repeated_and_stored_once(system: System, name: str) -> None:
    queue = Queue(name)
    with Proxy(system.port) as proxy, client(proxy.url) as context:
        context.send(queue, "first")
        proxy.hold_answers()
        cutting = threading.Thread(
            target=lambda: (system.wait_depth(name, 2), proxy.cut())
        )  # the message is stored, and the answer is lost
        cutting.start()
        context.send(queue, "second")
        cutting.join()
        assert all_in(context, queue, 2) == ["first", "second"]


def test_commit_with_lost_answer_is_in_doubt_and_complete_in_the_broker(system: System, name: str) -> None:
    queue = Queue(name)

    def work(context: Context, proxy: Proxy, cutting: threading.Thread) -> None:
        with context.transaction():
            context.producer(queue).send_many(["a", "b"])
            proxy.hold_answers()
            cutting.start()

    with Proxy(system.port) as proxy, client(proxy.url) as context:
        cutting = threading.Thread(target=lambda: (system.wait_depth(name, 2), proxy.cut()))
        with pytest.raises(TransactionInDoubt, match="connection was lost"):
            work(context, proxy, cutting)
        cutting.join()
        assert all_in(context, queue, 2) == ["a", "b"]


def test_transaction_interrupted_by_broker_kill_rolls_back_and_can_be_repeated(system: System, name: str) -> None:
    source, target = Queue(f"{name}.in"), Queue(f"{name}.out")
    killed = Counter[str]()
    with client(system.url) as context, client(system.url) as reader:
        context.producer(source).send_many(["1", "2", "3"])

        def transfer(consumer: Any) -> None:
            with context.transaction():
                message = consumer.receive(SOON_S)
                context.send(target, message.body)
                if message.body == "2" and not killed["broker"]:
                    killed["broker"] += 1
                    system.broker.restart()
                    wait_for(lambda: context.connected, "the connection after the kill")

        with context.consumer(source) as consumer:
            transfer(consumer)
            with pytest.raises(TransactionRolledBack, match="do its work again"):
                transfer(consumer)
            transfer(consumer)
            transfer(consumer)
        assert all_in(reader, target, 3) == ["1", "2", "3"]
        assert all_in(reader, source, 0) == []


@pytest.mark.parametrize("received_again", [0, 3])
def test_interrupted_batch_is_redelivered_and_each_message_is_consumed_once(system: System, name: str, received_again: int) -> None:
    queue, count = Queue(name), 60
    taken: list[Any] = []
    cuts = iter(range(3))
    with client(system.url) as others:
        others.producer(queue).send_many(map(str, range(count)))
    with Proxy(system.port) as proxy, client(proxy.url) as context, context.consumer(queue) as consumer:
        while len(taken) < count:
            with suppress(TransactionError):
                with context.transaction():
                    batch = [consumer.receive(SOON_S) for _ in range(5)]
                    if next(cuts, None) is not None:
                        proxy.cut()
                        batch += [consumer.receive(SOON_S) for _ in range(received_again)]
                taken += [message and message.body for message in batch]
        assert consumer.receive(0.5) is None
    assert taken == list(map(str, range(count)))
    assert system.depth(name) == 0


def test_listener_gets_unacknowledged_messages_marked_redelivered_after_broker_kill(system: System, name: str) -> None:
    queue = Queue(name)
    seen: list[tuple[Any, bool]] = []
    with client(system.url) as sender, client(system.url, Acknowledge.CLIENT) as context:
        sender.producer(queue).send_many(["1", "2", "3"])
        context.consumer(queue).listener = lambda message: seen.append((message.body, message.redelivered))
        wait_for(lambda: len(seen) == 3, "the first deliveries")
        system.broker.restart()
        wait_for(lambda: len(seen) >= 6, "the second deliveries")
        assert seen == [("1", False), ("2", False), ("3", False), ("1", True), ("2", True), ("3", True)]


def test_durable_subscriptions_and_temporary_queues_are_restored_after_broker_kill(system: System, name: str) -> None:
    topic = Topic(name)
    with client(system.url, client_id=name) as context, client(system.url) as service:
        subscription = context.durable_consumer(topic, name)
        temporary = context.temporary_queue()
        before = temporary.name
        answers = context.consumer(temporary)
        system.broker.restart()
        service.send(topic, Message("after", reply_to=None))
        received = subscription.receive(SOON_S)
        assert received is not None
        assert received.body == "after"
        wait_for(lambda: temporary.name != before, "the new temporary queue")
        service.send(temporary, "answer")
        answer = answers.receive(SOON_S)
        assert answer is not None
        assert answer.body == "answer"
        subscription.close()
        context.unsubscribe(name)


def test_asyncio_client_loses_and_doubles_no_message_when_the_broker_is_killed(system: System, name: str) -> None:
    queue = Queue(name)

    async def main() -> list[Any]:
        async with connect_async(PYTHON_FAILOVER.format(system.url), timeout_s=60.0) as context:
            producer = context.producer(queue)
            first = [await producer.send_async(str(number)) for number in range(300)]
            system.broker.kill()
            system.broker.launch()
            second = [await producer.send_async(str(number)) for number in range(300, 600)]
            sent = [message.body for message in await asyncio.gather(*first, *second)]
            consumer = await context.consumer(queue)
            assert await all_bodies_async(consumer, len(sent)) == sent
            return sent

    assert asyncio.run(main()) == list(map(str, range(600)))
    system.broker.wait_ready()


def test_worker_repeating_failed_transactions_moves_each_message_once_across_broker_kills(system: System, name: str) -> None:
    source, target = Queue(f"{name}.in"), Queue(f"{name}.out")
    count = 60
    with client(system.url) as context, client(system.url) as reader:
        context.producer(source).send_many(map(str, range(count)))
        moved: list[Any] = []
        done = threading.Event()

        def work() -> None:
            with context.consumer(source) as consumer:
                while not done.is_set():
                    try:
                        with context.transaction():
                            message = consumer.receive(0.5)
                            if message is None:
                                continue
                            context.send(target, Message(message.body, properties={"_AMQ_DUPL_ID": str(message.body)}))
                        moved.append(message.body)
                    except TransactionError:
                        continue  # in doubt or rolled back: the message is redelivered if it was not moved

        worker = threading.Thread(target=work)
        worker.start()
        for least in (10, 30):
            wait_for(lambda least=least: len(moved) > least, "messages that have moved")
            system.broker.restart()
        system.wait_depth(target.name, count)
        done.set()
        worker.join(SOON_S)
        assert not worker.is_alive()
        assert sorted(all_in(reader, target, count), key=int) == list(map(str, range(count)))
        assert all_in(reader, source, 0) == []


def test_listener_of_deleted_queue_gets_an_error_and_other_listeners_continue(system: System, name: str) -> None:
    told: list[BasculeError] = []
    heard: list[Any] = []
    other = Queue(f"{name}.other")
    with client(system.url, on_exception=told.append) as context, client(system.url) as sender:
        for queue in (Queue(name), other):
            context.consumer(queue).listener = lambda message: heard.append(message.body)
        sender.send(Queue(name), "before")
        wait_for(lambda: heard == ["before"], "the first message")
        system.act("queues/delete", name=name, force=True)
        wait_for(lambda: told, "the error")
        sender.send(other, "after")
        wait_for(lambda: heard == ["before", "after"], "the second message")
    assert [(type(error), str(error)) for error in told] == [
        (InvalidDestination, f"amqp:resource-deleted: queue {name!r} has been deleted")
    ]


def test_receive_waits_for_slow_broker_before_it_reports_no_message(system: System, name: str) -> None:
    with client(system.url) as context, ThreadPoolExecutor(1) as receiving:
        context.send(Queue(name), "waits")
        context.stop()
        consumer = context.consumer(Queue(name))
        with paused(system.broker.pid):
            context.start()
            received = receiving.submit(consumer.receive, 0.1)
            with pytest.raises(TimeoutError):
                received.result(1.0)
        message = received.result(SOON_S)
        assert message is not None
        assert message.body == "waits"
        assert consumer.receive(0.1) is None
        context.send(Queue(name), "comes later")
        message = consumer.receive(SOON_S)
        assert message is not None
        assert message.body == "comes later"


def test_asyncio_receive_waits_for_slow_broker_before_it_reports_no_message(system: System, name: str) -> None:
    async def receive() -> None:
        async with connect_async(PYTHON_FAILOVER.format(system.url), timeout_s=60.0) as context:
            await context.send(Queue(name), "waits")
            await context.stop()
            consumer = await context.consumer(Queue(name))
            with paused(system.broker.pid):
                context.start()
                received = asyncio.create_task(consumer.receive(0.1))
                _, waiting = await asyncio.wait([received], timeout=1.0)
                assert waiting == {received}
            message = await asyncio.wait_for(received, SOON_S)
            assert message is not None
            assert message.body == "waits"
            assert await consumer.receive(0.1) is None

    asyncio.run(receive())
