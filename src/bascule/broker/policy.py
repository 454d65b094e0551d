"""What the broker's owner decides: for the broker as a whole, and for addresses by pattern."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from bascule.broker.duplicates import WINDOW_COUNT, WINDOW_MS
from bascule.core.address_index import AddressIndex
from bascule.core.caches import peer_cache
from bascule.core.defaults import (
    AUTO_DELETE_AFTER_S,
    DEAD_LETTER_ADDRESS,
    EXPIRY_ADDRESS,
    MAX_DELIVERY_ATTEMPTS,
    QUEUES_MAX,
    TRANSACTION_TIMEOUT_S,
)
from bascule.core.topics import MESSAGE_BYTES_MAX

BLOCK: Final = "block"
REJECT: Final = "reject"
DROP: Final = "drop-oldest-nonpersistent"


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """The settings of an address and of each queue and subscription on it. 0 stands for no limit; an address "" for none."""

    max_messages: int = 0  # in one queue, waiting or with consumers
    max_bytes: int = 0
    #: What becomes of a message to a full queue: its sender gets no credit, is refused, or the oldest non-persistent ones go.
    when_full: str = BLOCK
    deliveries_max: int = MAX_DELIVERY_ATTEMPTS  # failed deliveries after which a message goes to the dead-letter address
    redelivery_delay_ms: int = 0
    redelivery_multiplier: float = 1.0  # of the delay, from one failed delivery to the next
    redelivery_delay_max_ms: int = 0
    expiry_ms: int = 0  # time to live of messages whose sender set none
    expiry_max_ms: int = 0  # no message lives longer
    dead_letter_address: str = DEAD_LETTER_ADDRESS
    expiry_address: str = EXPIRY_ADDRESS
    duplicate_count: int = WINDOW_COUNT
    duplicate_ms: int = WINDOW_MS
    prefetch_max: int = 0  # messages one consumer may hold unsettled, whatever credit it gives
    exclusive: bool = False  # only the oldest consumer is served
    auto_create: bool = True
    auto_delete: bool = True  # auto-created queues go when they are empty and nobody uses them
    auto_delete_ms: int = AUTO_DELETE_AFTER_S * 1000  # after so long
    subscription_expiry_ms: int = 0  # a durable subscription goes when it has no consumer for so long

    def redelivery_pause_ms(self, failures: int) -> int:
        """How long a message waits after so many failed deliveries (1 or more)."""
        if not self.redelivery_delay_ms:
            return 0
        longest = self.redelivery_delay_max_ms or float("inf")
        try:
            pause = self.redelivery_delay_ms * self.redelivery_multiplier ** (failures - 1)
        except OverflowError:
            pause = longest
        return int(min(pause, longest, _PAUSE_MAX_MS))

    def expiry_of(self, expiry_ms: int, now_ms: int) -> int:
        """When a message expires that asked for ``expiry_ms`` (0: never)."""
        if not expiry_ms and self.expiry_ms:
            expiry_ms = now_ms + self.expiry_ms
        if self.expiry_max_ms and not 0 < expiry_ms <= now_ms + self.expiry_max_ms:
            expiry_ms = now_ms + self.expiry_max_ms
        return expiry_ms


#: A hundred years: a delay without end would leave the integers that time is counted in.
_PAUSE_MAX_MS = 100 * 365 * 86_400_000

#: Overrides of the defaults: a pattern, and settings by the name of their field.
Rule = tuple[str, Mapping[str, Any]]


def _specificity(pattern: str) -> tuple[int, int, int]:
    """Orders patterns: what fixes more comes later."""
    words = pattern.split(".")
    return ("#" not in words, "*" not in words, len([word for word in words if word not in ("*", "#")]))


@dataclass(frozen=True)
class Policy:
    """The owner's decisions. Of several rules that match an address, the more specific wins, setting by setting."""

    defaults: AddressPolicy = AddressPolicy()
    rules: tuple[Rule, ...] = ()
    #: A transaction must fit into one journal record, which Kafka bounds.
    transaction_bytes_max: int = MESSAGE_BYTES_MAX
    #: A local transaction that holds something for longer is rolled back: its messages are missing to others.
    transaction_ms_max: int = TRANSACTION_TIMEOUT_S * 1000
    #: Queues a broker holds; each costs memory for good, and a peer can ask for any name.
    queues_max: int = QUEUES_MAX
    #: The same of each user who creates some, and of those that are durable subscriptions. 0: no limit.
    queues_per_user_max: int = 0
    durable_subscriptions_per_user_max: int = 0
    #: Queues (name) and topics that are there although nobody uses them.
    queues: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    def of(self, address: str) -> AddressPolicy:
        """The settings of an address."""
        return _settings(self, address)

    def overrides(self, address: str) -> Iterator[Mapping[str, Any]]:
        """The overrides of the rules that match an address: what is more specific comes later."""
        return (self._ordered_rules[index][1] for index in self._index.matching(address))

    @cached_property
    def _ordered_rules(self) -> list[Rule]:
        return sorted(self.rules, key=lambda rule: _specificity(rule[0]))

    @cached_property
    def _index(self) -> AddressIndex[int]:
        return AddressIndex((pattern, index) for index, (pattern, _) in enumerate(self._ordered_rules))

    def __hash__(self) -> int:
        """By identity: there is one for a broker."""
        return id(self)


@peer_cache(entries=10_000, entry_bytes=2048)
def _settings(policy: Policy, address: str) -> AddressPolicy:
    settings = policy.defaults
    for overrides in policy.overrides(address):
        settings = replace(settings, **overrides)
    return settings
