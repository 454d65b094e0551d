"""If an error ends the loop of a thread or task of the product, the process ends, or its owner fails with the reason."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bascule.adapter.inbound.activation import Activation
from bascule.adapter.inbound.worker_pool import WorkerPool
from bascule.amqp.connection import Connection
from bascule.amqp.events import ConnectionClosed
from bascule.cli.load import Load
from bascule.cli.load_plan import LoadPlan
from bascule.client import ConnectionFactory, ConnectionLost, Queue
from bascule.client.session import ClientSession
from bascule.core.errors import BasculeError, Unavailable
from bascule.testing.xa import ModelLog
from bascule.threads.lasting import EXIT_CODE
from bascule.xa import TransactionManager
from bascule.xa.reaper import Reaper
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for
from tests.unit.adapter.test_activation import Hanging
from tests.unit.client.server import obliging, server
from tests.unit.server.served import run_async

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "bascule"
WAIT_S = 60.0 * SLOWNESS

#: Threads of the broker's process: scripts that start each thread on Kafka in memory and make it fail.
BEGIN = """
import asyncio, logging, tempfile, threading, time
from pathlib import Path
import pytest
from tests.support.kafka_in_memory import KafkaInMemory, SETTINGS
logging.basicConfig()
kafka = KafkaInMemory(pytest.MonkeyPatch())
kafka.create("topic")
def fail(*arguments, **more):
    raise AssertionError("injected")
"""
PROCESS = {
    ("kafka/log.py", "journal-delivery"): """
from bascule.kafka.log import JournalWriter
JournalWriter(SETTINGS, "topic", 0, fail).append(b"D", b"value")
""",
    ("kafka/election.py", "election"): """
from bascule.kafka.election import Election
Election(SETTINGS, "group", "topic", "name", 6.0, on_change=fail, on_error=print)
""",
    ("kafka/broadcast.py", "broadcast"): """
from bascule.kafka.broadcast import Broadcast
broadcast = Broadcast(SETTINGS, "topic", fail)
while True:  # the thread reads from the end of the topic that it finds
    broadcast.send(b"value")
    time.sleep(0.1)
""",
    ("server/topics.py", "topic-watch"): """
from bascule.config import Settings
from bascule.server import topics
topics.WATCH_S, topics.guard = 0.01, fail
topics.TopicWatch(SETTINGS, Settings())
""",
    ("server/users_watch.py", "users-watch"): """
from pathlib import Path
from bascule.server import users_watch
users_watch.stamp = fail
async def watch():
    users_watch.UsersWatch(None, Path("users"), fail)
    await asyncio.sleep(60)
asyncio.run(watch())
""",
    ("server/tls_watch.py", "tls-watch"): """
from bascule.config import Settings
from bascule.server import tls_watch
tls_watch.ListenerTls.look = fail
tls_watch.amqp_tls, tls_watch.held_certificates = lambda tls: None, lambda tls, where: []
tls_watch.TlsWatch(Settings.model_validate({"broker": {"tls": {"certificate": "certificate"}}})).start()
""",
    ("threads/hangup.py", "hangup"): """
import os, signal
os.isatty = lambda descriptor: False
from bascule.threads import hangup
hangup.on_hangup(fail)
os.kill(os.getpid(), signal.SIGHUP)
""",
    ("threads/prompt_end.py", "prompt-end"): """
import os
from bascule.threads import prompt_end
os.read = fail
prompt_end.end_within(60)
""",
    ("server/ingress.py", "ingress-tail"): """
from bascule.server.ingress import IngressTail
from bascule.testing.broker import BrokerInMemory
from tests.support.kafka_in_memory import MemoryConsumer
from tests.support.speed import SLOWNESS
MemoryConsumer.consume = lambda *_: exit(3)
async def tail():
    IngressTail(SETTINGS, "topic", 0, BrokerInMemory().engine, asyncio.get_running_loop())
    await asyncio.sleep(60)
asyncio.run(tail())
""",
}
#: Tasks of the event loop of a broker's process, in the same way.
PROCESS_TASKS = {
    ("server/life.py", "audit"): """
