"""The admin server over a broker that only has a status."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from bascule.embedded.process import PortInUse
from bascule.server.admin import AdminServer, Status


class Broker:
    """A broker's status, to be changed at will."""

    def __init__(self) -> None:
        self.now = Status(
            bridge="demo",
            version="1",
            state="active",
            serving=True,
            reason="",
            queues=[{"name": "q", "address": "a", "routing": "anycast", "messages": 3, "bytes": 30, "delivering": 1, "consumers": 2}],
            gauges={"connections": 4},
            counters={"messages_sent": 5},
        )

    def status(self) -> Status:
        return self.now


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def served(broker: Broker, ask: Callable[[int], None]) -> None:
    async def run() -> None:
        server = AdminServer(broker, host="127.0.0.1", port=0)
        server.start()
        try:
            await asyncio.to_thread(ask, server.port)
        finally:
            await server.stop()

    asyncio.run(run())


def test_status_and_queues_are_told_as_json() -> None:
    def ask(port: int) -> None:
        code, text = get(port, "/status")
        assert code == 200
        assert json.loads(text)["queues"][0]["messages"] == 3
        assert json.loads(get(port, "/queues")[1])[0]["name"] == "q"

    served(Broker(), ask)


def test_readiness_follows_the_broker_and_liveness_the_process() -> None:
    broker = Broker()

    def ask(port: int) -> None:
        assert get(port, "/readyz") == (200, "ok\n")
        broker.now |= {"serving": False, "state": "loading", "reason": "reads the journal"}
        assert get(port, "/readyz") == (503, "reads the journal\n")
        assert get(port, "/livez") == (200, "ok\n")

    served(broker, ask)


def test_metrics_are_in_the_text_format_of_prometheus() -> None:
    def ask(port: int) -> None:
        lines = get(port, "/metrics")[1].splitlines()
        assert "bascule_serving 1.0" in lines
        assert "bascule_connections 4.0" in lines
        assert "bascule_messages_sent_total 5.0" in lines
        assert 'bascule_queue_messages{address="a",queue="q"} 3.0' in lines

    served(Broker(), ask)


def test_what_is_not_there_is_not_repeated_in_the_answer() -> None:
    def ask(port: int) -> None:
        assert get(port, "/<script>") == (404, "Not Found")

    served(Broker(), ask)


def test_a_port_in_use_is_named_with_the_flag_that_chooses_it() -> None:
    def ask(port: int) -> None:
        with pytest.raises(PortInUse, match=rf"port {port} for admin on 127.0.0.1 .* --admin-port"):
            AdminServer(Broker(), host="127.0.0.1", port=port)

    served(Broker(), ask)
