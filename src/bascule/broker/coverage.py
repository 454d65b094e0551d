"""Coverage of diverts that are defined at run time, without IO: docs/adr/0028-diverts-at-run-time.md.

The journal has messages that nobody else wants only if a divert wants them. The active broker follows the definitions in
``PREFIX.control``. It says in a mark from which offset on the journal has the messages for a definition. Before it stores a mark, it waits
for a record of its epoch that was made after it has read the definition. So a broker that takes over later finds the definition, which it
reads behind its start record.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

from bascule.core import crash
from bascule.core.effects import Severity, Timer, Waiter
from bascule.core.errors import BasculeError

#: Interval, in seconds, at which the active broker looks for new definitions.
LOOK_S: Final = 1.0


class CoverageViolation(enum.StrEnum):
    """Rules of coverage that a test can break."""

    EPOCH_NOT_PROVED = "a mark is stored without a record of the epoch behind the definition"
    SERVED_BEFORE_READ = "a broker that takes over serves before it has read the definitions"
    OFFSET_OF_PROOF = "a broker that takes over says that the journal covers a divert from its own proof on only"
    NOTHING_HELD = "the journal is trimmed before the driver has begun a divert"


class CoveredDivert(NamedTuple):
    """A divert that is defined at run time: id and revision of its definition, and the pattern of its addresses.

    The id is "" if the definition cannot be read.
    """

    definition: str
    revision: int
    pattern: str


@dataclass(frozen=True, slots=True)
class CoverageMark:
    """What a broker has found: from ``offset`` on, the journal has the messages for a definition, and for its ``revision`` since then.

    ``id`` is that of the definition. Each epoch of the journal may store a mark in ``PREFIX.control``, and all are true.
    """

    id: str
    revision: int
    offset: int


@dataclass(frozen=True, slots=True)
class ControlledDiverts:
    """The diverts that are defined at run time, and all marks of them, by name."""

    diverts: Mapping[str, CoveredDivert]
    marks: Mapping[str, Sequence[CoverageMark]]

    def mark_of(self, name: str) -> CoverageMark | None:
        """Return what the marks of the current definition of a divert say together; None if there are none."""
        divert = self.diverts.get(name)
        return None if divert is None else joint_mark(self.marks.get(name, ()), divert.definition)

    def offset_of(self, name: str) -> int | None:
        """Return the lowest offset of the marks of the current definition; None if there are none.

        Any mark may be of a definition that cannot be read.
        """
        definition = self.diverts[name].definition
        return min((mark.offset for mark in self.marks.get(name, ()) if definition in ("", mark.id)), default=None)


def joint_mark(marks: Sequence[CoverageMark], definition: str) -> CoverageMark | None:
    """Return the highest revision and the lowest offset of the marks of a definition; None if there are none.

    Each of several brokers that have served may have stored one, and each is true.
    """
    own = [mark for mark in marks if mark.id == definition]
    if not own:
        return None
    return CoverageMark(definition, max(mark.revision for mark in own), min(mark.offset for mark in own))


class CoverageEffects(Protocol):
    """The effects of coverage."""

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Call an action after a delay, unless the timer is cancelled."""
        ...

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        """Run a protocol concurrently. The protocol raises nothing."""
        ...

    def waiter(self) -> Waiter[Any]:
        """Return a waiter for a later value."""
        ...

    def note(self, severity: Severity, event: str, detail: str) -> None:
        """Write an event to the log."""
        ...

    async def controlled(self) -> ControlledDiverts:
        """Return the definitions and marks. What was stored before the call is there, or a later state. Raises BasculeError."""
        ...

    async def store(self, name: str, epoch: int, mark: CoverageMark) -> None:
        """Store the mark of an epoch. Marks of other epochs stay. Raises BasculeError."""
        ...

    async def decide_access(self) -> None:
        """Store whether the users of diverts may consume, as far as that has changed since the last read. Raises BasculeError."""
        ...


