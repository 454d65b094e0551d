"""A Kafka of three nodes, one of which can be cut off from its peers while clients still reach all of them, or the other way round.

    with DividedCluster(directory, divide_clients=True) as cluster:
        cluster.isolate(cluster.nodes[0])  # neither replication nor the quorum of the controllers reaches it
        ...
        cluster.shut_out(cluster.nodes[0])  # its peers reach it, and no client does
        ...
        cluster.heal()

Nodes reach one another only through proxies: each has its own listener for replication, advertised at the port of a proxy, and the voters
of the quorum are named by ports of proxies. A proxy finds out which node a connection comes from by the process that owns its socket. If
clients are to be divided from nodes, they use proxies, too.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from bascule.embedded.cluster import ClusterNode, EmbeddedCluster
from bascule.embedded.process import free_ports
from tests.support.proxy import HOST, RECEIVE_BYTES, Relay

PROPERTIES = """
listeners=PLAINTEXT://{host}:{port},PEERS://{host}:{peers_port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{clients_port},PEERS://{host}:{peers_proxy},CONTROLLER://{host}:{controller_proxy}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,PEERS:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PEERS
controller.quorum.voters={voters}
"""
#: The columns of ``/proc/net/tcp`` and ``tcp6``: local port, remote port, state, inode.
_SOCKET = re.compile(r"^ *\d+: \w+:(\w{4}) \w+:(\w{4}) (\w\w) \S+ \S+ \S+ +\d+ +\d+ (\d+)", re.MULTILINE)


class _Link(Relay):
    """A proxy through which a node's peers reach one of its ports."""

    def __init__(self, cluster: DividedCluster, number: int, port: int) -> None:
        self.number = number
        self._cluster = cluster
        self._open: dict[tuple[socket.socket, socket.socket], int] = {}  # with the number of the node at the other end
        super().__init__(port)

    def end(self, number: int) -> None:
        """End the connections between this node and the others if it is ``number``; else those that come from ``number``."""
        with self._lock:
            pairs = [pair for pair, source in self._open.items() if source != self.number and number in (source, self.number)]
        for pair in pairs:
            for each in pair:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        try:
            source = self._cluster.number_of(client.getpeername()[1], self.port)
        except OSError:  # the connection has ended already
            source = 0
        with self._lock:
            self._open[client, server] = source
        # Checked afterwards: a connection that passes now is known to a later ``isolate``.
        if not self._cluster.joined(source, self.number):
            self._close(client, server)
            return
        for pair in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(*pair, client, server), name="divided-cluster", daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(RECEIVE_BYTES):
                target.sendall(data)
        self._close(client, server)

    def _close(self, client: socket.socket, server: socket.socket) -> None:
        with self._lock:
            self._open.pop((client, server), None)
        self._end(client, server)


class _ClientLink(Relay):
    """A proxy through which clients reach a node. Data that arrives while it is shut waits; on a network it would be sent again."""

    def __init__(self, port: int) -> None:
        self.open = threading.Event()
        self.open.set()
        super().__init__(port)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        for pair in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=pair, name="divided-cluster", daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(RECEIVE_BYTES):
                self.open.wait()
                target.sendall(data)
        self._end(source, target)


class DividedCluster(EmbeddedCluster):
    """A cluster of three nodes behind proxies: see the module."""

    def __init__(self, data_dir: Path, *, divide_clients: bool = False) -> None:
        super().__init__(data_dir)
        self._client_links = [_ClientLink(node.port) for node in self.nodes] if divide_clients else []
        self._isolated = 0
        count = len(self.nodes)
        ports = free_ports(2 * count, HOST)
        peers = [_Link(self, number, port) for number, port in enumerate(ports[:count], 1)]
        controllers = [_Link(self, number, port) for number, port in enumerate(ports[count:], 1)]
        self._links = [*peers, *controllers]
        voters = ",".join(f"{link.number}@{HOST}:{link.port}" for link in controllers)
        for place, node in enumerate(self.nodes):
            node.more_properties = PROPERTIES.format(
                host=HOST, port=node.port, voters=voters, clients_port=self._client_ports[place],
                peers_port=ports[place], peers_proxy=peers[place].port,
                controller_port=ports[count + place], controller_proxy=controllers[place].port,
            )  # fmt: skip

    @property
    def _client_ports(self) -> list[int]:
        return [each.port for each in self._client_links or self.nodes]

    def bootstrap_of(self, *nodes: ClusterNode) -> str:
        """Return ``bootstrap.servers`` for clients that ask these nodes first."""
        return ",".join(f"{HOST}:{self._client_ports[node.number - 1]}" for node in nodes)

    def isolate(self, node: ClusterNode) -> None:
        """Cut a node off from its peers: it exchanges no byte with them. Clients reach it as before."""
        self._isolated = node.number
        for link in self._links:
            link.end(node.number)

    def shut_out(self, node: ClusterNode) -> None:
        """Cut clients off from a node: they exchange no byte with it. Its peers reach it as before."""
        self._client_links[node.number - 1].open.clear()

    def heal(self) -> None:
        """Let all nodes reach one another, and let clients reach all of them."""
        self._isolated = 0
        for link in self._client_links:
            link.open.set()

    def joined(self, one: int, other: int) -> bool:
        """Return True if two nodes, by their numbers, reach each other. A node always reaches its own controller."""
        return one == other or (one != 0 and self._isolated not in (one, other))

    def number_of(self, port: int, at: int) -> int:
        """Return the number of the node whose process has the connection from ``port`` to the proxy's port ``at``; 0 if none has."""
        inodes = {f"socket:[{inode}]" for local, remote, inode in _connections() if (local, remote) == (port, at)}
        for node in self.nodes:
            if node.pid is not None and inodes.intersection(_files(node.pid)):
                return node.number
        return 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop the cluster."""
        super().__exit__(kind, error, trace)
        self.heal()  # ends waiting connections
        for link in (*self._links, *self._client_links):
            link.__exit__()


def _connections() -> Iterator[tuple[int, int, str]]:
    """Yield local port, remote port and inode of each TCP connection."""
    for name in ("tcp", "tcp6"):
        for local, remote, _, inode in _SOCKET.findall(Path("/proc/net", name).read_text()):
            yield int(local, 16), int(remote, 16), inode


def _files(pid: int) -> Iterator[str]:
    """Yield the targets of the open descriptors of a process."""
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield os.readlink(file)
