"""A broker on a Kafka of three nodes that are stopped, killed and isolated under load.

Each confirmed message is there once; the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from bascule.core.topics import JournalTopics
from bascule.embedded.cluster import ClusterNode, EmbeddedCluster
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.bounds import Bounds, bounds_of
from bascule.kafka.guards import TRANSACTION_STATE, TopicRole, UnsafeTopic, guard, guard_transactions
from bascule.kafka.history import PartitionOffsets, TopicHistory, offsets_client
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import PipelinesSpec
from bascule.writer.position import POSITION_PARTITIONS
from tests.scenarios.changed_topics import Hand, make_transactions, refused, set_topic
from tests.scenarios.cluster_load import CONFIG, NODE_S, Load, storm
from tests.support.system import Late, System, paused, wait_for

PREFIX = "cluster"
STILL_S = 2.0
#: Less than the time after which a client gives up a connection without an answer (socket.timeout.ms, 60 s by default).
ANSWER_S = 45.0
#: Marks the reason in the broker's log why a topic is unsafe.
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


@pytest.fixture
def load(system: System, cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[Load]:
    with storm(system, tmp_path) as clients_at_work:
        yield Load(clients_at_work, system, cluster, PREFIX)


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
    load.judge()


def leader(load: Load, cluster: EmbeddedCluster) -> ClusterNode:
    return load.leader()


def controller(load: Load, cluster: EmbeddedCluster) -> ClusterNode:
    found: ClusterNode = wait_for(cluster.controller, "an active controller")
    return found


def numbered(number: int) -> Callable[[Load, EmbeddedCluster], ClusterNode]:
    return lambda _, cluster: cluster.nodes[number]


def test_guards_report_unsafe_and_weak_replication_settings_in_a_cluster(
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
        said = f"topic '{topic_prefix}.store' has min.insync.replicas=1: with 3 replicas, a record is confirmed when a single replica"
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
        assert str(finding).startswith(
            f"topic '{TRANSACTION_STATE}' has min.insync.replicas=1: with 3 replicas, a record is confirmed when a single replica"
        )
        set_topic(cluster.bootstrap, TRANSACTION_STATE, "unclean.leader.election.enable", "true")
        with pytest.raises(UnsafeTopic, match=rf"'{TRANSACTION_STATE}' has unclean\.leader\.election\.enable=true"):
            guard_transactions(hand.kafka)
    finally:
        set_topic(cluster.bootstrap, TRANSACTION_STATE, "min.insync.replicas", "2")
        set_topic(cluster.bootstrap, TRANSACTION_STATE, "unclean.leader.election.enable", "false")
    with System(cluster.bootstrap, tmp_path / "one", prefix=f"{topic_prefix}-one") as system:
        assert (
            f"topic '{topic_prefix}-one.journal' has replication factor=1: the loss of one disk loses all records; set 3"
            in system.broker.said()
        )


def test_offsets_come_from_the_new_leader_while_the_former_one_is_suspended(cluster: EmbeddedCluster, topic_prefix: str) -> None:
    """A suspended node accepts a request and never answers it."""
    kafka, topic = {"bootstrap.servers": cluster.bootstrap}, f"{topic_prefix}.ends"
    topics, admin = Topics(kafka), offsets_client(kafka)
    topics.create(topic, 1, {}, replication_factor=3)
    topics.await_visible([topic])
    offsets = PartitionOffsets(kafka, [TopicPartition(topic, 0)], admin)
    assert offsets.end(ANSWER_S).offset == 0
    former = cluster.nodes[admin.list_topics(topic, timeout=ANSWER_S).topics[topic].partitions[0].leader - 1]
    assert former.pid
    with paused(former.pid):
        assert offsets.end(ANSWER_S).offset == 0
        assert bounds_of(kafka, [(topic, 0)], ANSWER_S) == {(topic, 0): Bounds(0, 0)}
        assert topics.config(topic, ANSWER_S)["cleanup.policy"] == "delete"


def test_kill_of_leader_and_controller_lose_and_double_no_message(load: Load, cluster: EmbeddedCluster) -> None:
    """The next test stops the leader."""
    bounce(load, cluster, (ClusterNode.kill, leader), (ClusterNode.kill, controller))


@pytest.mark.slow
def test_stop_and_kill_of_every_node_lose_and_double_no_message(load: Load, cluster: EmbeddedCluster) -> None:
    bounce(load, cluster, *((end, numbered(number)) for number in range(3) for end in (ClusterNode.stop, ClusterNode.kill)))


def test_sends_continue_with_two_of_three_nodes_and_wait_while_one_node_is_left(
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
    load.judge()


def test_transaction_committed_while_a_partition_has_no_leader_is_visible_after_its_return(
    cluster: EmbeddedCluster, topic_prefix: str
) -> None:
    """Kafka 4.3 and 4.4 forget the transaction: readers of committed records wait for its end for ever (docs/adr/0011)."""
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
