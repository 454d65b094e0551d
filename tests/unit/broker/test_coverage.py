"""Coverage of diverts defined at run time: brokers are replaced, suspended and killed, and no message is missing from the journal."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from bascule.broker.addresses import Diverts
from bascule.broker.coverage import ControlledDiverts, CoverageMark, CoverageViolation, CoveredDivert, DivertCoverage, joint_mark
from bascule.broker.epoch import EpochProtocol
from bascule.broker.loading import Loader
from bascule.core.destination import Routing
from bascule.core.errors import Unavailable
from bascule.jms.sections import scan
from bascule.journal.records import Kind, decode_header
from bascule.testing.broker import Sender, message_bytes
from tests.sim.world import World
from tests.unit.broker.epoch_effects_model import LIMITS, EpochEffectsModel

NAMES = ("a", "b")
#: Seconds that a scenario lasts, and between the things that happen in it.
LASTS_S, STEP_S = 25.0, 0.08
#: Without messages of clients, the mean of the delays of Kafka, in ms.
DELAY_MS = 60.0


@dataclass
class Definition:
    """A divert as its administrator sees it, and what was sent for it once ``create`` had answered."""

    divert: CoveredDivert
    answered: bool = False
    deleted: bool = False
    begun: int | None = None
    sent: list[str] = field(default_factory=list)


class Kafka:
    """The journal, and the control topic with definitions and marks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.journal: list[bytes] = []
        self.trimmed = 0
        self.diverts: dict[str, CoveredDivert] = {}
        self.marks: dict[tuple[str, int], CoverageMark] = {}
        self.epoch = -1

    def append(self, value: bytes) -> int:
        self.journal.append(value)
        if decode_header(value).kind is Kind.EPOCH:
            self.epoch = len(self.journal) - 1
        return len(self.journal) - 1

    def controlled(self) -> ControlledDiverts:
        marks = {name: [mark for (of, _), mark in self.marks.items() if of == name] for name in self.diverts}
        return ControlledDiverts(dict(self.diverts), marks)

    def valid(self) -> list[tuple[int, bytes]]:
        """Return the records that count: those of the newest epoch before each of them."""
        found, epoch = [], -1
        for offset, value in enumerate(self.journal):
            header = decode_header(value)
            if header.kind is Kind.EPOCH:
                epoch = offset
            elif header.epoch == epoch:
                found.append((offset, value))
        return found


class BrokerModel(EpochEffectsModel):
    """A broker: the real protocols of epoch and coverage on the journal in memory."""

    def __init__(self, kafka: Kafka, violations: Collection[enum.StrEnum]) -> None:
        super().__init__()
        self.kafka, self.world = kafka, kafka.world
        self.process = type(self.process)(kafka.world, f"broker {len(kafka.journal)}")
        self.sender = Sender()
        self._lands_ms = self._answers_ms = 0.0
        self.coverage = DivertCoverage(self, ("of the file",), LIMITS.append_timeout_s, violations=violations)
        self.epoch = EpochProtocol(self, LIMITS, "journal", Diverts(replayable=()), coverage=self.coverage)
        self.process.spawn(self._start())

    async def _start(self) -> None:
        with suppress(Unavailable):
            await self.epoch.start({})

    def _delay_ms(self) -> float:
        return self.world.random.expovariate(1 / DELAY_MS)

    def append(self, key: bytes, value: bytes) -> None:
        self._lands_ms = max(self._lands_ms, self.world.now_ms + self._delay_ms())
        self.world.after(self._lands_ms - self.world.now_ms, self._land, value)

    def _land(self, value: bytes) -> None:
        offset = self.kafka.append(value)
        self._answers_ms = max(self._answers_ms, self.world.now_ms + self._delay_ms())
        self.process.after(self._answers_ms - self.world.now_ms, self.epoch.outcomes, [(offset, None)])

    async def records(self, start: int, end: int) -> list[tuple[int, bytes | None]]:
        await self.process.sleep(self._delay_ms())
        return [(offset, self.kafka.journal[offset]) for offset in range(start, end)]

    async def state_before(self, end: int) -> Loader:
        await self.process.sleep(self._delay_ms())
        return Loader(self.epoch.fresh_engine())

    async def controlled(self) -> ControlledDiverts:
        await self.process.sleep(self._delay_ms())
        if self.world.chance(0.05):
            raise Unavailable("no answer")
        found = self.kafka.controlled()
        await self.process.sleep(self._delay_ms())
        return found

    async def store(self, name: str, epoch: int, mark: CoverageMark) -> None:
        await self.process.sleep(self._delay_ms())
        self.kafka.marks[name, epoch] = mark
        await self.process.sleep(self._delay_ms())

    async def decide_access(self) -> None:
        """Decide nothing: no divert has a user here."""

    @property
    def serves(self) -> bool:
        return self.epoch.loaded and not self.epoch.ended

    def publish(self, token: str, address: str) -> None:
        body = message_bytes(token)
        self.epoch.engine.send(address, Routing.MULTICAST, body, scan(body), "client", self.sender, token)
        self.epoch.flush()


