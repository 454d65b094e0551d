"""Message groups: all messages of a group go to one consumer, in order, until it leaves.

Groups share a fixed number of buckets, and consumers hold buckets: what is remembered does not grow with the number of groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from bascule.broker.message import BrokerMessage
from bascule.broker.ready import Ready

if TYPE_CHECKING:
    from bascule.broker.queue import QueueConsumer

#: Many more than a queue has consumers, so that they get equal shares.
BUCKETS: Final = 1024


class Groups:
    """Who holds which groups of one queue, and the messages that wait for a consumer that holds their group.

    A group is a consumer's from the first message that it gets. A consumer whose selector does not want a message has no claim to it.
    """

    __slots__ = ("_parked", "_places", "_queue_ready", "holders")

    def __init__(self, ready: Ready) -> None:
        self._queue_ready = ready
        self.holders: dict[int, QueueConsumer] = {}
        self._parked: dict[QueueConsumer, Ready] = {}
        self._places: dict[int, Ready] = {}  # of what has been put aside, by position

    def peek(self, consumer: QueueConsumer) -> BrokerMessage | None:
        """The next message that the consumer may have; what stands before it and is another's is put aside for that one."""
        own = self._parked.get(consumer)
        parked = own.peek() if own is not None else None
        ready = self._queue_ready
        while True:
            message = ready.peek() if consumer.view is None else consumer.view.peek()
            if message is None or (parked is not None and _before(parked, message)):
                return parked
            holder = self._holder(message)
            if holder is None or holder is consumer:
                return message
            ready.take(message)
            self._park(holder, message)

    def _holder(self, message: BrokerMessage) -> QueueConsumer | None:
        if message.group is None:
            return None
        holder = self.holders.get(hash(message.group) % BUCKETS)
        if holder is None or (holder.view is not None and not holder.view.matches(message)):
            return None
        return holder

    def _park(self, holder: QueueConsumer, message: BrokerMessage) -> None:
        own = self._parked.get(holder)
        if own is None:
            own = self._parked[holder] = Ready()
        own.insert(message)
        self._places[message.position] = own

    def take(self, consumer: QueueConsumer, message: BrokerMessage) -> None:
        """The consumer gets the message that a peek returned, and with it the group."""
        if not self.remove(message):
            self._queue_ready.take(message)
        if message.group is not None:
            self.holders.setdefault(hash(message.group) % BUCKETS, consumer)

    def waits_for(self, consumer: QueueConsumer) -> bool:
        """Whether something has been put aside for the consumer."""
        own = self._parked.get(consumer)
        return own is not None and own.count > 0

    def leave(self, consumer: QueueConsumer) -> None:
        """The consumer is gone: its groups are free, and what was put aside for it is the queue's again."""
        self.holders = {bucket: holder for bucket, holder in self.holders.items() if holder is not consumer}
        own = self._parked.pop(consumer, None)
        if own is not None and own.count:
            waiting = list(own)
            for message in waiting:
                del self._places[message.position]
            self._queue_ready.put_back(waiting)

    def remove(self, message: BrokerMessage) -> bool:
        """Take a message out that has been put aside; False where it has not."""
        own = self._places.pop(message.position, None)
        if own is None:
            return False
        own.take(message)
        return True

    @property
    def count(self) -> int:
        """How many have been put aside."""
        return len(self._places)

    def parked(self) -> Iterator[BrokerMessage]:
        """All that has been put aside."""
        for own in self._parked.values():
            yield from own


def _before(first: BrokerMessage, second: BrokerMessage) -> bool:
    return (-first.priority, first.position) < (-second.priority, second.position)
