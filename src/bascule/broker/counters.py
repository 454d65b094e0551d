"""What has happened since the broker started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What has happened since the broker started."""

    messages_in: int = 0
    messages_out: int = 0
    acknowledged: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    expired: int = 0
    expired_subscriptions: int = 0
    dropped: int = 0  # non-persistent ones, from full queues
    duplicates: int = 0
    committed: int = 0
    rolled_back: int = 0
