"""A real Kafka of one node (KRaft, broker and controller in one process) as a child of this process.

For development, ``python -m bascule.embedded.kafka --data-dir DIR --port N`` runs one until it is interrupted.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from bascule.config.private_file import make_private, replace_private
from bascule.core.environment import NOTHING, inherited
from bascule.core.errors import BasculeError, InvalidInput, Scope, Unavailable
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.embedded.jars import JarStore
from bascule.embedded.java import Java, find_java
from bascule.embedded.process import HOST, POLL_S, Child, NotStarted, check_port, free_port
from bascule.embedded.protection import LISTENER, LOCK_FILE, Protection

#: Kafka's default of 128 MiB would be most of the heap; 16 MiB hold 700,000 keys in one pass of the cleaner.
CLEANER_BUFFER_BYTES = 16 << 20
HEAP_MB = 512
#: Options of the JVM for a Kafka that runs for some minutes: the first compiler alone. Later, both compilers are faster (ADR 11).
SHORT_LIVED = ("-XX:TieredStopAtLevel=1",)
START_TIMEOUT_S = 90.0
FORMAT_TIMEOUT_S = 120.0
#: Retries if a free port was taken before Kafka used it.
START_ATTEMPTS = 3
#: A Kafka whose parent was killed stops by itself within a second or two.
ORPHAN_TIMEOUT_S = 10.0

#: The file in Kafka's data directory with the first records of the metadata log: the versions of Kafka's features.
CHECKPOINT = "bootstrap.checkpoint"

SERVER_PROPERTIES = """\
# Written by Bascule at every start; changes are lost.
process.roles=broker,controller
node.id={node_id}
controller.quorum.voters={voters}
listeners=PLAINTEXT://{host}:{port}{own_listener},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port}{own_listener}
controller.listener.names=CONTROLLER
inter.broker.listener.name={node_listener}
log.dirs={log_dir}

# One machine, two cores: few partitions of the internal topics, few threads; as many copies as there are nodes.
offsets.topic.replication.factor={replicas}
offsets.topic.num.partitions=4
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={in_sync_replicas}
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor={replicas}
share.coordinator.state.topic.min.isr={in_sync_replicas}
share.coordinator.state.topic.num.partitions=4
num.network.threads=2
num.io.threads=4
log.cleaner.dedupe.buffer.size={cleaner_buffer_bytes}

# After a crash the new process waits until the old one's session is over; 2 s instead of 9 s.
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=400

# A controller without work writes a record for its followers every 10 s, not every 0.5 s, which took a third of an idle node's work.
metadata.max.idle.interval.ms=10000

