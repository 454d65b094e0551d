"""A broker checks the permissions of the users of pipelines: the whole broker, on Kafka in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bascule.broker.divert_access import DivertAccess
from bascule.core.destination import Routing
from bascule.core.topics import JournalTopics
from bascule.journal.records import KafkaOrigin, Kind, Send, SendFlag, encode_record, send_entry
from bascule.testing.broker import message_bytes
from bascule.writer.control import PipelineDefinition, decoded, encoded
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import PREFIX, kafka, serving, until  # noqa: F401 - a fixture
from tests.unit.server.served import run_async

NAMES = JournalTopics(PREFIX)
SETTINGS: dict[str, Any] = {
    "broker": {"roles": {"stock": ["stock"]}},
    "permission": [
        {"match": "#", "consume": ["*"], "createAddress": ["*"], "createDurableQueue": ["*"]},
        {"match": "allowed", "send": ["stock"], "createAddress": ["stock"], "createDurableQueue": ["stock"], "consume": ["*"]},
        {"match": "secret"},
    ],
    "divert": [{"name": "x", "from": "allowed", "user": "stock"}],
}


def record(address: str, content: str) -> bytes:
    send = Send(SendFlag.SOURCE, Routing.ANYCAST, 4, 0, 0, 0, address, (), (), (), KafkaOrigin("t", 0, 0), message_bytes(content))
    return encode_record(Kind.DATA, 0, 0, send_entry(send))


@run_async
async def test_broker_dead_letters_messages_that_the_user_of_their_ingress_may_not_send(
    kafka: KafkaInMemory,  # noqa: F811
    tmp_path: Path,
) -> None:
    async with serving(kafka, tmp_path, **SETTINGS) as broker:
        for address, content in (("allowed", "1"), ("refused", "2"), ("allowed", "3")):
            kafka.put(NAMES.ingress, record(address, content), unbound=b"keep", user=b"stock")
        kafka.put(NAMES.ingress, record("refused", "of the owner"), unbound=b"keep")
        assert await broker.receive("allowed", 2) == ["1", "3"]
        assert await broker.receive("refused", 1) == ["of the owner"]
        assert broker.node.counters.dead_lettered == 1
    everybody = {**SETTINGS, "permission": [{"match": "#", "send": ["*"], "consume": ["*"], "createAddress": ["*"]}]}
    async with serving(kafka, tmp_path, **everybody) as broker:
        assert await broker.receive("DLQ", 1) == ["2"], "the decision is stored, and not made again"


@run_async
async def test_active_broker_decides_about_diverts_with_a_user(kafka: KafkaInMemory, tmp_path: Path) -> None:  # noqa: F811
    def said(name: str) -> DivertAccess | None:
        topic = kafka.topics.get(NAMES.control)
        records = [] if topic is None else list(topic.partitions[0].records.values())
        values = [record.value for record in records if record.key == f"access/divert:{name}".encode() and record.value is not None]
        return decoded(DivertAccess, values[-1], name) if values else None

    async def decided(name: str) -> tuple[str, str, str]:
        await until(lambda: said(name), f"a decision about divert {name}")
        found = said(name)
        assert found is not None
        return found.user, found.address, found.reason

    async with serving(kafka, tmp_path, **SETTINGS):
        assert await decided("x") == ("stock", "allowed", "")
        definition = PipelineDefinition("1", 1, {"from": "secret", "to": "t", "user": "stock"})
        kafka.put(NAMES.control, encoded(definition), b"definition/divert:y")
        assert await decided("y") == ("stock", "secret", "user 'stock' has no permission 'consume' on address 'secret'")