from bascule.server.audit import AuditTrail
from tests.unit.server.broker_process import Broker
AuditTrail.poll = fail
async def broker():
    Broker(kafka, Path(tempfile.mkdtemp()))
    await asyncio.sleep(60)
asyncio.run(broker())
""",
    ("server/life.py", "service-manager"): """
from bascule.embedded.service_manager import ServiceManager
from tests.unit.server.broker_process import Broker
ServiceManager.alive = fail
async def broker():
    Broker(kafka, Path(tempfile.mkdtemp()), service_manager=ServiceManager({"NOTIFY_SOCKET": "/nowhere"}))
    await asyncio.sleep(60)
asyncio.run(broker())
""",
    ("server/admin.py", "admin"): """
import uvicorn
from tests.unit.server.broker_process import Broker
uvicorn.Server.main_loop = fail
async def broker():
    Broker(kafka, Path(tempfile.mkdtemp()))
    await asyncio.sleep(60)
asyncio.run(broker())
""",
    ("server/key_set.py", "key-set"): """
from bascule.server.key_set import KeySet
KeySet._update = fail
async def keys():
    KeySet(None, (), 60.0).start()
    await asyncio.sleep(60)
asyncio.run(keys())
""",
}
#: Threads of a user's process, which fail their owner, and the tests that make them fail.
OWNED = {
    ("adapter/inbound/activation.py", "inbound"): "test_activation_stops_and_says_why_when_thread_fails",
    ("adapter/inbound/activation.py", "take"): "test_activation_stops_and_says_why_when_thread_fails",
    ("adapter/inbound/worker_pool.py", "watch"): "test_activation_stops_and_says_why_when_thread_fails",
    ("adapter/inbound/worker_pool.py", "worker"): "test_activation_stops_and_says_why_when_thread_fails",
    ("cli/load.py", "bascule-bench"): "test_failed_thread_of_a_load_is_an_error_of_its_report",
    ("client/blocking.py", "listener"): "test_failed_listener_thread_is_reported_and_closes_the_connection",
    ("client/thread.py", "connection"): "test_error_that_ends_connection_thread_is_reported",
    ("kafka/appender.py", "appender"): "test_appender_with_failed_thread_uses_new_client",
    ("pipelines/lineage_sender.py", "openlineage"): "test_failed_thread_ends_the_events_alone",
    ("threads/metrics_server.py", "metrics"): "test_failed_thread_of_metrics_server_refuses_connections",
    ("tracing/metrics.py", "metrics-export"): "test_failed_export_thread_ends_the_export_alone",
    ("xa/manager.py", "recovery"): "test_manager_begins_nothing_when_thread_of_recovery_fails",
    ("xa/manager.py", "reaper"): "test_manager_begins_nothing_when_thread_of_reaper_fails",
}


#: Other tasks in attributes: their owner awaits them, or they contain every error.
KEPT_TASKS = {
    "client/aio.py: self._task",
    "client/thread.py: self._task",
    "server/brokers.py: self._asking",
    "server/connection.py: self._login",
    "server/takeover.py: self._watching",
}
#: Tasks of a user's process, in the same way.
OWNED_TASKS = {("client/aio.py", "listener"): "test_failed_listener_task_is_reported_and_closes_the_connection"}


@pytest.mark.parametrize(
    ("kind", "place"),
    [pytest.param(kind, place, id=place[1]) for kind, places in (("thread", PROCESS), ("task", PROCESS_TASKS)) for place in places],
)
def test_process_ends_with_log_line_when_thread_or_task_fails(kind: str, place: tuple[str, str]) -> None:
    script = f"{BEGIN}{(PROCESS | PROCESS_TASKS)[place]}\nthreading.Event().wait({WAIT_S})"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, capture_output=True, text=True,
        timeout=2 * WAIT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == EXIT_CODE, ended.stderr
    assert f"{kind} failed {kind}={place[1]}" in ended.stderr
    assert "process ends thread=" in ended.stderr


@pytest.mark.parametrize("thread", ["_poll", "_housekeep", "_take", "_watch", "_work"])
def test_activation_stops_and_says_why_when_thread_fails(monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    owner = Activation if hasattr(Activation, thread) else WorkerPool
    monkeypatch.setattr(owner, thread, fail)
    failing = Hanging(monkeypatch, "nothing")
    failing.activation.start()
    try:
        wait_for(lambda: "stopped: injected" in failing.activation.status().trouble, "the activation to say it")
        assert not failing.activation.status().running
    finally:
        failing.activation.stop(0.0)


def test_manager_begins_nothing_when_thread_of_recovery_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionManager, "_recover", fail)
    with TransactionManager("shop", ModelLog(), []) as manager:
        wait_for(lambda: manager._failures, "the thread to fail")
        with pytest.raises(Unavailable, match=r"the recovery thread failed: .*injected.*\. Close the manager and open it again"):
            manager.begin()


def test_manager_begins_nothing_when_thread_of_reaper_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reaper, "run", fail)
    with TransactionManager("shop", ModelLog(), []) as manager:
        wait_for(lambda: manager._failures, "the thread to fail")
        with pytest.raises(Unavailable, match=r"cannot begin a transaction: .*injected.*\. Close the manager and open it again"):
            manager.begin()


def test_failed_listener_thread_is_reported_and_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BasculeError] = []
    closed: list[Any] = []

    def react(connection: Connection, event: Any) -> None:
        closed.extend([event] if isinstance(event, ConnectionClosed) else [])
        obliging(connection, event)

    monkeypatch.setattr(ClientSession, "next_for_listener", fail)
    with server(react) as url:
        context = ConnectionFactory(url, on_exception=errors.append).connect()
        context.consumer(Queue("queue")).listener = print
        wait_for(lambda: errors, "an error at the application")
        with pytest.raises(ConnectionLost, match="no listener is called any more"):
            context.create_context(timeout_s=5)
        assert "no listener is called any more" in str(errors[0])
        assert not context.connected
        wait_for(lambda: closed, "the broker to hear of the end, which takes back what was not acknowledged")
        context.close(timeout_s=1)


@run_async
async def test_failed_listener_task_is_reported_and_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BasculeError] = []
    monkeypatch.setattr(ClientSession, "next_for_listener", fail)
    with server(obliging) as url:
        context = await ConnectionFactory(url, on_exception=errors.append).connect_async()
        (await context.consumer(Queue("queue"))).listener = print
        async with asyncio.timeout(WAIT_S):
            while not errors:
                await asyncio.sleep(0.01)
        with pytest.raises(ConnectionLost, match="no listener is called any more"):
            await context.send(Queue("queue"), "x")
        assert "injected" in str(errors[0])
        assert not context.connected
        await context.close()


def test_failed_thread_of_a_load_is_an_error_of_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "_marks", fail)
    with server(obliging) as url:
        found = Load(ConnectionFactory(url), LoadPlan(consumers=0, topic=True, warm_up_s=0, seconds=0.1, arrival_s=1)).run()
    assert (found.errors, found.examples) == ({"AssertionError": 1}, {"AssertionError": "injected"})


def fail(*_: object, **__: object) -> None:
    raise AssertionError("injected")


@pytest.mark.parametrize(
    ("function", "process", "owned"), [("lasting_thread", PROCESS, OWNED), ("lasting_task", PROCESS_TASKS, OWNED_TASKS)]
)
def test_each_lasting_thread_and_task_of_the_product_has_a_test(
    function: str, process: Mapping[tuple[str, str], str], owned: Mapping[tuple[str, str], str]
) -> None:
    """A new call of ``lasting_thread`` or ``lasting_task`` needs a row in one of the tables, and a test."""
    calls = Counter(
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if function in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    )
    assert calls == Counter(file for file, _ in (*process, *owned))
    tests = {
        node.name
        for path in (ROOT / "tests" / "unit").rglob("test_*.py")
        if any(name in (source := path.read_text()) for name in owned.values())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert set(owned.values()) <= tests


def test_task_whose_end_nobody_sees_is_a_lasting_task() -> None:
    """An attribute that keeps a task hides its error, because asyncio reports it only when nobody refers to the task."""
    kept: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source if "create_task(" in source else "")):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and "create_task(" in ast.unparse(node.value):
                kept[f"{path.relative_to(SOURCE)}: {ast.unparse(node.targets[0])}"] += 1
    assert set(kept) == KEPT_TASKS
