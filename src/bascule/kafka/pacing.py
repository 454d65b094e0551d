"""When a producer begins its next transaction: not before Kafka has written the markers of the last one.

Until then, Kafka refuses AddPartitionsToTxn (CONCURRENT_TRANSACTIONS), and librdkafka asks again after 20 ms, whatever its settings are.
The markers need 2 to 10 ms, depending on the load. A writer that waits a little gathers more records meanwhile, and is seldom refused.
"""

from __future__ import annotations

from typing import Final

#: The first pause, in seconds.
FIRST_S: Final = 0.004
#: A longer pause would cost as much as a refusal.
LONGEST_S: Final = 0.015
#: The change of the pause for a refused transaction, and for another one that waited for the pause: one in eleven is refused in the end.
LONGER_S: Final = 0.001
SHORTER_S: Final = 0.0001


class BeginPause:
    """The pause between two transactions of a writer, which follows Kafka's answers. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self.pause_s = FIRST_S
        self._ended_s = float("-inf")  # when the last transaction was committed
        self._waited = False  # the next transaction was asked for during the pause

    def left_s(self, now_s: float) -> float:
        """Return how long the next transaction should still wait."""
        left_s = self._ended_s + self.pause_s - now_s
        if left_s <= 0:
            return 0.0
        self._waited = True
        return left_s

    def committed(self, now_s: float) -> None:
        """Begin a pause."""
        self._ended_s = now_s

    def learn(self, refusals: int) -> None:
        """Adapt the pause to the number of refusals of the last transaction. One that came late says nothing about the pause."""
        if refusals:
            self.pause_s = min(LONGEST_S, self.pause_s + LONGER_S)
        elif self._waited:
            self.pause_s = max(0.0, self.pause_s - SHORTER_S)
        self._waited = False
