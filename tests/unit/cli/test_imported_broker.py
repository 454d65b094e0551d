"""A broker with an imported configuration keeps what the report calls taken: users, permissions, settings of addresses and queues."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from bascule.cli.imports.importer import ImportOptions, import_sources, write_result
from bascule.client import ConnectionFactory, Queue, Topic
from bascule.client.blocking import Context
from bascule.config import load
from bascule.core.errors import BasculeError
from bascule.server.reload import ReloadSource
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import PREFIX, SOON_S, Broker, called, kafka
from tests.unit.server.served import run_async

__all__ = ["kafka"]

ROLES = "sales = ann\nshipping = bob\n"
USERS = "ann = of-ann\nbob = of-bob\n"
XML = """
<configuration xmlns="urn:activemq">
  <core xmlns="urn:activemq:core">
    <acceptors><acceptor name="amqp">tcp://127.0.0.1:0?protocols=AMQP</acceptor></acceptors>
    <security-settings>
      <security-setting match="#">
        <permission type="send" roles="sales"/>
        <permission type="consume" roles="sales,shipping"/>
      </security-setting>
      <security-setting match="orders.#">
        <permission type="send" roles="sales"/>
        <permission type="consume" roles="shipping"/>
        <permission type="createNonDurableQueue" roles="shipping"/>
      </security-setting>
    </security-settings>
    <address-settings>
      <address-setting match="#">
        <dead-letter-address>orders.dead</dead-letter-address>
        <max-delivery-attempts>1</max-delivery-attempts>
      </address-setting>
      <address-setting match="orders.few">
        <max-size-messages>2</max-size-messages>
        <address-full-policy>FAIL</address-full-policy>
      </address-setting>
    </address-settings>
    <addresses>
      <address name="orders.few"><anycast><queue name="orders.few"/></anycast></address>
      <address name="orders.both"><anycast><queue name="orders.both"/></anycast><multicast/></address>
      <address name="orders.dead"><anycast><queue name="orders.dead"/></anycast></address>
    </addresses>
  </core>
</configuration>
"""
IN_MEMORY = {"kafka": {"bootstrap_servers": "memory"}, "journal": {"prefix": PREFIX, "retention_s": 0}, "admin": {"port": 0}}


@pytest.fixture
def source(tmp_path: Path) -> ReloadSource:
    """Import, and return the written configuration for a broker on Kafka in memory."""
    for name, text in (("broker.xml", XML), ("users", USERS), ("roles", ROLES)):
        (tmp_path / name).write_text(text)
    options = ImportOptions([tmp_path / "broker.xml"], tmp_path / "bascule.toml", tmp_path / "users", tmp_path / "roles", iterations=4096)
    write_result(options, import_sources(options), force=False)
    read = partial(load, options.to, flags={**IN_MEMORY, "embedded": {"data_dir": str(tmp_path)}})
    return ReloadSource(read(), read)


def connected(broker: Broker, user: str) -> Context:
    return ConnectionFactory(f"amqp://127.0.0.1:{broker.ready[-1]}", user=user, password=f"of-{user}", timeout_s=SOON_S).connect()


def use(broker: Broker) -> None:
    """Do what the configuration allows, and try what it denies."""
    with connected(broker, "ann") as ann, connected(broker, "bob") as bob:
        ann.send(Queue("orders.few"), "1")  # exists, so ann needs no permission to create it
        ann.send(Queue("orders.few"), "2")
        with pytest.raises(BasculeError, match=r"full|limit"):
            ann.send(Queue("orders.few"), "3")
        with pytest.raises(BasculeError, match=r"'send' on address 'orders.few'"):
            bob.send(Queue("orders.few"), "4")
        with pytest.raises(BasculeError, match=r"'consume' on address 'orders.few'"):
            ann.consumer(Queue("orders.few"))
        with pytest.raises(BasculeError, match="'createAddress' on address 'other'"):
            ann.send(Queue("other"), "5")
        with bob.consumer(Queue("orders.few")) as consumer:
            assert [message.body for message in (consumer.receive(SOON_S), consumer.receive(SOON_S)) if message] == ["1", "2"]
        with bob.consumer(Queue("orders.both")) as queue, bob.consumer(Topic("orders.both")) as topic:
            ann.send(Queue("orders.both"), "queue")
            ann.send(Topic("orders.both"), "topic")
            assert [each.body for each in (queue.receive(SOON_S), topic.receive(SOON_S)) if each] == ["queue", "topic"]
    with pytest.raises(BasculeError):
        ConnectionFactory(f"amqp://127.0.0.1:{broker.ready[-1]}", user="ann", password="wrong", timeout_s=SOON_S).connect()


@run_async
async def test_broker_keeps_what_was_imported(kafka: KafkaInMemory, source: ReloadSource, tmp_path: Path) -> None:
    broker = Broker(kafka, tmp_path, reload_source=source)
    try:
        await broker.serves()
        await called(use, broker)
        settings = broker.settings
        assert [each.name for each in settings.queue] == ["orders.few", "orders.both", "orders.dead"]
    finally:
        await broker.stop()
