"""Long work in short turns: what the engine does in one turn of the event loop is bounded by steps, and the rest goes on in the next.

A step stands for about a microsecond of processor time. Steps are counted, not measured, so that a run can be repeated. Work that may take
long is an iterator that yields what each of its pieces has cost; a piece is whole in itself. The shell begins a turn, does what has come
from outside, and lets the work go on with what is left; see docs/internals/turns.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

#: Steps of one turn. Several kinds of work share a turn, and a slow machine takes three times as long: even then a turn takes less than
#: 50 ms.
TURN_STEPS: Final = 10_000
#: So many pieces of work share the steps of a turn, so that short work does not wait for long work.
SLICES: Final = 10

#: Work that yields the steps of each of its pieces, or AFTER_STORED. A piece costs no more than a slice where that can be helped.
Work = Iterator[int]
#: Work that yields this goes on when all that has been decided so far is stored.
AFTER_STORED: Final = -1


class Retry(Protocol):
    """Tries once more what had to wait for another turn. Returns what to call in the next one if it still has to."""

    def __call__(self) -> Retry | None:
        """Call it once."""
        ...


class Allowance:
    """What may still be spent. It may be overdrawn by the piece that spends the last of it."""

    __slots__ = ("left",)

    def __init__(self, left: int = TURN_STEPS) -> None:
        self.left = left


class Turns(Allowance):
    """The present turn, and the work that goes on in the next ones.

    ``on_backlog`` is called when there is work for another turn; the shell calls :meth:`go_on` then.
    """

    __slots__ = ("_when_stored", "_work", "on_backlog", "steps")

    def __init__(self, steps: int = TURN_STEPS, *, when_stored: Callable[..., None]) -> None:
        """``when_stored(action, argument)`` calls the action once all that has been decided so far is stored."""
        super().__init__(steps)
        self.steps = steps
        self._when_stored = when_stored
        self.on_backlog: Callable[[], None] = lambda: None
        self._work: deque[Work] = deque()

    @property
    def slice_steps(self) -> int:
        """What one piece of work may take before another has its turn."""
        return min(self.steps // SLICES + 1, self.left)

    @property
    def pending(self) -> bool:
        """Whether there is work to go on with."""
        return bool(self._work)

    def begin(self, work: Work) -> None:
        """Do work, a first slice of it at once; the rest goes on in the next turns, beside other work."""
        self._advance(work)
        if self._work:
            self.on_backlog()

    def begin_turn(self) -> None:
        """Another turn of the event loop begins."""
        self.left = self.steps

    def go_on(self) -> None:
        """Go on with all work in turns, as far as this turn's steps go. Call it once a turn, and again while work is pending."""
        while self._work and self.left > 0:
            self._advance(self._work.popleft())

    def _advance(self, work: Work) -> None:
        """Do a slice of work, and keep the rest."""
        enough = self.left - self.slice_steps
        while self.left > enough:  # a piece may also have spent steps by itself
            cost = next(work, None)
            if cost is None:
                return
            if cost == AFTER_STORED:
                self._when_stored(self.begin, work)
                return
            self.left -= cost
        self._work.append(work)
