"""Plans: decisions that are worked out in turns, concurrently with other work, and then carried out in one turn."""

from __future__ import annotations

from collections.abc import Generator

from bascule.broker.memory import MemoryAccount
from bascule.broker.turns import Turns, Work


class PlanInTurns:
    """Work in turns whose result its owner waits for. The owner must call :meth:`close` in the end, even if it no longer waits.

    ``over`` is true when the work is complete or has failed.
    """

    __slots__ = ("_account", "_charged_bytes", "_failure", "_pieces", "over")

    def __init__(self, pieces: Generator[int, None, None], account: MemoryAccount, size_bytes: int) -> None:
        """Create a plan. ``pieces`` yields the steps of each piece; the plan takes ``size_bytes`` of memory."""
        self._pieces = pieces
        self._account = account
        self._charged_bytes = size_bytes
        self._failure: Exception | None = None
        self.over = False
        account.plans_bytes += size_bytes

    def begin(self, turns: Turns) -> None:
        """Do the first slice of the work at once, and the rest in the next turns."""
        turns.begin(self._in_turns())

    def _in_turns(self) -> Work:
        try:
            yield from self._pieces
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
        self._pieces.close()
        self._account.plans_bytes -= self._charged_bytes
        self._charged_bytes = 0
