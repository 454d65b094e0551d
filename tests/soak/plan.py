"""The plan of a soak: its duration, faults, load, and the configuration of the bridge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.support.history import Divert

#: Kind of fault -> its description.
KINDS: Final = {
    "kill-active": "kill -9 of the broker that serves",
    "kill-standby": "kill -9 of the broker that stands by",
    "kill-driver": "kill -9 of the Spark driver, now and then while it starts",
    "kill-worker": "kill -9 of a Spark worker",
    "kill-kafka": "kill -9 of the Kafka node; it comes back on the same port and data",
    "pause-active": "SIGSTOP of the broker that serves, SIGCONT later",
    "pause-standby": "SIGSTOP of the broker that stands by, SIGCONT later",
    "pause-driver": "SIGSTOP of the Spark driver and its JVM, SIGCONT later; its workers continue",
    "pause-worker": "SIGSTOP of a Spark worker, SIGCONT later",
    "pause-kafka": "SIGSTOP of the Kafka node, SIGCONT later",
    "hand-over": "SIGTERM of the broker that serves",
}
#: Kinds that need a standby broker.
OF_TWO_BROKERS: Final = frozenset({"kill-standby", "pause-standby", "hand-over"})

#: Queues and topics of the load. In Storm.java and in the history, ``topic:`` precedes the name of a topic.
ORDERS, MOVED, PARTS, MOUNTED, REGIONAL, TIMED = "orders", "moved", "parts", "mounted", "regional", "timed"
#: Destination of expired messages (`expiry_address`).
EXPIRED = "ExpiryQueue"
SPILLS: Final = {TIMED: (EXPIRED,)}
NEWS, QUOTES = "topic:news", "topic:quotes"
PAYMENTS = "payments"
#: Kafka topics that applications write to, by the destination that receives their records.
INGRESSES: Final = {PAYMENTS: "payments", QUOTES: "quotes"}
#: Java clients, as options of java/Storm.java.
JAVA_CLIENTS: Final = (
    f"send:{ORDERS}", f"send-tx:{ORDERS}", f"move:{ORDERS}>{MOVED}", f"take:{MOVED}", f"take:{PAYMENTS}", f"send:{NEWS}", f"take:{NEWS}",
)  # fmt: skip

#: Number of different values of the property ``n`` in the messages that Python sends.
NUMBERS: Final = 10
SELECTOR: Final = "n > 5"
EXCLUSIVE_SELECTOR: Final = "n < 3 AND region IN ('EU')"

CONFIG: Final = """
[broker]
session_timeout_s = 6

[journal]
snapshot_records = {snapshot_records}
retention_s = 0

[pipelines]
master = "local[2]"

[[divert]]
name = "orders"
from = "orders"
to = "{prefix}.orders"
start = "earliest"

[[divert]]
name = "moved"
from = "moved"
to = "{prefix}.moved"
start = "earliest"

[[divert]]
name = "parts"
from = "parts"
selector = "{selector}"
to = "{prefix}.parts"
start = "earliest"

[[divert]]
name = "regional"
from = "regional"
selector = "{exclusive_selector}"
exclusive = true
to = "{prefix}.regional"
start = "earliest"

[[divert]]
name = "news"
from = "news"
to = "{prefix}.news"
start = "earliest"

[[divert]]
name = "returned"
from = "payments"
to = "{prefix}.returned"
start = "earliest"

[[ingress]]
name = "payments"
topics = ["{prefix}.payments", "{prefix}.regional"]
to = "payments"
routing = "anycast"
unbound = "keep"

[[ingress]]
name = "quotes"
topics = ["{prefix}.quotes"]
to = "quotes"
routing = "multicast"
"""

#: Diverted topic (without prefix) -> its expected content; the ids are added when the topic has been read.
DIVERTS: Final = {
    "orders": Divert(ORDERS, (), ordered=True),
    "moved": Divert(MOVED, ()),
    "parts": Divert(PARTS, (), selector=SELECTOR, ordered=True),
    "regional": Divert(REGIONAL, (), selector=EXCLUSIVE_SELECTOR, exclusive=True, ordered=True),
    "news": Divert(NEWS, (), ordered=True),
    # What came from Kafka does not go back, as what went there by "regional" does not come back by the ingress: both would be loops.
    "returned": Divert(PAYMENTS, ()),
}

#: Mean time between faults: more than 100 faults in the half hour of `make soak`.
FAULT_EVERY_S: Final = 16.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A soak. It runs until the time is over, the planned number of faults is reached, and every kind has occurred."""

    seed: int
    seconds: float = 1800.0
    faults: int = 110
    kinds: tuple[str, ...] = tuple(KINDS)
    brokers: int = 2
    pause_min_s: float = 1.0
    pause_max_s: float = 60.0
    down_max_s: float = 5.0  # from the death of a process to its restart
    rate: int = 20  # messages per second of each sender
    batch: int = 5  # of each transaction
    snapshot_records: int = 2_000
    quiet_s: int = 3  # how long a receiver waits before it concludes that no more messages come
    prefix: str = "soak"

    def __post_init__(self) -> None:
        """Check the kinds."""
        assert self.brokers > 1 or not OF_TWO_BROKERS.intersection(self.kinds)

    @property
    def config(self) -> str:
        """Return the bascule.toml of brokers and pipelines."""
        return CONFIG.format(
            prefix=self.prefix, snapshot_records=self.snapshot_records, selector=SELECTOR, exclusive_selector=EXCLUSIVE_SELECTOR
        )

    def topic(self, name: str) -> str:
        """Return the name of a Kafka topic of the soak."""
        return f"{self.prefix}.{name}"
