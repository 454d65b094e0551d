"""Pipelines, adapter and distributed transactions on a Kafka of three nodes that restart in turn or are partly cut off.

Each of them retries by itself: nothing is lost or duplicated, and the test restarts no process except Kafka's nodes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from confluent_kafka.admin import AdminClient, PartitionMetadata

from bascule.adapter.inbound import Activation, ActivationSpec, Backoff, InboundLog, Record, Xa
from bascule.client import Queue, connect
from bascule.embedded.cluster import ClusterNode
from bascule.kafka import clients
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.xa import TransactionManager
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from tests.scenarios.adapter_topics import Watcher, create
from tests.scenarios.cluster_load import CONFIG, NODE_S
from tests.support.divided_cluster import DividedCluster
from tests.support.system import PYTHON_FAILOVER, Late, System, wait_for

PREFIX = "bridged"
#: Seconds between two messages, and between two records, of the load.
PAUSE_S = 0.1
#: Messages and records that each way carries while a node is away, and again after its return.
PROGRESS = 10
#: Kafka's name for the leader of a partition that has none.
NOBODY = -1
#: How long a node stays cut off: twice as long as the broker waits for an append until it reports that the journal stalls.
DIVIDED_S = 10.0
#: Timeout of the endpoint's transactions: those that wait for a divided node are rolled back, and their records are tried again.
TRANSACTION_S = 0.5 * DIVIDED_S
#: Topics of adapter and transactions have the cluster's defaults. Leaders move only because of faults.
PROPERTIES = """
default.replication.factor=3
min.insync.replicas=2
auto.leader.rebalance.enable=false
"""
BRIDGE = f"""{CONFIG}
[[divert]]
name = "out"
from = "orders"
to = "{PREFIX}.out"
start = "earliest"

