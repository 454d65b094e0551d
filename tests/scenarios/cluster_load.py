"""JMS clients at work on a broker whose Kafka has three nodes, and what was answered to them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from confluent_kafka.admin import PartitionMetadata

from bascule.core.topics import JournalTopics
from bascule.embedded.cluster import ClusterNode, EmbeddedCluster
from bascule.kafka import clients
from tests.support.history import check
from tests.support.storm import Storm
from tests.support.system import System, wait_for

#: Of a broker on such a Kafka.
CONFIG: Final = """
[journal]
replication_factor = 3
min_insync_replicas = 2
append_timeout_s = 5
"""
OWN_TOPICS: Final = ("journal", "snapshots", "store", "ingress")
CLIENTS: Final = ("send:orders", "send-tx:orders", "move:orders>moved", "take:moved")
QUEUES: Final = ("orders", "moved")
#: Messages per second of each sender: the nodes need the processors to come back.
RATE: Final = 40
#: What is answered while a node is away, and again when it is back, before the next one goes.
PROGRESS: Final = 20
#: A node's start takes six seconds on an idle machine, with three of them and a load at once a minute.
NODE_S: Final = 150.0


def storm(system: System, directory: Path) -> Storm:
    """The clients."""
    return Storm(system.failover_url, directory, *CLIENTS, rate=RATE, batch=5, quiet_s=2)


class Load:
    """Java clients at work, and what was answered to them."""

    def __init__(self, storm: Storm, system: System, cluster: EmbeddedCluster, prefix: str) -> None:
        """``prefix`` is that of Bascule's topics."""
        self._storm = storm
        self._system = system
        self._prefix = prefix
        self._admin = clients.admin({"bootstrap.servers": cluster.bootstrap})
        self._cluster = cluster
        self._nodes = cluster.nodes

    def answered(self) -> int:
        return sum(each.outcome == "ok" and each.target == "orders" for each in self._storm.history())

    def goes_on(self) -> None:
        """Returns when some more sends are answered."""
        before = self.answered()
        wait_for(lambda: self.answered() >= before + PROGRESS, "answers", NODE_S)

    def whole(self) -> None:
        """Returns when all nodes have all of Bascule's topics."""
        wait_for(lambda: all(len(partition.isrs) == len(self._nodes) for partition in self._partitions()), "all replicas in sync", NODE_S)

    def leader(self, *, but_for: ClusterNode | None = None) -> ClusterNode:
        """The node that leads the journal, as all nodes but one say: one without its peers goes on calling itself leader."""
        admin = self._admin
        if but_for is not None:
            admin = clients.admin({"bootstrap.servers": self._cluster.bootstrap_of(*(node for node in self._nodes if node is not but_for))})
        topic = f"{self._prefix}.journal"
        (partition,) = admin.list_topics(topic, timeout=NODE_S).topics[topic].partitions.values()
        return self._nodes[partition.leader - 1]

    def coordinator(self) -> ClusterNode:
        """The node that coordinates the election of the broker."""
        group = JournalTopics(self._prefix).brokers
        node = self._admin.describe_consumer_groups([group], request_timeout=NODE_S)[group].result().coordinator
        return self._nodes[node.id - 1]

    def judge(self) -> None:
        """Stop the clients; nothing may be lost, doubled or out of order."""
        self._storm.stop_senders()
        for queue in QUEUES:
            self._system.wait_depth(queue, 0)
        self._storm.stop()
        tally = check(self._storm.history())
        assert tally.anomalies == [], tally
        assert tally.sent > 0

    def _partitions(self) -> list[PartitionMetadata]:
        topics = self._admin.list_topics(timeout=NODE_S).topics
        return [partition for name in OWN_TOPICS for partition in topics[f"{self._prefix}.{name}"].partitions.values()]
