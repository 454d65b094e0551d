"""Plans: decisions that are worked out in turns, concurrently with other work, and then carried out in one turn."""

from __future__ import annotations

from collections.abc import Generator

from bascule.broker.memory import MemoryAccount
from bascule.broker.turns import Turns, Work


class PlanInTurns:
    """Work in turns whose result its owner waits for. The owner must call :meth:`close` in the end, even if it no longer waits.

    ``over`` is true when the work is complete or has failed.
    """

    __slots__ = ("_account", "_charged_bytes", "_failure", "_turns", "_work", "over")

    def __init__(self, pieces: Generator[int, None, None], account: MemoryAccount, size_bytes: int) -> None:
        """Create a plan. ``pieces`` yields the steps of each piece; the plan takes ``size_bytes`` of memory."""
        self._work = pieces
        self._turns: Turns | None = None
        self._account = account
        self._charged_bytes = size_bytes
        self._failure: Exception | None = None
        self.over = False
        account.plans_bytes += size_bytes

    def begin(self, turns: Turns) -> None:
        """Do the first slice of the work at once, and the rest in the next turns."""
        self._turns = turns
        turns.begin(self._in_turns())

    def go_on(self, pieces: Generator[int, None, None]) -> None:
        """Do more work, after the first work is over, in the turns in which the first work was done."""
        self._work, self.over = pieces, False
        if self._turns is not None:
            self._turns.begin(self._in_turns())

    @property
    def failed(self) -> bool:
        """Return True if an error has ended the work. ``finish`` raises the error."""
        return self._failure is not None

    def fail(self, error: Exception) -> None:
        """Abandon the plan: ``finish`` raises this error."""
        self._failure = error

    def ready(self) -> bool:
        """Return True if the plan may be carried out in this turn."""
        return self.over

    def _in_turns(self) -> Work:
        try:
            yield from self._work
        except Exception as error:
            self._failure = error
        self.over = True

    def finish(self) -> None:
        """Do the rest of the work at once. Raises the error that has ended the work, if any."""
        for _ in self._in_turns():
            pass
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the work and release the memory of the plan."""
        self._work.close()
        self._account.plans_bytes -= self._charged_bytes
        self._charged_bytes = 0
