"""JMS clients of a broker whose Kafka has three nodes, and the sends that were confirmed to them."""

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

#: Settings of a broker on this Kafka.
CONFIG: Final = """
[journal]
replication_factor = 3
min_insync_replicas = 2
append_timeout_s = 5
"""
OWN_TOPICS: Final = ("journal", "snapshots", "store", "ingress")
CLIENTS: Final = ("send:orders", "send-tx:orders", "move:orders>moved", "take:moved")
QUEUES: Final = ("orders", "moved")
#: Messages per second of each sender. The rate is low because starting nodes need the processors.
RATE: Final = 40
#: Sends to confirm while a node is stopped, and again after its restart.
PROGRESS: Final = 20
#: A node starts in six seconds on an idle machine; three nodes and a load on a busy machine take up to a minute.
NODE_S: Final = 150.0


def storm(system: System, directory: Path) -> Storm:
    """The options of the clients."""
    return Storm(system.failover_url, directory, *CLIENTS, rate=RATE, batch=5, quiet_s=2)


class Load:
    """Java clients under load, and the sends that were confirmed to them."""

    def __init__(self, storm: Storm, system: System, cluster: EmbeddedCluster, prefix: str) -> None:
        """``prefix`` is the prefix of Bascule's topics."""
        self._storm = storm
        self._system = system
        self._prefix = prefix
        self._admin = clients.admin({"bootstrap.servers": cluster.bootstrap})
        self._cluster = cluster
        self._nodes = cluster.nodes

    def answered(self) -> int:
        return sum(each.outcome == "ok" and each.target == "orders" for each in self._storm.history())

    def goes_on(self) -> None:
        """Return when some more sends are confirmed."""
        before = self.answered()
        wait_for(lambda: self.answered() >= before + PROGRESS, "answers", NODE_S)

    def whole(self) -> None:
        """Return when all nodes have all replicas of Bascule's topics in sync."""
        wait_for(lambda: all(len(partition.isrs) == len(self._nodes) for partition in self._partitions()), "all replicas in sync", NODE_S)

    def leader(self, *, but_for: ClusterNode | None = None) -> ClusterNode:
        """Return the node that leads the journal according to all nodes but one: an isolated node still considers itself the leader."""
        admin = self._admin
        if but_for is not None:
            admin = clients.admin({"bootstrap.servers": self._cluster.bootstrap_of(*(node for node in self._nodes if node is not but_for))})
        topic = f"{self._prefix}.journal"
        (partition,) = admin.list_topics(topic, timeout=NODE_S).topics[topic].partitions.values()
        return self._nodes[partition.leader - 1]

    def coordinator(self) -> ClusterNode:
        """Return the node that coordinates the election of the broker."""
        group = JournalTopics(self._prefix).brokers
        node = self._admin.describe_consumer_groups([group], request_timeout=NODE_S)[group].result().coordinator
        return self._nodes[node.id - 1]

    def judge(self) -> None:
        """Stop the clients, and check that no message is lost, duplicated or out of order."""
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
