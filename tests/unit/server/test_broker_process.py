"""A broker process on Kafka in memory: stored data survives a restart, and the end of an epoch disconnects the clients."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from bascule.client import Queue
from bascule.config import Settings
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, InvalidInput, Unavailable
from bascule.embedded.process import PortInUse
from bascule.journal.records import KEY_OF_KIND, KafkaOrigin, Kind, Op, Send, SendFlag, encode_record, json_entry, send_entry
from bascule.kafka import admin
from bascule.kafka.guards import UnsafeTopic
from bascule.server import ingress
from bascule.server.effects import LoopEffects
from bascule.server.node import run_broker
from bascule.server.status import holds_of
from bascule.testing.broker import message_bytes
from bascule.threads.clock import elapsed_s
from bascule.writer.position import COMMON, DIVERT, Position, lag_group, position_key, position_partition
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import PREFIX, SOON_S, Broker, called, kafka, serving, until
from tests.unit.server.served import run_async

__all__ = ["kafka"]
JOURNAL, INGRESS, SNAPSHOTS, STORE = (f"{PREFIX}.{name}" for name in ("journal", "ingress", "snapshots", "store"))


def epoch_start(epoch: int = 0) -> bytes:
    return encode_record(Kind.EPOCH, epoch, 0, json_entry(Op.EPOCH, {"exclusive": []}))


def from_kafka(offset: int, address: str = "orders") -> bytes:
    """Return a record of the ingress topic."""
    body = message_bytes(f"kafka {offset}")
    send = Send(SendFlag.SOURCE | SendFlag.DURABLE, Routing.ANYCAST, 4, 0, 0, 0, address, (), (), (), KafkaOrigin("topic", 0, offset), body)
    return encode_record(Kind.DATA, 0, 0, send_entry(send))


# -- stored data --------------------------------------------------------------------------------------------------------


@run_async
async def test_message_survives_restart(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "1", "2", "3")
        assert await broker.receive("orders", 1) == ["1"]
    await until(lambda: kafka.open_clients() == [], "all clients of Kafka are gone, with the last thread that has one")
    journaled = kafka.partition(JOURNAL).end
    async with serving(kafka, tmp_path) as broker:
        assert broker.epoch.following._protocol.next_offset >= journaled
        assert await broker.receive("orders", 2) == ["2", "3"]


@run_async
async def test_housekeeping_keeps_journal_short_and_loses_nothing(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, journal={"snapshot_records": 100}) as broker:
        await broker.send("old", "oldest")
        for _ in range(4):
            await housekept(broker)
            assert len({key.rpartition(b"/")[0] for key in keys(kafka, SNAPSHOTS) if key != b"journal"}) == 1
        assert keys(kafka, STORE)
        assert kafka.partition(JOURNAL).first > 60
        before = kafka.partition(JOURNAL).end
        await broker.send("orders", *map(str, range(110)))
        await until(lambda: holds_of(broker.node)[-1].offset > before, "a round begins by itself")
    async with serving(kafka, tmp_path) as broker:
        assert await broker.receive("old", 1) == ["oldest"]
        assert await broker.receive("orders", 110) == [str(number) for number in range(110)]
        for _ in range(3):
            await housekept(broker)
        assert not keys(kafka, STORE)


def keys(kafka: KafkaInMemory, topic: str) -> set[bytes]:
    """Return the records that are not deleted."""
    found: dict[bytes, bytes | None] = {}
    for _, record in sorted(kafka.partition(topic).records.items()):
        found[record.key or b""] = record.value
    return {key for key, value in found.items() if value is not None}


@run_async
async def test_snapshot_that_is_not_stored_does_no_harm(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "1")
        kafka.topics[SNAPSHOTS].config["max.message.bytes"] = "1"
    assert not [key for key in keys(kafka, SNAPSHOTS) if key != b"journal"]
    async with serving(kafka, tmp_path) as broker:
        assert await broker.receive("orders", 1) == ["1"]


@run_async
async def test_broker_on_a_suspended_machine_ends_its_epoch(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    suspended_s = 60.0
    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "1")
        # The monotonic clock stops with the machine; asyncio's timers notice nothing.
        monkeypatch.setattr(LoopEffects, "now_s", staticmethod(lambda: elapsed_s() + suspended_s))
        await broker.serves(2)
        assert "this process was suspended for 60 s" in caplog.text
        assert await broker.receive("orders", 1) == ["1"]


# -- the ingress topic -----------------------------------------------------------------------------------------------------


@run_async
async def test_ingress_takes_committed_records_only_and_each_once(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        partition = kafka.partition(INGRESS)
        kafka.put(INGRESS, from_kafka(0), unbound=b"keep", transaction="aborted")
        with kafka.turn:
            partition.mark("aborted", committed=False)
        kafka.put(INGRESS, from_kafka(1), unbound=b"keep", transaction="committed")
        await asyncio.sleep(3 * ingress.READ_S)
        assert broker.node.engine.ingress_positions == {}
        with kafka.turn:
            partition.mark("committed", committed=True)
        assert await broker.receive("orders", 1) == ["kafka 1"]
    kafka.put(INGRESS, from_kafka(2), unbound=b"keep")
    async with serving(kafka, tmp_path) as broker:
        assert await broker.receive("orders", 1) == ["kafka 2"]
        assert broker.node.engine.queue("orders").held_messages == 0


@pytest.mark.parametrize("recreated", [False, True])
@run_async
async def test_ingress_is_trimmed_to_position_in_snapshot_unless_topic_was_recreated(
    kafka: KafkaInMemory, tmp_path: Path, recreated: bool
) -> None:
    async with serving(kafka, tmp_path, journal={"snapshot_records": 100}) as broker:
        for number in range(3):
            kafka.put(INGRESS, from_kafka(number), unbound=b"keep")
        assert len(await broker.receive("orders", 3)) == 3
        if recreated:
            kafka.create(INGRESS, retention_ms="-1")
            for _ in range(4):
                kafka.put(INGRESS, from_kafka(7), unbound=b"keep")
        await housekept(broker)
        assert kafka.partition(INGRESS).first == (0 if recreated else 3)


@run_async
async def test_ingress_stops_and_reports_a_recreated_topic(kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.broker.ingress_tail.LOOK_S", 0.0)
    async with serving(kafka, tmp_path) as broker:
        kafka.put(INGRESS, from_kafka(1), unbound=b"keep")
        assert await broker.receive("orders", 1) == ["kafka 1"]
        assert broker.node.tail is not None
        with pytest.raises(InvalidInput, match="was not recreated; there is nothing to reset"):
            await broker.node.tail.reset()
        kafka.create(INGRESS, retention_ms="-1")
        await until(lambda: "was recreated" in broker.node.trouble, "the broker says what is wrong")
        assert broker.node.serving
        kafka.put(INGRESS, from_kafka(7), unbound=b"keep")
        assert broker.node.tail is not None
        await broker.node.tail.reset()
        assert await broker.receive("orders", 1) == ["kafka 7"]


@run_async
async def test_open_transaction_that_blocks_ingress_is_reported(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bascule.broker.ingress_tail.LOOK_S", 0.0)
    async with serving(kafka, tmp_path) as broker:
        kafka.put(INGRESS, from_kafka(1), unbound=b"keep", transaction="open")
        await until(lambda: "transaction" in broker.node.trouble, "the broker says what is wrong")
        with kafka.turn:
            kafka.partition(INGRESS).mark("open", committed=True)
        await until(lambda: broker.node.trouble == "", "nothing is wrong any more")


# -- the end of an epoch ---------------------------------------------------------------------------------------------------


@run_async
async def test_ended_epoch_closes_its_connections_and_kafka_clients(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        with await called(broker.connect) as context:
            await called(context.send, Queue("orders"), "1")
            ended = broker.epoch
            before = kafka.open_clients()
            assert {"consumer", "producer"} <= set(before)
            kafka.put(JOURNAL, epoch_start(), KEY_OF_KIND[Kind.EPOCH])  # of another broker
            with pytest.raises(BasculeError):
                await called(context.send, Queue("orders"), "2")
            await broker.serves(2)
            await until(lambda: not context.connected, "the client is told")
        assert ended is not broker.epoch
        assert ended.ended
        del ended
        await until(lambda: len(kafka.open_clients()) <= len(before), "the clients of the epoch that ended are gone")
        assert await broker.receive("orders", 1) == ["1"]


@run_async
async def test_failed_append_ends_epoch_and_next_epoch_has_all_answered_messages(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "1")
        kafka.fail("delivery", KafkaError._MSG_TIMED_OUT)
        with pytest.raises(BasculeError):
            await broker.send("orders", "2")
        await broker.serves(2)
        await broker.send("orders", "3")
        assert await broker.receive("orders", 2) == ["1", "3"]


@run_async
async def test_foreign_record_in_journal_is_skipped_and_counted(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "1")
        kafka.put(JOURNAL, b"foreign")
        await broker.send("orders", "2")
        await until(lambda: broker.node.foreign_records == 1, "the record is counted")
        assert await broker.receive("orders", 2) == ["1", "2"]
        assert len(broker.ready) == 1


@run_async
async def test_stalled_broker_disconnects_clients_and_accepts_them_again(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, journal={"append_timeout_s": 1}) as broker:
        send_released = kafka.held["send"] = threading.Event()
        with await called(broker.connect) as context, pytest.raises(BasculeError):
            await called(context.send, Queue("orders"), "1")
        assert not broker.node.serving
        assert "Kafka has not stored" in broker.node.reason
        send_released.set()
        await until(lambda: broker.node.serving, "the broker serves again")
        await broker.send("orders", "2")


@run_async
async def test_stalled_broker_starts_a_new_epoch_if_a_new_client_can_append(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, journal={"append_timeout_s": 1}) as broker:
        stalled = broker.epoch
        send_released = kafka.held["send"] = threading.Event()
        with await called(broker.connect) as context, pytest.raises(BasculeError):
            await called(context.send, Queue("orders"), "1")
        await until(lambda: broker.epoch not in (stalled, None), "the next epoch begins")
        send_released.set()
        await broker.serves(2)
        await broker.send("orders", "2")
        assert await broker.receive("orders", 1) == ["2"]


# -- elections -------------------------------------------------------------------------------------------------------------


@run_async
async def test_standby_takes_over_with_all_stored_messages_when_broker_stops(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path / "1") as first:
        standby = Broker(kafka, tmp_path / "2")
        await until(lambda: standby.standing_by, "it stands by")
        assert (standby.node.serving, standby.node.reason) == (False, "standing by")
        await first.send("orders", "1")
        await until(lambda: standby.node.journal_offset >= first.node.journal_offset - 1, "it follows")
        await first.stop()
        await standby.serves()
        assert await standby.receive("orders", 1) == ["1"]
        await standby.stop()


@run_async
async def test_broker_that_loses_election_stops_serving_at_once(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path / "1") as first:
        with await called(first.connect) as context:
            standby = Broker(kafka, tmp_path / "2")
            await until(lambda: standby.standing_by, "it stands by")
            (member,) = [each for each in kafka.members[f"{PREFIX}.brokers"] if each.instance == first.settings.instance]
            member.expire()
            await standby.serves()
            await until(lambda: not context.connected, "the clients of the first broker are let go")
            assert not first.node.serving
            await standby.stop()


@run_async
async def test_lost_election_ends_epoch_before_other_broker_writes(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        with await called(broker.connect) as context:
            (member,) = kafka.members[broker.settings.journal_topics.brokers]
            with kafka.turn:
                member.target = set()
                kafka.turn.notify_all()
            await until(lambda: not context.connected, "the clients are let go")
        assert not broker.node.serving
        assert len(broker.ready) == 1


@run_async
async def test_election_that_kafka_does_not_confirm_starts_no_epoch(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.fail("commit", KafkaError.ILLEGAL_GENERATION)
    async with serving(kafka, tmp_path):
        assert len([value for value in kafka.values(JOURNAL) if value]) >= 1
        assert not kafka.faults["commit"]


@run_async
async def test_broker_ends_when_another_broker_has_same_instance_name(kafka: KafkaInMemory, tmp_path: Path) -> None:
    name = {"broker": {"instance": "twin"}}
    first = Broker(kafka, tmp_path / "1", **name)
    await first.serves()
    second = Broker(kafka, tmp_path / "2", **name)
    with pytest.raises(BasculeError, match="another process runs as 'twin'"):
        await asyncio.wait_for(asyncio.gather(first.task, second.task), SOON_S)
    for each in (first, second):
        if not each.task.done():
            await each.stop()


# -- refused starts, and messages -----------------------------------------------------------------------------


@run_async
async def test_broker_does_not_start_with_unsafe_topic_setting(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create(JOURNAL, retention_ms="1000")
    with pytest.raises(UnsafeTopic, match=r"retention\.ms=1000"):
        await Broker(kafka, tmp_path).task


@run_async
async def test_broker_does_not_start_without_kafka(kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "REACH_TIMEOUT_S", 0.1)
    kafka.fail("list_topics", KafkaError._TRANSPORT, times=1000)
    with pytest.raises(Unavailable, match=r"no Kafka answers at memory \(kafka\.bootstrap_servers\)"):
        await Broker(kafka, tmp_path).task


@run_async
async def test_amqp_port_in_use_error_names_port(kafka: KafkaInMemory, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} for AMQP on 127.0.0.1 cannot be used"):
            await asyncio.wait_for(Broker(kafka, tmp_path, broker={"port": port}).task, SOON_S)


@run_async
async def test_unsafe_topic_setting_is_reported_until_it_is_corrected(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        assert broker.node.trouble == ""
        kafka.topics[JOURNAL].config["retention.ms"] = "1000"
        await until(lambda: "retention.ms=1000" in broker.node.trouble, "it is said")
        kafka.fail("list_topics", KafkaError._TRANSPORT)
        kafka.topics[JOURNAL].config["retention.ms"] = "-1"
        await until(lambda: broker.node.trouble == "", "nothing is wrong any more")


@run_async
async def test_broker_does_not_start_when_journal_record_limit_is_below_message_limit(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        largest = broker.node.max_message_bytes
    kafka.topics[JOURNAL].config["max.message.bytes"] = "2000000"
    kafka.topics[STORE].config["max.message.bytes"] = "2000000"
    with pytest.raises(UnsafeTopic, match=r"max\.message\.bytes=2000000"):
        await Broker(kafka, tmp_path).task
    assert largest > 2_000_000


@run_async
async def test_lowered_record_limit_of_journal_applies_to_next_epoch(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        kafka.topics[JOURNAL].config["max.message.bytes"] = "2000000"
        kafka.put(JOURNAL, epoch_start(), KEY_OF_KIND[Kind.EPOCH])
        with pytest.raises(BasculeError):
            await broker.send("orders", "1")
        await broker.serves(2)
        assert broker.node.max_message_bytes < 2_000_000
        await broker.send("orders", "2")


@run_async
async def test_admin_server_reports_status_and_health(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "1", "2")
        port = broker.life._admin_port

        def get(path: str) -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=SOON_S) as answer:
                return str(answer.read().decode())

        assert '"orders"' in await called(get, "/queues")
        assert "bascule_messages_in_total 2" in await called(get, "/metrics")
        assert broker.node.counters.messages_in == 2


@pytest.fixture
def _own_tuning() -> Iterator[None]:
    """Restore the setting of the test process that a broker changes, and check that it changes no other."""
    collection, interval_s = (gc.get_threshold(), list(gc.callbacks)), sys.getswitchinterval()
    yield
    assert (gc.get_threshold(), list(gc.callbacks)) == collection
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("kafka", "_own_tuning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_broker_process_serves_until_it_is_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    told: list[tuple[int, int]] = []

    def ready(port: int, admin_port: int) -> None:
        told.append((port, admin_port))
        os.kill(os.getpid(), number)

    given: Any = {"kafka": {"bootstrap_servers": "memory"}, "embedded": {"data_dir": tmp_path}}
    settings = Settings(**given, broker={"port": 0, "session_timeout_s": 6}, admin={"port": 0}, journal={"prefix": PREFIX})
    for _ in range(2):  # the data directory is free again
        run_broker(settings, on_ready=ready, on_standby=lambda *_: None)
    assert len(told) == 2
    assert all(port > 0 and admin_port > 0 for port, admin_port in told)


def test_second_broker_in_data_directory_is_refused(kafka: KafkaInMemory, tmp_path: Path) -> None:

    given: Any = {"kafka": {"bootstrap_servers": "memory"}, "embedded": {"data_dir": tmp_path}}
    settings = Settings(**given)
    with (tmp_path / "broker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another broker uses the data directory"):
            run_broker(settings, on_ready=lambda *_: None, on_standby=lambda *_: None)


# -- retention of the journal ------------------------------------------------------------------------------------------


@run_async
async def test_journal_is_kept_from_position_of_pipeline_and_reason_is_reported(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, journal={"snapshot_records": 100}) as broker:
        kafka.create(f"{PREFIX}.positions", 16, cleanup_policy="compact")
        journal_id = kafka.topics[JOURNAL].id
        for pipeline, offset, members, owner in ((COMMON, 20, ("d",), "driver"), (f"{DIVERT}slow", 5, ("slow",), "")):
            key = position_key(pipeline, JOURNAL, 0)
            position = Position(JOURNAL, journal_id, 0, offset, members=members, owner=owner)
            kafka.put(f"{PREFIX}.positions", position.encode(), key.encode(), partition=position_partition(key))
        group = kafka.offsets[lag_group(PREFIX, broker.settings.bridge.id, f"{DIVERT}slow")]
        group[JOURNAL, 0] = (5, "the topic is not there")
        await housekept(broker)
        holds = {hold.name: hold for hold in holds_of(broker.node) if hold.name}
        assert (holds[f"{DIVERT}slow"].offset, holds[f"{DIVERT}slow"].reason) == (5, "the topic is not there")
        assert (holds[COMMON].offset, holds[COMMON].reason) == (20, "")
        assert kafka.partition(JOURNAL).first == 5
        await housekept(broker)
        holds = {hold.name: hold for hold in holds_of(broker.node) if hold.name}
        assert "has not moved since" in holds[COMMON].reason


@run_async
async def test_pipeline_beyond_its_quota_no_longer_pins_journal(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, journal={"snapshot_records": 100, "pinned_bytes": 200}) as broker:
        kafka.create(f"{PREFIX}.positions", 16, cleanup_policy="compact")
        key = position_key(f"{DIVERT}slow", JOURNAL, 0)
        position = Position(JOURNAL, kafka.topics[JOURNAL].id, 0, 5, members=("slow",), owner="")
        kafka.put(f"{PREFIX}.positions", position.encode(), key.encode(), partition=position_partition(key))
        await housekept(broker)
        assert kafka.partition(JOURNAL).first > 5


@run_async
async def test_journal_is_pinned_for_exclusive_divert_without_position(kafka: KafkaInMemory, tmp_path: Path) -> None:
    divert = {"name": "export", "from": "orders", "to": "out", "exclusive": True}
    async with serving(kafka, tmp_path, journal={"snapshot_records": 100}, divert=[divert]) as broker:
        await housekept(broker, "orders")
        (hold,) = [each for each in holds_of(broker.node) if each.name == f"{DIVERT}export"]
        assert "an exclusive divert has taken messages" in hold.reason
        assert kafka.partition(JOURNAL).first == hold.offset == 0


async def housekept(broker: Broker, queue: str = "housekeeping") -> None:
    """Send and acknowledge messages, and run a round of housekeeping."""
    await broker.send(queue, *map(str, range(20)))
    if queue != "orders":
        await broker.receive(queue, 20)
    await broker.epoch.housekeeping.rounds()