class CoveringEpoch(Protocol):
    """The epoch whose journal covers diverts: see bascule.broker.epoch.EpochProtocol."""

    @property
    def number(self) -> int:
        """Return the offset of the start record."""
        ...

    @property
    def ended(self) -> bool:
        """Return True if the epoch has ended."""
        ...

    @property
    def next_offset(self) -> int:
        """Return the offset behind the last record that is known to be stored."""
        ...

    def cover(self, patterns: tuple[str, ...]) -> None:
        """Journal the messages for these addresses, besides those for the diverts of the configuration."""
        ...

    def after_barrier(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call an action when a record of this epoch is stored that was made after the call. A replaced broker never calls it."""
        ...


class _Since(NamedTuple):
    """A divert, and the offset from which this epoch covers its definition."""

    divert: CoveredDivert
    offset: int


class DivertCoverage:
    """The coverage of one epoch. ``load`` before the epoch serves, and ``begin`` when its state is loaded."""

    def __init__(
        self, effects: CoverageEffects, configured: Collection[str], proof_timeout_s: float,
        *, violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:  # fmt: skip
        """Begin without diverts. ``configured`` are the names of the pipelines in the configuration file, which win.

        A proof that is not stored in ``proof_timeout_s`` is begun again.
        """
        self._effects = effects
        self._configured = frozenset(configured)
        self._proof_timeout_s = proof_timeout_s
        self._violations = violations
        self._epoch: CoveringEpoch | None = None
        self._found = ControlledDiverts({}, {})
        self._since: dict[str, _Since] = {}
        self._timer: Timer | None = None
        self._trouble = ""
        #: Definition and offset from which the journal is kept until the driver has begun the divert, by name. Replaced at each change.
        self.held: Mapping[str, tuple[str, int]] = {}

    async def load(self) -> None:
        """Read the definitions. Call this after the start record is stored. Raises BasculeError."""
        if CoverageViolation.SERVED_BEFORE_READ not in self._violations:
            self._found = await self._effects.controlled()

    def begin(self, epoch: CoveringEpoch) -> None:
        """Cover what is defined, and follow the definitions from now on."""
        self._epoch = epoch
        self._cover(epoch, self._found)
        self._timer = self._effects.after(0, self._spawn_look)

    def close(self) -> None:
        """Follow the definitions no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _spawn_look(self) -> None:
        self._effects.spawn(self.look())

    async def look(self) -> None:
        """Follow the definitions of now, and store the marks that are missing."""
        epoch = self._epoch
        if epoch is None or epoch.ended:
            return
        try:
            found = await self._effects.controlled()
            if not epoch.ended:
                self._cover(epoch, found)
                await self._effects.decide_access()
                await self._mark(epoch)
            self._trouble = ""
        except (BasculeError, TimeoutError) as error:
            self._note(f"{error}" or "Kafka has not stored a record of the journal in time")
        except Exception as error:  # otherwise the epoch would continue to serve, and cover no new divert
            self._note(f"fault: {error!r}")
        if not epoch.ended:
            self._timer = self._effects.after(LOOK_S, self._spawn_look)

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._effects.note(Severity.WARNING, "could not follow the definitions of diverts, will retry", trouble)

    def _cover(self, epoch: CoveringEpoch, found: ControlledDiverts) -> None:
        """Journal the messages for the diverts that are defined now."""
        self._found = replace(found, diverts={name: each for name, each in found.diverts.items() if name not in self._configured})
        since: dict[str, _Since] = {}
        for name, divert in self._found.diverts.items():
            before = self._since.get(name)
            same = before is not None and before.divert.definition == divert.definition
            since[name] = _Since(divert, before.offset if before is not None and same else epoch.next_offset)
        if {name: each.divert.pattern for name, each in since.items()} != {name: each.divert.pattern for name, each in self._since.items()}:
            epoch.cover(tuple(each.divert.pattern for each in since.values()))
        self._since = since
        held = {name: (each.divert.definition, self._offset_of(name, each)) for name, each in since.items()}
        self.held = {} if CoverageViolation.NOTHING_HELD in self._violations else held

    def _offset_of(self, name: str, since: _Since) -> int:
        """Return the lowest offset from which the journal covers a definition, as far as this broker knows."""
        known = self._found.offset_of(name)
        return since.offset if known is None else min(known, since.offset)

    async def _mark(self, epoch: CoveringEpoch) -> None:
        """Store the marks that are missing, behind a record of this epoch. Raises BasculeError, TimeoutError."""
        due = {name: each for name, each in self._since.items() if self._is_due(name, each)}
        if not due:
            return
        crash.point("coverage.before")
        if CoverageViolation.EPOCH_NOT_PROVED not in self._violations:
            proved = self._effects.waiter()
            epoch.after_barrier(proved.keep, None)
            await proved.wait(self._proof_timeout_s)
        crash.point("coverage.proved")
        for name, each in due.items():
            offset = epoch.next_offset if CoverageViolation.OFFSET_OF_PROOF in self._violations else self._offset_of(name, each)
            mark = CoverageMark(each.divert.definition, each.divert.revision, offset)
            await self._effects.store(name, epoch.number, mark)
            self._effects.note(Severity.INFO, "divert covered", f"{name}, revision {mark.revision}, from offset {mark.offset}")
        crash.point("coverage.after")

    def _is_due(self, name: str, since: _Since) -> bool:
        """Return whether no mark says that the journal has the messages for the current revision.

        A later offset than that of this epoch is one of an earlier journal of the same name. A definition that cannot be read has no
        mark: it would replace the mark of an earlier revision.
        """
        if not since.divert.definition:
            return False
        mark = self._found.mark_of(name)
        return mark is None or mark.revision < since.divert.revision or mark.offset > since.offset
