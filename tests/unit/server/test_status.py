"""The reports on queues, subscriptions, connections and branches of a working broker."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

from bascule.broker.counters import Counters
from bascule.client import ConnectionFactory, Message, Queue, Topic
from bascule.server.admin_access import LOCAL
from bascule.server.administrator import Administrator
from bascule.server.status import COUNTERS, HELP, sum_of
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import PREFIX, SOON_S, called, kafka, serving
from tests.unit.server.served import run_async

__all__ = ["kafka"]

SNAPSHOTS = f"{PREFIX}.snapshots"


@run_async
async def test_queue_subscription_and_connection_are_reported(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        admin = Administrator(broker.node)

        def work() -> None:
            factory = ConnectionFactory(f"amqp://127.0.0.1:{broker.ready[-1]}", timeout_s=SOON_S, client_id="shop")
            with factory.connect() as context:
                with context.durable_consumer(Topic("news"), "kept", selector="urgent = TRUE"):
                    pass
                context.send(Topic("news"), Message("kept", properties={"urgent": True}))
                context.send(Topic("news"), "not kept")
                for body in ("1", "2", "3"):
                    context.send(Queue("orders"), body)
                with context.consumer(Queue("orders"), selector="JMSPriority > 3") as consumer:
                    assert consumer.receive(SOON_S) is not None
                    (connection,) = asyncio.run(admin.clients())
                    assert (connection["client_id"], connection["user"], connection["mechanism"]) == ("shop", "anonymous", "ANONYMOUS")
                    assert connection["consumers"] == 1
                    assert connection["producers"] >= 1
                    queue = asyncio.run(admin.queue("orders"))
                    (told,) = queue["consumer_list"]
                    assert (told["client_id"], told["selector"], told["connection"]) == ("shop", "JMSPriority > 3", connection["id"])
                    assert queue["consumers"] == 1

        await called(work)
        queue = await admin.queue("orders")
        assert (queue["name"], queue["address"], queue["routing"], queue["messages"]) == ("orders", "orders", "anycast", 2)
        assert (queue["delivering"], queue["delayed"], queue["durable"], queue["auto_created"]) == (0, 0, True, True)
        assert (queue["consumers"], list(queue["consumer_list"]), queue["selector"], queue["full"]) == (0, [], "", False)
        assert queue["bytes"] > 0
        (subscription,) = await admin.subscriptions()
        assert (subscription["topic"], subscription["selector"], subscription["durable"]) == ("news", "urgent = TRUE", True)
        assert (subscription["messages"], subscription["delivering"], subscription["consumers"]) == (1, 0, 0)
        assert "kept" in subscription["name"]
        status = await admin.status()
        assert (status["serving"], status["state"], status["reason"], status["branches"]) == (True, "serving", "", [])
        assert status["counters"]["messages_in"] == 5
        assert status["gauges"].keys() | status["counters"].keys() == HELP.keys()
        assert status["gauges"]["queues"] == len(status["queues"])
        assert status["gauges"]["connections"] == 0
        assert status["gauges"].keys() >= {
            "connections", "journal_offset", "journal_foreign_records", "queues", "transactions_open", "branches_prepared", "epoch",
            "journal_sequence", "journal_in_flight_bytes", "memory_bodies_bytes", "spilled_bodies_bytes",
        }  # fmt: skip
        journaling = broker.node.engine.journaling
        assert (status["gauges"]["epoch"], status["gauges"]["journal_sequence"]) == (journaling.epoch, journaling.confirmed_sequence)


@run_async
async def test_last_snapshot_is_reported_with_its_time_and_size(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        admin = Administrator(broker.node)
        gauges = (await admin.status())["gauges"]
        assert (gauges["snapshot_timestamp_seconds"], gauges["snapshot_bytes"]) == (0, 0)
        before_s = time.time()
        await broker.send("orders", "1")
        await broker.epoch.housekeeping.rounds()
        gauges = (await admin.status())["gauges"]
        assert before_s <= gauges["snapshot_timestamp_seconds"] <= time.time()
        stored = {bytes(each.key): each.value for each in kafka.partition(SNAPSHOTS).records.values() if each.value is not None}
        assert gauges["snapshot_bytes"] == max(len(value) for key, value in stored.items() if key.endswith(b"/0")) > 0


@run_async
async def test_prepared_branch_is_reported_until_it_has_ended(kafka: KafkaInMemory, tmp_path: Path) -> None:
    xid = branch(new_gtrid("shop", 0), "jms")
    async with serving(kafka, tmp_path) as broker:
        admin = Administrator(broker.node)
        await broker.send("orders", "order")
        before_ms = time.time() * 1000

        def prepare(resource: JmsResource) -> None:
            handle = resource.start(xid, timeout_s=60)
            assert handle.consumer(Queue("orders")).receive(SOON_S) is not None
            for number in range(2):
                handle.send(Queue("bills"), f"bill {number}")
            resource.end(xid, success=True)
            resource.prepare(xid)

        resource = JmsResource("jms", f"amqp://127.0.0.1:{broker.ready[-1]}", timeout_s=SOON_S)
        await called(prepare, resource)
        (told,) = (await admin.status())["branches"]
        assert (told["xid"], told["state"], told["sent"], told["received"]) == (str(xid), "prepared", 2, 1)
        assert told["bytes"] > 0
        assert before_ms - 1 <= told["since_ms"] <= time.time() * 1000
        assert (await admin.status())["gauges"]["branches_prepared"] == 1
        assert await admin.act(LOCAL, "branches/commit", {"xid": str(xid)})
        assert [each["state"] for each in (await admin.status())["branches"]] == ["heuristic-commit"]
        await admin.act(LOCAL, "branches/forget", {"xid": str(xid)})
        assert (await admin.status())["branches"] == []
        await called(resource.close)


def test_counters_of_two_epochs_are_added_by_name() -> None:
    fields = [field.name for field in dataclasses.fields(Counters)]
    one, other = Counters(*range(len(fields))), Counters(*[100] * len(fields))
    assert dataclasses.asdict(sum_of(one, other)) == {name: 100 + number for number, name in enumerate(fields)}
    assert COUNTERS.keys() == set(fields)
