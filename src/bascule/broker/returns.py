"""Messages that go back into a queue: piece by piece where they are many, so that each turn of the event loop stays short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bascule.broker.message import BrokerMessage
from bascule.broker.queue import BrokerQueue
from bascule.broker.turns import Turns, Work

#: Messages of one piece, and the steps that each takes.
PIECE_MESSAGES: Final = 200
PUT_BACK_STEPS: Final = 6


class Returns:
    """Works that put messages back. Until they have ended the queue gives out nothing: a message would overtake others."""

    def __init__(self, turns: Turns, dirty: dict[BrokerQueue, None]) -> None:
        """A queue to which all has come back is put into ``dirty``."""
        self._turns = turns
        self._dirty = dirty

    def in_pieces(self, queue: BrokerQueue, messages: list[BrokerMessage], act: Callable[[BrokerQueue, list[BrokerMessage]], None]) -> None:
        """Call ``act`` with the messages, which go back into the queue, or with one piece of them after another."""
        if len(messages) <= PIECE_MESSAGES:
            act(queue, messages)
        else:
            self.begin(queue, self._pieces(queue, messages, act))

    @staticmethod
    def _pieces(queue: BrokerQueue, messages: list[BrokerMessage], act: Callable[[BrokerQueue, list[BrokerMessage]], None]) -> Work:
        for first in range(0, len(messages), PIECE_MESSAGES):
            piece = messages[first : first + PIECE_MESSAGES]
            act(queue, piece)
            yield len(piece) * (PUT_BACK_STEPS + len(queue.ready.views))

    def begin(self, queue: BrokerQueue, work: Work) -> None:
        """Do work that puts messages back into the queue."""
        queue.returning += 1
        self._turns.begin(self._gated(queue, work))

    def _gated(self, queue: BrokerQueue, work: Work) -> Work:
        yield from work
        queue.returning -= 1
        self._dirty[queue] = None
