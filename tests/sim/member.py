"""A member of the adapter's group in the simulated world: takes partitions over, reads, logs, commits and delivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bascule.adapter.inbound.log_protocol import LogProtocol, Superseded, at_least_once
from bascule.adapter.inbound.state import FLIGHT, Flights, Place, Ref, key_of
from bascule.adapter.inbound.taking_over import PartitionEvent, Run, pass_on, take_over
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import GroupOffset
from bascule.core.xid import Xid
from bascule.xa.errors import BranchRolledBack, ResourceFailed
from tests.sim.inbound_view import View
from tests.sim.kafka import KafkaFault
from tests.sim.world import Process

if TYPE_CHECKING:
    from tests.sim.adapter import InboundSimulation

AGAIN_MS: Final = 15.0
#: How often a transaction manager recovers.
RECOVER_MS: Final = 100.0
POLL_MS: Final = 4.0
BATCH: Final = 4


@dataclass(slots=True, eq=False)
class Item:
    """A delivery."""

    ref: Ref
    keys: tuple[bytes, ...]
    found: bool = False


class Member:
    """A member of the group: takes partitions over, reads, logs, commits and delivers."""

    def __init__(self, run: InboundSimulation, name: str) -> None:
        self.run = run
        self.world, self.kafka, self.books, self.group = run.world, run.kafka, run.books, run.group
        self.violations = run.world.violations
        self.process = Process(run.world, name)
        self.view = View(self.process, run.kafka, self.violations)
        self.view.restlessness = run.restlessness
        self.log = LogProtocol(self.view, name, violations=self.violations)
        self.runs: dict[Place, Run[Item]] = {}
        self.generations: dict[Run[Item], int] = {}
        self._tokens = self._transactions = 0

        self.process.spawn(self._recover())

    async def _recover(self) -> None:
        """The transaction manager's: what is decided is carried out, whoever began it."""
        while True:
            await self.process.sleep(RECOVER_MS)
            try:
                for xid in await self.log.claims():
                    if xid in self.books.decisions:
                        self.books.end(xid)
                        await self.log.finish(xid, commit=self.books.decisions[xid])
                self.log.tidy()
            except Unavailable:
                continue

    # -- of the group

    def assigned(self, place: Place, generation: int) -> None:
        """The group gives it a partition."""
        if self.group.generation[place] != generation:
            return  # by the time it hears of that, somebody else has it
        run = self.runs[place] = Run[Item](place)
        self.generations[run] = generation
        self.process.spawn(self._life(run))

    def lose(self, place: Place) -> None:
        """The group has given it to somebody else."""
        if (run := self.runs.pop(place, None)) is not None:
            run.on(PartitionEvent.LEFT)

    def give_up(self, run: Run[Item]) -> None:
        """Take a partition over anew."""
        if not run.gone:
            generation = self.generations[run]
            self.lose(run.place)
            self.assigned(run.place, generation)

    # -- taking over, and reading

    async def _life(self, run: Run[Item]) -> None:
        while not run.gone:
            try:
                flights = await take_over(run, Takeover(self, run), self.violations)
            except (Unavailable, ResourceFailed):
                flights = None
            if flights is not None and not run.gone:
                items = [Item(Ref(run.place, run.token, offset), keys, found=True) for offset, keys in sorted(flights.keys.items())]
                # The client reads on where the group was, whatever the takeover has learnt.
                position = self.group.offsets[run.place]
                for item in run.adopt(items, self.violations):
                    self.process.spawn(self._deliver(run, item))
                await self._read(run, position)
            await self.process.sleep(AGAIN_MS)

    async def _read(self, run: Run[Item], position: int) -> None:
        source = self.kafka.partition(run.place.topic, run.place.partition)
        while not run.gone:
            try:
                records, _ = await self.kafka.fetch(self.process, source, position, committed=False, count=BATCH)
            except KafkaFault:
                continue
            items: list[Item] = []
            for record in records:
                position = record.offset + 1
                items += run.receive(record.offset, lambda at=record.offset: self._new(run, at)) or []  # type: ignore[misc]
            while items and not run.gone:
                try:
                    await pass_on(Reading(self, run, items), self.violations)
                    break
                except Unavailable:
                    await self.process.sleep(AGAIN_MS)
            await self.process.sleep(POLL_MS)

    def _new(self, run: Run[Item], offset: int) -> Item:
        ref = Ref(run.place, run.token, offset)
        return Item(ref, (key_of(FLIGHT, ref),))

    # -- delivering

    async def _deliver(self, run: Run[Item], item: Item) -> None:
        while not run.gone:
            try:
                await (self._in_transaction(item) if self.run.transacted else at_least_once(Work(self, item), self.violations))
            except Superseded:
                return
            except (Unavailable, BranchRolledBack, ResourceFailed):
                await self.process.sleep(AGAIN_MS)
            else:
                return

    async def _in_transaction(self, item: Item) -> None:
        self._transactions += 1
        xid = Xid(7, f"{self.process.name}-{self._transactions}".encode(), b"inbound")
        books, ref = self.books, item.ref
        await self.work()
        try:
            await self.log.claim(xid, ref)
            books.prepared[xid] = (ref.place, ref.offset)
            await self.work()
            committed = books.decide(xid, commit=True)
        except (Unavailable, ResourceFailed):
            books.decide(xid, commit=False)
            await self._insist(lambda: self.log.withdraw(xid, ref))
            raise
        await self.work()
        books.end(xid)
        if not committed:
            raise BranchRolledBack(f"{xid} was rolled back by the next member")
        await self.work()
        await self._insist(lambda: self.log.finish(xid, commit=True))

    async def _insist(self, call: Callable[[], object]) -> None:
        while True:
            try:
                await call()  # type: ignore[misc]
            except Unavailable:
                await self.process.sleep(AGAIN_MS)
            else:
                return

    async def work(self) -> None:
        """Take a while."""
        await self.process.sleep(self.world.random.random() * self.run.work_ms)

    def new_token(self) -> str:
        """A token that nobody has had."""
        self._tokens += 1
        return f"{self.process.name}.{self._tokens}"


