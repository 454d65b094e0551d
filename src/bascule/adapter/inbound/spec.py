"""The settings of an endpoint."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from bascule.core.errors import InvalidInput
from bascule.core.linear_regex import LinearRegex
from bascule.xa.transaction import LONGEST_TIMEOUT_S

if TYPE_CHECKING:
    from bascule.adapter.inbound.log import InboundLog
    from bascule.adapter.inbound.worker_pool import WorkerPool
    from bascule.xa.kafka import KafkaResource
    from bascule.xa.manager import TransactionManager

WORKERS_MAX = 1024
BATCH_MAX = 100_000
#: Group names become parts of topic names.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


class Order(enum.StrEnum):
    """Which records wait for one another. Ordered records are retried in place, without the retry topic."""

    NONE = "none"
    KEY = "key"
    PARTITION = "partition"


class Start(enum.StrEnum):
    """Where a new group begins to read. The first member commits this offset."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next try: ``first_s`` seconds, then ``factor`` times as long each time, up to ``longest_s``."""

    first_s: float = 1.0
    factor: float = 2.0
    longest_s: float = 60.0

    def __post_init__(self) -> None:
        if self.first_s < 0 or self.factor < 1 or self.longest_s < self.first_s:
            raise InvalidInput(f"invalid {self}: must have first_s >= 0, factor >= 1 and longest_s >= first_s")

    def pause_s(self, failures: int) -> float:
        """Return the pause in seconds after this many failures, from 1.

        >>> [Backoff(1, 2, 5).pause_s(failures) for failures in (1, 2, 3, 4)]
        [1, 2, 4, 5]
        """
        return float(min(self.longest_s, self.first_s * self.factor ** min(failures - 1, 64)))


@dataclass(frozen=True, slots=True, eq=False)
class Xa:
    """Delivers each record in its own transaction. ``log`` and ``kafka`` must be resources of ``manager``.

    ``log`` makes the receipt part of the transaction; ``kafka`` sends records to the retry and dead-letter topics.
    """

    manager: TransactionManager
    log: InboundLog
    kafka: KafkaResource

    def __post_init__(self) -> None:
        for each in (self.log, self.kafka):
            if self.manager.resources.get(each.name) is not each:
                raise InvalidInput(f"resource {each.name!r} does not belong to transaction manager {self.manager.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """The settings of an endpoint, checked when they are created. Raises InvalidInput with the name of the field.

    - topics: names, or one regular expression that begins with ``^``.
    - group: the consumer group. The names of the adapter's topics begin with it.
    - workers: maximum number of endpoint calls at once. pool: the pool of the threads; by default the endpoint has its own threads.
    - batch: number of records that are scheduled together.
    - retries: number of tries after the first one.
    - transacted: None for at-least-once delivery.
    - delivery_timeout_s: an endpoint that runs for longer than this time, in seconds, hangs, and its record counts as failed.
    """

    topics: tuple[str, ...]
    group: str
    workers: int = 4
    batch: int = 500
    order: Order = Order.NONE
    transacted: Xa | None = None
    retries: int = 3
    backoff: Backoff = field(default_factory=Backoff)
    delivery_timeout_s: float = 60.0
    start: Start = Start.EARLIEST
    retry_topic: str = ""
    dead_letter_topic: str = ""
    pool: WorkerPool | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "topics", (self.topics,) if isinstance(self.topics, str) else tuple(self.topics))
        put(self, "order", _one_of(Order, self.order, "order"))
        put(self, "start", _one_of(Start, self.start, "start"))
        put(self, "retry_topic", self.retry_topic or f"{self.group}.retry")
        put(self, "dead_letter_topic", self.dead_letter_topic or f"{self.group}.dead-letter")
        _expect(_NAME.fullmatch(self.group) is not None, "group", self.group, f"{_NAME.pattern}")
        _expect(1 <= self.workers <= WORKERS_MAX, "workers", self.workers, f"1 to {WORKERS_MAX}")
        _expect(1 <= self.batch <= BATCH_MAX, "batch", self.batch, f"1 to {BATCH_MAX}")
        _expect(self.retries >= 0, "retries", self.retries, "0 or more")
        longest_s = math.inf if self.transacted is None else LONGEST_TIMEOUT_S
        limit = "" if self.transacted is None else f", up to {longest_s:.0f} with a transaction"
        _expect(0 < self.delivery_timeout_s <= longest_s, "delivery_timeout_s", self.delivery_timeout_s, f"more than 0{limit}")
        self._check_topics()
        if self.transacted is not None and self.transacted.log.group != self.group:
            raise InvalidInput(f"transacted: the inbound log belongs to group {self.transacted.log.group!r}, not to group {self.group!r}")

    def _check_topics(self) -> None:
        _expect(bool(self.topics) and all(self.topics), "topics", self.topics, "at least one")
        _expect(not self._patterns or len(self.topics) == 1, "topics", self.topics, "names or a single pattern")
        own = {"retry_topic": self.retry_topic, "dead_letter_topic": self.dead_letter_topic, "inbound log": f"{self.group}.inbound"}
        _expect(len(set(own.values())) == len(own), "topics", own, "three different topics")
        for name, topic in own.items():
            _expect(not self.reads(topic), "topics", self.topics, f"topics without {topic!r} (the {name} of the group)")

    def reads(self, topic: str) -> bool:
        """Return True if a topic is one of the sources."""
        return topic in self.topics or any(_matches(pattern, topic) for pattern in self._patterns)

    def missing(self, there: Collection[str]) -> list[str]:
        """Return the sources that do not exist: names, and patterns that match no topic."""
        return [each for each in self.topics if each not in there and not (each in self._patterns and any(map(self.reads, there)))]

    @property
    def _patterns(self) -> list[str]:
        return [each for each in self.topics if each.startswith("^")]

    @property
    def in_place(self) -> bool:
        """Return True if a failed record is retried in place while those behind it wait."""
        return self.order is not Order.NONE


_regex: Final = lru_cache(100)(LinearRegex)


@lru_cache(10_000)
def _matches(pattern: str, topic: str) -> bool:
    """Return whether the beginning of a name matches. The Kafka client matches by itself: what is checked here is as quick there."""
    try:
        _regex(pattern)  # alone: "a)(b" is valid between the brackets below only
        return _regex(f"(?s)(?:{pattern}).*").fullmatch(topic) is not None
    except ValueError as error:
        raise InvalidInput(f"topics: {pattern!r:.200} cannot be used: {error}") from error


def _one_of(kind: type[enum.StrEnum], value: str, name: str) -> enum.StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(f"invalid {name}={value!r}; expected one of {', '.join(kind)}") from None


def _expect(right: bool, name: str, value: object, expected: str) -> None:
    if not right:
        raise InvalidInput(f"invalid {name}={value!r}; expected {expected}")
