"""Counters since the start of the broker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counters since the start of the broker."""

    messages_in: int = 0
    messages_out: int = 0
    acknowledged: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    expired: int = 0
    expired_subscriptions: int = 0
    dropped: int = 0  # non-persistent messages, from full queues
    duplicates: int = 0
    duplicate_ids_forgotten: int = 0  # by windows that used too much memory
    committed: int = 0
    rolled_back: int = 0

    def forgotten(self, count: int) -> None:
        """Count ids that duplicate windows have forgotten because they used too much memory."""
        self.duplicate_ids_forgotten += count
