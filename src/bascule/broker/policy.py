"""The owner's settings: for the broker as a whole, and for addresses by pattern."""

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
from bascule.core.destination import specificity
from bascule.core.topics import MESSAGE_BYTES_MAX
from bascule.core.user_limits import UNLIMITED, LimitRules

BLOCK: Final = "block"
REJECT: Final = "reject"
DROP: Final = "drop-oldest-nonpersistent"


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """The settings of an address and of each queue and subscription on it. 0 means no limit; an address "" means none."""

    max_messages: int = 0  # in one queue, waiting or unsettled
    max_bytes: int = 0
    #: What happens if a message arrives at a full queue: its sender gets no credit, the message is refused, or the oldest non-persistent
    #: ones are dropped.
    when_full: str = BLOCK
    deliveries_max: int = MAX_DELIVERY_ATTEMPTS  # failed deliveries after which a message goes to the dead-letter address
    redelivery_delay_ms: int = 0
    redelivery_multiplier: float = 1.0  # factor of the delay from one failed delivery to the next
    redelivery_delay_max_ms: int = 0
    expiry_ms: int = 0  # time to live of messages whose sender has set none
    expiry_max_ms: int = 0  # upper limit of the time to live
    dead_letter_address: str = DEAD_LETTER_ADDRESS
    expiry_address: str = EXPIRY_ADDRESS
    duplicate_count: int = WINDOW_COUNT
    duplicate_ms: int = WINDOW_MS
    prefetch_max: int = 0  # unsettled messages of one consumer, whatever its credit
    exclusive: bool = False  # only the oldest consumer is served
    auto_create: bool = True
    auto_delete: bool = True  # auto-created queues are deleted when they are empty and unused
    auto_delete_ms: int = AUTO_DELETE_AFTER_S * 1000  # for so long
    subscription_expiry_ms: int = 0  # a durable subscription is deleted when it has had no consumer for so long

    def redelivery_pause_ms(self, failures: int) -> int:
        """Return the delay in ms of a message after its ``failures`` failed deliveries (1 or more)."""
        if not self.redelivery_delay_ms:
            return 0
        longest = self.redelivery_delay_max_ms or float("inf")
        try:
            pause = self.redelivery_delay_ms * self.redelivery_multiplier ** (failures - 1)
        except OverflowError:
            pause = longest
        return int(min(pause, longest, _PAUSE_MAX_MS))

    def expiry_of(self, expiry_ms: int, now_ms: int) -> int:
        """Return the expiry of a message whose sender asked for ``expiry_ms`` (0: never), in ms since the epoch."""
        if not expiry_ms and self.expiry_ms:
            expiry_ms = now_ms + self.expiry_ms
        if self.expiry_max_ms and not 0 < expiry_ms <= now_ms + self.expiry_max_ms:
            expiry_ms = now_ms + self.expiry_max_ms
        return expiry_ms


#: A hundred years: a longer delay would exceed the integers that hold times.
_PAUSE_MAX_MS = 100 * 365 * 86_400_000

#: Overrides of the defaults: a pattern, and settings by field name.
Rule = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Policy:
    """The owner's settings. If several rules match an address, the more specific one wins, for each setting separately."""

    defaults: AddressPolicy = AddressPolicy()
    rules: tuple[Rule, ...] = ()
    #: A transaction must fit into one journal record, whose size Kafka limits.
    transaction_bytes_max: int = MESSAGE_BYTES_MAX
    #: A local transaction that holds messages for longer is rolled back, because others cannot get these messages.
    transaction_ms_max: int = TRANSACTION_TIMEOUT_S * 1000
    #: Maximum number of queues of a broker. Each queue costs memory permanently, and a client can ask for any name.
    queues_max: int = QUEUES_MAX
    #: Maximum number of queues, and of durable subscriptions, that one user may create.
    user_limits: LimitRules = UNLIMITED
    #: Names of queues and topics that exist even if nobody uses them.
    queues: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    def of(self, address: str) -> AddressPolicy:
        """Return the settings of an address."""
        return _settings(self, address)

    def overrides(self, address: str) -> Iterator[Mapping[str, Any]]:
        """Return the overrides of the rules that match an address, the more specific ones later."""
        return (self._ordered_rules[index][1] for index in self._index.matching(address))

    def make_index(self) -> None:
        """Make the index of the rules now. Otherwise the first address needs it, in a turn of the event loop."""
        _ = self._index

    @cached_property
    def _ordered_rules(self) -> list[Rule]:
        return sorted(self.rules, key=lambda rule: specificity(rule[0]))

    @cached_property
    def _index(self) -> AddressIndex[int]:
        return AddressIndex((pattern, index) for index, (pattern, _) in enumerate(self._ordered_rules))

    def __hash__(self) -> int:
        """Hash by identity: a broker has only one policy."""
        return id(self)


@peer_cache(entries=10_000, entry_bytes=2048)
def _settings(policy: Policy, address: str) -> AddressPolicy:
    settings = policy.defaults
    for overrides in policy.overrides(address):
        settings = replace(settings, **overrides)
    return settings
