"""Duplicate detection: what has been accepted lately, by 16-byte digests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b

from bascule.journal.records import DIGEST_SIZE

#: As in Artemis: a resend repeats what was unanswered, which is at most a link's credit per producer.
WINDOW_COUNT = 20_000
#: A client that could not reconnect for longer than this has given up.
WINDOW_MS = 3_600_000


def digest_of(*parts: bytes) -> bytes:
    """What stands for an id: long enough that two ids never meet by chance."""
    return blake2b(b"\0".join(parts), digest_size=DIGEST_SIZE).digest()


class DuplicateWindow:
    """The ids accepted on one address, bounded by count and by time."""

    __slots__ = ("count_max", "digests", "order", "period_ms")

    def __init__(self, count_max: int = WINDOW_COUNT, period_ms: int = WINDOW_MS) -> None:
        self.count_max = count_max
        self.period_ms = period_ms
        self.digests: set[bytes] = set()
        self.order: deque[tuple[bytes, int]] = deque()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.digests

    def add(self, digest: bytes, now_ms: int) -> None:
        """Remember an id; forget what is too many or too old."""
        if digest in self.digests:
            return
        self.digests.add(digest)
        order = self.order
        order.append((digest, now_ms))
        while len(order) > self.count_max or order[0][1] < now_ms - self.period_ms:
            self.digests.discard(order.popleft()[0])

    def snapshot(self, unconfirmed: Iterable[bytes]) -> list[tuple[bytes, int]]:
        """What is remembered of confirmed sends, oldest first."""
        without = set(unconfirmed)
        return [pair for pair in self.order if pair[0] not in without]