num.partitions=1
auto.create.topics.enable=false
message.max.bytes={message_size_max_bytes}
group.initial.rebalance.delay.ms=0
"""
FSYNC_PROPERTIES = """
# Every write is on the disk before it is acknowledged.
log.flush.interval.messages=1
"""
LOG4J_PROPERTIES = """\
status=error
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d %-5p %m (%c)%n
rootLogger.level=warn
rootLogger.appenderRef.out.ref=out
logger.server.name=kafka.server.KafkaRaftServer
logger.server.level=info
"""


class DataInUse(Unavailable):
    """Another Kafka runs on the data directory."""

    scope = Scope.PROCESS


class EmbeddedKafka:
    """A Kafka node on loopback with its data in one directory. A node that was stopped or killed restarts on the same data and port.

    ``fsync=True`` writes every record to the disk before it is acknowledged. Without it (Kafka's default), a killed process loses
    nothing, but a power failure may lose records. Start it from a thread that lives as long as the node (see ``Child``).
    """

    def __init__(
        self, data_dir: Path, *, port: int = 0, fsync: bool = False, heap_mb: int = HEAP_MB, jvm_options: Sequence[str] = (),
        jars: JarStore | None = None, protection: Protection | None = None,
    ) -> None:  # fmt: skip
        """``port`` 0 is any free port, chosen at the first start. Without ``protection``, every client may do everything."""
        self.data_dir = data_dir.absolute()
        self.port = port
        self.fsync = fsync
        self.heap_mb = heap_mb
        self.jvm_options = tuple(jvm_options)  # they come last, and so override those of this class
        self._chosen_port = port
        self._jars = jars or JarStore()
        self._protection = protection
        self._cluster_id = new_cluster_id()  # for a directory that is still empty
        self._child: Child | None = None
        self._archive: Path | None = None

    @property
    def bootstrap(self) -> str:
        """Return ``bootstrap.servers`` for clients; known after the first start."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Return the process id while the node runs."""
        return self._child.pid if self._child else None

    @property
    def running(self) -> bool:
        """Return whether the process lives."""
        return self._child is not None and self._child.running

    @property
    def log_file(self) -> Path:
        """Return the log file of Kafka."""
        return self.data_dir / "kafka.log"

    def start(self) -> None:
        """Return when Kafka serves. Raises DataInUse, PortInUse, NoJdk, JarUnavailable, NotStarted, NotProtected."""
        java = find_java()
        classpath = os.pathsep.join(map(str, self._jars.classpath("kafka")))
        with self._locked() as lock:
            if self.port:
                check_port(self.port, "Kafka", "--kafka-port", HOST)
            for attempt in range(1, START_ATTEMPTS + 1):
                try:
                    self._start_once(java, classpath, lock)
                    return
                except OSError as error:  # for example a full disk
                    raise NotStarted(f"the files of Kafka in {self.data_dir} cannot be used: {error}") from error
                except NotStarted as error:
                    if "Address already in use" not in str(error) or attempt == START_ATTEMPTS:
                        raise
                    self.port = self._chosen_port

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop the node (SIGTERM, then SIGKILL after the timeout)."""
        if self._child is None or not self._child.running:
            return
        self._child.stop(timeout_s)
        if self._archive is not None and self._child.returncode != -signal.SIGKILL and self._new_archive.exists():
            self._keep_archive(self._archive)

    def kill(self) -> None:
        """Kill the node as in a crash (SIGKILL)."""
        if self._child is not None:
            self._child.kill()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        self.stop()

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Lock the data with a lock that Kafka's process inherits and holds until it ends.

        Kafka's own lock comes too late: a second process writes to the metadata log before it detects the lock. The call waits for an
        orphan that is stopping.
        """
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            file = (self.data_dir / LOCK_FILE).open("w")
        except OSError as error:
            raise InvalidInput(f"the data directory {self.data_dir} cannot be written: {error}") from error
        with file:
            deadline = time.monotonic() + ORPHAN_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise DataInUse(
                            f"another Kafka runs on {self.data_dir}; stop it, or choose another directory with --data-dir"
                        ) from None
                    time.sleep(POLL_S)
            yield file.fileno()

    def _start_once(self, java: Java, classpath: str, lock: int) -> None:
        if self._protection is not None:
            make_private(self.data_dir)
        self.port = self.port or free_port(HOST)
        self._launch(java, classpath, lock)
        self._wait_ready()
        if self._protection is not None:
            self._protect(self._protection)

    def _protect(self, protection: Protection) -> None:
        try:
            protection.apply()
        except BaseException:
            self.kill()
            raise

    def _launch(self, java: Java, classpath: str, lock: int) -> None:
        (self.data_dir / "log4j2.properties").write_text(LOG4J_PROPERTIES)
        replace_private(self._properties_file, self._server_properties().encode())
        self._archive = self._archive_for(java, classpath)
        shared = [f"-XX:SharedArchiveFile={self._archive}"] if self._archive.exists() else []
        if not (self._log_dir / "meta.properties").exists():
            self._format(java, classpath, shared)
        sharing = shared or [f"-XX:ArchiveClassesAtExit={self._new_archive}"]
        argv = [*self._java_command(java, classpath), *sharing, "kafka.Kafka", self._properties_file]
        self._child = Child(argv, log_file=self.log_file, inherited=inherited(os.environ, NOTHING), name="Kafka")
        self._child.start(keep_open=[lock])

    def _wait_ready(self) -> None:
        if self._child is None:
            raise NotStarted(f"Kafka on {self.data_dir} was not launched")
        self._child.wait_ready(lambda: serves(self.port), START_TIMEOUT_S)

    @property
    def _log_dir(self) -> Path:
        return self.data_dir / "data"

    @property
    def _properties_file(self) -> Path:
        return self.data_dir / "server.properties"

    def _server_properties(self) -> str:
        protected = self._protection.properties() if self._protection is not None else ""
        return SERVER_PROPERTIES.format_map(self._properties()) + (FSYNC_PROPERTIES if self.fsync else "") + protected

    def _properties(self) -> dict[str, object]:
        """Return the values for the template."""
        controller_port, protection = free_port(HOST), self._protection
        return {
            "own_listener": f",{LISTENER}://{HOST}:{protection.port}" if protection is not None else "",
            "node_listener": LISTENER if protection is not None else "PLAINTEXT",
            "host": HOST, "port": self.port, "controller_port": controller_port, "node_id": 1, "voters": f"1@{HOST}:{controller_port}",
            "replicas": 1, "in_sync_replicas": 1, "log_dir": self._log_dir, "cleaner_buffer_bytes": CLEANER_BUFFER_BYTES,
            "message_size_max_bytes": RECORD_BYTES_MAX,
        }  # fmt: skip

    def _java_command(self, java: Java, classpath: str) -> list[str | Path]:
        return [
            java.executable,
            # Of the collectors, this one gave the most records per second and took the least memory on two cores.
            "-XX:+UseSerialGC",
            f"-Xms{self.heap_mb // 4}m",
            f"-Xmx{self.heap_mb}m",
            "-XX:+ExitOnOutOfMemoryError",
            "-Xlog:disable",
            "-Xlog:all=error:stderr",
            "-Djava.awt.headless=true",
            f"-Dlog4j2.configurationFile={self.data_dir / 'log4j2.properties'}",
            *self.jvm_options,
            "-cp",
            classpath,
        ]

    @property
    def _new_archive(self) -> Path:
        return self.data_dir / "classes.jsa"

    def _archive_for(self, java: Java, classpath: str) -> Path:
        """Return the archive of Kafka's classes for this Java (class data sharing).

        The first clean stop writes the archive, 50 MB in 4 s. Each later start takes 1 s and 40 MB less. The formatting of a directory
        also uses the archive.
        """
        key = hashlib.sha256(f"{java.home}\n{java.build}\n{classpath}".encode()).hexdigest()[:16]
        return self._jars.directory / f"kafka-{key}.jsa"

    def _keep_archive(self, archive: Path) -> None:
        half = archive.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a failure only makes the next start slower
            shutil.move(self._new_archive, half)
            half.replace(archive)

    def _format(self, java: Java, classpath: str, shared: list[str]) -> None:
        """Give an empty directory a permanent cluster id.

        Kafka's tool takes more than a second. Apart from the ids it writes the same each time, so a copy replaces it the next time.
        """
        checkpoint, copy = self._log_dir / CHECKPOINT, self._archive_for(java, classpath).with_suffix(".checkpoint")
        if copy.exists():
            self._log_dir.mkdir(exist_ok=True)
            shutil.copyfile(copy, checkpoint)
            replace_private(self._log_dir / "meta.properties", self._meta_properties().encode())  # last: it marks a formatted directory
            return
        self._run_format(java, classpath, shared)
        with suppress(OSError):  # a failure only makes the next format slower
            replace_private(copy, checkpoint.read_bytes())

    def _meta_properties(self) -> str:
        ids = {"cluster.id": self._cluster_id, "node.id": self._properties()["node_id"], "directory.id": new_cluster_id()}
        return "version=1\n" + "".join(f"{name}={value}\n" for name, value in ids.items())

    def _run_format(self, java: Java, classpath: str, shared: list[str]) -> None:
        tool: list[str | Path] = [
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={self._cluster_id}",
            "--config",
            self._properties_file,
        ]
        argv = [*self._java_command(java, classpath), *shared, *tool]
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=FORMAT_TIMEOUT_S, check=False,
            env=inherited(os.environ, NOTHING),
        )  # fmt: skip
        if done.returncode:
            raise NotStarted(f"Kafka's data directory {self._log_dir} could not be formatted:\n{done.stdout[-4000:]}")


