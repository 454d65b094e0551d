"""The resource adapter in the simulated world: members of a group that die, stop and take partitions over, and the records they deliver.

The rules are those that ship (``bascule.adapter.inbound``): the log's protocol, the takeover, the order of log, offsets and delivery. Here
is the world around them: the group's coordinator, a database with prepared transactions, the decisions, and the judgement.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from bascule.adapter.inbound.log_protocol import LogProtocol, Superseded, at_least_once
from bascule.adapter.inbound.state import FLIGHT, Flights, LogFold, Place, PlaceState, Ref, key_of
from bascule.adapter.inbound.taking_over import PartitionEvent, Run, pass_on, take_over
from bascule.core.errors import Unavailable
from bascule.core.xid import Xid
from bascule.xa.errors import BranchRolledBack, ResourceFailed
from tests.sim.kafka import Appender, Kafka, KafkaFault, Partition, ToWrite, Weather
from tests.sim.world import Process, Promise, World
from tests.support.history import Tally

R = TypeVar("R")

#: How long things go wrong, and how soon after that each record must be done.
TROUBLE_MS: Final = 500.0
HEALED_MS: Final = 6_000.0
LOOK_MS: Final = 25.0
AGAIN_MS: Final = 15.0
#: A member that does not answer for so long is taken for dead.
SESSION_MS: Final = 60.0
#: How often a transaction manager recovers.
RECOVER_MS: Final = 100.0
POLL_MS: Final = 4.0
BATCH: Final = 4
SOURCES: Final = (Place("payments", 0), Place("payments", 1))
LOG: Final = "inbound"


@dataclass(slots=True, eq=False)
class Item:
    """A delivery."""

    ref: Ref
    keys: tuple[bytes, ...]
    found: bool = False


@dataclass(slots=True)
class Books:
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

    def held(self, place: Place, generation: int) -> int | None:
        """Where the group reads on, if the partition was given to nobody else since."""
        return self.offsets[place] if self.generation[place] == generation else None

    def commit(self, place: Place, generation: int, offset: int) -> None:
        """Store an offset. Raises KafkaFault for a partition that was given to somebody else since.

        Commits of one member arrive in their order, as on one connection. (A commit that is repeated on a second connection and arrives
        after later ones would set the group back; Kafka does not tell, and what is done by then would be read and done again.)
        """
        if self.generation[place] != generation:
            raise KafkaFault("fenced")
        self.offsets[place] = max(self.offsets[place], offset)


class View:
    """The effects of the log's protocol for one member, and its view of the log."""

    def __init__(self, member: Member, kafka: Kafka, violations: Collection[enum.StrEnum]) -> None:
        self._process, self._kafka, self._violations = member.process, kafka, violations
        self.partition = kafka.partition(LOG)
        self._waiting: deque[Promise[int]] = deque()
        self._connect()
        self.restlessness = 0.0
        self._anew()

    def _connect(self) -> None:
        self._appender = Appender(self._kafka, self._process, self.partition, self._answered)

    def _anew(self) -> None:
        self.fold = LogFold(self._violations)
        self.next = self.partition.start

    def _answered(self, offset: int, error: str | None) -> None:
        promise = self._waiting.popleft()
        if error is None:
            promise.keep(offset)
        else:
            # An idempotent producer that has lost a record is done for; what it has sent may arrive all the same.
            self._appender.close()
            self._connect()
            lost, self._waiting = [promise, *self._waiting], deque()
            for each in lost:
                each.fail(Unavailable(error))

    def _append(self, key: bytes, value: bytes | None) -> Promise[int]:
        promise: Promise[int] = Promise()
        self._waiting.append(promise)
        self._appender.append(ToWrite(key, value))
        return promise

    async def append(self, key: bytes, value: bytes | None, place: Place) -> int | None:
        """See LogEffects."""
        offset = await self._append(key, value)
        return None if self._kafka.world.chance(self.restlessness) else offset

    def send(self, key: bytes, value: bytes | None, place: Place) -> None:
        """See LogEffects."""
        self._append(key, value)

    def delete_soon(self, place: Place, keys: Sequence[bytes]) -> None:
        """See LogEffects."""
        for key in keys:
            self.send(key, None, place)

    async def read(self, see: Callable[[LogFold], R]) -> R:
        """See LogEffects."""
        if self._kafka.world.chance(self.restlessness):
            self._kafka.world.note("read log anew", self._process.name)
            self._anew()
        await self._reach(await self._asked(self._kafka.end_of(self._process, self.partition)))
        return see(self.fold)

    look = read

    async def reach(self, place: Place, offset: int | None, see: Callable[[PlaceState], R]) -> R:
        """See LogEffects."""
        if offset is None:
            return await self.read(lambda fold: see(fold.place(place)))
        await self._reach(offset + 1)
        return see(self.fold.place(place))

    def known(self, see: Callable[[LogFold], R]) -> R:
        """See LogEffects."""
        return see(self.fold)

    async def _reach(self, end: int) -> None:
        while self.next < end:
            fold = self.fold
            records, read_to = await self._asked(self._kafka.fetch(self._process, self.partition, self.next, committed=False))
            if fold is not self.fold:
                continue  # another coroutine reads anew
            for record in records:
                if record.offset >= self.next and record.key is not None:
                    self.fold.apply(record.key, record.value)
                    self.next = record.offset + 1
            self.next = max(self.next, read_to)

    async def _asked(self, promise: Promise[R]) -> R:
        try:
            return await promise
        except KafkaFault as fault:
            raise Unavailable(str(fault)) from fault


