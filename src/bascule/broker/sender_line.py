"""The order of senders that wait in turns of the event loop, of which some may be lost at any time. A part of the engine."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final

#: A round ends at the latest at the next call after this time.
ROUND_MS: Final = 5_000


class SenderLineViolation(enum.StrEnum):
    """Rules of the line that a test breaks."""

    ORDER_IGNORED = "the sender that asks first goes on, however long others have waited"
    LOST_STAY = "a sender that no longer exists keeps its place"


class SenderLine:
    """The senders that wait, by number, in the order in which they began to wait.

    Each of them asks again in each turn, one after another. A sender whose connection has ended does not ask again, and nobody reports it.
    So the line counts rounds: a round ends when a sender asks for the second time. All senders that still exist have asked in each complete
    round, and a sender that has not done so is dropped when it becomes the first one. ``clock`` returns milliseconds.
    """

    __slots__ = ("_clock", "_numbers", "_round", "_round_end_ms", "_violations", "rounds")

    def __init__(self, clock: Callable[[], int], *, violations: Collection[enum.StrEnum] = frozenset()) -> None:
        self._clock = clock
        self._violations = violations
        self.rounds: OrderedDict[int, int] = OrderedDict()  # the last round in which a sender has asked, by its number
        self._numbers = 0
        self._round = 0
        self._round_end_ms = 0

    def __len__(self) -> int:
        return len(self.rounds)

    def first(self, number: int) -> bool:
        """Return True if no other sender waits before this one. ``number`` is 0 for a sender that does not wait yet."""
        rounds = self.rounds
        while rounds:
            first = next(iter(rounds))
            if first == number or SenderLineViolation.ORDER_IGNORED in self._violations:
                return True
            if rounds[first] >= self._round - 1 or SenderLineViolation.LOST_STAY in self._violations:
                return False
            del rounds[first]
        return True

    def wait(self, number: int) -> int:
        """Note that a sender has asked in vain. Return its number: the same one, or the next one if ``number`` is 0."""
        now_ms = self._clock()
        if not number:
            number = self._numbers = self._numbers + 1
        if self.rounds.get(number) == self._round or now_ms >= self._round_end_ms:
            self._round += 1
            self._round_end_ms = now_ms + ROUND_MS
        self.rounds[number] = self._round  # a sender that was dropped by mistake waits behind the others from now on
        return number

    def leave(self, number: int) -> None:
        """Remove a sender that does not wait any more."""
        self.rounds.pop(number, None)
