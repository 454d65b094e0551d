"""A Kafka of three nodes, some reachable for clients only or for peers only: nothing is lost or duplicated, and no position moves back.

A former leader that clients still reach, but its peers do not, answers with old data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import ElectionType

from bascule.core.errors import Unavailable
from bascule.core.topics import JournalTopics
from bascule.embedded.cluster import ClusterNode
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import TableReader
from bascule.kafka.transactional import Output, TransactionalWriter
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import PipelinesSpec
from bascule.writer.errors import PositionMoved
from bascule.writer.position import Position, position_partition
from tests.scenarios.cluster_load import CONFIG, Load, storm
from tests.scenarios.topics import Reader
from tests.support.divided_cluster import DividedCluster
from tests.support.system import System, wait_for

PREFIX = "divided"
#: A node is fenced after two seconds; on a busy machine elections take longer.
ELECTION_S = 120.0
#: How long a writer may try if only the former leader answers.
WRITER_DEADLINE_S = 10.0
TRANSACTIONS = "__transaction_state"
RECORDS = ("a", "b", "c")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DividedCluster]:
    with DividedCluster(tmp_path_factory.mktemp("cluster"), divide_clients=True) as running:
        yield running


class Site(NamedTuple):
    """A cluster in which ``former`` leads the positions of ``key``, but not the output or the transactions of the writer."""

    former: ClusterNode
    others: str  # bootstrap.servers of the other nodes
    topic: str
    positions: str
    key: str
    transactional_id: str

    def writer(self, deadline_s: float = WRITER_DEADLINE_S) -> TransactionalWriter:
        """Return a writer whose new clients find the leader, while its older clients still ask the former one."""
        kafka = {"bootstrap.servers": self.others, "log_level": 0}
        return TransactionalWriter(kafka, self.transactional_id, self.positions, self.key, deadline_s=deadline_s)

    def outputs(self, first: int, last: int) -> list[Output]:
        return [Output(self.topic, None, value.encode(), []) for value in RECORDS[first:last]]


def leaders(bootstrap: str, topic: str) -> dict[int, int]:
    listed = clients.admin({"bootstrap.servers": bootstrap, "log_level": 0}).list_topics(topic, timeout=30).topics[topic]
    return {number: partition.leader for number, partition in listed.partitions.items()}


def java_hash(text: str) -> int:
    """Return Java's ``String.hashCode``, by which Kafka chooses the coordinator of a transactional id."""
    found = 0
    for character in text:
        found = (31 * found + ord(character)) & 0xFFFFFFFF
    return found - (1 << 32) if found >= 1 << 31 else found


@pytest.fixture
def site(cluster: DividedCluster, topic_prefix: str) -> Site:
    kafka = {"bootstrap.servers": cluster.bootstrap}
    pipelines = PipelinesSpec(topic_prefix, kafka, topics=JournalTopics(topic_prefix), replication_factor=3, min_insync_replicas=2)
    Positions(pipelines, "").prepare_topics()
    topics, topic = Topics(kafka), f"{topic_prefix}.out"
    topics.create(topic, 1, {}, replication_factor=3)
    topics.await_visible([topic])
    with closing(TransactionalWriter(kafka, "first", pipelines.topics.positions, "first")) as first:
        first.write([], None, Position(topic, "id", 0, 0))  # Kafka creates the topic of its coordinators at the first request
    admin = clients.admin({**kafka, "log_level": 0})
    admin.elect_leaders(ElectionType.PREFERRED).result()  # an earlier test may have left one node with all partitions of a topic
    (out,) = leaders(cluster.bootstrap, topic).values()

    def chosen() -> tuple[ClusterNode, dict[int, int], dict[int, int]] | None:
        led, coordinators = leaders(cluster.bootstrap, pipelines.topics.positions), leaders(cluster.bootstrap, TRANSACTIONS)
        suitable = (node for node in cluster.nodes if node.number != out and node.number in led.values())
        return next(((node, led, coordinators) for node in suitable if set(coordinators.values()) - {node.number}), None)

    former, led, coordinators = wait_for(chosen, "a node that leads positions and not all coordinators", ELECTION_S)

    def named(wanted: Callable[[str], bool]) -> str:
        return next(name for name in (f"{topic_prefix}-{number}" for number in count()) if wanted(name))

    return Site(
        former,
        ",".join(node.bootstrap for node in cluster.nodes if node is not former),
        topic,
        pipelines.topics.positions,
        named(lambda name: led[position_partition(name)] == former.number),
        named(lambda name: coordinators[abs(java_hash(name)) % len(coordinators)] != former.number),
    )


def at(offset: int) -> Position:
    return Position("journal", "id", 0, offset)


