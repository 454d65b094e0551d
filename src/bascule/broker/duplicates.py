"""Duplicate detection: what has been accepted lately, by 16-byte digests."""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Set
from hashlib import blake2b
from typing import Final, NamedTuple

from bascule.broker.schedule import Schedule
from bascule.core.caches import peer_cache
from bascule.core.defaults import DUPLICATE_WINDOW_COUNT, DUPLICATE_WINDOW_S
from bascule.journal.records import DIGEST_SIZE

#: As in Artemis: a resend repeats what was unanswered, which is at most a link's credit per producer.
WINDOW_COUNT = DUPLICATE_WINDOW_COUNT
#: A client that could not reconnect for longer than this has given up.
WINDOW_MS = DUPLICATE_WINDOW_S * 1000
#: Maximum number of addresses with a window. Each temporary queue that receives a reply gets a window, which remains when the queue is
#: deleted.
WINDOWS_MAX = 10_000

#: A digest, and when it was accepted, in ms since the epoch.
_ID: Final = struct.Struct(f">{DIGEST_SIZE}sq")
ID_SIZE_BYTES: Final = _ID.size
_TIME_SIZE_BYTES: Final = ID_SIZE_BYTES - DIGEST_SIZE
#: Ids of a segment: a record of 24 KiB in the topic of snapshots, and 20 records for a window of the usual length.
SEGMENT_IDS: Final = 1024
SEGMENT_BYTES: Final = SEGMENT_IDS * ID_SIZE_BYTES
#: How often windows are searched for ids whose time is over.
SWEEP_INTERVAL_MS: Final = 60_000
#: Windows and ids of one turn of such a search: some 5 ms.
SWEEP_STEPS: Final = 5_000


class DuplicateViolation(enum.StrEnum):
    """Rules of duplicate detection that a test may break."""

    REPEATS_ADMITTED = "repeated sends are taken for new messages"


@peer_cache(entries=1024, entry_bytes=4096)
def _begun(address: str, scope: str) -> blake2b:
    return blake2b(f"{len(address)} {address} {len(scope)} {scope} ".encode(), digest_size=DIGEST_SIZE)


def digest_of(address: str, scope: str, identity: bytes) -> bytes:
    """What stands for an id that ``scope`` (a client, or a property) gives to a message: two never meet by chance.

    Digests are in the journal: computed in another way, they would not recognise a repeat of what was stored before an upgrade.
    """
    digest = _begun(address, scope).copy()
    digest.update(identity)
    return digest.digest()


class Segment(NamedTuple):
    """Consecutive ids of one window, which never change again: packed digests and times, and a name made of these."""

    name: bytes
    packed: bytes

    @classmethod
    def of(cls, packed: bytes) -> Segment:
        """The segment that has these ids."""
        return cls(segment_name(packed), packed)


def segment_name(packed: bytes) -> bytes:
    """The name of a segment: two different ones never have the same."""
    return blake2b(packed, digest_size=DIGEST_SIZE).digest()


class RememberedIds(NamedTuple):
    """The ids of one window in a snapshot: full segments, the packed ids behind them, and how many bytes of the first are forgotten."""

    segments: list[Segment]
    last: bytes
    forgotten_bytes: int = 0

    def ids(self) -> Iterator[tuple[bytes, int]]:
        """Digests and times in ms since the epoch, oldest first."""
        return _ID.iter_unpack(self._packed()[self.forgotten_bytes :])

    def _packed(self) -> bytes:
        return b"".join([*(segment.packed for segment in self.segments), self.last])

    def without(self, unconfirmed: Set[bytes]) -> RememberedIds:
        """The same without some ids. Segments before the first of these stay as they are."""
        kept: list[Segment] = []
        for segment in self.segments:
            if any(digest in unconfirmed for digest, _ in _ID.iter_unpack(segment.packed)):
                break
            kept.append(segment)
        forgotten_bytes = self.forgotten_bytes if kept else 0
        rest = RememberedIds(self.segments[len(kept) :], self.last, 0 if kept else self.forgotten_bytes)
        packed = b"".join(_ID.pack(digest, time_ms) for digest, time_ms in rest.ids() if digest not in unconfirmed)
        whole = len(packed) - len(packed) % SEGMENT_BYTES
        kept.extend(Segment.of(packed[start : start + SEGMENT_BYTES]) for start in range(0, whole, SEGMENT_BYTES))
        return RememberedIds(kept, packed[whole:], forgotten_bytes)


