"""Messages that one commit acknowledges, and that leave their queues in pieces if there are many.

The commit journals all acknowledgements in one record. From then on the messages do not count for the limits of their queues, and a
snapshot must not contain them, even if they have not left yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from bascule.broker.journaling import Journaling
from bascule.broker.message import BrokerMessage
from bascule.broker.queue import BrokerQueue
from bascule.broker.turns import Turns, Work

#: Messages of one piece, and the steps for each of them.
PIECE_MESSAGES: Final = 200
LEAVE_STEPS: Final = 4

Ack = tuple[BrokerQueue, BrokerMessage]


def collect(acks: Iterable[Ack], gone: dict[BrokerQueue, list[int]]) -> None:
    """Add the mids of messages that are in the journal to ``gone``."""
    for queue, message in acks:
        if message.mid >= 0 and queue.durable:
            mids = gone.get(queue)
            if mids is None:
                gone[queue] = [message.mid]
            else:
                mids.append(message.mid)


def count(acks: Iterable[Ack], held: dict[BrokerQueue, list[int]]) -> None:
    """Add the number and the bytes of the messages to ``held``, for each queue."""
    for queue, message in acks:
        sums = held.get(queue)
        if sums is None:
            held[queue] = [1, message.size_bytes]
        else:
            sums[0] += 1
            sums[1] += message.size_bytes


class RemoveMessage(Protocol):
    """Removes an acknowledged message from memory. ``counted`` is false if its queue no longer counts the message."""

    def __call__(self, queue: BrokerQueue, message: BrokerMessage, *, counted: bool = True) -> None:
        """Remove the message. Raises nothing."""
        ...


class LeavingMessages:
    """The acknowledged messages of one broker that have not left their queues yet."""

    def __init__(self, journaling: Journaling, turns: Turns, remove: RemoveMessage) -> None:
        self._journaling = journaling
        self._turns = turns
        self._remove = remove
        self._leaving: list[Mapping[BrokerQueue, list[int]]] = []  # mids of each commit whose messages have not all left

    def journal(self, gone: Mapping[BrokerQueue, list[int]]) -> None:
        """Add acknowledgements to the open record, by mids of messages of durable queues."""
        for queue, mids in gone.items():
            if not queue.deleted:
                self._journaling.add_acks(queue, mids)

    def forget(
        self, acks: Sequence[Ack], gone: Mapping[BrokerQueue, list[int]], held: Mapping[BrokerQueue, Sequence[int]] | None = None
    ) -> None:
        """Remove messages whose acknowledgements are in the open record from their queues.

        ``gone`` is the result of ``collect``, and ``held`` that of ``count``, if known.
        """
        if len(acks) <= PIECE_MESSAGES:
            for queue, message in acks:
                self._remove(queue, message)
            return
        if held is None:
            sums: dict[BrokerQueue, list[int]] = {}
            count(acks, sums)
            held = sums
        for queue, (messages, size_bytes) in held.items():
            queue.uncount(messages, size_bytes)
        self._leaving.append(gone)
        self._turns.begin_decided(self._leave(deque(acks), gone))

    def _leave(self, remaining: deque[Ack], gone: Mapping[BrokerQueue, list[int]]) -> Work:
        while remaining:
            count = min(PIECE_MESSAGES, len(remaining))
            for _ in range(count):
                queue, message = remaining.popleft()
                self._remove(queue, message, counted=False)
            yield count * LEAVE_STEPS
        self._leaving = [other for other in self._leaving if other is not gone]

    def mids(self) -> Iterator[tuple[BrokerQueue, list[int]]]:
        """Yield the mids of journaled messages of each queue that leave it, or that have just left it."""
        for gone in self._leaving:
            yield from gone.items()
