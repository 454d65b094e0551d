"""The lines of the audit about created and deleted queues: who has caused the change, and from where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bascule.client import Acknowledge, ConnectionFactory, Context, Queue, Topic
from bascule.server.admin_access import AdminRole, Principal
from bascule.server.administrator import Administrator
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import SOON_S, Broker, called, kafka, serving, until
from tests.unit.server.served import run_async
from tests.unit.server.test_audit import lines

__all__ = ["kafka"]
ADMIN = Principal("olga", AdminRole.MANAGE, "10.0.0.9:4711")


def changes(file: Path) -> list[dict[str, Any]]:
    return [line for line in lines(file) if line["action"] in ("create queue", "delete queue")]


def connected(broker: Broker) -> Context:
    url = f"amqp://127.0.0.1:{broker.ready[-1]}"
    return ConnectionFactory(url, timeout_s=SOON_S, user="ann", password="a", client_id="desk").connect()


def use_a_named_queue(context: Context) -> None:
    context.send(Queue("orders"), "x")


def use_a_producer_without_destination(context: Context) -> None:
    context.producer().send("x", to=Queue("orders"))


def consume(context: Context) -> None:
    context.consumer(Queue("orders")).close()


def browse(context: Context) -> None:
    list(context.browse(Queue("orders")))


def use_a_temporary_queue(context: Context) -> None:
    context.temporary_queue()


def subscribe(context: Context) -> None:
    context.consumer(Topic("news")).close()


def subscribe_durably(context: Context) -> None:
    context.durable_consumer(Topic("news"), "kept").close()


def change_a_durable_subscription(context: Context) -> None:
    context.durable_consumer(Topic("news"), "kept").close()
    context.durable_consumer(Topic("news"), "kept", selector="n = 1").close()


def unsubscribe(context: Context) -> None:
    context.durable_consumer(Topic("news"), "kept").close()
    context.unsubscribe("kept")


CREATED, DELETED = "create queue", "delete queue"


@pytest.mark.parametrize(
    ("use", "actions"),
    [
        (use_a_named_queue, [CREATED]),
        (use_a_producer_without_destination, [CREATED]),
        (consume, [CREATED]),
        (browse, [CREATED]),
        (use_a_temporary_queue, [CREATED, DELETED]),  # the end of the connection deletes it
        (subscribe, [CREATED, DELETED]),
        (subscribe_durably, [CREATED]),
        (change_a_durable_subscription, [CREATED, DELETED, CREATED]),
        (unsubscribe, [CREATED, DELETED]),
    ],
)
@run_async
async def test_line_of_a_queue_names_the_client_that_caused_the_change_and_its_address(
    kafka: KafkaInMemory, tmp_path: Path, use: Any, actions: list[str]
) -> None:
    file = tmp_path / "audit.jsonl"
    async with serving(kafka, tmp_path / "data", audit={"file": file}, broker={"users": {"ann": "a"}}) as broker:

        def work() -> None:
            with connected(broker) as context:
                use(context)

        await called(work)
        await until(lambda: not broker.node.connections and len(changes(file)) >= len(actions), "the connection has ended")
    login = next(line for line in lines(file) if line["action"] == "login")
    assert login["from"].startswith("127.0.0.1:")
    assert [(line["action"], line["who"], line["from"]) for line in changes(file)] == [(each, "ann", login["from"]) for each in actions]


@run_async
async def test_line_of_a_queue_names_the_administrator(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    async with serving(kafka, tmp_path / "data", audit={"file": file}) as broker:
        act = Administrator(broker.node).act
        await act(ADMIN, "queues/create", {"name": "made"})
        await act(ADMIN, "messages/send", {"to": "sent", "body": "x"})
        await act(ADMIN, "queues/move", {"name": "sent", "to": "moved"})
        await act(ADMIN, "subscriptions/create", {"name": "kept", "topic": "news", "client_id": "desk", "user": "ann"})
        await act(ADMIN, "subscriptions/delete", {"name": "desk.kept"})
        await act(ADMIN, "queues/delete", {"name": "made"})
    assert [(line["action"], line["on"]) for line in changes(file)] == [
        (CREATED, "made"), (CREATED, "sent"), (CREATED, "moved"), (CREATED, "desk.kept"), (DELETED, "desk.kept"), (DELETED, "made"),
    ]  # fmt: skip
    assert {(line["who"], line["from"]) for line in changes(file)} == {("olga", ADMIN.peer)}
    assert [line["owner"] for line in changes(file)] == ["", "", "", "ann", "ann", ""]


@run_async
async def test_line_of_a_queue_that_the_broker_itself_deletes_names_nobody(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    address: Any = [{"match": "orders", "auto_delete_after_s": 0.05}]
    users: Any = {"users": {"ann": "a"}}
    async with serving(kafka, tmp_path / "data", audit={"file": file}, broker=users, address=address) as broker:

        def work() -> None:
            with connected(broker) as context:
                context.consumer(Queue("orders")).close()

        await called(work)
        await until(lambda: [line["action"] for line in changes(file)] == [CREATED, DELETED], "the unused queue is deleted")
    created, deleted = changes(file)
    assert (created["who"], deleted["who"], deleted["from"], deleted["owner"]) == ("ann", "", "", "ann")


@run_async
async def test_line_of_a_queue_that_returned_dead_letters_create_names_the_administrator(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    addresses: Any = [{"match": "orders", "max_delivery_attempts": 1}]
    users: Any = {"users": {"ann": "a"}}
    async with serving(kafka, tmp_path / "data", audit={"file": file}, broker=users, address=addresses) as broker:

        def work() -> None:
            with connected(broker) as context:
                context.send(Queue("orders"), "x")
                transacted = context.create_context(Acknowledge.TRANSACTED)
                with transacted.consumer(Queue("orders")) as consumer:
                    assert consumer.receive(SOON_S) is not None
                    transacted.rollback()

        await called(work)
        act = Administrator(broker.node).act
        await act(ADMIN, "queues/delete", {"name": "orders", "force": True})
        assert (await act(ADMIN, "dead-letters/return", {}))["returned"] == 1
    orders = [(line["action"], line["who"], line["from"]) for line in changes(file) if line["on"] == "orders"]
    assert orders[1:] == [(DELETED, "olga", ADMIN.peer), (CREATED, "olga", ADMIN.peer)]