def new_cluster_id() -> str:
    """Return a new cluster id, or the id of a directory, in the format of Kafka's tools."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()


# A Metadata request, version 1, that asks for no topic: size; api key, version, correlation id, client id, number of topics.
_METADATA_REQUEST = struct.pack(">ihhih5si", 19, 3, 1, 1, 5, b"ready", 0)
_CONNECT_TIMEOUT_S = 1.0


def serves(port: int, host: str = HOST) -> bool:
    """Return whether a Kafka broker on ``port`` accepts requests: its metadata has a broker that is not fenced."""
    try:
        with socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as connection:
            connection.sendall(_METADATA_REQUEST)
            answer = connection.makefile("rb").read(12)
    except OSError:
        return False
    # size, correlation id, number of brokers
    return len(answer) == 12 and struct.unpack(">iii", answer)[2] > 0


def main(argv: list[str] | None = None) -> int:
    """Run a node in the foreground until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m bascule.embedded.kafka", description="Run a Kafka of one node.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0, help="port of Kafka; 0 = any free port (default: 0)")
    parser.add_argument("--fsync", action="store_true", help="write every record to the disk before it is acknowledged")
    arguments = parser.parse_args(argv)
    # Block the signals before anything starts and take them below, so that none is lost in between.
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        with EmbeddedKafka(arguments.data_dir, port=arguments.port, fsync=arguments.fsync) as kafka:
            sys.stdout.write(f"ready kafka={kafka.bootstrap} pid={kafka.pid}\n")
            sys.stdout.flush()
            signal.sigwait(signals)
    except BasculeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