class Scenario:
    """Administrators, clients, a driver and brokers that are replaced, in random order."""

    def __init__(self, seed: int, violations: Collection[enum.StrEnum] = ()) -> None:
        self.world = World(seed)
        self.random = self.world.random
        self.kafka = Kafka(self.world)
        self.violations = violations
        self.brokers: list[BrokerModel] = []
        self.definitions: list[Definition] = []
        self.count = 0

    def run(self) -> None:
        self.elect()
        acts: list[tuple[Callable[[], None], int]] = [
            (self.send, 30), (self.define, 2), (self.delete, 1), (self.change, 1), (self.elect, 1), (self.suspend, 1), (self.trim, 4),
            (self.begin, 3),
        ]  # fmt: skip
        end_ms = self.world.now_ms + LASTS_S * 1000
        while self.world.now_ms < end_ms:
            (act,) = self.random.choices([each for each, _ in acts], [weight for _, weight in acts])
            act()
            self.world.run(self.world.now_ms + STEP_S * 1000)
            self.answer()
        self.world.run(self.world.now_ms + 10_000)
        self.check()

    def elect(self) -> None:
        """Let another broker begin. Nobody has told the one before."""
        self.brokers.append(BrokerModel(self.kafka, self.violations))

    def suspend(self) -> None:
        process = self.random.choice(self.brokers).process
        if self.random.random() < 0.3:
            process.kill()
            self.elect()
        else:
            process.stop()
            self.world.after(self.random.uniform(10, 4000), process.go_on)

    @property
    def active(self) -> BrokerModel | None:
        """Return the broker whose epoch is in force, if it serves."""
        epoch = self.kafka.epoch
        return next((each for each in self.brokers if each.serves and each.epoch.number == epoch), None)

    def open(self) -> list[Definition]:
        return [each for each in self.definitions if not each.deleted]

    def define(self) -> None:
        free = [name for name in NAMES if name not in self.kafka.diverts]
        if free:
            self.count += 1
            divert = CoveredDivert(f"{free[0]}{self.count}", 1, f"{free[0]}.first")
            self.kafka.diverts[free[0]] = divert
            self.definitions.append(Definition(divert))

    def change(self) -> None:
        for each in self.open():
            name, definition, revision = each.divert.definition[0], each.divert.definition, each.divert.revision + 1
            each.divert = self.kafka.diverts[name] = CoveredDivert(definition, revision, f"{name}.{revision}")
            each.answered = False
            return

    def delete(self) -> None:
        for each in self.open():
            each.deleted = True
            name = each.divert.definition[0]
            del self.kafka.diverts[name]
            for key in [key for key in self.kafka.marks if key[0] == name]:
                del self.kafka.marks[key]
            return

    def mark(self, each: Definition) -> CoverageMark | None:
        marks = self.kafka.controlled().marks.get(each.divert.definition[0], ())
        return joint_mark(marks, each.divert.definition)

    def answer(self) -> None:
        """Let the requests to create and change diverts answer that are complete."""
        for each in self.open():
            mark = self.mark(each)
            each.answered = each.answered or (mark is not None and mark.revision >= each.divert.revision)

    def begin(self) -> None:
        """Let the driver begin a divert."""
        for each in self.open():
            mark = self.mark(each)
            if each.begun is None and mark is not None and self.random.random() < 0.5:
                each.begun = max(mark.offset, self.kafka.trimmed)

    def trim(self) -> None:
        """Let the broker whose epoch is in force delete what nobody needs. A pipeline that has begun keeps its part by its position."""
        broker = self.active
        if broker is not None:
            begun = {each.divert.definition for each in self.definitions if each.begun is not None}
            held = [offset for definition, offset in broker.coverage.held.values() if definition not in begun]
            self.kafka.trimmed = max(self.kafka.trimmed, min([broker.epoch.next_offset, *held]))

    def send(self) -> None:
        broker = self.active
        if broker is None or not self.definitions:
            return
        each = self.random.choice(self.definitions)
        self.count += 1
        token = f"message {self.count}."
        broker.publish(token, each.divert.pattern)
        if each.answered and not each.deleted:
            each.sent.append(token)

    def check(self) -> None:
        valid = self.kafka.valid()
        accepted = {token for broker in self.brokers for token in broker.sender.accepted_tokens}
        for each in self.definitions:
            for token in accepted.intersection(each.sent):
                found = [offset for offset, value in valid if token.encode() in value]
                assert found, f"{token} is not in the journal, for {each.divert}"
                if each.begun is not None:
                    assert each.begun <= found[0], f"{token} is before the beginning of {each.divert}"
                elif not each.deleted:
                    assert found[0] >= self.kafka.trimmed, f"{token} was deleted before {each.divert} has begun"


