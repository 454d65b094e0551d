"""A consumer group in the simulated world: its coordinator, and what outlives its members."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bascule.adapter.inbound.state import Place
from bascule.core.kafka_records import GroupOffset
from bascule.core.xid import Xid
from tests.sim.kafka import KafkaFault
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.member import Member

SOURCES: Final = (Place("payments", 0), Place("payments", 1))


@dataclass(slots=True)
class SharedState:
    """What outlives the members: the decisions, the database, and what endpoints have done."""

    decisions: dict[Xid, bool] = field(default_factory=dict)
    prepared: dict[Xid, tuple[Place, int]] = field(default_factory=dict)
    #: How often the work on a record has taken effect.
    done: Counter[tuple[Place, int]] = field(default_factory=Counter)

    def decide(self, xid: Xid, *, commit: bool) -> bool:
        """Decide, unless it is decided; return the decision that stands."""
        return self.decisions.setdefault(xid, commit)

    def end(self, xid: Xid) -> None:
        """Commit or roll back in the database, as it was decided."""
        if (work := self.prepared.pop(xid, None)) is not None and self.decisions[xid]:
            self.done[work] += 1


class Group:
    """The coordinator: who has which partition, and where the group reads on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.members: list[Member] = []
        self.offsets: dict[Place, int] = dict.fromkeys(SOURCES, 0)
        self.owner: dict[Place, Member] = {}
        self.generation: Counter[Place] = Counter()

    def spread(self) -> None:
        """Give partitions to members that live, and tell them."""
        if not self.members:
            return
        for place in SOURCES:
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
        if offset < self.offsets[place]:
            self._world.note("set group back", str(place))
        self.offsets[place] = offset
