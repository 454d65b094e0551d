"""Message groups: all messages of a group go to one consumer, in order, until it leaves.

Groups share a fixed number of buckets, and consumers hold buckets: what is remembered does not grow with the number of groups.
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

#: Many more than a queue has consumers, so that they get equal shares.
BUCKETS: Final = 1024
#: Steps of putting a message aside, or back.
MOVE_STEPS: Final = 5


class Groups:
    """Who holds which groups of one queue, and the messages that wait for a consumer that holds their group.

    A group is a consumer's from the first message that it gets. A consumer whose selector does not want a message has no claim to it.
    """

    __slots__ = ("_parked", "_places", "_queue_ready", "_takers", "holders")

    def __init__(self, ready: Ready, takers: dict[QueueConsumer, None]) -> None:
        """A consumer for which something is put aside becomes one of ``takers``."""
        self._queue_ready = ready
        self._takers = takers
        self.holders: dict[int, QueueConsumer] = {}
        self._parked: dict[QueueConsumer, Lines] = {}
        self._places: dict[int, Lines] = {}  # of what has been put aside, by position

    def peek(self, consumer: QueueConsumer, allowance: Allowance) -> BrokerMessage | None:
        """The next message that the consumer may have; what stands before it and is another's is put aside for that one.

        None says that there is none, or that the allowance is spent: the next call goes on from there.
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
        self._places[message.position] = own
        self._takers[holder] = None

    def take(self, consumer: QueueConsumer, message: BrokerMessage) -> None:
        """The consumer gets the message that a peek returned, and with it the group."""
        if not self.remove(message):
            self._queue_ready.take(message)
        if message.group is not None:
            self.holders.setdefault(hash(message.group) % BUCKETS, consumer)

    def leave(self, consumer: QueueConsumer) -> Work:
        """The consumer is gone: its groups are free, and the work puts back into the queue what was put aside for it."""
        self.holders = {bucket: holder for bucket, holder in self.holders.items() if holder is not consumer}
        return self._return(consumer)

    def _return(self, consumer: QueueConsumer) -> Work:
        own = self._parked.get(consumer)
        while own is not None and (returned := own.pop_some()):
            for message in returned:
                del self._places[message.position]
                self._queue_ready.insert(message)
            yield (MOVE_STEPS + self._queue_ready.take_steps) * len(returned)
        self._parked.pop(consumer, None)

    def remove(self, message: BrokerMessage) -> bool:
        """Take a message out that has been put aside; False where it has not."""
        own = self._places.pop(message.position, None)
        if own is None:
            return False
        own.remove(message)
        return True

    @property
    def count(self) -> int:
        """How many have been put aside."""
        return len(self._places)

    def after(self, place: QueuePlace, count: int) -> Iterator[list[BrokerMessage]]:
        """Of what has been put aside for each consumer, the next messages behind a place."""
        for own in self._parked.values():
            yield own.after(place, count)

    def pop_some(self) -> list[BrokerMessage]:
        """Remove and return some of what has been put aside; none when there is nothing."""
        for own in self._parked.values():
            if own.count:
                popped = list(own.pop_some())
                for message in popped:
                    del self._places[message.position]
                return popped
        return []

    def parked(self) -> Iterator[BrokerMessage]:
        """All that has been put aside."""
        for own in self._parked.values():
            yield from own


def _before(first: BrokerMessage, second: BrokerMessage) -> bool:
    return (-first.priority, first.position) < (-second.priority, second.position)