@pytest.mark.parametrize("seed", range(40))
def test_message_sent_after_the_answer_is_in_the_journal_behind_the_beginning_of_its_divert(seed: int) -> None:
    Scenario(seed).run()


def test_diverts_are_covered_and_messages_are_checked() -> None:
    """Guards the test above against scenarios in which nothing happens."""
    scenarios = [Scenario(seed) for seed in range(8)]
    for each in scenarios:
        each.run()
    assert sum(len(each.sent) for scenario in scenarios for each in scenario.definitions) > 200
    assert sum(each.begun is not None for scenario in scenarios for each in scenario.definitions) > 10
    assert sum(scenario.kafka.trimmed > 0 for scenario in scenarios) == len(scenarios)


@pytest.mark.parametrize("violation", CoverageViolation)
def test_planted_fault_is_found(violation: CoverageViolation) -> None:
    for seed in range(400):
        try:
            Scenario(seed, {violation}).run()
        except AssertionError:
            return
    pytest.fail(f"no scenario has found: {violation}")


def served(kafka: Kafka) -> BrokerModel:
    """Return a broker that serves and has looked at the definitions."""
    broker = BrokerModel(kafka, ())
    kafka.world.run(kafka.world.now_ms + 5000)
    assert broker.serves
    return broker


def test_mark_that_somebody_has_deleted_is_stored_again() -> None:
    kafka = Kafka(World(1))
    kafka.diverts["a"] = CoveredDivert("a1", 1, "a")
    broker = served(kafka)
    before = dict(kafka.marks)
    assert before == {("a", broker.epoch.number): CoverageMark("a1", 1, broker.epoch.number + 1)}
    kafka.marks.clear()
    kafka.world.run(kafka.world.now_ms + 5000)
    assert kafka.marks == before


def test_definition_that_cannot_be_read_keeps_the_marks_and_the_journal_of_its_earlier_revision() -> None:
    kafka = Kafka(World(1))
    kafka.diverts["a"] = CoveredDivert("a1", 1, "a")
    broker = served(kafka)
    marks = dict(kafka.marks)
    kafka.diverts["a"] = CoveredDivert("", 0, "#")
    kafka.world.run(kafka.world.now_ms + 5000)
    assert kafka.marks == marks
    first = broker.epoch.number + 1
    assert broker.coverage.held == {"a": ("", first)}
    assert served(kafka).coverage.held == {"a": ("", first)}, "also by the next broker"


def test_mark_of_an_earlier_journal_is_corrected() -> None:
    kafka = Kafka(World(1))
    kafka.diverts["a"] = CoveredDivert("a1", 1, "a")
    kafka.marks["a", 90_000] = CoverageMark("a1", 1, 90_007)
    broker = served(kafka)
    found = joint_mark(list(kafka.marks.values()), "a1")
    assert found == CoverageMark("a1", 1, broker.epoch.number + 1)


def test_definitions_are_followed_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = Kafka(World(1))
    broker = served(kafka)

    async def fault() -> ControlledDiverts:
        raise ValueError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(broker, "controlled", fault)
        kafka.world.run(kafka.world.now_ms + 3000)
    kafka.diverts["a"] = CoveredDivert("a1", 1, "a")
    kafka.world.run(kafka.world.now_ms + 5000)
    assert kafka.marks
