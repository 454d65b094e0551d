"""A backup of a broker that serves, restored into a new Kafka, where a broker continues with all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bascule.backup.restoring import Restore
from bascule.client import Queue, Topic, connect
from bascule.core.errors import Unavailable
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka
from bascule.embedded.process import NotStarted
from bascule.kafka.history import TopicHistory
from bascule.xa.jms import JmsResource
from bascule.xa.resource import Vote
from bascule.xa.xid import branch
from tests.support.client import SOON_S
from tests.support.system import PYTHON_FAILOVER, System, wait_for
from tests.unit.cli.conftest import Bascule, bascule  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(900)

CONFIG = """
[journal]
snapshot_records = 100
retention_s = 0
"""
#: This number of messages causes some snapshots, after which the journal is trimmed.
MESSAGES = 300


@pytest.fixture(scope="module")
def new_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(tmp_path_factory.mktemp("new-kafka"), jvm_options=SHORT_LIVED) as running:
        yield running


def options(system: System, kafka: EmbeddedKafka, directory: Path) -> list[str]:
    """Return the options of a command with the settings of a system, and another Kafka."""
    file = directory / "command.toml"
    text = (system.data_dir / "bascule.toml").read_text().replace("[journal]\n", f'[journal]\nprefix = "{system.prefix}"\n', 1)
    file.write_text(f'bridge.id = "{system.prefix}"\nkafka.bootstrap_servers = "{kafka.bootstrap}"\n{text}')
    return ["--config", str(file)]


def churn(system: System) -> None:
    """Send and receive messages until the journal has been trimmed."""
    queue = Queue("churn")
    with connect(system.url) as context, context.consumer(queue) as consumer:
        for number in range(MESSAGES):
            context.send(queue, f"{number}")
            assert consumer.receive(SOON_S) is not None
    wait_for(lambda: first_offset(system) > 0, "the journal to be trimmed")


def first_offset(system: System) -> int:
    return TopicHistory({"bootstrap.servers": system.bootstrap}, f"{system.prefix}.journal", 0).earliest()


def bodies(system: System, queue: str) -> list[object]:
    with connect(system.url) as context:
        return [message.body for message in context.browse(Queue(queue))]


def test_backup_of_a_serving_broker_continues_in_a_new_kafka(
    kafka: EmbeddedKafka,
    new_kafka: EmbeddedKafka,
    tmp_path: Path,
    bascule: Bascule,  # noqa: F811
) -> None:
    saved = tmp_path / "saved"
    xid = branch(b"backup", "jms")
    with System(kafka.bootstrap, tmp_path / "old", prefix="saved-jms", config=CONFIG) as system:
        with connect(system.url, client_id="desk") as context, context.durable_consumer(Topic("news"), "reader"):
            pass
        with connect(system.url) as context:
            context.send(Queue("old"), "waits since before the first snapshot")
            context.send(Topic("news"), "news 1")
        churn(system)
        with connect(system.url) as context:
            for number in range(20):
                context.send(Queue("orders"), f"order {number}")
            with context.consumer(Queue("orders")) as consumer:
                assert [consumer.receive(SOON_S).body for _ in range(5)] == [f"order {number}" for number in range(5)]  # type: ignore[union-attr]
        resource = JmsResource("jms", PYTHON_FAILOVER.format(system.url), timeout_s=SOON_S)
        handle = resource.start(xid, timeout_s=60)
        assert handle.consumer(Queue("orders")).receive(SOON_S).body == "order 5"  # type: ignore[union-attr]
        handle.send(Queue("bills"), "bill 5")
        resource.end(xid, success=True)
        assert resource.prepare(xid) is Vote.YES
        done = bascule("backup", str(saved), *options(system, kafka, tmp_path), "--format", "json")
        assert done.returncode == 0, done.stderr
        trimmed = first_offset(system)
        assert trimmed > 0
        with connect(system.url) as context:
            context.send(Queue("orders"), "after the backup")
        resource.close()

    again = bascule("backup", str(saved), *options(system, kafka, tmp_path))
    assert again.returncode == 2
    assert "has a backup" in again.stderr

    broken = Restore({"bootstrap.servers": new_kafka.bootstrap}, JournalTopics("saved-jms"), "saved-jms", saved, progress=die)
    with pytest.raises(Unavailable, match="died"):
        broken.run()
    restored = System(new_kafka.bootstrap, tmp_path / "new", prefix="saved-jms", config=CONFIG)
    with pytest.raises(NotStarted):
        restored.broker.start()
    assert "retention.ms" in restored.broker.said()

    settings = options(restored, new_kafka, tmp_path)
    done = bascule("restore", str(saved), *settings, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert first_offset(restored) == json.loads((saved / "manifest.json").read_text())["topics"][-1]["parts"][0]["first"]
    assert bascule("restore", str(saved), *settings).returncode == 2
    with restored:
        assert bodies(restored, "orders") == [f"order {number}" for number in range(6, 20)]
        assert bodies(restored, "old") == ["waits since before the first snapshot"]
        resource = JmsResource("jms", PYTHON_FAILOVER.format(restored.url), timeout_s=SOON_S)
        assert list(resource.recover()) == [xid]
        resource.commit(xid)
        resource.close()
        assert bodies(restored, "bills") == ["bill 5"]
        with connect(restored.url, client_id="desk") as context, context.durable_consumer(Topic("news"), "reader") as reader:
            message = reader.receive(SOON_S)
            assert message is not None
            assert message.body == "news 1"
        churn(restored)
        restored.broker.restart()
        assert bodies(restored, "orders") == [f"order {number}" for number in range(6, 20)]


def die(topic: str, count: int) -> None:
    """Interrupt a restore while it writes the journal."""
    if topic == "saved-jms.journal" and count == 10:
        raise Unavailable("died")