@dataclass(frozen=True, slots=True)
class Work:
    """The effects of a delivery outside of transactions."""

    member: Member
    item: Item

    async def work(self) -> None:
        """See DeliveryEffects."""
        await self.member.work()
        self.member.books.done[self.item.ref.place, self.item.ref.offset] += 1

    async def receipt(self) -> None:
        """See DeliveryEffects."""
        await self.member.log.done(self.item.ref.place, self.item.keys)


@dataclass(frozen=True, slots=True)
class Takeover:
    """The effects of a takeover."""

    member: Member
    run: Run[Item]

    async def owner(self, place: Place) -> str | None:
        """See TakeoverEffects."""
        return await self.member.log.owner(place)

    async def held(self, place: Place) -> GroupOffset | None:
        """See TakeoverEffects."""
        member, generation = self.member, self.member.generations[self.run]
        try:
            return await member.kafka.request(member.process, "Heartbeat", lambda: member.group.held(place, generation))
        except KafkaFault as fault:
            raise Unavailable(str(fault)) from fault

    async def take(self, place: Place, after: str | None) -> str:
        """See TakeoverEffects."""
        token = self.member.new_token()
        await self.member.log.take(place, token, after)
        return token

    async def flights(self, place: Place) -> Flights:
        """See TakeoverEffects."""
        return await self.member.log.flights(place)

    async def finish(self, place: Place, claims: Sequence[Xid]) -> None:
        """See TakeoverEffects."""
        books = self.member.books
        for xid in claims:
            self.member.world.note("finish claim", self.member.process.name)
            committed = books.decide(xid, commit=False)
            books.end(xid)
            await self.member.log.finish(xid, commit=committed)


@dataclass(frozen=True, slots=True)
class Reading:
    """The effects of records that were read."""

    member: Member
    run: Run[Item]
    items: list[Item]

    async def schedule(self) -> None:
        """See Reading."""
        new = [item for item in self.items if not item.found]
        await self.member.log.schedule([item.ref for item in new])
        for item in new:
            item.found = True

    async def advance(self) -> None:
        """See Reading."""
        await self.member.log.advance([Ref(self.run.place, self.run.token, self.run.next_offset)])

    def give_up(self) -> None:
        """See Reading."""
        self.member.give_up(self.run)

    async def commit(self) -> None:
        """See Reading."""
        member, at = self.member, (self.run.place, self.member.generations[self.run], self.run.next_offset)
        try:
            await member.kafka.request(member.process, "OffsetCommit", lambda: member.group.commit(*at))
        except KafkaFault as fault:
            raise Unavailable(str(fault)) from fault

    async def deliver(self) -> None:
        """See Reading."""
        for item in self.items:
            self.member.process.spawn(self.member._deliver(self.run, item))
