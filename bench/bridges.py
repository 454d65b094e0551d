"""The bridges that bench/bridge.py compares, each with the broker that it needs: Bascule, Apache Camel, Spark's Kafka sink.

A bridge carries from JMS to the topic ``target``, and from the topic ``source`` to JMS. The sink of Spark has no JMS: its messages come
from a journal that the benchmark writes.
"""

from __future__ import annotations

import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

from bascule.amqp.types import Int
from bascule.client import Context, Message, Queue
from bascule.core.errors import BasculeError, Unavailable
from bascule.embedded.jars import jar_sets
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import Child
from bascule.kafka.admin import Topics
from bench.artemis import Artemis
from bench.carry import ADDRESS
from tests.scenarios.bridge import await_end
from tests.support.java import java_command
from tests.support.journal import SyntheticJournal, text_message
from tests.support.speed import SLOWNESS
from tests.support.system import SHORT_SESSION, System, descendants, wait_for
from tests.support.usage import cpu_s, memory_mib

TO_KAFKA, FROM_KAFKA = "JMS to Kafka", "Kafka to JMS"
START_TIMEOUT_S = 240.0 * SLOWNESS
#: Longest wait for the broker's answers to a backlog.
STORED_S = 300.0
CAMEL_JARS = "camel"
#: Camel runs for long, so it gets both compilers and the default collector of the JVM.
CAMEL_JVM = ("-Xms256m", "-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
#: The properties of each message, those of the demo.
PROPERTIES = {"carrier": "UA", "origin": "EWR", "dest": "IAH", "dep_delay": 12, "distance": 1400, "tailnum": "N14228"}


class Usage(NamedTuple):
    """What a part of a bridge uses: processor time so far, and resident memory."""

    cpu_s: float
    rss_mb: float


class Sender(ABC):
    """Sends the messages of one path."""

    @abstractmethod
    def send(self, body: bytes) -> None:
        """Send a message without waiting for its answer."""

    @abstractmethod
    def flush(self) -> None:
        """Return when all messages are stored. Raises BasculeError."""


class JmsSender(Sender):
    """Asynchronous sends of a Python client to a queue."""

    def __init__(self, context: Context, queue: str) -> None:
        self._producer = context.producer(Queue(queue))
        self._sent = self._answered = 0
        self._errors: list[BasculeError] = []

    def send(self, body: bytes) -> None:
        self._sent += 1
        self._producer.send_async(Message(body.decode(), properties=PROPERTIES), on_done=self._note)

    def flush(self) -> None:
        wait_for(lambda: self._answered == self._sent, f"the answers to {self._sent} sends", STORED_S)
        if self._errors:
            raise self._errors[0]

    def _note(self, _: Message, error: BasculeError | None) -> None:
        if error is not None:
            self._errors.append(error)
        self._answered += 1


class JournalSender(Sender):
    """Writes text messages into a journal, as a broker does."""

    def __init__(self, journal: SyntheticJournal) -> None:
        self._journal = journal
        self._sent = 0

    def send(self, body: bytes) -> None:
        self._sent += 1
        properties = {name: Int(value) if isinstance(value, int) else value for name, value in PROPERTIES.items()}
        message = text_message(
            body.decode(), message_id=f"ID:bench-{self._sent}", destination=ADDRESS, destination_kind="queue", properties=properties
        )
        self._journal.send(message, address=ADDRESS)

    def flush(self) -> None:
        self._journal.flush()


class Bridge(ABC):
    """A bridge in one turn. Enter it in a thread that stays: it starts the broker, and the bridge itself is started by ``start``."""

    name: ClassVar[str]
    title: ClassVar[str]
    paths: ClassVar[tuple[str, ...]] = (TO_KAFKA, FROM_KAFKA)

    def __init__(self, kafka: EmbeddedKafka, directory: Path, run: str) -> None:
        """``run`` makes the names of topics and queues unique."""
        self.kafka = kafka
        self.directory = directory / run
        self.directory.mkdir()
        self.run = run
        self.source, self.target = f"{run}.in", f"{run}.out"
        for topic in (self.source, self.target):
            Topics({"bootstrap.servers": kafka.bootstrap}).create(topic, 1, {})

    @abstractmethod
    def __enter__(self) -> Self:
        """Start the broker."""

    def __exit__(self, *_: object) -> None:
        """Stop the bridge and the broker."""
        self.stop()

    @property
    @abstractmethod
    def url(self) -> str | None:
        """Return the URL for AMQP clients; None if there is no broker."""

    def sender(self, context: Context | None) -> Sender:
        """Return the sender of messages to Kafka; ``context`` is a connection to ``url``."""
        assert context is not None, f"{self.name} needs a connection"
        return JmsSender(context, self.target)

    @abstractmethod
    def start(self) -> None:
        """Start the bridge; return when it is ready. Raises NotStarted."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the bridge in order."""

    @abstractmethod
    def reap(self) -> None:
        """Kill the process of the bridge, and read its exit status."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Return the process id of the bridge, whose other processes descend from it."""

    @property
    def broker_pid(self) -> int | None:
        """Return the process id of the broker."""
        return None

    def kill(self) -> None:
        """Kill all processes of the bridge at once by SIGKILL; return when none is left."""
        pids = [self.pid, *descendants(self.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.reap()
        await_end(pids)

    def usage(self) -> dict[str, Usage]:
        """Return what each part uses: the bridge by kind of process, the broker, Kafka, and the clients of this process."""
        parts = {"bridge": self.pid, "broker": self.broker_pid, "Kafka": self.kafka.pid, "clients": os.getpid()}
        found: dict[str, Usage] = {}
        for part, pid in parts.items():
            if pid is not None:
                found[part] = Usage(cpu_s(pid), memory_mib(pid))
        for pid, command in descendants(self.pid).items():
            kind = "bridge JVM" if Path(command.split(" ", 1)[0]).name == "java" else "bridge workers"
            with suppress(OSError):  # the process has just ended
                before = found.get(kind, Usage(0, 0))
                found[kind] = Usage(before.cpu_s + cpu_s(pid), before.rss_mb + memory_mib(pid))
        return found


class Bascule(Bridge):
    """A broker and pipelines of Bascule, with an exclusive divert and an ingress."""

    name = "bascule"
    title = "Bascule, exclusive divert and ingress: exactly once"

    def __init__(self, kafka: EmbeddedKafka, directory: Path, run: str) -> None:
        super().__init__(kafka, directory, run)
        # The time until a restarted driver may run is Bascule's default, not that of the tests.
        config = f"""{SHORT_SESSION}
[[divert]]
name = "out"
from = "{self.target}"
to = "{self.target}"
exclusive = true
[[ingress]]
name = "in"
topics = ["{self.source}"]
to = "{self.source}"
routing = "anycast"
start = "earliest"
"""
        env = {"BASCULE_PIPELINES__SPARK": "{}"}  # as users have it, not as the tests do
        self._system = System(kafka.bootstrap, self.directory, prefix=run, config=config, env=env)

    def __enter__(self) -> Self:
        self._system.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._system.__exit__()

    @property
    def url(self) -> str:
        return self._system.url

    def start(self) -> None:
        self._system.pipelines.start()

    def stop(self) -> None:
        self._system.pipelines.stop()

    def reap(self) -> None:
        self._system.pipelines.kill()

    @property
    def pid(self) -> int:
        return self._system.pipelines.pid

    @property
    def broker_pid(self) -> int:
        return self._system.broker.pid


class ChildBridge(Bridge):
    """A bridge that is a command, which prints a line when it is ready."""

    def __init__(self, kafka: EmbeddedKafka, directory: Path, run: str) -> None:
        super().__init__(kafka, directory, run)
        self._log = self.directory / "bridge.log"
        self._child: Child | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line."""

    def start(self) -> None:
        lines = self._ready_lines()
        self._child = Child(self.command(), log_file=self._log, name=self.name)
        self._child.start()
        self._child.wait_ready(lambda: self._ready_lines() > lines, START_TIMEOUT_S)

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()

    def reap(self) -> None:
        if self._child is not None:
            self._child.kill()

    @property
    def pid(self) -> int:
        pid = self._child.pid if self._child is not None else None
        if pid is None:
            raise Unavailable(f"{self.name} does not run; see {self._log}")
        return pid

    def _ready_lines(self) -> int:
        return self._log.read_text(errors="replace").splitlines().count("ready") if self._log.exists() else 0


class Camel(ChildBridge):
    """Artemis as ``artemis create`` makes it, and java/camelbridge/CamelBridge.java."""

    name = "camel"
    title = "Apache Camel with Artemis, transacted: at least once"

    def __init__(self, kafka: EmbeddedKafka, directory: Path, run: str) -> None:
        super().__init__(kafka, directory, run)
        self._artemis = Artemis(self.directory / "artemis")

    def __enter__(self) -> Self:
        self._artemis.start()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._artemis.stop()

    @property
    def url(self) -> str:
        return self._artemis.url

    def command(self) -> list[str]:
        broker = f"tcp://127.0.0.1:{self._artemis.port}"
        return java_command("CamelBridge", broker, self.kafka.bootstrap, self.target, self.source, jvm=CAMEL_JVM, jars=CAMEL_JARS)

    @property
    def broker_pid(self) -> int:
        return self._artemis.pid


class SparkSink(ChildBridge):
    """Spark's Kafka sink on a journal, with the divert's mapping (bench/carry.py)."""

    name = "spark"
    title = "Spark's Kafka sink with the same mapping: at least once, JMS messages from a journal"
    paths = (TO_KAFKA,)
    carry = "sink"

    def __enter__(self) -> Self:
        topic = f"{self.run}.journal"
        Topics({"bootstrap.servers": self.kafka.bootstrap}).create(topic, 1, {})
        self._journal = SyntheticJournal(self.kafka.bootstrap, topic)
        self._journal.start_epoch()
        return self

    @property
    def url(self) -> None:
        return None

    def sender(self, _: Context | None) -> Sender:
        return JournalSender(self._journal)

    def command(self) -> list[str]:
        checkpoints = self.directory / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        return [sys.executable, "-m", "bench.carry", self.carry, self.kafka.bootstrap, self.run, self.target, str(checkpoints)]


class SparkCopy(SparkSink):
    """The same sink with the bytes of the journal unread: the least that a record costs in Spark."""

    name = "copy"
    title = "Spark's Kafka sink, bytes copied unread: at least once"
    carry = "copy"


BRIDGES: Mapping[str, Callable[[EmbeddedKafka, Path, str], Bridge]] = {each.name: each for each in (Bascule, Camel, SparkSink, SparkCopy)}
TITLES = {each.name: each.title for each in (Bascule, Camel, SparkSink, SparkCopy)}
#: The copy is no bridge, so it is measured on demand.
DEFAULT = (Bascule.name, Camel.name, SparkSink.name)


def versions() -> dict[str, str]:
    """Return the versions of the products that are compared."""
    artifacts = {"Artemis": ("artemis", "apache-artemis"), "Camel": (CAMEL_JARS, "camel-main"), "Kafka": ("kafka", "kafka_2.13")}
    artifacts |= {"Spark": ("spark-kafka", "spark-sql-kafka-0-10_2.13"), "Spring JMS (of Camel)": (CAMEL_JARS, "spring-jms")}
    artifacts["Kafka client of Camel"] = (CAMEL_JARS, "kafka-clients")
    found = {}
    for product, (name, artifact) in artifacts.items():
        found[product] = next(
            jar.coordinates.split("@")[0].split(":")[2] for jar in jar_sets()[name] if jar.coordinates.split(":")[1] == artifact
        )
    return found
