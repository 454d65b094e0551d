"""Payments of an online store: the app writes a request to Kafka; the shop charges once and confirms once, whatever dies.

python examples/shop.py [HOST:PORT of Kafka] [conninfo of PostgreSQL] [directory of its transaction log]
"""

import json
import sys
from pathlib import Path

from bascule import FileLog, Message, Topic, TransactionManager
from bascule.adapter.inbound import ActivationSpec, InboundLog, Record, ResourceAdapter, Xa
from bascule.adapter.outbound import KafkaConnectionFactory, XaSends, bind, lookup
from bascule.xa.kafka import KafkaResource
from bascule.xa.postgres import PostgresResource

TABLE = "CREATE TABLE IF NOT EXISTS charges (payment text, customer text, amount int)"


class Notifications:
    """Sends confirmations through JMS. It knows the name of a connection factory, and nothing about Kafka."""

    def confirm(self, payment: str, amount: int) -> None:
        with lookup("kafka/notifications").connection() as connection:
            message = Message({"payment": payment, "charged": amount}, properties={"payment": payment})
            connection.jms(key="property:payment").send(Topic("receipts"), message)


def main(servers: str, conninfo: str, directory: str) -> None:
    settings = {"bootstrap.servers": servers}
    database = PostgresResource("shop-db", conninfo)
    kafka = KafkaResource("kafka", settings, prefix="shop.xa", instance="shop")
    inbound = InboundLog("payments", settings, group="shop.payments")
    manager = TransactionManager("shop", FileLog(Path(directory, "shop.xalog")), [inbound, database, kafka])
    bind("kafka/notifications", KafkaConnectionFactory(settings, transacted=XaSends(manager, kafka)))
    adapter = ResourceAdapter({**settings, "group.instance.id": "shop"})  # with this name, a restarted process continues at once
    spec = ActivationSpec(topics=("payments",), group="shop.payments", workers=8, retries=3, transacted=Xa(manager, inbound, kafka))

    @adapter.endpoint(spec)
    def charge(record: Record) -> None:
        request = json.loads(record.value or b"")
        if request["amount"] <= 0:
            raise ValueError(f"a payment of {request['amount']}")  # retried, then dead-lettered
        row = (request["payment"], request["customer"], request["amount"])
        manager.enlist(database).execute("INSERT INTO charges VALUES (%s, %s, %s)", row)
        Notifications().confirm(request["payment"], request["amount"])

    with manager:
        with manager.begin() as transaction:
            transaction.enlist(database).execute(TABLE)
        adapter.run()  # until SIGTERM


if __name__ == "__main__":
    defaults = ["127.0.0.1:9092", "host=127.0.0.1 dbname=shop user=shop", "."]
    main(*sys.argv[1:], *defaults[len(sys.argv) - 1 :])
