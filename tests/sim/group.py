"""A consumer group in the simulated world: its coordinator, and the state that outlives its members."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from bascule.adapter.inbound.state import Place
from bascule.core.kafka_records import GroupOffset
from bascule.core.xid import Xid
from tests.sim.kafka import KafkaFault, Partition, ToWrite
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.member import Member

SOURCES: Final = (Place("payments", 0), Place("payments", 1))
#: How much later a commit of offsets may arrive a second time.
LATE_MS: Final = 200.0
#: The place of records that are retried later.
RETRY: Final = Place("retry", 0)


class SharedState:
    """The state that outlives the members: decisions, the database, failures of endpoints, and the fate of each record."""

    def __init__(self, retry: Partition, tempers: dict[tuple[Place, int], int]) -> None:
        """Create the state. ``tempers`` says how often the endpoint fails for each record before it succeeds."""
        self._retry = retry
        self._tempers = tempers
        self.decisions: dict[Xid, bool] = {}
        #: The effect of each prepared transaction: on which record, and the number of failures of the record by then.
        self.prepared: dict[Xid, tuple[tuple[Place, int], str, int]] = {}
        #: How often the work on a record has taken effect, how often the record became a dead letter, and how often its endpoint has
        #: failed.
        self.done: Counter[tuple[Place, int]] = Counter()
        self.dead: Counter[tuple[Place, int]] = Counter()
        self.failed: Counter[tuple[Place, int]] = Counter()
        self._retried: dict[int, tuple[tuple[Place, int], int]] = {}

    def decide(self, xid: Xid, *, commit: bool) -> bool:
        """Decide, unless a decision exists; return the decision that stands."""
        return self.decisions.setdefault(xid, commit)

    def end(self, xid: Xid) -> None:
        """Commit or roll back in the database and in Kafka, as decided."""
        if (work := self.prepared.pop(xid, None)) is not None and self.decisions[xid]:
            self.effect(*work)

    def effect(self, origin: tuple[Place, int], effect: str, failures: int) -> None:
        """Apply the work on a record, its return to the retry topic, or its dead letter."""
        if effect == "retry":
            self._retried[self._retry.end] = (origin, failures)
            self._retry.store(ToWrite(None, b"again"))
        else:
            (self.done if effect == "done" else self.dead)[origin] += 1

    def fails(self, origin: tuple[Place, int]) -> bool:
        """Return True if the endpoint fails this time."""
        failing = self.failed[origin] < self._tempers.get(origin, 0)
        self.failed[origin] += failing
        return failing

    def origin(self, place: Place, offset: int) -> tuple[tuple[Place, int], int]:
        """Return where a record was first, and how often it had failed when it was stored here."""
        return self._retried[offset] if place == RETRY else ((place, offset), 0)


class Group:
    """The coordinator of the group: who has which partition, and where the group continues to read."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.members: list[Member] = []
        #: How many commits arrive a second time, later, because their first request was delayed.
        self.late = 0.0
        self.offsets: dict[Place, int] = dict.fromkeys((*SOURCES, RETRY), 0)
        self.owner: dict[Place, Member] = {}
        self.generation: Counter[Place] = Counter()

    def spread(self) -> None:
        """Give partitions to live members, and tell them."""
        if not self.members:
            return
        for place in (*SOURCES, RETRY):
            before, after = self.owner.get(place), self._world.random.choice(self.members)
            if before is after:
                continue
            if before is not None:
                before.process.after(0, before.lose, place)
            self.owner[place] = after
            self.generation[place] += 1
            after.process.after(self._world.random.random() * 5, after.assigned, place, self.generation[place])

    def held(self, place: Place, generation: int) -> GroupOffset | None:
        """Return where the group continues to read, if the partition was given to no other member since."""
        return GroupOffset(self.offsets[place]) if self.generation[place] == generation else None

    def commit(self, place: Place, generation: int, offset: int) -> None:
        """Store an offset. Raises KafkaFault for a partition that was given to another member since.

        The last commit stands, as in Kafka: a delayed one sets the group back.
        """
        if self.generation[place] != generation:
            raise KafkaFault("fenced")
        self._store(place, generation, offset)
        if self._world.chance(self.late):
            self._world.after(self._world.random.random() * LATE_MS, self._store, place, generation, offset)

    def _store(self, place: Place, generation: int, offset: int) -> None:
        if self.generation[place] != generation:
            return
        if offset < self.offsets[place]:
            self._world.note("set group back", str(place))
        self.offsets[place] = offset