[[ingress]]
name = "in"
topics = ["{PREFIX}.in"]
to = "back"
routing = "anycast"
unbound = "keep"
start = "earliest"
"""

pytestmark = pytest.mark.timeout(900)


class Ways:
    """The ways between JMS and Kafka: a divert, an ingress, and an endpoint whose transactions join a database model, Kafka and JMS."""

    def __init__(self, system: System, cluster: DividedCluster) -> None:
        self._system, self._cluster = system, cluster
        self._url = PYTHON_FAILOVER.format(system.url)
        self._settings = {"bootstrap.servers": cluster.bootstrap, "log_level": 0}
        self._over = threading.Event()
        self.sent: list[str] = []  # confirmed messages and records, which all ways have to carry
        self.produced: list[str] = []
        self.errors: list[object] = []
        self._threads = [threading.Thread(target=self._guarded, args=(each,), daemon=True) for each in (self._send, self._produce)]
        self._rows = DurableBranches()
        self._out = Watcher(cluster.bootstrap, f"{PREFIX}.out")
        self._receipts = Watcher(cluster.bootstrap, f"{PREFIX}.receipts")

    def _send(self) -> None:
        """Send messages for the divert."""
        with connect(self._url) as context:
            producer = context.producer(Queue("orders"))
            while not self._over.wait(PAUSE_S):
                value = f"m{len(self.sent)}"
                producer.send(value, timeout_s=2 * NODE_S)
                self.sent.append(value)

    def _produce(self) -> None:
        """Produce records for the ingress and for the endpoint."""
        producer = clients.producer({**self._settings, "enable.idempotence": True, "delivery.timeout.ms": 300_000})
        while not self._over.wait(PAUSE_S):
            value = f"r{len(self.produced)}"
            for topic in ("in", "work"):
                producer.produce(f"{PREFIX}.{topic}", value.encode(), value.encode(), on_delivery=self._delivered)
            assert producer.flush(2 * NODE_S) == 0
            self.produced.append(value)

    def _delivered(self, error: object, _record: object) -> None:
        if error is not None:
            self.errors.append(error)

    def _guarded(self, load: Callable[[], None]) -> None:
        try:
            load()
        except Exception as error:  # the test raises it
            self.errors.append(error)

    @contextmanager
    def running(self) -> Iterator[Ways]:
        """Run the load and the endpoint until the end of the block."""
        with ExitStack() as stack:
            stack.callback(self._out.close)
            stack.callback(self._receipts.close)
            log = InboundLog("inbound", self._settings, group=PREFIX)
            kafka, jms = KafkaResource("kafka", self._settings, prefix=f"{PREFIX}.xa"), JmsResource("jms", self._url)
            for each in (log, kafka, jms):
                stack.callback(each.close)
            database = ModelResource("db", self._rows)
            manager = stack.enter_context(TransactionManager("shop", ModelLog(), [log, database, kafka, jms], timeout_s=TRANSACTION_S))

            def work(record: Record) -> None:
                value = record.value or b""
                manager.enlist(database).append(value.decode())
                manager.enlist(kafka).send(f"{PREFIX}.receipts", value, record.key)
                manager.enlist(jms).send(Queue("receipts"), value.decode())

            spec = ActivationSpec(
                topics=(f"{PREFIX}.work",), group=PREFIX, backoff=Backoff(0.1, 2.0, 1.0), retries=1000, transacted=Xa(manager, log, kafka)
            )
            activation = Activation(self._settings, spec, work)
            activation.start()
            stack.callback(activation.stop, 5.0)
            stack.callback(self._over.set)
            for thread in self._threads:
                thread.start()
            yield self

    def carried(self) -> tuple[int, int, int]:
        """Return what the divert, the ingress and the endpoint have carried so far."""
        return len(self._out.look()), self._system.depth("back"), len(self._rows.committed)

    def goes_on(self) -> None:
        """Return when each way has carried some more."""
        before = self.carried()

        def further() -> bool:
            assert self.errors == []
            return all(now >= then + PROGRESS for now, then in zip(self.carried(), before, strict=True))

        wait_for(further, lambda: f"each way to carry {PROGRESS} more than {before}; they have carried {self.carried()}", NODE_S)

    def whole(self) -> None:
        """Return when all replicas are in sync."""
        admin = clients.admin(self._settings)

        def lagging() -> list[str]:
            return [
                f"{topic}-{partition.id}: {partition.isrs} of {partition.replicas}"
                for topic, partition in _partitions(admin)
                if len(partition.isrs) < len(self._cluster.nodes)
            ]

        wait_for(lambda: not lagging(), lambda: f"all replicas in sync; not in sync are {lagging()}", NODE_S)

    def leader(self) -> ClusterNode:
        """Return the node that leads the journal."""
        admin = clients.admin(self._settings)
        (number,) = {partition.leader for topic, partition in _partitions(admin) if topic == f"{PREFIX}.journal"}
        return self._cluster.nodes[number - 1]

    def replaced(self, node: ClusterNode) -> None:
        """Return when the other nodes have taken over all partitions that a node led."""
        others = self._cluster.bootstrap_of(*(each for each in self._cluster.nodes if each is not node))

        def led() -> list[str]:
            admin = clients.admin({**self._settings, "bootstrap.servers": others})  # another client, as this one may ask the node itself
            return [f"{topic}-{partition.id}" for topic, partition in _partitions(admin) if partition.leader in (node.number, NOBODY)]

        wait_for(lambda: not led(), lambda: f"other leaders of {led()}", NODE_S)

    def endure(self) -> None:
        """Leave the cluster divided for a time. Work that needs the divided node may wait, but must not fail."""
        with suppress(Late):
            wait_for(lambda: self.errors, "an error", DIVIDED_S)
        assert self.errors == []

    def judge(self) -> None:
        """End the load, and check that each way has carried everything once."""
        self._over.set()
        for thread in self._threads:
            thread.join(2 * NODE_S)
            assert not thread.is_alive()
        assert self.errors == []
        wait_for(lambda: set(self._out.look()) >= set(self.sent), "all messages in Kafka", NODE_S)
        wait_for(lambda: set(self._receipts.look()) >= set(self.produced), "all receipts in Kafka", NODE_S)
        for queue in ("back", "receipts"):
            self._await_depth(queue, len(self.produced))
        with connect(self._url) as context:
            back, receipts = ([_text(message.body) for message in context.browse(Queue(queue))] for queue in ("back", "receipts"))
        assert wrong(self._out.values, self.sent) == ""
        assert wrong(back, self.produced) == ""
        assert self._out.values == self.sent
        assert back == self.produced
        for carried in (self._receipts.values, receipts, self._rows.committed):  # keys differ, so their order is free
            assert wrong(carried, self.produced) == ""

    def _await_depth(self, queue: str, count: int) -> None:
        wait_for(lambda: self._system.depth(queue) >= count, f"{count} messages in queue {queue}", NODE_S)


def wrong(carried: list[str], wanted: list[str]) -> str:
    """Return what is lost and what is there too often; an empty text if nothing is."""
    lost, extra = Counter(wanted) - Counter(carried), Counter(carried) - Counter(wanted)
    return f"lost: {sorted(lost)}, too often: {sorted(extra)}" if lost or extra else ""


def _partitions(admin: AdminClient) -> list[tuple[str, PartitionMetadata]]:
    topics = admin.list_topics(timeout=NODE_S).topics
    return [(name, partition) for name, topic in topics.items() for partition in topic.partitions.values()]


def _text(body: object) -> str:
    return body.decode() if isinstance(body, bytes) else str(body)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DividedCluster]:
    divided = DividedCluster(tmp_path_factory.mktemp("cluster"), divide_clients=True)
    for node in divided.nodes:
        node.more_properties += PROPERTIES
    with divided as running:
        yield running


@pytest.fixture(scope="module")
def ways(cluster: DividedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    create(cluster.bootstrap, *(f"{PREFIX}.{name}" for name in ("out", "in", "work", "receipts")), partitions=1)
    with System(cluster.bootstrap, tmp_path_factory.mktemp("broker"), prefix=PREFIX, config=BRIDGE) as system:
        system.pipelines.start()
        with Ways(system, cluster).running() as ways:
            yield ways


@pytest.mark.slow
def test_each_way_continues_after_node_restarts_and_partial_partitions_and_carries_everything_once(
    ways: Ways, cluster: DividedCluster
) -> None:
    ways.goes_on()
    for node, end in zip(cluster.nodes, (ClusterNode.stop, ClusterNode.kill, ClusterNode.stop), strict=True):
        ways.whole()
        end(node)
        ways.goes_on()
        node.start()
    ways.whole()
    isolated = ways.leader()
    cluster.isolate(isolated)
    ways.replaced(isolated)
    ways.endure()
    cluster.heal()
    ways.goes_on()
    ways.whole()
    cluster.shut_out(ways.leader())
    sent = len(ways.sent)
    ways.endure()
    assert len(ways.sent) <= sent + 1  # one had an answer on its way; the next one waits for the leader of the journal
    cluster.heal()
    ways.goes_on()
    ways.judge()
