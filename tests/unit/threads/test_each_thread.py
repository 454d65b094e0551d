"""If an error ends the loop of a thread of the product, the process ends, or the owner of the thread fails with the reason."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
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

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "bascule"
WAIT_S = 60.0 * SLOWNESS

#: Threads of the broker's process: scripts that start each thread on Kafka in memory and make it fail.
BEGIN = """
import asyncio, logging, threading, time
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
    ("tracing/metrics.py", "metrics-export"): "test_failed_export_thread_ends_the_export_alone",
    ("xa/manager.py", "recovery"): "test_manager_begins_nothing_when_thread_of_recovery_fails",
    ("xa/manager.py", "reaper"): "test_manager_begins_nothing_when_thread_of_reaper_fails",
}


@pytest.mark.parametrize("place", PROCESS, ids=lambda place: place[1])
def test_process_ends_with_log_line_when_thread_fails(place: tuple[str, str]) -> None:
    script = f"{BEGIN}{PROCESS[place]}\nthreading.Event().wait({WAIT_S})"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, capture_output=True, text=True,
        timeout=2 * WAIT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == EXIT_CODE, ended.stderr
    assert f"thread failed thread={place[1]}" in ended.stderr
    assert f"process ends thread={place[1]}" in ended.stderr


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
        with pytest.raises(ConnectionLost, match="the listener thread failed"):
            context.create_context(timeout_s=5)
        assert "the listener thread failed" in str(errors[0])
        assert not context.connected
        wait_for(lambda: closed, "the broker to hear of the end, which takes back what was not acknowledged")
        context.close(timeout_s=1)


def test_failed_thread_of_a_load_is_an_error_of_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "_marks", fail)
    with server(obliging) as url:
        found = Load(ConnectionFactory(url), LoadPlan(consumers=0, topic=True, warm_up_s=0, seconds=0.1, arrival_s=1)).run()
    assert (found.errors, found.examples) == ({"AssertionError": 1}, {"AssertionError": "injected"})


def fail(*_: object, **__: object) -> None:
    raise AssertionError("injected")


def test_each_lasting_thread_of_the_product_has_a_test() -> None:
    """A new call of ``lasting_thread`` needs a row in one of the tables, and a test."""
    calls = Counter(
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "lasting_thread" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lasting_thread"
    )
    assert calls == Counter(file for file, _ in (*PROCESS, *OWNED))
    tests = {
        node.name
        for path in (ROOT / "tests" / "unit").rglob("test_*.py")
        if any(name in (source := path.read_text()) for name in OWNED.values())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }
    assert set(OWNED.values()) <= tests
