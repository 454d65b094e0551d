"""Kafka's MirrorMaker 2 copies the topics of an installation to another cluster: what docs/guides/disaster-recovery.md promises of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bascule.client import Queue, connect
from bascule.core.errors import Unavailable
from bascule.embedded.jars import classpath
from bascule.embedded.java import find_java
from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka
from bascule.embedded.process import Child
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from tests.scenarios.topics import Reader, create, produce
from tests.support.java import SMALL_JVM
from tests.support.system import Command, System, wait_for
from tests.unit.cli.conftest import Bascule, bascule  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

PREFIX = "mirrored"
ORDERS, STOCK = "shop.orders", "shop.stock"
DIVERT = f'[[divert]]\nname = "orders"\nfrom = "orders"\nto = "{ORDERS}"\nstart = "earliest"\n'
INGRESS = '[[ingress]]\nname = "{}"\ntopics = ["shop.stock"]\nto = "stock"\nrouting = "anycast"\nunbound = "keep"\nstart = "{}"\n'
JOURNAL = "[journal]\nsnapshot_records = 100\nretention_s = 0\n"
#: This number of messages causes a snapshot.
CHURN = 150
WAIT_S = 60.0
IDENTITY = "replication.policy.class = org.apache.kafka.connect.mirror.IdentityReplicationPolicy"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(tmp_path_factory.mktemp("other-site"), jvm_options=SHORT_LIVED) as running:
        yield running


def mirror(directory: Path, source: EmbeddedKafka, target: EmbeddedKafka, *lines: str) -> Child:
    """Start MirrorMaker 2 from one cluster to another one, with more lines of its configuration."""
    directory.mkdir(parents=True)
    logging = directory / "log4j2.properties"
    logging.write_text(
        "appender.out.type = Console\nappender.out.name = out\nappender.out.layout.type = PatternLayout\n"
        "rootLogger.level = warn\nrootLogger.appenderRef.out.ref = out\n"
    )
    single = [f"{each}replication.factor = 1" for each in (
        "", "checkpoints.topic.", "heartbeats.topic.", "offset-syncs.topic.", "offset.storage.", "status.storage.", "config.storage."
    )]  # fmt: skip
    file = directory / "mm2.properties"
    file.write_text("\n".join((
        "clusters = site, other", f"site.bootstrap.servers = {source.bootstrap}", f"other.bootstrap.servers = {target.bootstrap}",
        "site->other.enabled = true", "emit.heartbeats.enabled = false", "sync.topic.acls.enabled = false",
        "refresh.topics.interval.seconds = 2", "dedicated.mode.enable.internal.rest = false", *single, *lines,
    )))  # fmt: skip
    path = ":".join(map(str, classpath("mirror-maker")))
    command = [str(find_java().executable), *SMALL_JVM, f"-Dlog4j2.configurationFile={logging}", "-cp", path]
    child = Child([*command, "org.apache.kafka.connect.mirror.MirrorMaker", str(file)], log_file=directory / "mm2.log", name="mirror-maker")
    child.start()
    return child


def abort(bootstrap: str, topic: str, value: str) -> None:
    """Write a record to a topic in a transaction that is rolled back."""
    producer = clients.producer({"bootstrap.servers": bootstrap, "transactional.id": "rolled-back"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, value.encode())
    producer.flush(30)
    producer.abort_transaction(30)


def ends(bootstrap: str, topic: str) -> tuple[int, int]:
    """Return the first offset of a topic, and the offset behind its last record; -1 if the topic is missing."""
    history = TopicHistory({"bootstrap.servers": bootstrap}, topic, 0)
    return history.earliest(), history.latest()


def options(system: System, directory: Path, config: str) -> list[str]:
    """Return the options of a command with the settings of a system."""
    file = directory / "command.toml"
    text = config.replace("[journal]\n", f'[journal]\nprefix = "{system.prefix}"\n', 1)
    file.write_text(f'bridge.id = "{system.prefix}"\nkafka.bootstrap_servers = "{system.bootstrap}"\n{text}')
    return ["--config", str(file)]


def test_backup_and_mirrored_topics_continue_in_another_cluster(
    kafka: EmbeddedKafka,
    other: EmbeddedKafka,
    tmp_path: Path,
    bascule: Bascule,  # noqa: F811
) -> None:
    create(kafka.bootstrap, ORDERS, STOCK)
    saved = tmp_path / "saved"
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    config = f"{JOURNAL}{DIVERT}{INGRESS.format('stock', 'earliest')}"
    with System(kafka.bootstrap, tmp_path / "old", prefix=PREFIX, config=config) as system:
        system.pipelines.start()
        churn(system)
        exchange(system, "before")
        system.pipelines.stop()
        done = bascule("backup", str(saved), *options(system, tmp_path, JOURNAL))
        assert done.returncode == 0, done.stderr
        system.pipelines.start()
        exchange(system, "after")
        abort(kafka.bootstrap, STOCK, "rolled back")
        produce(kafka.bootstrap, STOCK, ["last"])
        system.wait_depth("stock", 7)
    trimmed = ends(kafka.bootstrap, f"{PREFIX}.journal")
    assert trimmed[0] > 0

    # Your own topics: the records of committed transactions, in order, with keys and headers, also if MirrorMaker is killed meanwhile.
    committed = "site.consumer.isolation.level = read_committed"
    for number in range(2):
        process = mirror(tmp_path / f"own-{number}", kafka, other, "site->other.topics = shop\\..*", IDENTITY, committed)
        copied, stock = Reader(other.bootstrap, ORDERS), Reader(other.bootstrap, STOCK)
        copied.read_until("after 2")
        stock.read_until("last")
        process.kill()
        original = Reader(kafka.bootstrap, ORDERS)
        original.read_until("after 2")
        assert list(dict.fromkeys(copied.ids)) == original.ids
        assert None not in original.ids
        assert "rolled back" not in stock.values
        for each in (copied, stock, original):
            each.close()
    copies_what_was_rolled_back(tmp_path / "uncommitted", kafka, other)

    # Bascule's own topics: neither broker nor pipelines carry anything with the copies.
    process = mirror(tmp_path / "internal", kafka, other, f"site->other.topics = {PREFIX}\\..*", IDENTITY)
    wait_for(lambda: copied_until(other, trimmed), "a copy of the journal", WAIT_S)
    process.kill()
    assert ends(other.bootstrap, f"{PREFIX}.journal")[0] == 0, "all offsets differ"
    topics = Topics({"bootstrap.servers": other.bootstrap})
    copies = System(other.bootstrap, tmp_path / "copies", prefix=PREFIX, config=config)
    refuses(copies.broker, f"journal {PREFIX}.journal was recreated; its records are lost")
    refuses(copies.pipelines, "was recreated since pipeline 'diverts' last ran", "was recreated since pipeline 'ingress:stock' last ran")
    topics.delete([f"{PREFIX}.snapshots"])
    refuses(copies.broker, "records are missing in between")
    topics.delete([name for name in topics.partitions() if name.startswith(f"{PREFIX}.")])

    # The backup, restored beside the mirrored topics: a reader that removes duplicates by bascule.id finds each message once.
    config = f"{JOURNAL}{DIVERT}{INGRESS.format('stock-here', began)}"
    restored = System(other.bootstrap, tmp_path / "new", prefix=PREFIX, config=config)
    done = bascule("restore", str(saved), *options(restored, tmp_path, JOURNAL))
    assert done.returncode == 0, done.stderr
    with restored:
        restored.pipelines.start()
        exchange(restored, "there")
        there = Reader(other.bootstrap, ORDERS)
        there.read_until("there 2")
        first = dict(zip(reversed(there.ids), reversed(there.values), strict=True))
        assert sorted(first.values()) == sorted(f"{when} {number}" for when in ("before", "after", "there") for number in range(3))
        arrived = {f"{when} {number}" for when in ("before", "after", "there") for number in range(3)} | {"last"}
        wait_for(lambda: bodies(restored, "stock") == arrived, lambda: f"{arrived} in {bodies(restored, 'stock')}", WAIT_S)
        there.close()


def copies_what_was_rolled_back(directory: Path, source: EmbeddedKafka, target: EmbeddedKafka) -> None:
    """Check that the settings of the guide are needed: by default, MirrorMaker copies aborted records too, to topics with other names."""
    # MirrorMaker continues behind what it has copied before, so it needs new records.
    abort(source.bootstrap, STOCK, "rolled back")
    produce(source.bootstrap, STOCK, ["behind it"])
    process = mirror(directory, source, target, "site->other.topics = shop\\..*")
    topics = Topics({"bootstrap.servers": target.bootstrap})
    wait_for(lambda: f"site.{STOCK}" in topics.partitions(), f"topic site.{STOCK}", WAIT_S)
    copied = Reader(target.bootstrap, f"site.{STOCK}")  # that reads committed records alone
    assert "rolled back" in copied.read_until("behind it")
    copied.close()
    process.kill()


def churn(system: System) -> None:
    """Send and receive messages until the journal has been trimmed."""
    queue = Queue("churn")

    def trimmed() -> bool:
        """Write as much as needs a snapshot, because the broker trims the journal after one. The position of the divert follows."""
        with connect(system.url) as context, context.consumer(queue) as consumer:
            for number in range(CHURN):
                context.send(queue, f"{number}")
                assert consumer.receive(WAIT_S) is not None
        return ends(system.bootstrap, f"{system.prefix}.journal")[0] > 0

    wait_for(trimmed, "the journal to be trimmed")


def exchange(system: System, when: str) -> None:
    """Carry three messages to Kafka and three records to JMS, and return when they have arrived. Others may arrive again meanwhile."""
    texts = [f"{when} {number}" for number in range(3)]
    reader = Reader(system.bootstrap, ORDERS)
    with connect(system.url) as context:
        for text in texts:
            context.send(Queue("orders"), text)
    produce(system.bootstrap, STOCK, texts)
    reader.read_until(texts[-1])
    reader.close()
    wait_for(lambda: bodies(system, "stock") >= set(texts), lambda: f"{texts} in {bodies(system, 'stock')}", WAIT_S)


def bodies(system: System, queue: str) -> set[object]:
    """Return the different bodies of the messages in a queue."""
    with connect(system.url) as context:
        return {message.body for message in context.browse(Queue(queue))}


def refuses(command: Command, *reasons: str) -> None:
    """Check that a command gives reasons why it, or its pipelines, do not continue."""
    command.launch()
    wait_for(lambda: all(each in command.said() for each in reasons), lambda: f"{reasons} in {command.said()}", WAIT_S)
    command.stop()  # in an orderly way, so that the next driver does not wait for the end of a session


def copied_until(target: EmbeddedKafka, original: tuple[int, int]) -> bool:
    """Return True if the copy of the journal has as many records as the journal."""
    try:
        first, end = ends(target.bootstrap, f"{PREFIX}.journal")
    except Unavailable:
        return False
    return end - first == original[1] - original[0]
