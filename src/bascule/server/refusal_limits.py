"""How many refusals before a login get a line in the audit and in the log, without a clock: the caller says what time it is.

Anybody who reaches a port can be refused, thousands of times a second, and each line takes space on a disk. So each kind of refusal has a
token bucket for each address, and all refusals together have another one. Refusals without a token get no line, but they are counted: the
next line about the address says how many there were, or a line of its own once the address has been quiet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from bascule.server.login_delays import network_of

#: Lines about refusals of one kind from one address at once: an administrator who corrects a setting sees each attempt.
LINES_AT_ONCE: Final = 10
#: Further lines about refusals of one kind from one address per second.
LINES_PER_S: Final = 1.0
#: Lines about refusals of all kinds from all addresses at once: an attacker may have many addresses.
ALL_LINES_AT_ONCE: Final = 1_000
#: Further lines about refusals of all kinds from all addresses per second.
ALL_LINES_PER_S: Final = 20.0
#: Kinds and addresses whose refusals are counted. Beyond it, the count of the oldest is added to the count of other addresses.
ADDRESSES_MAX: Final = 10_000
#: An address without a refusal for this time has all its tokens again, and is forgotten.
QUIET_S: Final = LINES_AT_ONCE / LINES_PER_S
#: The name of all addresses that are not counted alone any more.
OTHERS: Final = "others"


@dataclass(slots=True)
class _Bucket:
    """Tokens of one key, and its refusals without a line."""

    tokens: float
    at_s: float
    unwritten: int = 0

    def fill(self, now_s: float, per_s: float, most: float) -> float:
        """Return the number of tokens now."""
        self.tokens = min(self.tokens + max(0.0, now_s - self.at_s) * per_s, most)
        self.at_s = now_s
        return self.tokens


class Unwritten(NamedTuple):
    """Refusals of a kind from an address, or the network of an address, that have no line."""

    kind: str
    address: str
    number: int


class RefusalLimits:
    """The refusals before a login of one broker."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()  # the key whose last refusal is oldest is first
        self._all = _Bucket(ALL_LINES_AT_ONCE, 0.0)
        self._others: dict[str, int] = {}  # refusals without a line from addresses that are forgotten, by kind

    def refused(self, kind: str, address: str, now_s: float) -> int | None:
        """Count a refusal. Return None if it gets no line, otherwise the number of refusals of the address before it that got none."""
        key = kind, network_of(address)
        bucket = self._buckets.pop(key, None) or _Bucket(LINES_AT_ONCE, now_s)
        self._buckets[key] = bucket
        if len(self._buckets) > ADDRESSES_MAX:
            self._forget(self._buckets.popitem(last=False))
        if bucket.fill(now_s, LINES_PER_S, LINES_AT_ONCE) < 1.0 or not self._take_one_of_all(now_s):
            bucket.unwritten += 1
            return None
        bucket.tokens -= 1.0
        unwritten, bucket.unwritten = bucket.unwritten, 0
        return unwritten

    def quiet(self, now_s: float) -> Iterator[Unwritten]:
        """Forget addresses that have been quiet, and yield their refusals without a line, as far as lines may be written."""
        while self._buckets:
            key, bucket = next(iter(self._buckets.items()))
            if now_s - bucket.at_s < QUIET_S or (bucket.unwritten and not self._take_one_of_all(now_s)):
                break
            del self._buckets[key]
            if bucket.unwritten:
                yield Unwritten(*key, bucket.unwritten)
        for kind in list(self._others):
            if self._take_one_of_all(now_s):
                yield Unwritten(kind, OTHERS, self._others.pop(kind))

    def rest(self) -> Iterator[Unwritten]:
        """Forget all addresses, and yield for each kind the number of refusals without a line."""
        while self._buckets:
            self._forget(self._buckets.popitem(last=False))
        for kind in list(self._others):
            yield Unwritten(kind, OTHERS, self._others.pop(kind))

    def _forget(self, item: tuple[tuple[str, str], _Bucket]) -> None:
        (kind, _), bucket = item
        if bucket.unwritten:
            self._others[kind] = self._others.get(kind, 0) + bucket.unwritten

    def _take_one_of_all(self, now_s: float) -> bool:
        if self._all.fill(now_s, ALL_LINES_PER_S, ALL_LINES_AT_ONCE) < 1.0:
            return False
        self._all.tokens -= 1.0
        return True
