"""The coordinators of transactions, protocol v1: their state is in a replicated log, which a new coordinator replays."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from tests.sim.cluster import Cluster
from tests.sim.partition import KafkaFault, Later, NotNow, Partition, ToWrite, Transaction
from tests.sim.world import Promise

T = TypeVar("T")
#: The log of the coordinators, and its partitions.
STATE_TOPIC: Final = "__transaction_state"
STATE_PARTITIONS: Final = 2


class Coordinated(NamedTuple):
    """The state of a transactional id. ``state``: empty, ongoing, prepare-commit, complete-commit, and as -abort."""

    producer: int
    epoch: int
    state: str
    transaction: Transaction


class Coordinator:
    """The coordinator of the ids in one partition of the state topic, on the node that leads it."""

    def __init__(self, cluster: Cluster, partition: Partition, new_producer: Callable[[], int]) -> None:
        self.partition = partition
        self._cluster = cluster
        self._world = cluster.world
        self._new_producer = new_producer
        self._known: dict[str, Coordinated] = {}
        self._log: list[tuple[str, Coordinated]] = []  # by offset
        self._changing: dict[str, None] = {}  # ids whose change is not replicated yet
        self._leader_epoch = partition.leader_epoch
        self._time_outs_ms: dict[str, float] = {}  # by id, for ids with their own timeout
        self._marking: dict[str, set[Partition]] = {}  # partitions without the marker of an ending transaction

    # -- requests ----------------------------------------------------------------------------------------------------

    def init(self, transactional_id: str, time_out_ms: float | None = None) -> tuple[int, int]:
        """InitProducerId: return a new epoch. The open transaction of an older epoch ends. ``time_out_ms`` is for its transactions."""
        if time_out_ms is not None:
            self._time_outs_ms[transactional_id] = time_out_ms
        known = self._current(transactional_id)
        if known is None:
            known = Coordinated(self._new_producer(), 0, "empty", Transaction())
        elif known.state == "ongoing":
            with suppress(Later):
                self._end(transactional_id, known._replace(epoch=known.epoch + 1), commit=False)
            raise NotNow
        elif known.state.startswith("prepare"):
            raise NotNow
        else:
            known = known._replace(epoch=known.epoch + 1, state="empty")
        return self._change(transactional_id, known, (known.producer, known.epoch))

    def add_partition(self, transactional_id: str, producer: int, epoch: int, partition: Partition) -> None:
        """AddPartitionsToTxn: add a partition; the first one begins the transaction."""
        known = self._of(transactional_id, producer, epoch)
        if known.state.startswith("prepare"):
            raise NotNow
        if known.state != "ongoing":
            known = known._replace(state="ongoing", transaction=Transaction())
            time_out_ms = self._time_outs_ms.get(transactional_id, self._cluster.weather.transaction_ms)
            self._world.after(time_out_ms, self._expire, transactional_id, known.transaction)
        known.transaction.partitions[partition] = None
        self._change(transactional_id, known, None)

    def takes(self, transactional_id: str, epoch: int, partition: Partition) -> Transaction:
        """Return the ongoing transaction, for the leader of a partition. Raises KafkaFault."""
        known = self._current(transactional_id)
        if known is None or known.state != "ongoing" or known.epoch != epoch or partition not in known.transaction.partitions:
            raise KafkaFault("fenced" if known is not None and known.epoch > epoch else "invalid-state")
        return known.transaction

    def end(self, transactional_id: str, producer: int, epoch: int, *, commit: bool) -> None:
        """EndTxn: end the transaction. A repetition finds it ended, or ends the next one: with protocol v1 nothing tells them apart."""
        known = self._of(transactional_id, producer, epoch)
        if known.state == "ongoing":
            self._end(transactional_id, known, commit=commit)
        elif known.state.startswith("prepare"):
            raise NotNow
        elif not known.state.endswith("commit" if commit else "abort"):
            raise KafkaFault("invalid-state")

    # -- state -------------------------------------------------------------------------------------------------------

    def _current(self, transactional_id: str) -> Coordinated | None:
        if self._leader_epoch != self.partition.leader_epoch:
            self._replay()
        if transactional_id in self._changing:
            raise NotNow
        return self._known.get(transactional_id)

    def _of(self, transactional_id: str, producer: int, epoch: int) -> Coordinated:
        known = self._current(transactional_id)
        if known is None or known.producer != producer or known.epoch != epoch:
            raise KafkaFault("fenced")
        return known

    def _replay(self) -> None:
        """Read the log on the node that leads now, and continue unfinished transactions."""
        self._world.note("move coordinator", f"node {self.partition.leader}")
        self._leader_epoch = self.partition.leader_epoch
        del self._log[self.partition.log_end :]
        self._known = dict(self._log)
        self._changing.clear()
        self._marking.clear()
        for transactional_id, known in list(self._known.items()):
            if known.state.startswith("prepare"):
                self._send_markers(transactional_id, known)

    def _change(self, transactional_id: str, known: Coordinated, value: T, then: Callable[[], None] = lambda: None) -> T:
        """Append a state. Return the answer ``value`` when the state is replicated. Raises Later, NotNow."""
        leader_epoch = self._leader_epoch
        try:
            self.partition.store(ToWrite(transactional_id.encode(), f"{known.producer} {known.epoch} {known.state}".encode()))
        except Later as later:
            stored = later.answer
            answer: Promise[T] = Promise()
            self._changing[transactional_id] = None
            self._log.append((transactional_id, known))

            def count() -> None:
                if stored.error is not None:
                    answer.fail(stored.error)
                    return
                if self._leader_epoch == leader_epoch == self.partition.leader_epoch:
                    del self._changing[transactional_id]
                    self._known[transactional_id] = known
                    then()
                elif self._leader_epoch != self.partition.leader_epoch:
                    self._replay()
                answer.keep(value)

            stored.then(count)
            raise Later(answer) from None
        self._log.append((transactional_id, known))
        self._known[transactional_id] = known
        then()
        return value

    def _expire(self, transactional_id: str, transaction: Transaction) -> None:
        def again() -> None:
            self._world.after(self._cluster.weather.delay_ms, self._expire, transactional_id, transaction)

        try:
            known = self._current(transactional_id)
            if known is not None and known.state == "ongoing" and known.transaction is transaction:
                self._world.note("expire transaction")
                self._end(transactional_id, known._replace(epoch=known.epoch + 1), commit=False)
        except NotNow:
            again()
        except Later as later:
            later.answer.then(again)

    def _end(self, transactional_id: str, known: Coordinated, *, commit: bool) -> None:
        ending = known._replace(state=f"prepare-{'commit' if commit else 'abort'}")
        self._change(transactional_id, ending, None, lambda: self._send_markers(transactional_id, ending))

    def _send_markers(self, transactional_id: str, known: Coordinated) -> None:
        due = self._marking[transactional_id] = set(known.transaction.partitions)
        if not due:
            self._complete(transactional_id, known)
        for partition in known.transaction.partitions:
            self._send_marker(transactional_id, known, partition, due)

    def _send_marker(self, transactional_id: str, known: Coordinated, partition: Partition, due: set[Partition]) -> None:
        self._world.after(self._world.random.random() * self._cluster.weather.delay_ms, self._mark, transactional_id, known, partition, due)

    def _mark(self, transactional_id: str, known: Coordinated, partition: Partition, due: set[Partition]) -> None:
        if self._marking.get(transactional_id) is not due:
            return  # another coordinator continues
        if self._world.now_ms < partition.away_until_ms:
            self._send_marker(transactional_id, known, partition, due)
            return

        def count() -> None:
            due.discard(partition)
            if not due and self._marking.get(transactional_id) is due:
                self._complete(transactional_id, known)

        commit = known.state == "prepare-commit"
        partition.finish(known.transaction, known.producer, known.epoch, commit=commit).then(count)

    def _complete(self, transactional_id: str, known: Coordinated) -> None:
        def again() -> None:
            self._world.after(self._cluster.weather.delay_ms, self._complete, transactional_id, known)

        try:
            now = self._current(transactional_id)
            if now is None or now.transaction is not known.transaction or now.state != known.state:
                return
            self._change(transactional_id, known._replace(state=known.state.replace("prepare", "complete")), None)
        except NotNow:
            again()
        except Later as later:
            later.answer.then(again)


class Coordinators:
    """All coordinators of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._producers = 0
        self._all = [Coordinator(cluster, cluster.partition(STATE_TOPIC, index), self.new_producer) for index in range(STATE_PARTITIONS)]

    def new_producer(self) -> int:
        """Return a new producer id."""
        self._producers += 1
        return self._producers

    def of(self, transactional_id: str) -> Coordinator:
        """Return the coordinator of an id."""
        return self._all[zlib.crc32(transactional_id.encode()) % STATE_PARTITIONS]
