"""Non-persistent messages that full queues drop to make room for new ones. A part of the engine."""

from __future__ import annotations

from bascule.broker.delivery import Deliveries
from bascule.broker.policy import DROP
from bascule.broker.queue import BrokerQueue
from bascule.broker.turns import Work

#: Messages that one send drops at once, and the steps for each of them. It drops fewer if each visits many selectors of its queue.
DROPPED_AT_ONCE = 200
DROP_STEPS = 5


class DroppedMessages:
    """A context in which the queues of one message, or of one record from Kafka, make room.

    One large message, or a lowered limit, can drive out any number of small messages, and a message may be for thousands of full
    subscriptions. All queues of the context together drop DROPPED_AT_ONCE messages. The other queues are marked ``dropping``, and the next
    turns drop their messages.
    """

    __slots__ = ("_deliveries", "_left", "_marked")

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._left = DROPPED_AT_ONCE * DROP_STEPS
        self._marked: list[BrokerQueue] = []

    def __enter__(self) -> DroppedMessages:
        return self

    def __exit__(self, *_: object) -> None:
        self.begin()

    def begin(self) -> None:
        """Let the queues that are marked so far make room: at once as far as the steps of this turn allow, and in the next turns."""
        if self._marked:
            marked, self._marked = self._marked, []
            self._deliveries.turns.begin(self._rest(marked))

    def drop(self, queue: BrokerQueue) -> None:
        """Drop non-persistent messages of a full queue, the oldest first, until it has room or holds no more of them.

        Does nothing for a queue whose settings say otherwise, or that is marked ``dropping``.
        """
        if queue.settings.when_full != DROP or queue.dropping:
            return
        while self._left > 0 and (steps := self._drop_oldest(queue)):
            self._left -= steps
            self._deliveries.turns.left -= steps
        if queue.full() and queue.oldest_volatile() is not None:
            queue.dropping = True
            self._marked.append(queue)

    def _drop_oldest(self, queue: BrokerQueue) -> int:
        """Drop one message, and return the steps; 0 if none has to be dropped, or none is left."""
        if queue.deleted or not queue.full() or (oldest := queue.oldest_volatile()) is None:
            return 0
        queue.take_out(oldest)
        self._deliveries.counters.dropped += 1
        self._deliveries.gone(queue, oldest)
        return DROP_STEPS + queue.ready.take_steps

    def _rest(self, marked: list[BrokerQueue]) -> Work:
        """Let the marked queues make room, the last one first: a sender that waits examines no queue behind the first marked queue."""
        try:
            while marked:
                queue = marked[-1]
                steps = self._drop_oldest(queue)
                if not steps or not queue.full():  # a message that arrives before the next piece stays
                    marked.pop().dropping = False
                yield steps or 1
        finally:
            for queue in marked:  # after an error: the next message that finds a queue full starts again
                queue.dropping = False
