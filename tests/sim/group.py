"""A consumer group in the simulated world: its coordinator, and what outlives its members."""

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
#: How much later a commit of offsets may arrive once more.
LATE_MS: Final = 200.0
#: Where records go that are tried again later.
RETRY: Final = Place("retry", 0)


class SharedState:
    """What outlives the members: the decisions, the database, the endpoints' temper, and where each record went."""

    def __init__(self, retry: Partition, tempers: dict[tuple[Place, int], int]) -> None:
        """``tempers`` says how often the endpoint fails for each record before it does what it should."""
        self._retry = retry
        self._tempers = tempers
        self.decisions: dict[Xid, bool] = {}
        #: What each prepared transaction does: to which record, and how often that has failed by then.
        self.prepared: dict[Xid, tuple[tuple[Place, int], str, int]] = {}
        #: How often the work on a record has taken effect, how often it became a dead letter, and how often its endpoint has failed.
        self.done: Counter[tuple[Place, int]] = Counter()
        self.dead: Counter[tuple[Place, int]] = Counter()
        self.failed: Counter[tuple[Place, int]] = Counter()
        self._retried: dict[int, tuple[tuple[Place, int], int]] = {}

    def decide(self, xid: Xid, *, commit: bool) -> bool:
        """Decide, unless it is decided; return the decision that stands."""
        return self.decisions.setdefault(xid, commit)

    def end(self, xid: Xid) -> None:
        """Commit or roll back in the database and in Kafka, as it was decided."""
        if (work := self.prepared.pop(xid, None)) is not None and self.decisions[xid]:
            self.effect(*work)

    def effect(self, origin: tuple[Place, int], effect: str, failures: int) -> None:
        """The work on a record, its return to the retry topic, or its dead letter."""
        if effect == "retry":
            self._retried[self._retry.end] = (origin, failures)
            self._retry.store(ToWrite(None, b"again"))
        else:
            (self.done if effect == "done" else self.dead)[origin] += 1

    def fails(self, origin: tuple[Place, int]) -> bool:
        """Whether the endpoint fails this time."""
        failing = self.failed[origin] < self._tempers.get(origin, 0)
        self.failed[origin] += failing
        return failing

    def origin(self, place: Place, offset: int) -> tuple[tuple[Place, int], int]:
        """Where a record was at first, and how often it had failed when it was stored here."""
        return self._retried[offset] if place == RETRY else ((place, offset), 0)


class Group:
    """The coordinator: who has which partition, and where the group reads on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.members: list[Member] = []
        #: How many commits arrive once more, later: their first request was held up.
        self.late = 0.0
        self.offsets: dict[Place, int] = dict.fromkeys((*SOURCES, RETRY), 0)
        self.owner: dict[Place, Member] = {}
        self.generation: Counter[Place] = Counter()

    def spread(self) -> None:
        """Give partitions to members that live, and tell them."""
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
        """Where the group reads on, if the partition was given to nobody else since."""
        return GroupOffset(self.offsets[place]) if self.generation[place] == generation else None

    def commit(self, place: Place, generation: int, offset: int) -> None:
        """Store an offset. Raises KafkaFault for a partition that was given to somebody else since.

        The last commit stands, as in Kafka: one that was held up sets the group back.
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
