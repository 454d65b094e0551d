"""Expiry by time, for expired messages that no consumer finds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.message import BrokerMessage
from bascule.broker.order import FRONT, place_of
from bascule.broker.queue import BrokerQueue
from bascule.broker.schedule import Schedule
from bascule.broker.turns import AFTER_STORED, Turns, Work

#: Least time between two sweeps of a queue. A sweep of a deep queue takes about 0.2 us for each message; the pause grows with the depth, so
#: that sweeps take less than a hundredth of the time.
SWEEP_MS: Final = 1_000
SWEEP_MESSAGES_PER_MS: Final = 50
#: Bytes of a queue's messages that expire before the decisions about them must be stored, so that the journal sets the pace. A message
#: counts as its bytes and an overhead.
EXPIRED_BYTES = 8 << 20
EXPIRED_OVERHEAD_BYTES = 1600
#: Steps of an expired message, which usually goes to another queue.
EXPIRE_STEPS: Final = 50
#: Messages that a sweep examines in one piece, and messages for each step.
SWEPT_MESSAGES: Final = 400
_PER_STEP: Final = 4
#: The purpose of the timer of a queue.
_SWEEP: Final = "sweep"


class Expiry:
    """Sweeps of queues for expired messages.

    ``expire(queue, message)`` is called for each, after the message was taken out of its queue. An error concerns one message only.
    """

    def __init__(
        self,
        turns: Turns,
        schedule: Schedule,
        clock: Callable[[], int],
        expire: Callable[[BrokerQueue, BrokerMessage], None],
        errors: ErrorContainment | None = None,
    ) -> None:
        self._turns = turns
        self._schedule = schedule
        self._clock = clock
        self._expire = expire
        self._errors = errors or ErrorContainment()

    def watch(self, queue: BrokerQueue, expiry_ms: int) -> None:
        """Schedule a sweep of the queue at ``expiry_ms`` or soon after."""
        if not queue.deleted and (not queue.sweep_at_ms or expiry_ms < queue.sweep_at_ms):
            pause_ms = max(SWEEP_MS, queue.ready.count // SWEEP_MESSAGES_PER_MS)
            due_ms = max(expiry_ms, self._clock() + pause_ms)
            if not queue.sweep_at_ms or due_ms < queue.sweep_at_ms:
                queue.sweep_at_ms = due_ms
                queue.keep_timer(_SWEEP, self._schedule.cancellable(due_ms, self._sweep, queue, due_ms))

    def _sweep(self, queue: BrokerQueue, due_ms: int) -> None:
        """Begin a sweep of the queue, unless an earlier or later one replaces it."""
        if queue.deleted or queue.sweep_at_ms != due_ms:
            return
        queue.sweep_at_ms = 0
        if queue.sweeping:
            self.watch(queue, due_ms)  # the previous sweep is still running
        else:
            queue.sweeping = True
            self._turns.begin(self._swept(queue))

    def _swept(self, queue: BrokerQueue) -> Work:
        try:
            following_ms = yield from self._expired(queue)
        except Exception:
            self.watch(queue, self._clock())  # the next sweep continues
            raise
        finally:
            queue.sweeping = False
        if following_ms:
            self.watch(queue, following_ms)

    def _expired(self, queue: BrokerQueue) -> Generator[int, None, int]:
        """Expire all messages that are due. Return when the next message expires, in ms since the epoch, 0 if none does."""
        place, now_ms, following_ms, expired_bytes = FRONT, self._clock(), 0, 0
        while waiting := queue.after(place, SWEPT_MESSAGES):
            place = place_of(waiting[-1])
            expired = [message for message in waiting if message.expiry_ms and message.expiry_ms <= now_ms]  # also before 1970
            later_ms = min((message.expiry_ms for message in waiting if message.expiry_ms > now_ms), default=0)
            following_ms = min(following_ms or later_ms, later_ms or following_ms)
            yield len(waiting) // _PER_STEP + 1
            for message in expired:
                try:
                    taken = queue.take_out(message)
                    if taken:
                        self._expire(queue, message)
                except Exception as error:
                    self._errors.contain(ErrorKind.MOVE, error, queue=queue.name, mid=message.mid)
                    taken = True
                if taken:
                    expired_bytes += message.size_bytes + EXPIRED_OVERHEAD_BYTES
                    yield EXPIRE_STEPS + queue.ready.take_steps
                if expired_bytes > EXPIRED_BYTES:
                    expired_bytes = 0
                    yield AFTER_STORED
        return following_ms
