"""A member of the adapter's group in the simulated world: it takes partitions over, reads, logs, commits and delivers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bascule.adapter.inbound.log_protocol import LogProtocol, at_least_once
from bascule.adapter.inbound.settling import MoveTarget, SettlingEvent, SettlingViolation, meaning_of, resolve, try_once
from bascule.adapter.inbound.state import FLIGHT, Flights, Place, Ref, key_of
from bascule.adapter.inbound.taking_over import PartitionEvent, Run, pass_on, take_over
from bascule.core.errors import BasculeError, TooLarge, TransactionInDoubt, TransactionRolledBack, Unavailable
from bascule.core.kafka_records import GroupOffset
from bascule.core.xid import Xid
from bascule.xa.errors import BranchRolledBack, ResourceFailed
from bascule.xa.two_phase import rolled_back_by
from tests.sim.inbound_view import View
from tests.sim.kafka import KafkaFault
from tests.sim.world import Process

if TYPE_CHECKING:
    from tests.sim.adapter import InboundSimulation

AGAIN_MS: Final = 15.0
#: How often a transaction manager recovers.
RECOVER_MS: Final = 100.0
#: The same of one that takes transactions for left behind soon.
HASTY_MS: Final = 30.0
POLL_MS: Final = 4.0
SETTLING_TROUBLE: Final = {
    SettlingEvent.FAILED: "fail endpoint",
    SettlingEvent.RETRIED: "retry record",
    SettlingEvent.DEAD_LETTERED: "dead-letter record",
}
BATCH: Final = 4


@dataclass(slots=True, eq=False)
class Item:
    """A delivery. ``origin`` is where the record was before it came to the retry topic."""

    ref: Ref
    keys: tuple[bytes, ...]
    origin: tuple[Place, int]
    failures: int = 0
    found: bool = False
    returned: bool = False
    failure: BaseException | None = None
    refusals: int = 0


class EndpointFailed(Exception):
    """Raised when the endpoint fails for a record."""


class Member:
    """A member of the group, which takes partitions over, reads, logs, commits and delivers."""

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
        """Run the recovery of the transaction manager: carry out decisions, and perhaps roll back transactions without one."""
        while True:
            await self.process.sleep(HASTY_MS if self.run.hasty else RECOVER_MS)
            try:
                for xid in await self.log.claims():
                    if self.run.hasty and xid not in self.books.decisions:
                        self.world.note("recover claim", self.process.name)
                        self.books.decide(xid, commit=False)
                    if xid in self.books.decisions:
                        self.books.end(xid)
                        await self.log.finish(xid, commit=self.books.decisions[xid])
                self.log.tidy()
            except Unavailable:
                continue

    # -- of the group

    def assigned(self, place: Place, generation: int) -> None:
        """Take over a partition that the group assigns."""
        if self.group.generation[place] != generation:
            return  # another member has it already
        run = self.runs[place] = Run[Item](place)
        self.generations[run] = generation
        self.process.spawn(self._life(run))

    def lose(self, place: Place) -> None:
        """Leave a partition that the group has given to another member."""
        if (run := self.runs.pop(place, None)) is not None:
            run.on(PartitionEvent.LEFT)

    def give_up(self, run: Run[Item]) -> None:
        """Take a partition over again."""
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
                items = [self._found(run, offset, flights) for offset in sorted(flights.keys)]
                # The client continues at the group's offset, whatever the takeover has learnt.
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
        origin, failures = self.books.origin(run.place, offset)
        return Item(ref, (key_of(FLIGHT, ref),), origin, failures)

    def _found(self, run: Run[Item], offset: int, flights: Flights) -> Item:
        origin, failures = self.books.origin(run.place, offset)
        return Item(Ref(run.place, run.token, offset), flights.keys[offset], origin, max(failures, flights.failures[offset]), found=True)

    # -- delivering

    async def _deliver(self, run: Run[Item], item: Item) -> None:
        while not run.gone:
            item.returned = False
            pause_s = await try_once(item, Try(self, item), self.run.policy, self.violations)
            if pause_s is None:
                return
            await self.process.sleep(pause_s * 1000)

    async def in_transaction(self, item: Item, effect: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do something in a transaction of its own. Raise the meaning of an error for the record."""
        self._transactions += 1
        name = f"{self.process.name}-{self._transactions}"
        try:
            await self._transaction(Xid(7, name.encode(), b"inbound"), item, effect, work)
        except BasculeError as error:
            meaning = meaning_of(error, name)
            if meaning is None:
                meaning = await resolve(item.ref, error, Doubt(self, item.ref))
            if meaning is not None:
                raise meaning from error

    async def _transaction(self, xid: Xid, item: Item, effect: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a transaction as a manager does.

        Without an answer of the inbound log it rolls back; without an answer of the decision log it is in doubt.
        """
        books, ref, name = self.books, item.ref, xid.gtrid.decode()
        await work()
        try:
            await self.log.claim(xid, ref)
        except (Unavailable, ResourceFailed, BranchRolledBack) as error:
            cause = ResourceFailed(str(error)) if isinstance(error, Unavailable) else error
            books.decide(xid, commit=False)
            if not isinstance(error, BranchRolledBack):
                await self._insist(lambda: self.log.withdraw(xid, ref))
            raise TransactionRolledBack(f"{name} was rolled back", transaction_id=name, cause=cause) from error
        books.prepared[xid] = (item.origin, effect, item.failures + 1)
        await self.work()
        committed = books.decide(xid, commit=True)
        if self.world.chance(self.run.doubt):
            self.world.note("doubt", self.process.name)
            raise TransactionInDoubt(f"{name} is in doubt", transaction_id=name)
        await self.work()
        books.end(xid)
        if not committed:
            raise rolled_back_by("the next member", name, self.violations)
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
        """Sleep for the duration of some work."""
        await self.process.sleep(self.world.random.random() * self.run.work_ms)

    def new_token(self) -> str:
        """Return a token that nobody has used."""
        self._tokens += 1
        return f"{self.process.name}.{self._tokens}"


@dataclass(frozen=True, slots=True)
class Try:
    """The effects of a try."""

    member: Member
    item: Item

    async def deliver(self) -> None:
        """See TryEffects."""
        if self.member.run.transacted:
            await self.member.in_transaction(self.item, "done", self._endpoint)
        else:
            await at_least_once(self, self.member.violations)

    async def _endpoint(self) -> None:
        await self.member.work()
        if self.member.books.fails(self.item.origin):
            raise EndpointFailed
        self.settle()

    async def work(self) -> None:
        """See DeliveryEffects."""
        await self._endpoint()
        self.member.books.effect(self.item.origin, "done", 0)

    async def receipt(self) -> None:
        """See DeliveryEffects."""
        await self.member.log.done(self.item.ref.place, self.item.keys)

    def settling(self) -> bool:
        """See TryEffects."""
        return self.item.returned

    def settle(self) -> None:
        """See TryEffects."""
        self.item.returned = True

    async def keep(self, failures: int) -> None:
        """See TryEffects."""
        key = await self.member.log.failed(self.item.ref, failures)
        self.item.keys = (*self.item.keys, key)
        self.item.failures = failures

    async def move(self, target: MoveTarget, error: BaseException, pause_s: float, refused: TooLarge | None) -> None:
        """See TryEffects."""
        member, effect = self.member, "retry" if target is MoveTarget.RETRY else "dead"
        if member.run.transacted:
            await member.in_transaction(self.item, effect, member.work)
            return
        if SettlingViolation.DONE_BEFORE_MOVED in member.violations:
            await self.receipt()
        await member.work()
        member.books.effect(self.item.origin, effect, self.item.failures + 1)
        await member.work()
        await self.receipt()

    def note(self, event: SettlingEvent, error: BaseException | None = None, pause_s: float = 0.0) -> None:
        """See TryEffects."""
        if event in SETTLING_TROUBLE:
            self.member.world.note(SETTLING_TROUBLE[event], self.member.process.name)


@dataclass(frozen=True, slots=True)
class Doubt:
    """The effects of waiting for a transaction in doubt."""

    member: Member
    ref: Ref

    async def flights(self) -> Flights:
        """See DoubtEffects."""
        return await self.member.log.flights(self.ref.place)

    def stopping(self) -> bool:
        """See DoubtEffects."""
        return False

    async def sleep(self, pause_s: float) -> None:
        """See DoubtEffects."""
        await self.member.process.sleep(AGAIN_MS)

    def note_doubt(self, error: BaseException) -> None:
        """See DoubtEffects."""


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
