"""Long work in short turns: steps limit the work of the engine in one turn of the event loop, and the rest continues in the next turns.

A step is about a microsecond of processor time. Steps are counted, not measured, so that a run can be repeated. Long work is an iterator
that yields the cost of each of its pieces; a piece is complete in itself. The shell begins a turn, handles input from outside, and
continues the work with the steps that are left; see docs/internals/turns.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from bascule.broker.containment import ErrorContainment, ErrorKind

#: Steps of one turn. Several kinds of work share a turn, and a slow machine takes three times as long; together this stays below 50 ms.
TURN_STEPS: Final = 10_000
#: Each piece of work gets this fraction of a turn, so that short work does not wait for long work.
SLICES: Final = 10

#: Work that yields the steps of each of its pieces, or AFTER_STORED. A piece costs at most a slice, if possible.
Work = Iterator[int]
#: Work that yields this value continues after all decisions so far are stored.
AFTER_STORED: Final = -1


class Retry(Protocol):
    """Tries something again that had to wait for another turn. Returns what to call in the next turn, or None if it succeeded."""

    def __call__(self) -> Retry | None:
        """Try again. Call this only once."""
        ...


class AfterStored:
    """A retry that has no effect before all decisions so far are stored, so it is not called in each turn."""

    __slots__ = ("_retry",)

    def __init__(self, retry: Retry) -> None:
        self._retry = retry

    def __call__(self) -> Retry | None:
        """Try again: see Retry."""
        return self._retry()


def when_due(waiting: Retry, retry: Retry) -> Retry:
    """Return ``retry``, to be called as soon as ``waiting``, which it calls."""
    return AfterStored(retry) if isinstance(waiting, AfterStored) else retry


class Allowance:
    """A number of steps that may still be spent. The piece that spends the last of it may overdraw it."""

    __slots__ = ("left",)

    def __init__(self, left: int = TURN_STEPS) -> None:
        self.left = left


class Turns(Allowance):
    """The current turn, and the work that continues in the next turns.

    ``on_backlog`` is called when there is work for another turn; the shell then calls :meth:`go_on`.
    """

    __slots__ = ("_errors", "_when_stored", "_work", "on_backlog", "steps")

    def __init__(self, steps: int = TURN_STEPS, *, when_stored: Callable[..., None], errors: ErrorContainment | None = None) -> None:
        """Create turns of ``steps``. ``when_stored(action, *arguments)`` calls the action once all decisions so far are stored.

        ``errors`` contains the errors of later slices.
        """
        super().__init__(steps)
        self.steps = steps
        self._when_stored = when_stored
        self._errors = errors or ErrorContainment()
        self.on_backlog: Callable[[], None] = lambda: None
        self._work: deque[tuple[Work, bool]] = deque()  # with True if an error ends the work only

    @property
    def slice_steps_max(self) -> int:
        """Return the steps that one piece of work may take before another one runs, if the turn has so many left."""
        return self.steps // SLICES + 1

    @property
    def pending(self) -> bool:
        """Return True if there is work to continue."""
        return bool(self._work)

    def begin(self, work: Work) -> None:
        """Begin work with a first slice at once. The rest continues in the next turns, concurrently with other work.

        An error of the first slice reaches the caller. An error of a later slice ends only this work: it is logged and counted.
        """
        self._begin(work, True)

    def begin_decided(self, work: Work) -> None:
        """Begin work that carries out a decision, as ``begin`` does. An error of a later slice ends the epoch.

        Without the rest of such work, the memory would contradict the decision, and only a load from the journal repairs it.
        """
        self._begin(work, False)

    def _begin(self, work: Work, contained: bool) -> None:
        self._advance(work, contained)
        if self._work:
            self.on_backlog()

    def begin_turn(self) -> None:
        """Begin another turn of the event loop."""
        self.left = self.steps

    def go_on(self) -> None:
        """Continue all work as far as the steps of this turn allow. Call this once a turn, and again while work is pending."""
        while self._work and self.left > 0:
            self._advance_later(*self._work.popleft())

    def _resume(self, work: Work, contained: bool) -> None:
        """Continue work that has waited until earlier decisions are stored."""
        self._advance_later(work, contained)
        if self._work:
            self.on_backlog()

    def _advance_later(self, work: Work, contained: bool) -> None:
        try:
            self._advance(work, contained)
        except Exception as error:
            if not contained:
                raise
            self._errors.contain(ErrorKind.WORK, error, work=getattr(work, "__qualname__", type(work).__name__))

    def _advance(self, work: Work, contained: bool) -> None:
        """Do a slice of work, and keep the rest."""
        enough = self.left - min(self.slice_steps_max, self.left)
        while self.left > enough:  # a piece may also have spent steps itself
            cost = next(work, None)
            if cost is None:
                return
            if cost == AFTER_STORED:
                self._when_stored(self._resume, work, contained)
                return
            self.left -= cost
        self._work.append((work, contained))
