"""Durable subscriptions without a consumer: since when they are unused, and when they expire. A part of the destinations.

The journal stores each change, so that a restart neither ends a subscription early nor keeps it for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bascule.broker.journaling import Journaling
from bascule.broker.queue import BrokerQueue
from bascule.broker.schedule import Schedule
from bascule.journal.records import Op, json_entry

#: The purpose of the timer of a subscription.
_UNUSED_FOR_LONG: Final = "unused for long"


class SubscriptionUse:
    """The use of durable subscriptions. Calls ``expire`` with a subscription that was unused for ``subscription_expiry_ms``."""

    def __init__(self, journaling: Journaling, schedule: Schedule, clock: Callable[[], int], expire: Callable[[BrokerQueue], None]) -> None:
        self._journaling = journaling
        self._schedule = schedule
        self._clock = clock
        self._expire = expire

    def begin(self, queue: BrokerQueue) -> None:
        """Note that a consumer has attached. Call this only if ``unused_since_ms`` is not 0."""
        self._note(queue, 0)

    def end(self, queue: BrokerQueue) -> None:
        """Note that no consumer is left, or that the state is loaded and nobody consumes yet."""
        if not queue.unused_since_ms:
            self._note(queue, self._clock())
        self._watch(queue)

    def give(self, queue: BrokerQueue, user: str) -> None:
        """Store that a subscription belongs to another user. Earlier versions ignore this."""
        queue.changed()
        self._journaling.add(json_entry(Op.SUBSCRIPTION_USE, {"queue": queue.id, "unused_since_ms": queue.unused_since_ms, "user": user}))

    def _note(self, queue: BrokerQueue, since_ms: int) -> None:
        queue.unused_since_ms = since_ms
        queue.changed()
        self._journaling.add(json_entry(Op.SUBSCRIPTION_USE, {"queue": queue.id, "unused_since_ms": since_ms}))

    def _watch(self, queue: BrokerQueue) -> None:
        """Schedule the expiry of a subscription, at most once however often its consumers come and go."""
        if queue.settings.subscription_expiry_ms and not queue.expiry_watched:
            queue.expiry_watched = True
            due_ms = queue.unused_since_ms + queue.settings.subscription_expiry_ms
            queue.keep_timer(_UNUSED_FOR_LONG, self._schedule.cancellable(due_ms, self._look, queue))

    def _look(self, queue: BrokerQueue) -> None:
        queue.expiry_watched = False
        if queue.deleted or not queue.unused_since_ms or not queue.settings.subscription_expiry_ms:
            return  # the owner may have turned expiry off meanwhile
        if queue.unused_since_ms + queue.settings.subscription_expiry_ms <= self._clock():
            self._expire(queue)
        else:
            self._watch(queue)