class Member:
    """A member of the group: takes partitions over, reads, logs, commits and delivers."""

    def __init__(self, run: InboundSimulation, name: str) -> None:
        self.run = run
        self.world, self.kafka, self.books, self.group = run.world, run.kafka, run.books, run.group
        self.violations = run.world.violations
        self.process = Process(run.world, name)
        self.view = View(self, run.kafka, self.violations)
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

    async def held(self, place: Place) -> int | None:
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
        for item in self.items:
            if not item.found:
                await self.member.log.schedule(item.ref)
                item.found = True

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


class InboundSimulation:
    """One run: a seed draws the records, the faults and their times; then all is healed, and each record must be done."""

    def __init__(self, seed: int, violations: Collection[enum.StrEnum] = (), *, trace: bool = False) -> None:
        world = self.world = World(seed, violations)
        world.trace = [] if trace else None
        pick = self.random = world.random
        self.kafka = Kafka(world)

        def some(most: float) -> float:
            return pick.random() * most if pick.random() < 0.5 else 0.0

        self.kafka.weather = Weather(some(0.04), some(0.06), some(0.25), some(0.1), some(0.06), pick.choice((0.5, 2.0, 6.0)))
        self.restlessness = some(0.3)
        self.transacted = pick.random() < 0.7
        self.work_ms = pick.choice((2.0, 10.0, 40.0))
        self.pause_ms = pick.choice((10.0, 30.0, 80.0))
        self.troubles = {name: pick.random() for name in TROUBLES if pick.random() < 0.6}
        self.counts = {place: pick.randint(1, 12) for place in SOURCES}
        self.books = Books()
        self.group = Group(world)
        self._members = 0
        self._all: list[Member] = []

    def run(self) -> Tally:
        """Trouble, healing, and the verdict."""
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
        """One more member."""
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
        """kill -9 of a member; the group finds out."""
        member = self.random.choice(self.group.members)
        self.world.note("kill member", member.process.name)
        member.process.kill()
        self.world.after(self.random.random() * SESSION_MS, self._leave, member)

    def stop(self) -> None:
        """SIGSTOP for a while. The group may take it for dead; it joins anew when it has found out."""
        member = self.random.choice(self.group.members)
        self.world.note("stop member", member.process.name)
        member.process.stop()
        self.world.after(self.random.random() * 3 * SESSION_MS, member.process.go_on)
        if self.random.random() < 0.7:
            self.world.after(self.random.random() * SESSION_MS, self._leave, member)

    def rebalance(self) -> None:
        """The group gives partitions to others, for whatever reason."""
        self.world.note("rebalance")
        self.group.spread()

    def compact(self) -> None:
        """The log cleaner. Deletions go, too, once everybody who reads has read them."""
        partition: Partition = self.kafka.partition(LOG)
        below = min([each.view.next for each in self._all if each.process.alive] or [0])
        if partition.compact(below):
            self.world.note("compact")
        partition.records = [each for each in partition.records if each.offset >= below or each.value is not None]

    def _heal(self) -> None:
        self.kafka.weather = Weather()
        self.restlessness = 0.0
        for member in self._all:
            member.view.restlessness = 0.0
            member.process.go_on()
        for member in [each for each in self.group.members if not each.process.alive]:
            self._leave(member)
        if not any(self.group.owner.get(place) in self.group.members for place in SOURCES):
            self.group.spread()

    def _records(self) -> list[tuple[Place, int]]:
        return [(place, offset) for place in SOURCES for offset in range(self.counts[place])]

    def _look(self) -> None:
        if all(self.books.done[each] for each in self._records()) and not self._open():
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
        done = self.books.done
        tally.report("lost", "source topics", [f"{place}/{offset}" for place, offset in self._records() if not done[place, offset]])
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
