"""A broker on a Kafka of three nodes that are stopped, killed and missing under load: what was answered is there once, the rest waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import PartitionMetadata

from bascule.core.topics import JournalTopics
from bascule.embedded.cluster import ClusterNode, EmbeddedCluster
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.guards import TRANSACTION_STATE, TopicRole, UnsafeTopic, guard, guard_transactions
from bascule.kafka.history import TopicHistory
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import PipelinesSpec
from bascule.writer.position import POSITION_PARTITIONS
from tests.scenarios.changed_topics import Hand, make_transactions, refused, set_topic
from tests.support.history import Operation, check
from tests.support.storm import Storm
from tests.support.system import Late, System, wait_for

PREFIX = "cluster"
CONFIG = """
[journal]
replication_factor = 3
min_insync_replicas = 2
append_timeout_s = 5
"""
OWN_TOPICS = ("journal", "snapshots", "store", "ingress")
CLIENTS = ("send:orders", "send-tx:orders", "move:orders>moved", "take:moved")
RATE = 40  # messages per second of each sender: the nodes need the processors to come back
#: What is answered while a node is away, and again when it is back, before the next one goes.
PROGRESS = 20
#: A node's start takes six seconds on an idle machine, with three of them and a load at once a minute.
NODE_S = 150.0
STILL_S = 2.0
#: In the log of a broker, before what is wrong with a topic.
WARNED = "weak topic setting"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def system(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(cluster.bootstrap, tmp_path_factory.mktemp("broker"), prefix=PREFIX, config=CONFIG) as running:
        yield running


class Load:
    """Java clients at work, and what was answered to them."""

    def __init__(self, storm: Storm, cluster: EmbeddedCluster) -> None:
        self._storm = storm
        self._admin = clients.admin({"bootstrap.servers": cluster.bootstrap})
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

    def leader(self) -> ClusterNode:
        """The node that leads the journal."""
        (partition,) = self._admin.list_topics(f"{PREFIX}.journal", timeout=NODE_S).topics[f"{PREFIX}.journal"].partitions.values()
        return self._nodes[partition.leader - 1]

    def finish(self) -> list[Operation]:
        self._storm.stop()
        return self._storm.history()

    def _partitions(self) -> list[PartitionMetadata]:
        topics = self._admin.list_topics(timeout=NODE_S).topics
        return [partition for name in OWN_TOPICS for partition in topics[f"{PREFIX}.{name}"].partitions.values()]


@pytest.fixture
def load(system: System, cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[Load]:
    with Storm(system.failover_url, tmp_path, *CLIENTS, rate=RATE, batch=5, quiet_s=2) as storm:
        yield Load(storm, cluster)


def judge(load: Load) -> None:
    tally = check(load.finish())
    assert tally.anomalies == [], tally
    assert tally.sent > 0


Bounce = tuple[Callable[[ClusterNode], None], Callable[[Load, EmbeddedCluster], ClusterNode]]


def bounce(load: Load, cluster: EmbeddedCluster, *bounces: Bounce) -> None:
    for end, choose in bounces:
        load.whole()
        node = choose(load, cluster)
        end(node)
        load.goes_on()
        node.start()
        load.goes_on()
    load.whole()
    judge(load)


def leader(load: Load, cluster: EmbeddedCluster) -> ClusterNode:
    return load.leader()


def controller(load: Load, cluster: EmbeddedCluster) -> ClusterNode:
    found: ClusterNode = wait_for(cluster.controller, "an active controller")
    return found


def numbered(number: int) -> Callable[[Load, EmbeddedCluster], ClusterNode]:
    return lambda _, cluster: cluster.nodes[number]


def test_a_journal_of_three_replicas_needs_two_and_its_guards_say_what_is_wrong(
    cluster: EmbeddedCluster, tmp_path: Path, topic_prefix: str
) -> None:
    hand = Hand(cluster.bootstrap, topic_prefix)
    with System(cluster.bootstrap, tmp_path / "three", prefix=topic_prefix, config=CONFIG) as system:
        assert WARNED not in system.broker.said()
        system.broker.stop()
        hand.set("journal", "unclean.leader.election.enable", "true")
        assert "has unclean.leader.election.enable=true: a replica that lags may become the leader" in refused(system)
        hand.set("journal", "unclean.leader.election.enable", "false")
        hand.set("store", "min.insync.replicas", "1")
        system.broker.start()
        said = f"topic '{topic_prefix}.store' has min.insync.replicas=1: of 3 replicas, what one alone has stored is confirmed"
        assert said in system.broker.said()
        assert WARNED in system.broker.said()
    positions = Positions(
        PipelinesSpec(topic_prefix, hand.kafka, topics=JournalTopics(topic_prefix), replication_factor=3, min_insync_replicas=2), "test"
    )
    positions.prepare_topics()
    assert guard(Topics(hand.kafka), {f"{topic_prefix}.positions": (TopicRole.TABLE, POSITION_PARTITIONS)}) == []
    make_transactions(positions)
    assert guard_transactions(hand.kafka) == []
    try:
        set_topic(cluster.bootstrap, TRANSACTION_STATE, "min.insync.replicas", "1")
        (finding,) = wait_for(lambda: guard_transactions(hand.kafka), "every node to know the setting")
        assert str(finding).startswith(f"topic '{TRANSACTION_STATE}' has min.insync.replicas=1: of 3 replicas, what one alone has stored")
        set_topic(cluster.bootstrap, TRANSACTION_STATE, "unclean.leader.election.enable", "true")
        with pytest.raises(UnsafeTopic, match=rf"'{TRANSACTION_STATE}' has unclean\.leader\.election\.enable=true"):
            guard_transactions(hand.kafka)
    finally:
        set_topic(cluster.bootstrap, TRANSACTION_STATE, "min.insync.replicas", "2")
        set_topic(cluster.bootstrap, TRANSACTION_STATE, "unclean.leader.election.enable", "false")
    with System(cluster.bootstrap, tmp_path / "one", prefix=f"{topic_prefix}-one") as system:
        assert f"topic '{topic_prefix}-one.journal' has replication factor=1: all is lost with one disk; set 3" in system.broker.said()


def test_nodes_are_stopped_and_killed_one_after_the_other_and_nothing_is_lost_or_doubled(load: Load, cluster: EmbeddedCluster) -> None:
    bounce(load, cluster, (ClusterNode.stop, leader), (ClusterNode.kill, leader), (ClusterNode.kill, controller))


@pytest.mark.slow
def test_every_node_is_stopped_and_killed_and_nothing_is_lost_or_doubled(load: Load, cluster: EmbeddedCluster) -> None:
    bounce(load, cluster, *((end, numbered(number)) for number in range(3) for end in (ClusterNode.stop, ClusterNode.kill)))


def test_with_two_of_three_nodes_it_goes_on_and_with_one_every_send_waits_until_they_are_back(
    load: Load, system: System, cluster: EmbeddedCluster
) -> None:
    load.whole()
    first = load.leader()
    others = [node for node in cluster.nodes if node is not first]
    first.stop()
    load.goes_on()
    others[0].kill()
    wait_for(lambda: not system.status()["serving"], "the broker to find out")
    before = load.answered()
    with pytest.raises(Late):
        wait_for(lambda: load.answered() > before, "an answer that nobody may give", STILL_S)
    for node in (first, others[0]):
        node.launch()
    for node in (first, others[0]):
        node.wait_ready()
    load.goes_on()
    load.whole()
    judge(load)


def test_a_transaction_that_is_committed_while_a_partition_has_no_leader_is_there_when_it_has_one_again(
    cluster: EmbeddedCluster, topic_prefix: str
) -> None:
    """Kafka 4.3 and 4.4 forget it: whoever reads what is committed waits for its end for ever (docs/adr/0011)."""
    kafka, node = {"bootstrap.servers": cluster.bootstrap}, cluster.nodes[2]
    topics = Topics(kafka)
    topics.create(topic_prefix, len(cluster.nodes), {}, replication_factor=1)
    topics.await_visible([topic_prefix])
    admin = clients.admin(kafka)

    def leaders() -> dict[int, int]:
        return {at.leader: number for number, at in admin.list_topics(topic_prefix, timeout=NODE_S).topics[topic_prefix].partitions.items()}

    partition = leaders()[3]
    producer = clients.producer({**kafka, "transactional.id": topic_prefix})
    producer.init_transactions(NODE_S)
    producer.begin_transaction()
    producer.produce(topic_prefix, b"committed", partition=partition)
    assert producer.flush(NODE_S) == 0
    node.kill()
    wait_for(lambda: -1 in leaders(), "a partition without a leader")
    producer.commit_transaction(NODE_S)
    node.start()
    history = TopicHistory(kafka, topic_prefix, partition)
    wait_for(lambda: history.stable() == history.latest() > 0, "the end of the transaction", NODE_S)
    assert [record.value() for record in history.records(0, history.latest(), committed=True)] == [b"committed"]
