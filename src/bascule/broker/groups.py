"""Message groups: all messages of a group go to one consumer, in order, until the consumer detaches.

Groups share a fixed number of buckets, and consumers hold buckets, so the memory does not grow with the number of groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from bascule.broker.message import BrokerMessage
from bascule.broker.order import Lines, QueuePlace
from bascule.broker.ready import Ready
from bascule.broker.turns import Allowance, Work

if TYPE_CHECKING:
    from bascule.broker.queue import QueueConsumer

#: Many more buckets than a queue has consumers, so that the consumers get equal shares.
BUCKETS: Final = 1024
#: Steps to set a message aside, or to put it back.
MOVE_STEPS: Final = 5
#: Steps of one piece of the messages that are put back.
PIECE_STEPS: Final = 1_000


class Groups:
    """The consumers that hold the groups of one queue, and the messages set aside for these consumers.

    A consumer holds a group from the first message of the group that it gets, but not for messages that its selector does not match.
    """

    __slots__ = ("_all", "_parked", "_places", "_queue_ready", "_takers", "holders")

    def __init__(self, ready: Ready, takers: dict[QueueConsumer, None]) -> None:
        """Share ``takers`` with the queue: a consumer is added when a message is set aside for it."""
        self._queue_ready = ready
        self._takers = takers
        self.holders: dict[int, QueueConsumer] = {}
        self._parked: dict[QueueConsumer, Lines] = {}
        self._all = Lines()  # the messages set aside for all consumers: a reader must not look at a thousand consumers for each piece
        self._places: dict[int, Lines] = {}  # where each message is set aside, by position

    def peek(self, consumer: QueueConsumer, allowance: Allowance) -> BrokerMessage | None:
        """Return the next message that the consumer may have. Earlier messages of other holders are set aside for them.

        Return None if there is no message, or if the allowance is spent; the next call continues the search.
        """
        own = self._parked.get(consumer)
        parked = own.peek() if own is not None else None
        ready = self._queue_ready
        while allowance.left > 0:
            message = ready.peek() if consumer.view is None else consumer.view.peek(allowance)
            if message is None:
                return parked if allowance.left > 0 else None
            if parked is not None and _before(parked, message):
                return parked
            holder = self._holder(message, allowance)
            if holder is None or holder is consumer:
                return message
            allowance.left -= MOVE_STEPS + ready.take_steps
            ready.take(message)
            self._park(holder, message)
        return None

    def _holder(self, message: BrokerMessage, allowance: Allowance) -> QueueConsumer | None:
        if message.group is None:
            return None
        holder = self.holders.get(hash(message.group) % BUCKETS)
        if holder is not None and holder.view is not None:
            return holder if holder.view.matches(message, allowance) else None
        return holder

    def _park(self, holder: QueueConsumer, message: BrokerMessage) -> None:
        own = self._parked.get(holder)
        if own is None:
            own = self._parked[holder] = Lines()
        own.insert(message)
        self._all.insert(message)
        self._places[message.position] = own
        self._takers[holder] = None

    def take(self, consumer: QueueConsumer, message: BrokerMessage) -> None:
        """Give the consumer the message that ``peek`` returned, and with it the group."""
        if not self.remove(message):
            self._queue_ready.take(message)
        if message.group is not None:
            self.holders.setdefault(hash(message.group) % BUCKETS, consumer)

    def leave(self, consumer: QueueConsumer) -> Work:
        """Release the groups of a consumer that leaves.

        The returned work puts the messages that were set aside for it back into the queue.
        """
        self.holders = {bucket: holder for bucket, holder in self.holders.items() if holder is not consumer}
        return self._return(consumer)

    def _return(self, consumer: QueueConsumer) -> Work:
        own = self._parked.get(consumer)
        while own is not None and own.count:
            steps = 0
            while steps < PIECE_STEPS and (message := own.peek()) is not None:
                self.remove(message)
                self._queue_ready.insert(message)
                steps += MOVE_STEPS + self._queue_ready.take_steps
            yield steps
        self._parked.pop(consumer, None)

    def remove(self, message: BrokerMessage) -> bool:
        """Remove a message that was set aside. Return False if it was not."""
        own = self._places.pop(message.position, None)
        if own is None:
            return False
        own.remove(message)
        self._all.remove(message)
        return True

    @property
    def count(self) -> int:
        """Return the number of messages that are set aside."""
        return len(self._places)

    def after(self, place: QueuePlace, count: int) -> list[BrokerMessage]:
        """Return the next messages behind a place among those set aside, at most ``count``, all of one priority."""
        return self._all.after(place, count)

    def pop_some(self) -> list[BrokerMessage]:
        """Remove and return some of the messages that are set aside; an empty list if there are none.

        The queue is deleted, and delivers none of them.
        """
        popped = list(self._all.pop_some())
        for message in popped:
            self._places.pop(message.position).remove(message)
        return popped

    def parked(self) -> Iterator[BrokerMessage]:
        """Yield all messages that are set aside."""
        yield from self._all


def _before(first: BrokerMessage, second: BrokerMessage) -> bool:
    return (-first.priority, first.position) < (-second.priority, second.position)