class DuplicateWindow:
    """The ids accepted on one address, bounded by count and by time.

    The ids lie in order of arrival in full segments and in ``_last``, which is not full. A snapshot stores a full segment once, so a
    window costs a snapshot only the ids that have come since. ``sequence`` is that of the last journal record that has some of the ids.
    """

    __slots__ = (
        "_forgotten_bytes", "_last", "_oldest_ms", "_violations", "added", "count_max", "digests", "period_ms", "segments", "sequence",
    )  # fmt: skip

    def __init__(
        self, count_max: int = WINDOW_COUNT, period_ms: int = WINDOW_MS, *, violations: Collection[enum.StrEnum] = frozenset()
    ) -> None:
        self._violations = violations
        self.count_max = count_max
        self.period_ms = period_ms
        self.digests: set[bytes] = set()
        self.segments: deque[Segment] = deque()
        self.sequence = 0
        self.added = 0  # ids in all: it tells whether some have come
        self._last = bytearray()
        self._forgotten_bytes = 0  # at the start of the first segment, or of ``_last`` where there is no segment
        self._oldest_ms = 0  # no remembered id is older

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.digests

    def add(self, digest: bytes, now_ms: int) -> None:
        """Remember an id; forget the oldest one if there are too many."""
        self.digests.add(digest)
        self.added += 1
        last = self._last
        last += _ID.pack(digest, now_ms)
        if len(last) >= SEGMENT_BYTES:
            self.segments.append(Segment.of(bytes(last)))
            last.clear()
        if len(self.digests) > self.count_max:
            self._forget()

    def admit(self, digests: tuple[bytes, ...], now_ms: int) -> bool:
        """Remember a message by its ids; False when one of them is known: it is a repeat, and nothing changes."""
        late = self._oldest_ms < now_ms - self.period_ms
        if late:
            self.expire(now_ms, SWEEP_STEPS)
        known = self.digests
        for digest in digests:
            if digest in known:
                if late:
                    self.expire(now_ms, len(known))
                    if digest not in known:
                        continue
                return DuplicateViolation.REPEATS_ADMITTED in self._violations
        for digest in digests:
            self.add(digest, now_ms)
        return True

    def take_back(self, digests: tuple[bytes, ...]) -> None:
        """Forget the ids of the message that was admitted last: it is not taken after all."""
        for digest in reversed(digests):
            if not self._last and self.segments:
                self._last += self.segments.pop().packed
            if self._last[-ID_SIZE_BYTES:-_TIME_SIZE_BYTES] == digest:
                del self._last[-ID_SIZE_BYTES:]
                self.digests.discard(digest)

    def expire(self, now_ms: int, count_max: int) -> int:
        """Forget ids whose time is over, ``count_max`` at most. Returns how many."""
        begin_ms = now_ms - self.period_ms
        for count in range(count_max):
            if not self.digests:
                self._oldest_ms = now_ms
                return count
            oldest = self.segments[0].packed if self.segments else self._last
            _, self._oldest_ms = _ID.unpack_from(oldest, self._forgotten_bytes)
            if self._oldest_ms >= begin_ms:
                return count
            self._forget()
        return count_max

    @property
    def newest_ms(self) -> int:
        """When the last id came, -1 where none is remembered."""
        if not self.digests:
            return -1
        packed = self._last or self.segments[-1].packed
        return int(_ID.unpack_from(packed, len(packed) - ID_SIZE_BYTES)[1])

    def _forget(self) -> None:
        """Forget the oldest id."""
        oldest, start = self.segments[0].packed if self.segments else self._last, self._forgotten_bytes
        self.digests.discard(bytes(oldest[start : start + DIGEST_SIZE]))
        self._forgotten_bytes = start + ID_SIZE_BYTES
        if self._forgotten_bytes == len(oldest):
            self._forgotten_bytes = 0
            if self.segments:
                self.segments.popleft()
            else:
                self._last.clear()

    def restore(self, remembered: RememberedIds) -> None:
        """Take the ids that a snapshot has."""
        for digest, time_ms in remembered.ids():
            self.add(digest, time_ms)

    def remembered(self) -> RememberedIds:
        """Return all ids, for a snapshot. Those of sends behind ``sequence`` of the snapshot must be left out."""
        return RememberedIds(list(self.segments), bytes(self._last), self._forgotten_bytes)


class DuplicateWindows:
    """The windows of all addresses; the ones that were used last are kept."""

    __slots__ = ("_clock", "_limits_of", "_schedule", "_swept", "_violations", "by_address")

    def __init__(
        self,
        limits_of: Callable[[str], tuple[int, int]] = lambda _: (WINDOW_COUNT, WINDOW_MS),
        schedule: Schedule | None = None,
        clock: Callable[[], int] = lambda: 0,
        *,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``limits_of`` gives an address's window as a count and a period in ms. With a schedule, ids expire where nothing is sent, too."""
        self._limits_of = limits_of
        self._schedule = schedule
        self._clock = clock
        self._violations = violations
        self._swept: Iterator[str] | None = None  # the addresses that a sweep has still to visit; None between two sweeps
        self.by_address: dict[str, DuplicateWindow] = {}

    def window(self, address: str) -> DuplicateWindow:
        """What has been accepted lately on an address."""
        window = self.by_address.get(address)
        if window is None:
            if not self.by_address and self._schedule is not None:
                self._schedule.at(self._clock() + SWEEP_INTERVAL_MS, self._sweep, self._schedule)
            if len(self.by_address) >= WINDOWS_MAX:
                self._drop_half()
            window = self.by_address[address] = DuplicateWindow(*self._limits_of(address), violations=self._violations)
        return window

    def _drop_half(self) -> None:
        for address in sorted(self.by_address, key=lambda address: self.by_address[address].newest_ms)[: WINDOWS_MAX // 2]:
            del self.by_address[address]

    def _sweep(self, schedule: Schedule) -> None:
        """Forget what is over in some windows, and windows without ids; the rest of them in the next turn."""
        now_ms = self._clock()
        if self._swept is None:
            self._swept = iter(list(self.by_address))
        left = SWEEP_STEPS
        for address in self._swept:
            window = self.by_address.get(address)
            if window is not None:
                left -= 1 + window.expire(now_ms, left)
                if not window.digests:
                    del self.by_address[address]
            if left <= 0:
                schedule.at(now_ms, self._sweep, schedule)
                return
        self._swept = None
        if self.by_address:
            schedule.at(now_ms + SWEEP_INTERVAL_MS, self._sweep, schedule)
