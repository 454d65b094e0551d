"""Arrival of messages, and end of their delay, for very many queues: in slices. A part of the engine.

A message to a topic enters all subscriptions of the topic, which may be tens of thousands. The slices of a stored message are part of its
record: the following actions of the record wait, and so does a snapshot. The slices of a message that the journal does not store are work
of several turns. Other such messages wait behind it if they are for one of its queues, so that they stay in order; their senders wait if
there are too many of them. Messages of the two kinds may overtake each other, as Jakarta Messaging allows for messages of different
delivery modes, but each has its place in each queue.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from bascule.broker.message import BrokerMessage
from bascule.broker.queue import BrokerQueue
from bascule.broker.sender_line import SenderLine
from bascule.broker.turns import Work

if TYPE_CHECKING:
    from bascule.broker.delivery import Deliveries

#: Queues that a message enters at once, and the steps for each of them.
FAN_OUT_QUEUES = 1_000
FAN_OUT_STEPS: Final = 3
#: Their bodies are in memory meanwhile, and each of them takes many turns.
LANE_MAX: Final = 4

#: A message, its queues, and its delivery time.
FannedOut = tuple[BrokerMessage, Collection[BrokerQueue], int]


class FanOut:
    """Messages that enter their queues in slices. ``waiting`` are those that the journal does not store, in order."""

    def __init__(self, deliveries: Deliveries, violations: Collection[enum.StrEnum] = frozenset()) -> None:
        self.many = FAN_OUT_QUEUES  # a message for more queues enters them in slices of this size
        self.waiting: deque[FannedOut] = deque()
        self.ended_delays: deque[tuple[BrokerMessage, list[BrokerQueue]]] = deque()  # messages whose delay ends, in order
        #: The senders that wait until they may put a message into ``waiting``.
        self.line = SenderLine(deliveries.clock, violations=violations)
        self._deliveries = deliveries

    def begin(self, message: BrokerMessage, queues: Collection[BrokerQueue], due_ms: int) -> Work | None:
        """Put a message into its queues. Return the work of a stored message, which is part of its record."""
        deliveries = self._deliveries
        message.position = deliveries.next_position
        deliveries.next_position += 1
        message.references += 1  # until the message is in all of its queues: a consumer may settle it before
        deliveries.bodies.hold(message)  # memory counts it from now on, also while it waits
        deliveries.memory.entries += len(queues)  # for the places in the queues, and until then for the list of the queues
        if message.mid >= 0:
            return self._put_in(message, queues, due_ms)
        for queue in queues:
            queue.entering += 1
        self.waiting.append((message, queues, due_ms))
        if len(self.waiting) == 1:
            deliveries.turns.begin_decided(self._in_order())
        return None

    def meets(self, queues: Collection[BrokerQueue]) -> bool:
        """Return True if a message that the journal does not store has not entered one of the queues yet."""
        return bool(self.waiting) and any(queue.entering for queue in queues)

    def admits(self, queues: Collection[BrokerQueue], number: int) -> bool:
        """Return False if the sender of a message that the journal does not store has to wait for a later turn: see ``line``.

        ``number`` is the number of the sender in the line, 0 if it does not wait yet.
        """
        if (not self.waiting and not self.line.rounds) or not self.orders(queues):
            return True
        return len(self.waiting) < LANE_MAX and self.line.first(number)

    def wait(self, queues: Collection[BrokerQueue], number: int, *, stored: bool) -> int:
        """Let a sender wait for a later turn. Return its number in the line; 0 if its message depends on no other one, or is ``stored``."""
        if stored:
            self.line.leave(number)
            return 0
        return self.line.wait(number) if number or self.orders(queues) else 0

    def orders(self, queues: Collection[BrokerQueue]) -> bool:
        """Return True if a message that the journal does not store has to enter its queues in the order of ``waiting``."""
        return len(queues) > self.many or self.meets(queues)

    def _in_order(self) -> Work:
        while self.waiting:
            try:
                yield from self._put_in(*self.waiting[0])
            finally:  # also after an error in a first slice, which must not stop the messages of later senders
                self.waiting.popleft()

    def _put_in(self, message: BrokerMessage, queues: Collection[BrokerQueue], due_ms: int) -> Work:
        deliveries = self._deliveries
        delayed = due_ms > deliveries.clock()
        places, holding = iter(queues), list[BrokerQueue]()
        there, reached = list[BrokerQueue](), 0
        try:
            while some := [*islice(places, self.many)]:
                if message.mid < 0:
                    for queue in some:
                        queue.entering -= 1
                there, reached = [queue for queue in some if not queue.deleted], 0
                for queue in there:
                    queue.hold(message, expected=True)
                    reached += 1
                    if delayed:
                        queue.delayed.put(message, due_ms)
                    else:
                        self._arrive(queue, message)
                deliveries.memory.entries -= len(some) - len(there)
                if delayed:
                    holding += there
                yield len(some) * FAN_OUT_STEPS
        except Exception:
            if message.mid < 0:
                deliveries.memory.entries -= len(some) - reached
                self._give_up(message, there[reached:], places)
            raise
        if holding:
            message.keep_timer(deliveries.schedule.cancellable(due_ms, deliveries.arrive, message, holding))
        deliveries.release(message)

    def _give_up(self, message: BrokerMessage, now: list[BrokerQueue], later: Iterator[BrokerQueue]) -> None:
        """Forget the places of a message in the queues of the failed slice, ``now``, and of later ones, which it does not reach."""
        for queue in later:  # no later message may wait for this one
            queue.entering -= 1
            self._deliveries.memory.entries -= 1
            now.append(queue)
        for queue in now:
            queue.unexpect(message)
        self._deliveries.release(message)

    def end_delay(self, message: BrokerMessage, queues: list[BrokerQueue]) -> None:
        """End the delay of a message in very many queues, or behind such a message."""
        message.references += 1  # until the message is in all of its queues, as in ``begin``
        self._deliveries.memory.entries += 1
        self.ended_delays.append((message, queues))
        if len(self.ended_delays) == 1:
            self._deliveries.turns.begin_decided(self._end_in_order())

    def _end_in_order(self) -> Work:
        while self.ended_delays:
            try:
                yield from self._end_delay(*self.ended_delays[0])
            finally:
                self.ended_delays.popleft()

    def _end_delay(self, message: BrokerMessage, queues: list[BrokerQueue]) -> Work:
        """End the delay of a message. Yields steps.

        Each queue knows a delayed message by its place. So the message gets its place among the others when it has left the delayed ones of
        all its queues. Meanwhile the queues do not deliver it, but an administrator finds it: see Delayed.leaving.
        """
        deliveries = self._deliveries
        pieces = [queues[first : first + self.many] for first in range(0, len(queues), self.many)]
        for number, some in enumerate(pieces):
            pieces[number] = [queue for queue in some if queue.delayed.let_leave(message)]
            yield len(some) * FAN_OUT_STEPS
        message.position = deliveries.next_position
        deliveries.next_position += 1
        for some in pieces:
            self.arrive_late(message, [queue for queue in some if queue.delayed.leaving is message and queue.delayed.remove(message)])
            yield len(some) * FAN_OUT_STEPS
        deliveries.release(message)

    def arrive_late(self, message: BrokerMessage, queues: list[BrokerQueue]) -> None:
        """Make a message whose delay has ended available to consumers. Its queues hold it, unless they have been deleted meanwhile."""
        for queue in queues:
            if queue.deleted:
                self._deliveries.release(message)
                continue
            if message.mid <= queue.recovered_mid:
                queue.counts[message.position] = 0  # it was not delivered before the crash
            self._arrive(queue, message)

    def _arrive(self, queue: BrokerQueue, message: BrokerMessage) -> None:
        """Make a message available to consumers, before messages with a later place that have arrived meanwhile."""
        if message.position == self._deliveries.next_position - 1:
            queue.add(message)  # no message has a later place, so no selector has been tested on one
        else:
            queue.put_back([message])
            self._deliveries.turns.left -= queue.ready.take_steps
        if queue.starved:
            queue.feed()
        self._deliveries.dirty[queue] = None
        if message.expiry_ms:
            self._deliveries.watch_expiry(queue, message.expiry_ms)
