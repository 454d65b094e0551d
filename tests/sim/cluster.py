"""The nodes of the simulated Kafka: leaders, in-sync replicas, elections, and nodes that are cut off or stopped.

Every node has a replica of every partition. At most one node is away at a time; another one may not have caught up yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.sim.partition import FormerLeader, NotNow, Partition
from tests.sim.world import Process, World

NODES: Final = (0, 1, 2)
#: min.insync.replicas of every topic.
IN_SYNC_MIN: Final = 2
#: How long a node that does not answer counts as in sync, and how soon a returned node is in sync again.
LAG_MAX_MS: Final = 30.0
CATCH_UP_MS: Final = 60.0
#: How long an election takes, and how long a new leader does not know the high watermark.
ELECTION_MS: Final = 40.0
#: How often an answer that waited for replicas is lost, because the leader has changed.
ANSWER_LOST: Final = 0.1
#: How often a client takes a former leader for the leader, and how often it finds out when a request is not answered.
STALE: Final = 0.5
REFRESH: Final = 0.5
#: How often a new leader does not know the offsets of the batches that it has.
FORGETFUL: Final = 0.5


@dataclass(slots=True)
class NetworkConditions:
    """The faults of network and servers for requests; probabilities for one request."""

    lost: float = 0.0  # the request never arrives
    unanswered: float = 0.0  # the request is carried out, and the answer is lost
    held: float = 0.0  # the request arrives after its own repetition
    slow: float = 0.0  # the request takes ten times as long
    failed_append: float = 0.0  # an append is reported failed, stored or not
    delay_ms: float = 1.0  # longest way in the network
    transaction_ms: float = 900.0  # the coordinator ends a transaction that is open for longer
    lag_ms: float = 0.0  # how much later followers store what the leader has, at most


class Cluster:
    """The nodes, and the leaders of the partitions."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = NetworkConditions()
        self.partitions: dict[tuple[str, int], Partition] = {}
        self.away: int | None = None  # the node that its peers do not reach
        self._leaderless: list[Partition] = []
        self.answer_lost = 0.0
        self.prompt = True  # followers have a record as soon as the leader has it

    def partition(self, topic: str, index: int = 0) -> Partition:
        """Return a partition, which is created on first use."""
        found = self.partitions.get((topic, index))
        if found is None:
            found = self.partitions[topic, index] = Partition(topic, index, self)
            found.leader = self.away_from(len(self.partitions) % len(NODES))
            found.in_sync = {node for node in NODES if node != self.away}
        return found

    def away_from(self, node: int) -> int:
        """Return a node that is not away: this one, or the next."""
        return node if node != self.away else (node + 1) % len(NODES)

    def use(self, weather: NetworkConditions) -> None:
        """Use these conditions from now on."""
        self.weather = weather
        self.answer_lost = ANSWER_LOST if weather.lag_ms else 0.0
        self.prompt = not weather.lag_ms and self.away is None

    # -- replication -------------------------------------------------------------------------------------------------

    def check_replicas(self, partition: Partition) -> None:
        """Check that enough replicas for an append are in sync. Raises NotNow."""
        if len(partition.in_sync) < IN_SYNC_MIN:
            self.world.note("too few in sync", partition.topic)
            raise NotNow

    def replicate(self, partition: Partition) -> None:
        """Let the followers fetch what the leader has now, some time later."""
        self.world.after(
            self.world.random.random() * self.weather.lag_ms, self._replicated, partition, partition.log_end, partition.leader_epoch
        )

    def _replicated(self, partition: Partition, end: int, leader_epoch: int) -> None:
        if partition.leader_epoch == leader_epoch and self.away not in partition.in_sync:
            partition.advance(end)

    def _shrink(self, partition: Partition, node: int) -> None:
        if self.away == node and partition.leader != node and node in partition.in_sync:
            partition.in_sync.discard(node)
            self.replicate(partition)

    def _join(self, node: int) -> None:
        if self.away != node:
            for partition in self.partitions.values():
                partition.in_sync.add(node)
            self._elect_leaderless()

    # -- leaders -----------------------------------------------------------------------------------------------------

    def change_leaders(self) -> None:
        """Let a leading node hand its partitions to others."""
        node = self.world.random.choice(NODES)
        for partition in list(self.partitions.values()):
            if partition.leader == node and node != self.away:
                self._elect(partition, without=node)

    def leave(self, node: int, *, cut_off: bool) -> None:
        """Stop a node, or cut it off from its peers but not from its clients."""
        if self.away is not None:
            return
        self.world.note("cut off node" if cut_off else "stop node", f"node {node}")
        self.away, self.prompt = node, False
        for partition in list(self.partitions.values()):
            if partition.leader != node:
                self.world.after(self.world.random.random() * LAG_MAX_MS, self._shrink, partition, node)
                continue
            former = FormerLeader(node, partition.start, partition.end, partition.stable)
            if self._elect(partition, without=node) and cut_off:
                partition.former = former
            partition.in_sync.discard(node)
        self.world.after(self.world.random.random() * 250, self.come_back, node)

    def come_back(self, node: int) -> None:
        """Let a node return: it no longer leads, truncates what only it has, and catches up."""
        if self.away == node:
            self.away = None
            self.prompt = not self.weather.lag_ms
            for partition in self.partitions.values():
                partition.former = None
                if node in partition.in_sync:
                    self.replicate(partition)
            self.world.after(self.world.random.random() * CATCH_UP_MS, self._join, node)

    def _elect(self, partition: Partition, *, without: int) -> bool:
        """Elect another in-sync replica. Without any, the partition has no leader until the node is in sync again."""
        random = self.world.random
        others = sorted(partition.in_sync - {without, self.away})
        if not others:
            partition.away_until_ms = float("inf")
            self._leaderless.append(partition)
            return False
        partition.leader = random.choice(others)
        partition.leader_epoch += 1
        partition.away_until_ms = self.world.now_ms + random.random() * ELECTION_MS
        if partition.truncate(random.randint(partition.end, partition.log_end)):
            self.world.note("truncate log", partition.topic)
        if random.random() < FORGETFUL:
            partition.forget_offsets()
        if self.weather.lag_ms:
            partition.known_end = max(0, partition.end - random.randint(0, 3))
            self.world.after(random.random() * ELECTION_MS, self._know_end, partition, partition.leader_epoch)
        self.replicate(partition)
        return True

    def _know_end(self, partition: Partition, leader_epoch: int) -> None:
        if partition.leader_epoch == leader_epoch:
            partition.known_end = None

    def _elect_leaderless(self) -> None:
        partitions, self._leaderless = self._leaderless, []
        for partition in partitions:
            self._elect(partition, without=-1)

    def heal(self) -> None:
        """Bring all nodes back, in sync."""
        self.use(NetworkConditions())
        if self.away is not None:
            self.come_back(self.away)
        for node in NODES:
            self._join(node)
        for partition in self.partitions.values():
            partition.away_until_ms, partition.known_end = 0.0, None
            partition.advance(partition.log_end)

    # -- what a client meets -----------------------------------------------------------------------------------------

    def takes_for_leader(self, process: Process, former: FormerLeader) -> bool:
        """Return True if a client's metadata says that a former leader leads. The client keeps its first belief."""
        believes = former.believers.get(process)
        if believes is None:
            believes = former.believers[process] = self.world.random.random() < STALE
        return believes

    def refresh(self, process: Process, former: FormerLeader) -> None:
        """Let a client that got no answer ask for the leader; it may ask a node that does not know."""
        if self.world.random.random() < REFRESH:
            former.believers[process] = False
