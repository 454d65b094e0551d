"""The admin server over a broker that has only a status."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bascule.broker.administration import InUse
from bascule.broker.errors import UnknownAddress
from bascule.config.tls import Tls
from bascule.core.errors import Unavailable
from bascule.embedded.process import PortInUse
from bascule.server.admin import AdminServer
from bascule.server.admin_access import Principal
from bascule.server.listener_tls import server_context
from bascule.server.status import (
    BrokerRole,
    BrokerStatus,
    ConnectionStatus,
    MemoryStatus,
    QueueDetail,
    QueueStatus,
    RetentionHoldStatus,
    SubscriptionStatus,
)
from bascule.server.tls import client_context
from tests.support.certificates import Authority

QUEUE = QueueStatus(
    name="q", address="a", routing="anycast", messages=3, bytes=30, delivering=1, delayed=0, consumers=2, durable=True
)  # fmt: skip

PIN = RetentionHoldStatus(keeper="pipeline", name="divert:idle", offset=7, records=12, bytes=34, reason="disabled", released=False)


MEMORY = MemoryStatus(
    limit_bytes=1000, used_bytes=830, blocked="too much", parts={"bodies": 630, "queues": 200}, spilled_bytes=40, spill_bytes=50,
    spill_limit_bytes=60,
)  # fmt: skip


class Broker:
    """A broker's status that tests can change."""

    def __init__(self) -> None:
        self.now = BrokerStatus(
            bridge="demo",
            version="1",
            state="active",
            serving=True,
            reason="",
            queues=[QUEUE],
            pins=[PIN],
            memory=MEMORY,
            users=[],
            gauges={"connections": 4},
            counters={"messages_in": 5},
        )

        self.acted: list[tuple[str, Mapping[str, Any]]] = []
        self.contained: list[tuple[str, str]] = []

    def trouble(self) -> str:
        return "" if self.now["serving"] else self.now["reason"] or self.now["state"]

    def role(self) -> BrokerRole | None:
        if self.now["serving"]:
            return BrokerRole.ACTIVE
        return BrokerRole.STANDBY if self.now["state"] == "standby" else None

    async def status(self) -> BrokerStatus:
        return self.now

    async def status_page(self) -> dict[str, Any]:
        return dict(self.now)

    async def queues(self) -> list[QueueStatus]:
        return self.now["queues"]

    async def queue(self, name: str) -> QueueDetail:
        if name != "a/b":
            raise UnknownAddress(f"there is no queue {name!r}")
        return QueueDetail(**QUEUE, auto_created=True, selector="", no_local="", full=False, consumer_list=[], settings={})

    async def subscriptions(self) -> list[SubscriptionStatus]:
        return []

    async def clients(self) -> list[ConnectionStatus]:
        return [ConnectionStatus(id="127.0.0.1:5", client_id="c", user="ann", mechanism="PLAIN", producers=1, consumers=0, transactions=0)]

    async def dead_letters(self, queue: str, count: int) -> list[dict[str, Any]]:
        return [{"queue": queue or "DLQ", "count": count}]

    def contain(self, error: Exception, path: str) -> None:
        self.contained.append((path, repr(error)))

    async def look(self, name: str, parameters: Mapping[str, str]) -> object:
        return {"name": name, "parameters": dict(parameters)}

    async def act(self, principal: Principal, action: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self.acted.append((action, arguments))
        match arguments:
            case {"name": "busy"}:
                raise InUse("has consumers")
            case {"name": "later"}:
                raise Unavailable("Kafka is away")
            case {"name": "fault"}:
                raise KeyError("a fault of ours")
        return {"purged": 3}


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def post(port: int, path: str, body: str = "{}", **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body.encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")


def served(broker: Broker, ask: Callable[[int], None], **options: Any) -> None:
    async def run() -> None:
        server = AdminServer(broker, host="127.0.0.1", port=0, **options)
        server.start()
        try:
            await asyncio.to_thread(ask, server.port)
        finally:
            await server.stop()

    asyncio.run(run())


def test_status_and_queues_are_reported_as_json() -> None:
    def ask(port: int) -> None:
        code, text = get(port, "/status")
        assert code == 200
        assert json.loads(text)["queues"][0]["messages"] == 3
        assert json.loads(get(port, "/queues")[1])[0]["name"] == "q"

    served(Broker(), ask)


def test_readiness_reports_broker_state_and_liveness_reports_process() -> None:
    broker = Broker()

    def ask(port: int) -> None:
        assert get(port, "/readyz") == get(port, "/active") == (200, "active\n")
        broker.now |= {"serving": False, "state": "loading", "reason": "reads the journal"}
        assert get(port, "/readyz") == get(port, "/active") == (503, "reads the journal\n")
        assert get(port, "/livez") == (200, "ok\n")

    served(broker, ask)


def test_standby_is_ready_and_not_active() -> None:
    broker = Broker()
    broker.now |= {"serving": False, "state": "standby", "reason": "standing by"}

    def ask(port: int) -> None:
        assert get(port, "/readyz") == (200, "standby\n")
        assert get(port, "/active") == (503, "standing by\n")

    served(broker, ask)


def test_metrics_report_memory_by_part_and_blocked_producers() -> None:
    def ask(port: int) -> None:
        lines = get(port, "/metrics")[1].splitlines()
        for line in (
            'bascule_memory_bytes{part="bodies"} 630.0',
            'bascule_memory_bytes{part="queues"} 200.0',
            "bascule_memory_limit_bytes 1000.0",
            "bascule_memory_used_bytes 830.0",
            "bascule_spill_bytes 50.0",
            "bascule_spill_limit_bytes 60.0",
            "bascule_producers_blocked 1.0",
        ):
            assert line in lines

    served(Broker(), ask)


def test_metrics_are_in_the_text_format_of_prometheus() -> None:
    def ask(port: int) -> None:
        lines = get(port, "/metrics")[1].splitlines()
        assert "bascule_serving 1.0" in lines
        assert "bascule_connections 4.0" in lines
        assert "bascule_messages_in_total 5.0" in lines
        assert "# HELP bascule_messages_in_total Messages accepted from producers and ingresses" in lines
        assert 'bascule_queue_messages{address="a",queue="q"} 3.0' in lines
        assert 'bascule_journal_pinned_records{keeper="pipeline",name="divert:idle"} 12.0' in lines
        assert 'bascule_journal_pinned_bytes{keeper="pipeline",name="divert:idle"} 34.0' in lines

    served(Broker(), ask)


def test_an_unknown_path_is_not_repeated_in_the_answer() -> None:
    def ask(port: int) -> None:
        assert get(port, "/<script>") == (404, '{"error":"there is no such path"}')

    served(Broker(), ask)


def test_admin_port_in_use_error_names_port_and_flag() -> None:
    def ask(port: int) -> None:
        with pytest.raises(PortInUse, match=rf"port {port} for admin on 127.0.0.1 .* --admin-port"):
            AdminServer(Broker(), host="127.0.0.1", port=port)

    served(Broker(), ask)


def test_one_queue_is_reported_in_detail_whatever_its_name() -> None:
    def ask(port: int) -> None:
        code, text = get(port, "/queues?name=a%2Fb")
        assert (code, json.loads(text)["auto_created"]) == (200, True)
        assert get(port, "/queues?name=x") == (404, '{"error":"there is no queue \'x\'"}')

    served(Broker(), ask)


def test_subscriptions_connections_and_dead_letters_are_reported() -> None:
    def ask(port: int) -> None:
        assert get(port, "/subscriptions") == (200, "[]")
        assert json.loads(get(port, "/connections")[1])[0]["user"] == "ann"
        assert json.loads(get(port, "/dead-letters?count=2")[1]) == [{"queue": "DLQ", "count": 2}]
        assert get(port, "/dead-letters?count=0")[0] == 400

    served(Broker(), ask)


def test_an_action_is_carried_out_with_its_arguments() -> None:
    broker = Broker()

    def ask(port: int) -> None:
        assert post(port, "/queues/purge", '{"name": "q"}') == (200, {"purged": 3})
        assert broker.acted == [("queues/purge", {"name": "q"})]
        assert get(port, "/queues/purge")[0] == 405
        assert get(port, "/queues/nothing")[0] == 404

    served(broker, ask)


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ('{"name": "busy"}', 409, "has consumers"),
        ('{"name": "later"}', 503, "Kafka is away"),
        ("[]", 400, "the arguments must be a JSON object"),
        ("{", 400, "the arguments are not valid JSON: "),
        ('{"name": "' + "x" * 70_000 + '"}', 400, "the arguments have more than 65536 bytes"),
    ],
)
def test_errors_of_actions_are_answered_with_status_and_text(body: str, code: int, text: str) -> None:
    def ask(port: int) -> None:
        answer = post(port, "/queues/delete", body)
        assert answer[0] == code
        assert answer[1]["error"].startswith(text)

    served(Broker(), ask)


