"""Durable subscriptions without a consumer: since when, and when they expire. A part of the destinations.

The journal has each change, so that a restart neither ends a subscription early nor keeps it for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from bascule.broker.journaling import Journaling
from bascule.broker.queue import BrokerQueue
from bascule.broker.schedule import Schedule
from bascule.journal.records import Op, json_entry


class SubscriptionUse:
    """Notes the use of durable subscriptions, and calls ``expire`` with one that nobody has used for ``subscription_expiry_ms``."""

    def __init__(self, journaling: Journaling, schedule: Schedule, clock: Callable[[], int], expire: Callable[[BrokerQueue], None]) -> None:
        self._journaling = journaling
        self._schedule = schedule
        self._clock = clock
        self._expire = expire

    def begin(self, queue: BrokerQueue) -> None:
        """A consumer has come. To be called where ``unused_since_ms`` is not 0."""
        self._note(queue, 0)

    def end(self, queue: BrokerQueue) -> None:
        """No consumer is left, or the state is loaded and nobody consumes yet."""
        if not queue.unused_since_ms:
            self._note(queue, self._clock())
        self._watch(queue)

    def _note(self, queue: BrokerQueue, since_ms: int) -> None:
        queue.unused_since_ms = since_ms
        self._journaling.add(json_entry(Op.SUBSCRIPTION_USE, {"queue": queue.id, "unused_since_ms": since_ms}))

    def _watch(self, queue: BrokerQueue) -> None:
        """At most one entry of the schedule is for a subscription, however often its consumers come and go."""
        if queue.settings.subscription_expiry_ms and not queue.expiry_watched:
            queue.expiry_watched = True
            self._schedule.at(queue.unused_since_ms + queue.settings.subscription_expiry_ms, self._look, queue)

    def _look(self, queue: BrokerQueue) -> None:
        queue.expiry_watched = False
        if queue.deleted or not queue.unused_since_ms:
            return
        if queue.unused_since_ms + queue.settings.subscription_expiry_ms <= self._clock():
            self._expire(queue)
        else:
            self._watch(queue)
