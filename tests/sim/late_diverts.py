"""Diverts that are defined at run time: their administrator, a client that sends to them, what drivers do with them, and the judgement.

The promise is that of docs/adr/0028-diverts-at-run-time.md: a message that is sent after the answer about a divert is in its topic, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from bascule.broker.coverage import CoverageMark, joint_mark
from bascule.core.errors import BasculeError, Unavailable
from bascule.jms.sections import Scan
from bascule.pipelines.registry import journal_position
from bascule.pipelines.spec import DivertSpec
from bascule.writer.control import PipelineDefinition
from bascule.writer.position import DEFINED, DIVERT, Position, PositionTaken, defined_mark, position_key
from tests.sim.clients import TOPIC, Client, Stage
from tests.sim.connections import Connection, ConnectionLost
from tests.sim.control import ControlTable
from tests.sim.housekeeping import JOURNAL_ID, ReadJournal
from tests.sim.kafka import JOURNAL, Kafka
from tests.sim.pipelines import Driver
from tests.sim.world import Process, Promise
from tests.sim.writer import Writer, all_positions, committed_position
from tests.support.history import Audit, Tally
from tests.support.operations import Facts

#: How many diverts an administrator defines, at most; how often one is deleted, and created again after that.
DIVERTS_MAX: Final = 3
DELETED: Final = 0.4
AGAIN: Final = 0.5
#: How often a change keeps the address.
SAME_ADDRESS: Final = 0.4
#: How often the administrator looks for an answer.
LOOK_MS: Final = 15.0


@dataclass
class LateDivert:
    """A divert as its administrator sees it."""

    name: str
    definition: PipelineDefinition
    #: The active broker covers the current revision, as the administrator was told.
    answered: bool = False
    #: It is deleted, or may be.
    ended: bool = False
    #: It has another address than at first.
    moved: bool = False
    #: Messages that its topic must have.
    due: set[str] = field(default_factory=set)
    #: Messages that the journal must have, by address.
    covered: set[tuple[str, str]] = field(default_factory=set)

    @property
    def address(self) -> str:
        """Return the address whose messages it carries."""
        return str(self.definition.settings["from"])

    @property
    def topic(self) -> str:
        """Return its topic, which belongs to one definition."""
        return f"t.{self.definition.id}"

    @property
    def key(self) -> str:
        """Return the key of its position."""
        return position_key(f"{DIVERT}{self.name}", JOURNAL, 0)


class LateDiverts:
    """All of them in one run.

    ``pause_ms`` is the mean pause of the administrator, who changes a divert ``changes_max`` times at most, and the longest pause of the
    client, which sends ``messages``. ``look_ms`` is the longest pause of a driver.
    """

    def __init__(self, stage: Stage, kafka: Kafka) -> None:
        self.stage, self.kafka = stage, kafka
        self.pause_ms = stage.world.random.choice((20.0, 60.0))
        self.look_ms = stage.world.random.choice((50.0, 50.0, 250.0))
        self.changes_max, self.messages = 2, 30
        self.diverts: list[LateDivert] = []
        self.administrator: Administrator | None = None
        self.sender: LateSender | None = None

    def begin(self) -> None:
        """Let the people begin."""
        self.administrator = Administrator(self)
        self.sender = LateSender(self)

    async def follow(self, driver: Driver) -> None:
        """Do what a driver does with diverts that are defined at run time."""
        await LateDriver(driver, self.look_ms).run()

    @property
    def live(self) -> list[LateDivert]:
        """Return the diverts that surely exist."""
        return [each for each in self.diverts if not each.ended]

    def left(self) -> Iterator[tuple[str, list[str]]]:
        """Yield what is not done, with a description."""
        if self.administrator is None or not self.administrator.done.done:
            yield "front of the administrator of diverts", ["administrator"]
        if self.sender is None or not self.sender.done.done:
            yield "late-sender, a sender", ["late-sender"]
        end = self.kafka.partition(JOURNAL).committed_end()
        for each in self.live:
            position = committed_position(self.kafka, each.key)
            begun = committed_position(self.kafka, _mark_key(each.name))
            if not each.answered:
                yield f"front of {each.name}, which no broker covers", [each.name]
            elif position is None or begun is None or begun.owner != each.definition.id or position.offset < end:
                yield f"front of {each.key}, at {position} of {end}", [each.key]

    def judge(self, tally: Tally, journal: Audit) -> None:
        """Add the findings to a tally. ``journal`` is what an independent reader has found."""
        for each in self.diverts:
            missing = {id for address, id in each.covered if id not in journal.sent.get(f"{TOPIC}{address}", ())}
            tally.report("divert-loss", f"sent after the answer about {each.definition.id}, and not in the journal", missing)
            copies = Counter((record.value or b"").decode() for record in self.kafka.partition(each.topic).all_committed())
            tally.report("divert-dup", f"twice in {each.topic}", (id for id, count in copies.items() if count > 1))
            tally.report("divert-loss", f"sent after the answer, and not in {each.topic}", each.due - copies.keys())


class Administrator:
    """Defines diverts, changes and deletes them; repeats a request that got no answer."""

    def __init__(self, late: LateDiverts) -> None:
        self._late = late
        self._world = late.stage.world
        self._process = Process(self._world, "administrator")
        self._control = ControlTable(late.kafka, self._process)
        self._definitions = 0
        self.done: Promise[None] = self._process.spawn(self._run())
        self.done.then(self.done.result)

    async def _run(self) -> None:
        pick = self._world.random
        for number in range(pick.randint(1, DIVERTS_MAX)):
            await self._pause()
            again = True
            while again:
                again = await self._one(f"late{number}") and pick.random() < AGAIN

    async def _one(self, name: str) -> bool:
        """Let a divert live. Return True if it is surely deleted, so that the name is free."""
        pick = self._world.random
        self._definitions += 1
        id = f"{name}.{self._definitions}"
        divert = LateDivert(name, PipelineDefinition(id, 1, {"from": f"{id}.1", "to": f"t.{id}"}))
        self._late.diverts.append(divert)
        sure = await self._define(divert, divert.definition)
        for revision in range(2, 2 + pick.randint(0, self._late.changes_max)):
            await self._pause()
            if sure:  # otherwise an earlier request could be carried out after this one
                address = divert.address if pick.random() < SAME_ADDRESS else f"{id}.{revision}"
                changed = PipelineDefinition(id, revision, {"from": address, "to": divert.topic})
                sure = await self._define(divert, changed)
        await self._pause()
        return sure and pick.random() < DELETED and await self._delete(divert)

    async def _define(self, divert: LateDivert, definition: PipelineDefinition) -> bool:
        """Store a definition, and return when a broker covers it: True if no request for it can be under way any more."""
        if definition.settings["from"] != divert.address:
            # From the former address, the driver carries nothing more. From the new one, it carries what it reads after it has followed.
            divert.moved = True
            divert.due.clear()
        divert.answered = False
        divert.definition = definition
        verb = "define divert" if definition.revision == 1 else "change divert"
        self._world.note(verb, f"{definition.id}, revision {definition.revision}, for {divert.address}")
        sure = True
        while True:
            try:
                await self._control.define(divert.name, definition)
                break
            except Unavailable:
                self._world.note("definition in doubt", definition.id)
                sure = False
        while not divert.answered:
            await self._process.sleep(LOOK_MS)
            with suppress(Unavailable):
                found = await self._control.read(decides=False)
                mark = joint_mark(found.marks.get(divert.name, ()), definition.id)
                divert.answered = mark is not None and mark.revision >= definition.revision
        self._world.say(f"administrator: {definition.id} is covered, revision {definition.revision}")
        return sure

    async def _delete(self, divert: LateDivert) -> bool:
        divert.ended = True
        divert.due.clear()
        self._world.note("delete divert", divert.definition.id)
        try:
            await self._control.undefine(divert.name)
            await self._control.forget_marks(divert.name)
        except Unavailable:
            return False
        return True

    async def _pause(self) -> None:
        await self._process.sleep(self._world.random.random() * 2 * self._late.pause_ms)


class LateSender(Client):
    """A client that sends to the addresses of these diverts, and notes which messages they must carry."""

    def __init__(self, late: LateDiverts) -> None:
        super().__init__(late.stage, "late")
        self._late = late
        self._replaced = False  # the broker that took the last message, unawares
        self.done = self.process.spawn(self._run())
        self.done.then(self.done.result)

    async def _run(self) -> None:
        connection = await self.connect()
        for _ in range(self._late.messages):
            await self.process.sleep(self.world.random.random() * self._late.pause_ms)
            if live := self._late.live:
                connection = await self._send(connection, self.world.random.choice(live))

    async def _send(self, connection: Connection, divert: LateDivert) -> Connection:
        """Send a message until it is accepted. Return the connection."""
        answered, address = divert.answered, divert.address
        id, body, said = self.message(f"{TOPIC}{address}", Facts())
        while True:
            try:
                await connection.ask(self._send_one, connection, f"{TOPIC}{address}", body, said)
            except ConnectionLost:
                connection = await self.connect()
                continue
            except BasculeError:
                return connection
            break
        self.stage.last_work_ms = self.world.now_ms
        covered = answered and not divert.ended and divert.address == address and not self._replaced
        self.world.say(f"{self.name}: {id} to {address}{', which is covered' if covered else ''}")
        if covered:
            divert.covered.add((address, id))
        if covered and not divert.moved:
            divert.due.add(id)
        return connection

    def _send_one(self, connection: Connection, to: str, body: bytes, said: Scan, token: Promise[None]) -> None:
        """Send at the broker. One that was replaced, and does not know it, confirms what it need not store: that is not promised."""
        self._replaced = connection.broker.superseded
        self.send(connection, connection.broker.engine, to, body, said, token, None)


@dataclass
class _Carrying:
    """A divert that a driver carries."""

    definition: PipelineDefinition
    wanted: bool = True
    ended: Promise[None] | None = None


class LateDriver:
    """One driver run: it begins a divert that a broker covers, carries it, and deletes its position (bascule.pipelines.definitions)."""

    def __init__(self, driver: Driver, look_ms: float) -> None:
        self._driver, self._look_ms = driver, look_ms
        self._kafka, self._process, self._world = driver.kafka, driver.process, driver.world
        self._control = ControlTable(driver.kafka, driver.process)
        self._carrying: dict[str, _Carrying] = {}

    async def run(self) -> None:
        """Follow the definitions until another driver has taken over."""
        while not self._driver.taken_over:
            await self._driver.guarded(self._follow)
            await self._process.sleep(self._world.random.random() * self._look_ms)

    async def _follow(self) -> None:
        found = await self._control.read(decides=True)
        positions = await all_positions(self._kafka, self._process)
        begun = {key.removeprefix(f"{DEFINED}{DIVERT}"): at.owner for key, at in positions.items() if key.startswith(DEFINED)}
        for name in sorted({*begun, *found.definitions}):
            wanted = found.definitions.get(name)
            carrying = self._carrying.get(name)
            if carrying is not None and (carrying.definition != wanted or carrying.ended is None or carrying.ended.done):
                await self._stop(name, carrying)
            if name in begun and (wanted is None or begun[name] != wanted.id):
                await self._forget(name, begun.pop(name))
            if wanted is not None and name not in self._carrying:
                mark = joint_mark(found.marks.get(name, ()), wanted.id)
                if name not in begun and mark is not None:
                    await self._begin(name, wanted, mark)
                if name in begun or mark is not None:
                    self._start(name, wanted)

    def _start(self, name: str, definition: PipelineDefinition) -> None:
        spec = DivertSpec(name, definition.settings["from"], definition.settings["to"])
        carrying = self._carrying[name] = _Carrying(definition)
        query = partial(self._driver.query, spec, self._kafka.partition(JOURNAL), lambda: carrying.wanted)
        carrying.ended = self._process.spawn(self._driver.guarded(query))

    async def _stop(self, name: str, carrying: _Carrying) -> None:
        carrying.wanted = False
        if carrying.ended is not None:
            await carrying.ended
        del self._carrying[name]

    async def _begin(self, name: str, definition: PipelineDefinition, mark: CoverageMark) -> None:
        """Register the position, with the id of the definition, in one transaction."""
        key, claims = position_key(f"{DIVERT}{name}", JOURNAL, 0), self._driver.claims
        writer = Writer(self._kafka, self._process, key)
        if await claims.take(writer, key) is None:
            begin = replace(await self._beginning(mark.offset), members=(name,), owner=claims.name(key))
            await writer.write([], None, begin, {_mark_key(name): defined_mark(definition.id)})
            self._world.note("begin divert", f"{self._driver.name}, {definition.id} at {begin.offset}, covered from {mark.offset}")
        claims.hold([key])

    async def _beginning(self, covered: int) -> Position:
        journal = self._kafka.partition(JOURNAL)
        first, end = await self._kafka.bounds_of(self._process, journal)
        if end < covered:
            raise Unavailable(f"the end {end} of the journal is that of a former leader")
        records, _ = await self._kafka.fetch(self._process, journal, first, committed=False)
        history: Any = ReadJournal(first, records)
        return journal_position(JOURNAL, JOURNAL_ID, 0, max(covered, first), history)

    async def _forget(self, name: str, definition: str) -> None:
        """Delete the position. Until it is taken, another driver may begin a later definition."""
        key, claims = position_key(f"{DIVERT}{name}", JOURNAL, 0), self._driver.claims
        writer = Writer(self._kafka, self._process, key)
        known = await claims.take(writer, key)
        mark = (await all_positions(self._kafka, self._process)).get(_mark_key(name))
        if mark is not None and mark.owner != definition:
            raise PositionTaken(f"another driver has begun {mark.owner}")
        await writer.write([], known, None, {_mark_key(name): None})
        self._world.note("forget divert", f"{self._driver.name}, {definition}")
        claims.give_up([key])


def _mark_key(name: str) -> str:
    return f"{DEFINED}{DIVERT}{name}"
