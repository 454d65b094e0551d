"""Duplicate detection: what has been accepted lately, by 16-byte digests."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from hashlib import blake2b

from bascule.core.defaults import DUPLICATE_WINDOW_COUNT, DUPLICATE_WINDOW_S
from bascule.journal.records import DIGEST_SIZE

#: As in Artemis: a resend repeats what was unanswered, which is at most a link's credit per producer.
WINDOW_COUNT = DUPLICATE_WINDOW_COUNT
#: A client that could not reconnect for longer than this has given up.
WINDOW_MS = DUPLICATE_WINDOW_S * 1000
#: Addresses with a window: each temporary queue that is replied to gets one, and outlives neither its client nor this.
WINDOWS_MAX = 10_000


class DuplicateViolation(enum.StrEnum):
    """Rules of duplicate detection that a test may break."""

    REPEATS_ADMITTED = "repeated sends are taken for new messages"


@lru_cache(maxsize=1024)
def _begun(address: str, scope: str) -> blake2b:
    return blake2b(f"{len(address)} {address} {len(scope)} {scope} ".encode(), digest_size=DIGEST_SIZE)


def digest_of(address: str, scope: str, identity: bytes) -> bytes:
    """What stands for an id that ``scope`` (a client, or a property) gives to a message: two never meet by chance.

    Digests are in the journal: computed in another way, they would not recognise a repeat of what was stored before an upgrade.
    """
    digest = _begun(address, scope).copy()
    digest.update(identity)
    return digest.digest()


class DuplicateWindow:
    """The ids accepted on one address, bounded by count and by time."""

    __slots__ = ("_violations", "count_max", "digests", "order", "period_ms")

    def __init__(
        self, count_max: int = WINDOW_COUNT, period_ms: int = WINDOW_MS, *, violations: Collection[enum.StrEnum] = frozenset()
    ) -> None:
        self._violations = violations
        self.count_max = count_max
        self.period_ms = period_ms
        self.digests: set[bytes] = set()
        self.order: deque[tuple[bytes, int]] = deque()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.digests

    def add(self, digest: bytes, now_ms: int) -> None:
        """Remember an id; forget what is too many."""
        self.digests.add(digest)
        self.order.append((digest, now_ms))
        if len(self.order) > self.count_max:
            self.digests.discard(self.order.popleft()[0])

    def admit(self, digests: tuple[bytes, ...], now_ms: int) -> bool:
        """Remember a message by its ids; False when one of them is known: it is a repeat, and nothing changes."""
        known, order = self.digests, self.order
        while order and order[0][1] < now_ms - self.period_ms:
            known.discard(order.popleft()[0])
        for digest in digests:
            if digest in known:
                return DuplicateViolation.REPEATS_ADMITTED in self._violations
        for digest in digests:
            self.add(digest, now_ms)
        return True

    def snapshot(self, unconfirmed: Iterable[bytes]) -> list[tuple[bytes, int]]:
        """What is remembered of confirmed sends, oldest first."""
        without = set(unconfirmed)
        return [pair for pair in self.order if pair[0] not in without]


class DuplicateWindows:
    """The windows of all addresses; the ones that were used last are kept."""

    __slots__ = ("_limits_of", "_violations", "by_address")

    def __init__(
        self,
        limits_of: Callable[[str], tuple[int, int]] = lambda _: (WINDOW_COUNT, WINDOW_MS),
        *,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``limits_of`` gives an address's window as a count and a period in ms."""
        self._limits_of = limits_of
        self._violations = violations
        self.by_address: dict[str, DuplicateWindow] = {}

    def window(self, address: str) -> DuplicateWindow:
        """What has been accepted lately on an address."""
        window = self.by_address.get(address)
        if window is None:
            if len(self.by_address) >= WINDOWS_MAX:
                self._drop_half()
            window = self.by_address[address] = DuplicateWindow(*self._limits_of(address), violations=self._violations)
        return window

    def _drop_half(self) -> None:
        def last_ms(address: str) -> int:
            order = self.by_address[address].order
            return order[-1][1] if order else -1

        for address in sorted(self.by_address, key=last_ms)[: WINDOWS_MAX // 2]:
            del self.by_address[address]
