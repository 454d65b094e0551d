"""Returns of messages to a queue: in pieces if there are many, so that each turn of the event loop stays short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from bascule.broker.message import BrokerMessage
from bascule.broker.queue import BrokerQueue
from bascule.broker.turns import Turns, Work

#: Messages of one piece, and the steps for each of them. A piece has fewer messages if each of them visits many selectors of its queue.
PIECE_MESSAGES = 200
PUT_BACK_STEPS: Final = 6


#: Puts messages back into their queue.
PutBack = Callable[[BrokerQueue, list[BrokerMessage]], None]


def by_queue(messages: Iterable[tuple[BrokerQueue, BrokerMessage]]) -> dict[BrokerQueue, list[BrokerMessage]]:
    """Return the messages of each queue, in their order."""
    found: dict[BrokerQueue, list[BrokerMessage]] = {}
    for queue, message in messages:
        found.setdefault(queue, []).append(message)
    return found


class Returns:
    """Works that put messages back. Until they have ended, the queue delivers nothing, so that no message overtakes others."""

    def __init__(self, turns: Turns, dirty: dict[BrokerQueue, None]) -> None:
        """Create the returns of one engine. A queue is put into ``dirty`` when all its messages are back."""
        self._turns = turns
        self._dirty = dirty

    def in_pieces(self, queue: BrokerQueue, messages: list[BrokerMessage], act: PutBack) -> None:
        """Call ``act`` with the messages that go back into the queue, either with all of them or with one piece after another.

        If the turn has no steps left, all pieces wait: a client may return a few messages of each of many queues.
        """
        turns = self._turns
        if len(messages) <= _piece_messages(queue) and turns.left > 0:
            turns.left -= _steps(queue, messages)
            act(queue, messages)
        elif messages:
            self.begin(queue, self._pieces(queue, messages, act))

    def of_several(self, queues: Iterable[BrokerQueue], messages: Iterator[tuple[BrokerQueue, BrokerMessage]], act: PutBack) -> None:
        """Call ``act`` for each queue, with one piece of ``messages`` after another."""
        returning = list(queues)
        for queue in returning:
            self.hold(queue)
        self._turns.begin_decided(self._of_several(returning, messages, act))

    def _of_several(self, queues: list[BrokerQueue], messages: Iterator[tuple[BrokerQueue, BrokerMessage]], act: PutBack) -> Work:
        try:
            while piece := list(islice(messages, PIECE_MESSAGES)):
                for queue, found in by_queue(piece).items():
                    yield from self._pieces(queue, found, act)
        finally:
            for queue in queues:
                self.let_go(queue)

    @staticmethod
    def _pieces(queue: BrokerQueue, messages: list[BrokerMessage], act: PutBack) -> Work:
        first = 0
        while first < len(messages):
            piece = messages[first : first + _piece_messages(queue)]
            act(queue, piece)
            first += len(piece)
            yield _steps(queue, piece)

    def begin(self, queue: BrokerQueue, work: Work) -> None:
        """Begin work that puts messages back into the queue."""
        self.hold(queue)
        self._turns.begin_decided(self._held(queue, work))

    def _held(self, queue: BrokerQueue, work: Work) -> Work:
        try:
            yield from work
        finally:
            self.let_go(queue)

    def hold(self, queue: BrokerQueue) -> None:
        """Suspend deliveries of a queue until ``let_go``, because messages go back into it."""
        queue.returning += 1

    def let_go(self, queue: BrokerQueue) -> None:
        """Resume deliveries of a queue, because its messages are back."""
        queue.returning -= 1
        self._dirty[queue] = None

    def begin_range(self) -> RangeReturn:
        """Return the context for a client that returns messages in several pieces."""
        return RangeReturn(self)


class RangeReturn:
    """A range of messages that a client returns in pieces. Until ``end``, the queues of the returned messages deliver nothing."""

    __slots__ = ("_queues", "_returns")

    def __init__(self, returns: Returns) -> None:
        self._returns = returns
        self._queues: dict[BrokerQueue, None] = {}

    def hold(self, queue: BrokerQueue) -> None:
        """Suspend deliveries of a queue to which messages of the range go back."""
        if queue not in self._queues:
            self._queues[queue] = None
            self._returns.hold(queue)

    def end(self) -> None:
        """Resume deliveries: all messages of the range are back."""
        while self._queues:
            self._returns.let_go(self._queues.popitem()[0])


def _piece_messages(queue: BrokerQueue) -> int:
    return max(1, PIECE_MESSAGES * PUT_BACK_STEPS // (PUT_BACK_STEPS + queue.ready.take_steps))


def _steps(queue: BrokerQueue, messages: list[BrokerMessage]) -> int:
    return len(messages) * (PUT_BACK_STEPS + queue.ready.take_steps)
