"""Duplicate detection: windows of recently accepted message ids, kept as 16-byte digests."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from hashlib import blake2b
from typing import Final

from bascule.broker.remembered_ids import ID, ID_SIZE_BYTES, SEGMENT_BYTES, TIME_SIZE_BYTES, RememberedIds, Segment
from bascule.broker.schedule import Schedule
from bascule.broker.turns import Allowance
from bascule.core.caches import peer_cache
from bascule.core.defaults import DUPLICATE_WINDOW_COUNT, DUPLICATE_WINDOW_S
from bascule.journal.records import DIGEST_SIZE

#: As in Artemis. A client resends the messages without an answer, which are at most as many as a link's credit for each producer.
WINDOW_COUNT = DUPLICATE_WINDOW_COUNT
#: A client that could not reconnect within this time is considered to have given up.
WINDOW_MS = DUPLICATE_WINDOW_S * 1000
#: Maximum number of addresses with a window. Each temporary queue that receives replies gets a window.
WINDOWS_MAX = 10_000

#: How often windows are searched for expired ids.
SWEEP_INTERVAL_MS: Final = 60_000
#: Windows and ids of one turn of such a search: about 5 ms.
SWEEP_STEPS = 5_000
#: Steps to add the ids of one address, which may create a window.
PENDING_STEPS: Final = 5
#: Ids that a window keeps if all windows together use too much memory: twice the credit of a link. A producer that connects again after a
#: failure repeats at most as many sends as its credit. Ids of the last minute are kept up to twice the share of the memory, because other
#: producers of the address may have added more than these.
KEPT_IDS_MIN = 2_000
#: Ids of this age, in seconds, are forgotten first, and a window without new ids for this time is dropped if the windows keep the memory
#: beyond twice the share: clients connect again sooner. The time before this broker served does not count, because no client could connect.
UNUSED_S: Final = 60
#: Ids that are forgotten in a step of about a microsecond, and windows that are examined in one.
FORGOTTEN_PER_STEP: Final = 8
WINDOWS_PER_STEP: Final = 4


class DuplicateViolation(enum.StrEnum):
    """Rules of duplicate detection that a test can break."""

    REPEATS_ADMITTED = "repeated sends count as new messages"
    SHORTENED_TO_NOTHING = "windows that use too much memory forget all ids"
    UNUSED_BY_WALL_CLOCK = "a window counts as unused by the times of its ids, whether or not a broker served meanwhile"


@peer_cache(entries=1024, entry_bytes=4096)
def _begun(address: str, scope: str, user: str) -> blake2b:
    begun = f"{len(address)} {address} {len(scope)} {scope} "
    if not user:
        return blake2b(begun.encode(), digest_size=DIGEST_SIZE)
    # A different function: no container id gives a client without a login the digest of a user.
    return blake2b(f"{begun}{len(user)} {user} ".encode(), digest_size=DIGEST_SIZE, person=b"user")


def digest_of(address: str, scope: str, identity: bytes, user: str = "") -> bytes:
    """Return the 16-byte digest of an id that ``scope`` (a client, or a property) gives to a message. Collisions by chance are negligible.

    ``user`` is the login of the client, whose ids are its own; "" if the id counts for everybody, or the client has no login. Digests are
    in the journal. With another algorithm, the broker would not recognise the repetition of a message stored before an upgrade.
    """
    digest = _begun(address, scope, user).copy()
    digest.update(identity)
    return digest.digest()


class DuplicateWindow:
    """The ids accepted on one address, bounded by count and by time.

    The ids lie in order of arrival in full segments and in ``_last``, which is not full. A snapshot stores each full segment once, so the
    cost of a window in a snapshot is only that of its new ids. ``sequence`` is that of the last journal record that contains some of the
    ids.
    """

    __slots__ = (
        "_admits_repeats", "_earlier", "_forgotten_bytes", "_last", "_looked", "_marked", "_marked_s", "_old", "_oldest_ms", "_used_s",
        "added", "count_max", "digests", "period_ms", "segments", "sequence",
    )  # fmt: skip

    def __init__(
        self, count_max: int = WINDOW_COUNT, period_ms: int = WINDOW_MS, *, violations: Collection[enum.StrEnum] = frozenset()
    ) -> None:
        self._admits_repeats = DuplicateViolation.REPEATS_ADMITTED in violations
        self.count_max = count_max
        self.period_ms = period_ms
        self.digests: set[bytes] = set()
        self.segments: deque[Segment] = deque()
        self.sequence = 0
        self.added = 0  # number of ids added so far; shows whether the window has new ids
        self._looked, self._used_s = -1, 0.0  # ``added`` at the last look, and the time of the first look with this number
        #: ``added`` at a look that was at least UNUSED_S ago, at the last marked look, and the time of that look.
        self._old, self._marked, self._marked_s = 0, 0, -math.inf
        self._last = bytearray()
        self._forgotten_bytes = 0  # at the start of the first segment, or of ``_last`` if there is no segment
        self._oldest_ms = 0  # no remembered id is older
        self._earlier: dict[bytes, int] = {}  # of the few ids with several places, the number of places before the last one

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.digests

    def add(self, digest: bytes, now_ms: int) -> None:
        """Remember an id; forget the oldest one if there are too many."""
        self.digests.add(digest)
        self.added += 1
        last = self._last
        last += ID.pack(digest, now_ms)
        if len(last) >= SEGMENT_BYTES:
            self.segments.append(Segment.of(bytes(last)))
            last.clear()
        forgotten = len(self.digests) <= self.count_max
        while not forgotten:
            forgotten = self._forget()

    def admit(self, digests: tuple[bytes, ...], now_ms: int) -> bool:
        """Remember a message by its ids. Return False, and change nothing, if one of the ids is known: the message is a repetition."""
        known = self.digests
        for digest in digests:
            if digest in known and self.repeats(digests, now_ms):
                return False
        if self._oldest_ms < now_ms - self.period_ms:
            self.expire(now_ms, SWEEP_STEPS)
        for digest in digests:
            if digest not in known:  # a known id is admitted only if a test breaks the rule
                self.add(digest, now_ms)
        return True

    def admit_stored(self, digests: Iterable[bytes], stored_ms: int) -> None:
        """Remember the ids of a message that the journal has, in the order of the journal.

        The broker that stored the message may have forgotten one of the ids that this window still knows: see DuplicateWindows.shortening.
        Such an id is as new as the message.
        """
        if self._oldest_ms < stored_ms - self.period_ms:
            self.expire(stored_ms, SWEEP_STEPS)
        for digest in digests:
            if digest in self.digests:
                self._earlier[digest] = self._earlier.get(digest, 0) + 1
            self.add(digest, stored_ms)

    def repeats(self, digests: tuple[bytes, ...], now_ms: int) -> bool:
        """Return True if one of the ids of a message is known: the message is a repetition."""
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
                return not self._admits_repeats
        return False

    def add_all(self, digests: Sequence[bytes], now_ms: int) -> None:
        """Remember ids that are not known, as ``add`` does for each."""
        self.digests.update(digests)
        self.added += len(digests)
        last = self._last
        last += b"".join([ID.pack(digest, now_ms) for digest in digests])
        whole = len(last) - len(last) % SEGMENT_BYTES
        for start in range(0, whole, SEGMENT_BYTES):
            self.segments.append(Segment.of(bytes(last[start : start + SEGMENT_BYTES])))
        del last[:whole]
        while len(self.digests) > self.count_max:
            self._forget_some(len(self.digests) - self.count_max)

    def take_back(self, digests: tuple[bytes, ...]) -> None:
        """Forget the ids of the message that was admitted last, because it is not accepted after all."""
        for digest in reversed(digests):
            if not self._last and self.segments:
                self._last += self.segments.pop().packed
            if self._last[-ID_SIZE_BYTES:-TIME_SIZE_BYTES] == digest:
                del self._last[-ID_SIZE_BYTES:]
                self.digests.discard(digest)

    def expire(self, now_ms: int, count_max: int) -> int:
        """Forget at most ``count_max`` expired ids. Return their number."""
        begin_ms = now_ms - self.period_ms
        for count in range(count_max):
            if not self.digests:
                self._oldest_ms = now_ms
                return count
            oldest = self.segments[0].packed if self.segments else self._last
            _, self._oldest_ms = ID.unpack_from(oldest, self._forgotten_bytes)
            if self._oldest_ms >= begin_ms:
                return count
            self._forget()
        return count_max

    @property
    def newest_ms(self) -> int:
        """Return the time of the newest id in ms since the epoch, -1 if no id is remembered."""
        if not self.digests:
            return -1
        packed = self._last or self.segments[-1].packed
        return int(ID.unpack_from(packed, len(packed) - ID_SIZE_BYTES)[1])

    def look(self, now_s: float) -> int:
        """Note whether the window has new ids since the last look. Return the number of ids. ``now_s`` is a time of a monotonic clock."""
        if self._looked != self.added:
            self._looked, self._used_s = self.added, now_s
        if now_s >= self._marked_s + UNUSED_S:
            self._old, self._marked, self._marked_s = self._marked, self.added, now_s
        return len(self.digests)

    def old(self, kept_min: int) -> int:
        """Return the number of ids that are older than a minute in which the broker served, without the last ``kept_min`` ids."""
        return max(0, len(self.digests) - max(kept_min, self.added - self._old))

    def used_s(self, now_s: float) -> float:
        """Return the time of the look that first found the newest id, ``now_s`` if none has found it yet."""
        return self._used_s if self._looked == self.added else now_s

    def shorten(self, count_max: int) -> int:
        """Forget the oldest ids of one segment, so that at least ``count_max`` ids remain. Return the number of forgotten ids.

        This number may be 0 if an id has several places, of which the first one is forgotten.
        """
        before = len(self.digests)
        if before > count_max:
            self._forget_some(before - count_max)
        return before - len(self.digests)

    def _forget(self) -> bool:
        """Forget the oldest id, or only its first place if it has several. Return whether the id is forgotten."""
        oldest, start = self.segments[0].packed if self.segments else self._last, self._forgotten_bytes
        forgotten = self._forget_place(bytes(oldest[start : start + DIGEST_SIZE]))
        self._forgotten_bytes = start + ID_SIZE_BYTES
        if self._forgotten_bytes == len(oldest):
            self._forgotten_bytes = 0
            if self.segments:
                self.segments.popleft()
            else:
                self._last.clear()
        return forgotten

    def _forget_some(self, count: int) -> None:
        """Forget the oldest ids, at most ``count``, and only those of one segment."""
        oldest, start = self.segments[0].packed if self.segments else self._last, self._forgotten_bytes
        end = min(len(oldest) - ID_SIZE_BYTES, start + (count - 1) * ID_SIZE_BYTES)
        forgotten = [digest for digest, _ in ID.iter_unpack(oldest[start:end])]
        if self._earlier:
            for digest in forgotten:
                self._forget_place(digest)
        else:
            self.digests.difference_update(forgotten)
        self._forgotten_bytes = end
        self._forget()

    def _forget_place(self, digest: bytes) -> bool:
        """Forget the first place of an id, and the id if it has no other place. Return whether the id is forgotten."""
        earlier = self._earlier.pop(digest, 0) if self._earlier else 0
        if not earlier:
            self.digests.discard(digest)
        elif earlier > 1:
            self._earlier[digest] = earlier - 1
        return not earlier

    def restore(self, remembered: RememberedIds) -> None:
        """Add the ids of a snapshot."""
        for digest, time_ms in remembered.ids():
            if digest in self.digests:
                self._earlier[digest] = self._earlier.get(digest, 0) + 1
            self.add(digest, time_ms)

    def remembered(self) -> RememberedIds:
        """Return all ids, for a snapshot. The caller must leave out the ids of sends behind the ``sequence`` of the snapshot."""
        return RememberedIds(list(self.segments), bytes(self._last), self._forgotten_bytes)


class PendingIds:
    """The ids of one decision that their windows do not have yet. They are added to the windows piece by piece.

    A message with one of these ids is a duplicate already.
    """

    __slots__ = ("_now_ms", "_pieces", "_sequence", "_turns", "_windows", "digests")

    def __init__(self, windows: DuplicateWindows, digests: Set[bytes], now_ms: int, sequence: int, pieces: int, turns: Allowance) -> None:
        """Create ids that were accepted at ``now_ms`` in the record ``sequence``. ``pieces`` is the number of calls of ``add``."""
        self._windows = windows
        self._now_ms = now_ms
        self._sequence = sequence
        self._pieces = pieces
        self._turns = turns
        self.digests = digests

    def add(self, ids: Mapping[str, Sequence[bytes]], *, journaled: bool) -> None:
        """Add the ids of one piece to the windows of their addresses. Call this once the journal has stored the decision."""
        self._turns.left -= PENDING_STEPS * len(ids)
        for address, added in ids.items():
            window = self._windows.window(address)
            window.add_all(added, self._now_ms)
            if journaled:
                window.sequence = max(window.sequence, self._sequence)
        self._pieces -= 1
        if not self._pieces:
            self._windows.pending.remove(self)


class DuplicateWindows:
    """The windows of all addresses. If there are too many, the windows with the oldest ids are dropped."""

    __slots__ = (
        "_clock", "_limits_of", "_schedule", "_swept", "_violations", "by_address", "kept_min", "pending", "plain_until_ms", "unused_s",
    )  # fmt: skip

    def __init__(
        self,
        limits_of: Callable[[str], tuple[int, int]] = lambda _: (WINDOW_COUNT, WINDOW_MS),
        schedule: Schedule | None = None,
        clock: Callable[[], int] = lambda: 0,
        *,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """Create windows as ``limits_of(address)`` says: a count and a period in ms.

        With a schedule, ids also expire if nothing is sent.
        """
        self._limits_of = limits_of
        self._schedule = schedule
        self._clock = clock
        self._violations = violations
        self._swept: Iterator[str] | None = None  # the addresses that a sweep has still to visit; None between two sweeps
        self.by_address: dict[str, DuplicateWindow] = {}
        self.kept_min = KEPT_IDS_MIN
        self.unused_s = float(UNUSED_S)
        self.pending: list[PendingIds] = []
        #: Until this time in ms since the epoch, windows may have digests of an earlier version, which have no user. 0: there are none.
        self.plain_until_ms = 0

    @property
    def admits_repeats(self) -> bool:
        """Return True if a test breaks the rule that repeated messages are dropped."""
        return DuplicateViolation.REPEATS_ADMITTED in self._violations

    def repeats_pending(self, ids: Iterable[bytes]) -> bool:
        """Return True if one of the ids was decided and its window does not have it yet."""
        return not self.admits_repeats and any(not pending.digests.isdisjoint(ids) for pending in self.pending)

    def window(self, address: str) -> DuplicateWindow:
        """Return the window of an address; create it if it does not exist."""
        window = self.by_address.get(address)
        if window is None:
            if not self.by_address and self._schedule is not None:
                self._schedule.at(self._clock() + SWEEP_INTERVAL_MS, self._sweep, self._schedule)
            if len(self.by_address) >= WINDOWS_MAX:
                self._drop_half()
            window = self.by_address[address] = DuplicateWindow(*self._limits_of(address), violations=self._violations)
        return window

    def expire_ms(self) -> int:
        """Return when the newest of the remembered ids expires, in ms since the epoch; 0 if there is no window."""
        return max((window.newest_ms + window.period_ms for window in self.by_address.values()), default=0)

    def plain_digest_of(self, address: str, scope: str, identity: bytes) -> bytes | None:
        """Return the digest of an id without its user, if an earlier version may have remembered it; None if it is not known."""
        now_ms = self._clock()
        if self.plain_until_ms < now_ms:
            self.plain_until_ms = 0
            return None
        window, digest = self.by_address.get(address), digest_of(address, scope, identity)
        return digest if window is not None and window.repeats((digest,), now_ms) else None

    def forgetting_old(self, count: int, counted: Callable[[int], object]) -> Iterator[int]:
        """Forget at least ``count`` ids that are older than a minute, from the windows with most of them. See ``shortening``.

        A client that lost its connection repeats its sends within this minute, however many other producers use the address.
        """
        windows = list(self.by_address.values())
        yield len(windows) // WINDOWS_PER_STEP
        most = _shortened([window.old(self._least) for window in windows], count, 0)
        for window in windows:
            while (surplus := window.old(self._least) - most) > 0:  # as it is now: ids expire and arrive between the turns
                forgotten = window.shorten(len(window.digests) - surplus)
                counted(forgotten)
                yield 1 + forgotten // FORGOTTEN_PER_STEP

    def shortening(self, count: int, counted: Callable[[int], object]) -> Iterator[int]:
        """Forget at least ``count`` ids, the oldest ones of the longest windows, as far as windows have more than ``kept_min`` ids.

        Yields steps. ``counted`` is called with the number of ids that were forgotten in each step. As for expired ids, nothing is
        journaled: a broker that starts remembers all ids that the journal has, and forgets again.
        """
        windows = list(self.by_address.values())
        yield len(windows) // WINDOWS_PER_STEP
        most = _shortened([len(window.digests) for window in windows], count, self._least)
        for window in windows:
            while len(window.digests) > most:
                forgotten = window.shorten(most)
                counted(forgotten)
                yield 1 + forgotten // FORGOTTEN_PER_STEP

    @property
    def _least(self) -> int:
        return 0 if DuplicateViolation.SHORTENED_TO_NOTHING in self._violations else self.kept_min

    def dropping(self, count: int, counted: Callable[[int], object], now_s: float) -> Iterator[int]:
        """Drop windows with at least ``count`` ids, longest unused first, if so many are unused for ``unused_s``. See ``shortening``.

        ``now_s`` is the time of the last look at all windows, on the clock of ``look``.
        """
        until_s = now_s - self.unused_s
        times = {address: self._used_s(window, now_s) for address, window in self.by_address.items()}
        unused = sorted((used_s, self.by_address[address].newest_ms, address) for address, used_s in times.items() if used_s <= until_s)
        yield len(self.by_address) // WINDOWS_PER_STEP
        for _, _, address in unused:
            window = self.by_address.get(address)
            if count <= 0:
                return
            if window is not None and self._used_s(window, now_s) <= until_s:  # nobody has used it meanwhile
                del self.by_address[address]
                forgotten = len(window.digests)
                count -= forgotten
                counted(forgotten)
                yield 1 + forgotten // FORGOTTEN_PER_STEP

    def _used_s(self, window: DuplicateWindow, now_s: float) -> float:
        """Return since when a window has had no new id, on the clock of ``look``."""
        if DuplicateViolation.UNUSED_BY_WALL_CLOCK in self._violations:
            return now_s - (self._clock() - window.newest_ms) / 1000
        return window.used_s(now_s)

    def _drop_half(self) -> None:
        for address in sorted(self.by_address, key=lambda address: self.by_address[address].newest_ms)[: WINDOWS_MAX // 2]:
            del self.by_address[address]

    def _sweep(self, schedule: Schedule) -> None:
        """Forget expired ids and empty windows, as many as one turn allows. The next turn continues."""
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


def _shortened(lengths: list[int], count: int, kept_min: int = KEPT_IDS_MIN) -> int:
    """Return the length to which the longest windows are shortened, so that ``count`` ids are forgotten; at least ``kept_min``."""
    lengths.sort(reverse=True)
    total = 0
    for number, length in enumerate(lengths, 1):
        if length <= kept_min:
            break
        total += length
        following = lengths[number] if number < len(lengths) else 0
        if total - number * following >= count:
            return max(kept_min, (total - count) // number)
    return kept_min
