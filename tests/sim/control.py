"""The topic with the definitions of diverts, and how a simulated broker follows it.

See bascule.kafka.control for the topic, and bascule.broker.coverage for the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

from bascule.broker.coverage import ControlledDiverts, CoverageMark, CoveredDivert
from bascule.writer.control import COVERED_KEY, DEFINITION_KEY, PipelineDefinition, decoded, encoded
from bascule.writer.position import DIVERT
from bascule.writer.reading import read_behind_barrier, read_latest
from tests.sim.effects import ProcessEffects, SimulatedTimer, answered
from tests.sim.kafka import Kafka, ToWrite
from tests.sim.world import Process
from tests.sim.writer import HASTE, TableView

CONTROL: Final = "control"


@dataclass(frozen=True, slots=True)
class ControlState:
    """The definitions of diverts, and what brokers say about them, by name of the divert."""

    definitions: Mapping[str, PipelineDefinition]
    marks: Mapping[str, list[CoverageMark]]


class ControlTable:
    """A client of the topic."""

    def __init__(self, kafka: Kafka, process: Process) -> None:
        self._kafka, self._process = kafka, process
        self._partition = kafka.partition(CONTROL)
        self._view = TableView(kafka, process, self._partition, bytes)

    async def read(self, *, decides: bool) -> ControlState:
        """Return the content. ``decides``: a former leader must not answer. Raises Unavailable."""
        violations = self._process.world.violations
        return state_of(await (read_behind_barrier if decides else read_latest)(self._view, violations=violations))

    async def define(self, name: str, definition: PipelineDefinition) -> None:
        """Store a definition. Raises Unavailable: it may be stored later."""
        await self._store(f"{DEFINITION_KEY}{DIVERT}{name}", encoded(definition))

    async def undefine(self, name: str) -> None:
        """Delete a definition. Raises Unavailable: it may be deleted later."""
        await self._store(f"{DEFINITION_KEY}{DIVERT}{name}", None)

    async def say_covered(self, name: str, epoch: int, mark: CoverageMark) -> None:
        """Store the mark of an epoch. Raises Unavailable: it may be stored later."""
        await self._store(f"{COVERED_KEY}{DIVERT}{name}/{epoch}", encoded(mark))

    async def forget_marks(self, name: str) -> None:
        """Delete the marks of a divert. Raises Unavailable: they may be deleted later."""
        table = await read_latest(self._view, violations=self._process.world.violations)
        for key in table:
            if key.startswith(f"{COVERED_KEY}{DIVERT}{name}/"):
                await self._store(key, None)

    async def _store(self, key: str, value: bytes | None) -> None:
        # A producer for each record: what is repeated is stored once, and a record that was given up may be stored later.
        store = partial(self._partition.produce, self._kafka.new_producer(), 0, 0, [ToWrite(key.encode(), value)], None)
        await answered(self._kafka.request(self._process, f"Produce {CONTROL}", store, at=self._partition))


def state_of(table: Mapping[str, bytes]) -> ControlState:
    """Return the content of the topic."""
    definitions: dict[str, PipelineDefinition] = {}
    marks: dict[str, list[CoverageMark]] = {}
    for key, value in table.items():
        if key.startswith(DEFINITION_KEY):
            definitions[key.removeprefix(f"{DEFINITION_KEY}{DIVERT}")] = _definition(value)
        else:
            marks.setdefault(key.removeprefix(f"{COVERED_KEY}{DIVERT}").rpartition("/")[0], []).append(_mark(value))
    return ControlState(definitions, marks)


@lru_cache(maxsize=1_000)
def _definition(value: bytes) -> PipelineDefinition:
    return decoded(PipelineDefinition, value, CONTROL)


@lru_cache(maxsize=1_000)
def _mark(value: bytes) -> CoverageMark:
    return decoded(CoverageMark, value, CONTROL)


class CoverageControl(ProcessEffects):
    """The effects of the coverage of one epoch: see bascule.broker.coverage.CoverageEffects."""

    def __init__(self, kafka: Kafka, process: Process) -> None:
        super().__init__(process)
        self._table = ControlTable(kafka, process)
        self._sure = False

    def after(self, delay_s: float, action: Callable[[], None]) -> SimulatedTimer:
        """Call an action after a scaled-down time."""
        return super().after(delay_s * HASTE, action)

    async def controlled(self) -> ControlledDiverts:
        """Return the definitions and marks. The first read, and one after an error, decides."""
        sure, self._sure = self._sure, False
        found = await self._table.read(decides=not sure)
        self._sure = True
        diverts = {name: CoveredDivert(each.id, each.revision, each.settings["from"]) for name, each in found.definitions.items()}
        return ControlledDiverts(diverts, found.marks)

    async def store(self, name: str, epoch: int, mark: CoverageMark) -> None:
        """Store the mark of an epoch."""
        await self._table.say_covered(name, epoch, mark)

    async def decide_access(self) -> None:
        """Decide nothing: no divert has a user here."""