def test_the_admin_server_uses_tls_with_a_certificate(authority: Authority) -> None:
    server = authority.issue("admin")

    def ask(port: int) -> None:
        with urllib.request.urlopen(
            f"https://127.0.0.1:{port}/livez", context=client_context(server.certificate, "admin.tls"), timeout=10
        ) as answer:
            assert answer.read() == b"ok\n"

    served(Broker(), ask, tls=lambda: server_context(Tls(certificate=server.certificate, key=server.key), "admin.tls"))


def test_error_in_admin_request_is_contained_and_next_request_is_answered() -> None:
    broker = Broker()

    def ask(port: int) -> None:
        code, answer = post(port, "/queues/purge", json.dumps({"name": "fault"}))
        assert (code, answer) == (500, {"error": "the broker failed to answer; see the broker's log"})
        assert broker.contained == [("/queues/purge", "KeyError('a fault of ours')")]
        assert post(port, "/queues/purge", json.dumps({"name": "q"}))[0] == 200

    served(broker, ask)


@pytest.mark.parametrize("path", ["/status", "/queues", "/metrics", "/readyz"])
def test_error_in_admin_page_is_contained(path: str) -> None:
    broker = Broker()
    del broker.now["queues"], broker.now["serving"]  # type: ignore[misc]

    def ask(port: int) -> None:
        code, _ = get(port, path)
        assert (code, [where for where, _ in broker.contained]) == ((200, []) if path == "/status" else (500, [path]))

    served(broker, ask)
