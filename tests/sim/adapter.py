"""The resource adapter in the simulated world: members of a group that die, stop and take partitions over.

The rules are those that ship (``bascule.adapter.inbound``): the log's protocol, the takeover, the order of log, offsets and delivery. This
module (with ``group``, ``member`` and ``inbound_view``) is the world around them: records, troubles, healing, and the judgement.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from random import Random
from typing import Final

from bascule.adapter.inbound.settling import RetryPolicy
from bascule.adapter.inbound.spec import Backoff
from bascule.adapter.inbound.state import LogFold, Place
from tests.sim.group import RETRY, SOURCES, Group, SharedState
from tests.sim.inbound_view import LOG
from tests.sim.kafka import Kafka, NetworkConditions, Partition, ToWrite
from tests.sim.member import Member
from tests.sim.world import World
from tests.support.history import Tally

#: How long faults happen, and how soon after that each record must be done.
TROUBLE_MS: Final = 500.0
HEALED_MS: Final = 6_000.0
LOOK_MS: Final = 25.0
#: How often recovery takes an active transaction for abandoned.
HASTY: Final = 0.15
#: A member that does not answer for this time is taken for dead.
SESSION_MS: Final = 60.0


class InboundSimulation:
    """One run. The seed draws the records, the faults and their times; then all is healed, and each record must be done."""

    def __init__(self, seed: int, violations: Collection[enum.StrEnum] = (), *, trace: bool = False) -> None:
        world = self.world = World(seed, violations)
        world.trace = [] if trace else None
        pick = self.random = world.random
        self.kafka = Kafka(world)

        def some(most: float) -> float:
            return pick.random() * most if pick.random() < 0.5 else 0.0

        self.kafka.weather = NetworkConditions(some(0.04), some(0.06), some(0.25), some(0.1), some(0.06), pick.choice((0.5, 2.0, 6.0)))
        self.restlessness = some(0.3)
        self.transacted = pick.random() < 0.7
        self.work_ms = pick.choice((2.0, 10.0, 40.0))
        self.pause_ms = pick.choice((10.0, 30.0, 80.0))
        self.troubles = {name: pick.random() for name in TROUBLES if pick.random() < 0.6}
        self.counts = {place: pick.randint(1, 12) for place in SOURCES}
        self.policy = RetryPolicy(2, Backoff(0.005, 2.0, 0.02), in_place=pick.random() < 0.5, away_s=0.015)
        self.doubt = some(0.1)
        #: Recovery rolls transactions back before their members have decided. Apart from the world's chance, which goes on as before.
        self.hasty = Random(f"recovery {seed}").random() < HASTY
        tempers = {each: pick.choice((1, 2, 3, 99)) for each in self._records() if pick.random() < 0.2}
        self.books = SharedState(self.kafka.partition(*RETRY), tempers)
        self.group = Group(world)
        self.group.late = some(0.2)
        self._members = 0
        self._all: list[Member] = []

    def run(self) -> Tally:
        """Run troubles and healing, and return the verdict."""
        world = self.world
        for place in SOURCES:
            world.after(0, self._feed, place, 0)
        for _ in range(2):
            self.join()
        world.after(self.random.random() * 20, self._trouble, world.now_ms + TROUBLE_MS)
        world.run(world.now_ms + TROUBLE_MS)
        self._heal()
        self._look()
        world.run(world.now_ms + HEALED_MS)
        return self._judge()

    def _feed(self, place: Place, number: int) -> None:
        if number < self.counts[place]:
            self.kafka.partition(place.topic, place.partition).store(ToWrite(None, b"%d" % number))
            self.world.after(self.random.random() * 40, self._feed, place, number + 1)

    def _trouble(self, until_ms: float) -> None:
        if self.world.now_ms < until_ms:
            if self.troubles:
                TROUBLES[self.random.choices(list(self.troubles), list(self.troubles.values()))[0]](self)
            self.world.after(self.random.random() * self.pause_ms * 2, self._trouble, until_ms)

    def join(self) -> None:
        """Start another member."""
        if len(self.group.members) < 3:
            self._members += 1
            member = Member(self, f"m{self._members}")
            self.group.members.append(member)
            self._all.append(member)
            self.group.spread()

    def _leave(self, member: Member) -> None:
        if member in self.group.members:
            self.group.members.remove(member)
            if not self.group.members:
                self.join()
            self.group.spread()

    def kill(self) -> None:
        """Kill a member (kill -9); the group finds out."""
        member = self.random.choice(self.group.members)
        self.world.note("kill member", member.process.name)
        member.process.kill()
        self.world.after(self.random.random() * SESSION_MS, self._leave, member)

    def stop(self) -> None:
        """Suspend a member (SIGSTOP). The group may take it for dead; it rejoins when it has found out."""
        member = self.random.choice(self.group.members)
        self.world.note("stop member", member.process.name)
        member.process.stop()
        self.world.after(self.random.random() * 3 * SESSION_MS, member.process.go_on)
        if self.random.random() < 0.7:
            self.world.after(self.random.random() * SESSION_MS, self._leave, member)

    def rebalance(self) -> None:
        """Give partitions to other members."""
        self.world.note("rebalance")
        self.group.spread()

    def compact(self) -> None:
        """Run the log cleaner. It also removes deletions that all readers have read."""
        partition: Partition = self.kafka.partition(LOG)
        below = min([each.view.next for each in self._all if each.process.alive] or [0])
        if partition.compact(below):
            self.world.note("compact")
        partition.records = [each for each in partition.records if each.offset >= below or each.value is not None]

    def _heal(self) -> None:
        self.kafka.weather = NetworkConditions()
        self.restlessness = 0.0
        for member in self._all:
            member.view.restlessness = 0.0
            member.process.go_on()
        for member in [each for each in self.group.members if not each.process.alive]:
            self._leave(member)
        if not any(self.group.owner.get(place) in self.group.members for place in (*SOURCES, RETRY)):
            self.group.spread()

    def _records(self) -> list[tuple[Place, int]]:
        return [(place, offset) for place in SOURCES for offset in range(self.counts[place])]

    def _look(self) -> None:
        if all(self.books.done[each] or self.books.dead[each] for each in self._records()) and not self._open():
            self.world.stop()
        self.world.after(LOOK_MS, self._look)

    def _open(self) -> list[str]:
        fold = LogFold()
        for record in self.kafka.partition(LOG).records:
            if record.key is not None:
                fold.apply(record.key, record.value)
        return [f"{place}/{offset}" for place, state in fold.places.items() for offset in state.flights]

    def _judge(self) -> Tally:
        tally = Tally(sent=sum(self.counts.values()), taken=sum(self.books.done.values()))
        done = self.books.done + self.books.dead
        tally.report("lost", "source topics", [f"{place}/{offset}" for place, offset in self._records() if not done[place, offset]])
        tried = {each: self.books.failed[each] for each in self.books.dead}
        early = [f"{place}/{offset}" for (place, offset), failed in tried.items() if failed <= self.policy.retries]
        tally.report("lost", "dead letters of records that were not tried often enough", early)
        if self.transacted:
            tally.report("duplicated", "endpoints", [f"{place}/{offset}" for (place, offset), count in done.items() if count > 1])
        tally.report("stuck", "the inbound log", self._open())
        return tally


TROUBLES: Final[dict[str, Callable[[InboundSimulation], None]]] = {
    "kill member": InboundSimulation.kill,
    "stop member": InboundSimulation.stop,
    "rebalance": InboundSimulation.rebalance,
    "compact": InboundSimulation.compact,
    "join": InboundSimulation.join,
}
