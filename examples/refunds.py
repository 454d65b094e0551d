"""Refunds: a request by Kafka and its approval by JMS become a row, a record and a message, once. Two endpoints share threads.

python examples/refunds.py [HOST:PORT of Kafka] [conninfo of PostgreSQL] [URL of the JMS broker] [directory of its transaction log]
"""

import json
import sys
from pathlib import Path
from typing import Any

from bascule import FileLog, JmsResource, Message, Queue, TransactionManager
from bascule.adapter.inbound import ActivationSpec, Backoff, InboundLog, Record, ResourceAdapter, WorkerPool, Xa
from bascule.adapter.outbound import JmsConnectionFactory, bind, lookup
from bascule.xa.kafka import KafkaResource
from bascule.xa.postgres import PostgresResource

TABLES = "CREATE TABLE IF NOT EXISTS refunds (refund int, by text); CREATE TABLE IF NOT EXISTS audit (refund int)"


def main(servers: str, conninfo: str, url: str, directory: str) -> None:
    settings = {"bootstrap.servers": servers}
    database = PostgresResource("refunds-db", conninfo)
    kafka = KafkaResource("kafka", settings, prefix="refunds.xa", instance="refunds")
    broker = JmsResource("broker", url)
    requests, audits = (InboundLog(name, settings, group=f"shop.{name}") for name in ("refunds", "audit"))
    manager = TransactionManager("refunds", FileLog(Path(directory, "refunds.xalog")), [requests, audits, database, kafka, broker])
    bind("jms/shop", JmsConnectionFactory(broker, manager))
    adapter, pool = ResourceAdapter({**settings, "group.instance.id": "refunds"}), WorkerPool(4)
    wait = Backoff(first_s=0.2, factor=1, longest_s=0.2)

    def spec(log: InboundLog, topic: str, **fields: Any) -> ActivationSpec:
        return ActivationSpec(topics=(topic,), group=log.group, pool=pool, transacted=Xa(manager, log, kafka), **fields)

    @adapter.endpoint(spec(requests, "refunds", retries=1000, backoff=wait))
    def refund(record: Record) -> None:
        number = int(json.loads(record.value or b"")["refund"])
        with lookup("jms/shop", JmsConnectionFactory).connect() as context:
            approval = context.consumer(Queue("approvals"), selector=f"refund = {number}").receive_no_wait()
            if approval is None:
                raise LookupError(f"refund {number} is not approved yet")  # tried again
            manager.enlist(database).execute("INSERT INTO refunds VALUES (%s, %s)", (number, approval.body))
            manager.enlist(kafka).send("refunded", record.value, record.key)
            context.send(Queue("mails"), Message(f"refund {number} is on its way", properties={"refund": number}))

    @adapter.endpoint(spec(audits, "refunded"))
    def audit(record: Record) -> None:
        manager.enlist(database).execute("INSERT INTO audit VALUES (%s)", (json.loads(record.value or b"")["refund"],))

    with manager:
        with manager.begin() as transaction:
            transaction.enlist(database).execute(TABLES)
        adapter.run()  # until SIGTERM


if __name__ == "__main__":
    defaults = ["127.0.0.1:9092", "host=127.0.0.1 dbname=shop user=shop", "failover:(amqp://127.0.0.1:5672)", "."]
    main(*sys.argv[1:], *defaults[len(sys.argv) - 1 :])
