"""What a broker reports to its service manager, over a real datagram socket."""

from __future__ import annotations

from pathlib import Path

from bascule.embedded.service_manager import ServiceManager
from bascule.server.status import BrokerRole
from tests.support.kafka_in_memory import KafkaInMemory
from tests.support.service_manager import notify_socket
from tests.unit.server.broker_process import Broker, kafka, serving, until
from tests.unit.server.served import run_async

__all__ = ["kafka"]


@run_async
async def test_broker_reports_its_role_to_the_service_manager(kafka: KafkaInMemory, tmp_path: Path) -> None:
    with notify_socket(tmp_path / "notify", watchdog_s=0.3) as manager:
        async with serving(kafka, tmp_path / "1") as first:
            assert first.node.role is BrokerRole.ACTIVE
            standby = Broker(kafka, tmp_path / "2", service_manager=ServiceManager(manager.environ))
            await until(lambda: standby.standing_by, "it stands by")
            assert standby.node.role is BrokerRole.STANDBY
            messages = manager.messages()
            assert messages[0] == ["WATCHDOG=1", "STATUS=waiting: starting"]
            assert ["READY=1", "STATUS=standby"] in messages
            await until(lambda: ["WATCHDOG=1"] in manager.messages(), "the watchdog is served")
        await standby.serves()
        messages = []
        await until(lambda: messages.extend(manager.messages()) or ["READY=1", "STATUS=active"] in messages, "the new role is reported")
        await standby.stop()
        assert ["STOPPING=1", "STATUS=stopping"] in manager.messages()