def cut_off(cluster: DividedCluster, site: Site) -> None:
    """Return when the other nodes have new leaders. The former leader does not know them, and considers itself the leader."""
    cluster.isolate(site.former)
    asked = (site.positions, site.topic, TRANSACTIONS)
    wait_for(lambda: all(site.former.number not in leaders(site.others, topic).values() for topic in asked), "new leaders", ELECTION_S)


def write_elsewhere(site: Site) -> None:
    """Write the second record as a successor on another machine, whose clients ask the new leader."""
    with closing(site.writer(ELECTION_S)) as successor:
        assert successor.current() == at(1)
        successor.write(site.outputs(1, 2), at(1), at(2))


def go_on(site: Site, writer: TransactionalWriter) -> bool:
    """Write what follows the position, as a starting pipeline does. Return whether everything is written."""
    try:
        position = writer.current() or at(0)
        if position != at(len(RECORDS)):
            writer.write(site.outputs(position.offset, len(RECORDS)), position, at(len(RECORDS)))
    except (Unavailable, PositionMoved):  # a pipeline restarts
        return False
    return True


@pytest.mark.slow
def test_writer_that_asks_former_leader_moves_no_position_back_and_doubles_no_record(cluster: DividedCluster, site: Site) -> None:
    with closing(site.writer()) as stale:
        stale.write(site.outputs(0, 1), None, at(1))
        assert stale.current() == at(1)  # from now on its reader knows the leader
        try:
            cut_off(cluster, site)
            write_elsewhere(site)
            done = go_on(site, stale)
        finally:
            cluster.heal()
        if not done:
            wait_for(lambda: go_on(site, stale), "all to be written", ELECTION_S)
        with closing(Reader(cluster.bootstrap, site.topic)) as reader:
            assert reader.read_until("c") == list(RECORDS)
        assert stale.current() == at(len(RECORDS))


def test_former_leader_returns_the_old_position_and_accepts_no_barrier(cluster: DividedCluster, site: Site) -> None:
    kafka = {"bootstrap.servers": site.others, "log_level": 0}
    partition, key = position_partition(site.key), site.key.encode()
    with closing(site.writer()) as writer:
        writer.write(site.outputs(0, 1), None, at(1))
    with closing(TableReader(kafka, site.positions, [partition])) as reader:
        assert Position.decode(reader.read(ELECTION_S)[key].value) == at(1)
        try:
            cut_off(cluster, site)
            write_elsewhere(site)
            assert Position.decode(reader.read(ELECTION_S)[key].value) == at(1), "the former leader was not asked"
            found = None
            with suppress(Unavailable):
                found = Position.decode(reader.read_behind_barrier(WRITER_DEADLINE_S)[key].value)
            assert found in (None, at(2))
        finally:
            cluster.heal()
        wait_for(lambda: reader.read_behind_barrier(ELECTION_S)[key].value == at(2).encode(), "the position", ELECTION_S)


@pytest.fixture(scope="module")
def system(cluster: DividedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(cluster.bootstrap, tmp_path_factory.mktemp("broker"), prefix=PREFIX, config=CONFIG) as running:
        yield running


@pytest.fixture
def load(system: System, cluster: DividedCluster, tmp_path: Path) -> Iterator[Load]:
    with storm(system, tmp_path) as clients_at_work:
        load = Load(clients_at_work, system, cluster, PREFIX)
        load.goes_on()
        load.whole()
        yield load
        cluster.heal()


@pytest.mark.slow
def test_broker_continues_when_a_leader_is_unreachable_only_for_its_peers(load: Load, cluster: DividedCluster) -> None:
    former = load.leader()
    cluster.isolate(former)
    load.goes_on()
    wait_for(lambda: load.leader(but_for=former) is not former, "another leader")
    cluster.heal()
    load.goes_on()
    load.whole()
    load.judge()


def test_sends_wait_when_a_leader_is_unreachable_only_for_the_broker(load: Load, system: System, cluster: DividedCluster) -> None:
    """Kafka elects no other leader: it does not know which nodes clients reach."""
    cluster.shut_out(load.leader())
    wait_for(lambda: not system.status()["serving"], "the broker to find out")
    cluster.heal()
    load.goes_on()
    load.whole()
    load.judge()


@pytest.mark.slow
def test_broker_continues_when_a_node_that_leads_no_needed_partition_is_unreachable(load: Load, cluster: DividedCluster) -> None:
    needed = (load.leader(), load.coordinator())
    cluster.shut_out(next(node for node in cluster.nodes if node not in needed))
    load.goes_on()
    cluster.heal()
    load.goes_on()
    load.whole()
    load.judge()
