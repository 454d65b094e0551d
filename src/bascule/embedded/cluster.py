"""A Kafka cluster of several nodes on one machine, each broker and controller (KRaft), for trials and tests."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from bascule.embedded.jars import JarStore
from bascule.embedded.java import find_java
from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka, new_cluster_id
from bascule.embedded.process import HOST, free_ports

NODES = 3
#: Enough for a few topics; three nodes share the memory of a single node.
NODE_HEAP_MB = 256
ASK_TIMEOUT_S = 10.0


class ClusterNode(EmbeddedKafka):
    """A node of a cluster. It can be stopped, killed and started like a single node, but its start needs a majority of the nodes."""

    def __init__(self, data_dir: Path, number: int, port: int, controllers: list[int], cluster_id: str, jars: JarStore | None) -> None:
        """Prepare node ``number``, from 1. ``controllers`` are the ports of the controllers of all nodes."""
        super().__init__(data_dir, port=port, heap_mb=NODE_HEAP_MB, jvm_options=SHORT_LIVED, jars=jars)
        self.number = number
        #: Lines for ``server.properties`` that override Bascule's settings; used at the next start.
        self.more_properties = ""
        self._controllers = controllers
        self._cluster_id = cluster_id

    def launch(self) -> None:
        """Start the node without waiting. Raises DataInUse, NoJdk, JarUnavailable, NotStarted."""
        with self._locked() as lock:
            self._launch(find_java(), os.pathsep.join(map(str, self._jars.classpath("kafka"))), lock)

    def wait_ready(self) -> None:
        """Return when the node serves. Raises NotStarted."""
        self._wait_ready()

    def start(self) -> None:
        """Start the node and return when it serves, which needs a majority of the nodes. Raises the errors of ``launch``."""
        self.launch()
        self.wait_ready()

    def _server_properties(self) -> str:
        return super()._server_properties() + self.more_properties

    def _properties(self) -> dict[str, object]:
        count = len(self._controllers)
        return {
            **super()._properties(),
            "node_id": self.number,
            "controller_port": self._controllers[self.number - 1],
            "voters": ",".join(f"{number}@{HOST}:{port}" for number, port in enumerate(self._controllers, 1)),
            "replicas": count,
            "in_sync_replicas": count // 2 + 1,
        }


class EmbeddedCluster:
    """Nodes on loopback with their data under one directory. A node that was stopped or killed restarts on the same data and port."""

    def __init__(self, data_dir: Path, *, nodes: int = NODES, jars: JarStore | None = None) -> None:
        ports, cluster_id = free_ports(2 * nodes, HOST), new_cluster_id()
        self.nodes = [
            ClusterNode(data_dir / f"node-{number}", number, ports[number - 1], ports[nodes:], cluster_id, jars)
            for number in range(1, nodes + 1)
        ]

    @property
    def bootstrap(self) -> str:
        """Return ``bootstrap.servers`` with all nodes."""
        return self.bootstrap_of(*self.nodes)

    def bootstrap_of(self, *nodes: ClusterNode) -> str:
        """Return ``bootstrap.servers`` for clients that ask these nodes first."""
        return ",".join(node.bootstrap for node in nodes)

    def controller(self) -> ClusterNode:
        """Return the node that is the active controller. Raises OSError if there is none."""
        for node in self.nodes:
            if node.running:
                with suppress(OSError, struct.error):
                    return self.nodes[_quorum_leader(node.port) - 1]
        raise ConnectionError("no node knows an active controller")

    def start(self) -> None:
        """Start all nodes and return when they serve; stop all if one fails. Raises the errors of ``ClusterNode.start``."""
        with ExitStack() as undo:
            for node in self.nodes:
                undo.callback(node.kill)
                node.launch()
            for node in self.nodes:
                node.wait_ready()
            undo.pop_all()

    def stop(self) -> None:
        """Stop all nodes."""
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        self.stop()


#: A DescribeQuorum request, version 0, for partition 0 of the metadata: api key, version, correlation id, client id; the topic.
_METADATA = b"__cluster_metadata"
_QUORUM_BODY = struct.pack(">hhih5sB", 55, 0, 1, 5, b"ready", 0) + bytes([2, len(_METADATA) + 1]) + _METADATA + b"\2" + bytes(4 + 3)
#: The beginning of the answer: size, correlation id, tags, error; one topic by its name; one partition, its number, error and leader.
_QUORUM_ANSWER = struct.Struct(f">iiBhBB{len(_METADATA)}sBihi")


def _quorum_leader(port: int) -> int:
    """Return the id of the metadata leader, as the node at ``port`` knows it. Raises OSError, struct.error."""
    with socket.create_connection((HOST, port), ASK_TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", len(_QUORUM_BODY)) + _QUORUM_BODY)
        answer = connection.makefile("rb").read(_QUORUM_ANSWER.size)
    leader: int = _QUORUM_ANSWER.unpack(answer)[-1]
    if leader < 1:
        raise ConnectionError("there is no active controller")
    return leader
