"""Judges what no client of the simulation can observe, with a view of every topic at each moment.

Deleted data must not be needed by anybody, whether or not somebody asks for it in this run. The delivery count of a message is at least the
count in the journal, and never decreases while one broker serves. It may decrease over the end of an epoch, since nobody waits until a
count is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bascule.broker.engine import Engine
from bascule.journal.errors import RecordError
from bascule.writer.position import position_key
from tests.sim.housekeeping import Following
from tests.sim.kafka import GIVE_UP_MS, JOURNAL, STORE, Answer, Kafka, KafkaFault, Partition
from tests.sim.world import Process, World
from tests.sim.writer import DIVERTS, committed_offset
from tests.support.history import Tally

T = TypeVar("T")


class _AtOnce(Kafka):
    """The same topics without the network, up to the high watermark even if a new leader does not know it yet."""

    def __init__(self, kafka: Kafka) -> None:
        super().__init__(World(0))
        self.cluster.partitions = kafka.cluster.partitions

    def request(
        self, process: Process, what: str, carry_out: Callable[[], T], give_up_ms: float = GIVE_UP_MS, *, at: Partition | None = None
    ) -> Answer[T]:
        promise: Answer[T] = Answer()
        known_end = None
        if at is not None:
            known_end, at.known_end = at.known_end, None
        try:
            promise.keep(carry_out())
        except KafkaFault as fault:
            promise.fail(fault)
        finally:
            if at is not None:
                at.known_end = known_end
        return promise


class Witness:
    """The witness of one run, from its beginning."""

    def __init__(self, kafka: Kafka, fresh_engine: Callable[[], Engine]) -> None:
        self._kafka = _AtOnce(kafka)
        self._fresh_engine = fresh_engine
        self._unread: list[str] = []
        self._unloadable: list[str] = []
        self._first: dict[tuple[int, int, int], int] = {}  # epoch, queue and mid: the first delivery count there
        self._newest: dict[tuple[int, int, int], int] = {}
        self._lowered: list[str] = []
        self._stale: list[str] = []
        kafka.partition(JOURNAL).on_delete = self._trimmed
        kafka.partition(STORE).on_delete = self._forgotten

    def handed_out(self, epoch: int, queue: int, mid: int, count: int) -> None:
        """Note that a broker delivers a message to a consumer."""
        key = epoch, queue, mid
        if mid >= 0:
            self._first.setdefault(key, count)
            if count < self._newest.get(key, 0):
                self._lowered.append(f"{mid} of queue {queue}")
            self._newest[key] = count

    def handed_out_stale(self, mid: int) -> None:
        """Note that a broker that was suspended and replaced delivers a message to a consumer."""
        self._stale.append(str(mid))

    def _trimmed(self) -> None:
        """Check a trim of the journal: positions that are not committed may never be."""
        start, read = self._kafka.partition(JOURNAL).start, committed_offset(self._kafka, position_key(DIVERTS, JOURNAL, 0))
        if start > read:
            self._unread.append(f"from {read} to {start}")

    def _forgotten(self) -> None:
        """Check that a broker that starts now could load its state."""
        following = Following(self._kafka, Process(self._kafka.world, "witness"), self._fresh_engine, 0.0)
        following.end = self._kafka.partition(JOURNAL).end
        try:
            following.run().send(None)
        except StopIteration:
            return
        except RecordError as error:
            self._unloadable.append(str(error))
        else:
            raise RuntimeError("a load without a network waits for something")

    def judge(self, tally: Tally, counts: Mapping[tuple[int, int], Sequence[tuple[int, int]]]) -> None:
        """Add the findings to a tally. ``counts`` are those of the journal: (epoch, count) by queue and mid."""
        tally.report("divert-loss", "parts of the journal were trimmed before diverts had read them", self._unread)
        tally.report("stuck", "times no broker could have started, for the store had forgotten what it needs", self._unloadable)
        tally.report("redelivered-unmarked", "handed out with a lower delivery count than before", self._lowered)
        tally.report("zombie-ack", "handed out by a broker that stood still and was replaced", self._stale)
        lost = (
            f"{mid} of queue {queue}"
            for (epoch, queue, mid), first in self._first.items()
            if first < max((count for began, count in counts.get((queue, mid), ()) if began < epoch), default=0)
        )
        tally.report("redelivered-unmarked", "handed out with a lower delivery count than the journal has", lost)
