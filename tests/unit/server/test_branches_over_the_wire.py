"""The broker as a resource of transactions, from ``JmsResource`` over the management node to the branches in the journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bascule.client import Message, Queue, Refused
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.core.xid import Xid
from bascule.xa import Vote
from bascule.xa.errors import BranchRolledBack, Code, DuplicateXid, OutOfOrder, ResourceFailed, UnknownXid
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import SOON_S, Broker, called, kafka, serving
from tests.unit.server.served import run_async

__all__ = ["kafka"]
ORDERS, BILLS = Queue("orders"), Queue("bills")
MANAGEMENT = Queue(MANAGEMENT_ADDRESS)
XID = {"formatId": 7, "gtrid": "67", "bqual": "62"}


def resource_of(broker: Broker) -> JmsResource:
    return JmsResource("jms", f"amqp://127.0.0.1:{broker.ready[-1]}", timeout_s=SOON_S)


def new_xid() -> Xid:
    return branch(new_gtrid("shop", 0), "jms")


def worked(resource: JmsResource, xid: Xid) -> None:
    """Receive an order, and send a bill."""
    handle = resource.start(xid, timeout_s=60)
    order = handle.consumer(ORDERS).receive(SOON_S)
    assert order is not None
    handle.send(BILLS, f"bill of {order.body}")
    resource.end(xid, success=True)


async def with_order(broker: Broker, steps: Callable[[JmsResource], None]) -> None:
    """Run ``steps`` with a resource and a broker that has one order."""

    def run() -> None:
        resource = resource_of(broker)
        try:
            steps(resource)
        finally:
            resource.close()

    await broker.send("orders", "order")
    await called(run)


def waiting(broker: Broker) -> tuple[list[Any], list[Any]]:
    """Return the orders and bills that consumers may get now."""
    with broker.connect() as context:
        orders, bills = ([message.body for message in context.browse(queue)] for queue in (ORDERS, BILLS))
    return orders, bills


@run_async
async def test_prepared_branch_outlives_broker_and_is_committed_by_another_process(kafka: KafkaInMemory, tmp_path: Path) -> None:
    xid = new_xid()

    def prepare(resource: JmsResource) -> None:
        worked(resource, xid)
        assert resource.prepare(xid) is Vote.YES

    async with serving(kafka, tmp_path) as broker:
        await with_order(broker, prepare)
        assert await called(waiting, broker) == ([], [])
    async with serving(kafka, tmp_path) as broker:
        assert await called(waiting, broker) == ([], [])
        resource = resource_of(broker)
        assert list(await called(resource.recover)) == [xid]
        await called(resource.commit, xid)
        assert await called(waiting, broker) == ([], ["bill of order"])
        with pytest.raises(UnknownXid, match="committed"):
            await called(resource.commit, xid)
        assert list(await called(resource.recover)) == []
        await called(resource.close)


@run_async
async def test_prepared_branch_is_rolled_back_by_another_process(kafka: KafkaInMemory, tmp_path: Path) -> None:
    xid = new_xid()
    async with serving(kafka, tmp_path) as broker:

        def steps(resource: JmsResource) -> None:
            worked(resource, xid)
            assert resource.prepare(xid) is Vote.YES
            other = resource_of(broker)
            try:
                other.rollback(xid)
                with pytest.raises(UnknownXid):
                    other.rollback(xid)
            finally:
                other.close()

        await with_order(broker, steps)
        assert await called(waiting, broker) == (["order"], [])


@run_async
async def test_branch_is_committed_in_one_phase_or_rolled_back_before_it_is_prepared(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:

        def steps(resource: JmsResource) -> None:
            undone, failed, done = new_xid(), new_xid(), new_xid()
            worked(resource, undone)
            resource.rollback(undone)
            assert waiting(broker) == (["order"], [])
            handle = resource.start(failed, timeout_s=60)
            handle.send(BILLS, "of a failure")
            resource.end(failed, success=False)
            with pytest.raises(OutOfOrder):
                resource.prepare(failed)
            resource.rollback(failed)
            worked(resource, done)
            resource.commit(done, one_phase=True)
            assert waiting(broker) == ([], ["bill of order"])

        await with_order(broker, steps)


@run_async
async def test_branch_without_work_votes_read_only_and_ends(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:

        def steps(resource: JmsResource) -> None:
            xid = new_xid()
            resource.start(xid, timeout_s=60)
            with pytest.raises((DuplicateXid, OutOfOrder)):
                resource.start(xid, timeout_s=60)
            resource.end(xid, success=True)
            assert resource.prepare(xid) is Vote.READ_ONLY
            assert list(resource.recover()) == []
            with pytest.raises(UnknownXid):
                resource.forget(xid)

        await with_order(broker, steps)


@run_async
async def test_unprepared_branch_ends_with_its_broker(kafka: KafkaInMemory, tmp_path: Path) -> None:
    xid = new_xid()
    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "order")
        resource = resource_of(broker)
        await called(worked, resource, xid)
    with pytest.raises((BranchRolledBack, ResourceFailed)):
        await called(resource.prepare, xid)
    await called(resource.close)
    async with serving(kafka, tmp_path) as broker:
        again = resource_of(broker)
        assert list(await called(again.recover)) == []
        await called(again.close)
        assert await called(waiting, broker) == (["order"], [])


@run_async
async def test_successive_branches_share_connection(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "first")

        def steps(resource: JmsResource) -> None:
            for _ in range(2):
                xid = new_xid()
                worked(resource, xid)
                resource.commit(xid, one_phase=True)
            assert len(broker.node.connections) == 1

        await with_order(broker, steps)
        assert await called(waiting, broker) == ([], ["bill of first", "bill of order"])


WRONG = [
    ({}, "type 'bascule.xa' has the operations"),
    ({"type": "bascule.xa", "operation": "explode"}, "has the operations prepare"),
    ({"type": "other", "operation": "commit", **XID}, "type 'bascule.xa' has the operations"),
    ({"type": "bascule.xa", "operation": "commit"}, "formatId None must be an integer"),
    ({"type": "bascule.xa", "operation": "commit", **XID, "formatId": "7"}, "formatId '7' must be an integer"),
    ({"type": "bascule.xa", "operation": "commit", **XID, "gtrid": "6"}, "gtrid '6' must be bytes as hexadecimal digits"),
    ({"type": "bascule.xa", "operation": "commit", **XID, "bqual": 62}, "bqual 62 must be bytes as hexadecimal digits"),
    ({"type": "bascule.xa", "operation": "commit", **XID, "gtrid": "67" * 65}, "64"),
    ({"type": "bascule.xa", "operation": "prepare", **XID, "txnId": "zz"}, "txnId 'zz' must be transaction ids as hexadecimal"),
]


@run_async
async def test_invalid_request_is_answered_with_the_fault_and_the_valid_values(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:

        def ask() -> list[tuple[Any, Any, str]]:
            with broker.connect() as context:
                answers = [context.request(MANAGEMENT, Message(properties=dict(properties))) for properties, _ in WRONG]
            return [(each.properties["statusCode"], each.properties["xaCode"], each.properties["statusDescription"]) for each in answers]

        answers = await called(ask)
        assert len(answers) == len(WRONG)
        for (status, code, description), (properties, expected) in zip(answers, WRONG, strict=True):
            assert (status, code) == (400, Code.XAER_INVAL), properties
            assert expected in description, properties


@run_async
async def test_request_without_reply_address_is_carried_out(kafka: KafkaInMemory, tmp_path: Path) -> None:
    xid = new_xid()
    fields = {"type": "bascule.xa", "formatId": xid.format_id, "gtrid": xid.gtrid.hex(), "bqual": xid.bqual.hex()}
    async with serving(kafka, tmp_path) as broker:

        def steps(resource: JmsResource) -> None:
            worked(resource, xid)
            assert resource.prepare(xid) is Vote.YES
            with broker.connect() as context:
                context.send(MANAGEMENT, Message(properties={**fields, "operation": "commit"}))
                with context.consumer(BILLS) as consumer:
                    bill = consumer.receive(SOON_S)
            assert bill is not None
            assert bill.body == "bill of order"

        await with_order(broker, steps)


@run_async
async def test_consumer_on_management_node_is_refused(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:

        def steps(resource: JmsResource) -> None:
            with broker.connect() as context, pytest.raises(Refused):
                context.consumer(MANAGEMENT)
            assert list(resource.recover()) == []

        await with_order(broker, steps)
