"""The account of the broker's memory: what the broker holds for its clients, by part, and whether producers must wait.

An account has two kinds of parts. Parts that grow with each message are integers, which their owners keep up to date. All other parts are
measured now and then: :func:`measure` measures those of the engine, the shell those of its connections.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from bascule.broker.errors import ResourceLimit
from bascule.broker.turns import Work
from bascule.core import caches
from bascule.core.defaults import MEMORY_BYTES

if TYPE_CHECKING:
    from bascule.broker.engine import Engine

#: One message in memory without its body: the object, its numbers, the header of the body. Measured: 240 to 275 bytes.
MESSAGE_BYTES: Final = 320
#: Its place in one queue, which holds it with all others of its priority.
QUEUE_ENTRY_BYTES: Final = 16
#: Its place in an index that not all messages are in: the view of one selector, what is put aside for the holder of its group, its count of
#: failed deliveries. Measured: 100 bytes.
VIEW_ENTRY_BYTES: Final = 112
#: A delayed message's place among those of its queue, and its arrival on the schedule.
DELAYED_BYTES: Final = 640
#: One unsettled delivery: an entry of the session and one of the consumer.
UNSETTLED_BYTES: Final = 400
#: One id in a duplicate window: the digest, an entry of a set, and both again as a snapshot has them.
DUPLICATE_BYTES: Final = 160
#: A compiled selector, for each character of its text.
SELECTOR_CHAR_BYTES: Final = 150
#: A queue or subscription without messages and names.
QUEUE_BYTES: Final = 4096
#: A duplicate window without ids.
WINDOW_BYTES: Final = 1536
#: An open transaction without messages.
TRANSACTION_BYTES: Final = 1024
#: A route that the broker has worked out and keeps, beside its address and queues.
ROUTE_BYTES: Final = 1024
#: The outcome of a branch that the broker remembers.
ENDED_BRANCH_BYTES: Final = 512
#: A record in flight is in memory twice: the bodies of its messages wait to be delivered, and Kafka's client has the record.
IN_FLIGHT_COPIES: Final = 2

#: Producers wait from this part of the limit on, and until no more than the second part is used: a gap, so that they do not alternate.
BLOCK_AT: Final = 0.8
FREE_AT: Final = 0.75
#: Share of the limit that one part may use, so that no single part keeps producers blocked.
BODIES_SHARE: Final = 0.25
TRANSACTIONS_SHARE: Final = 0.25
BRANCHES_SHARE: Final = 0.25
SELECTORS_SHARE: Final = 0.125
CACHES_SHARE: Final = 0.0625  # beyond it caches are emptied
IN_FLIGHT_SHARE: Final = 0.0625  # of records on their way into the journal: beyond it nothing is read from clients
#: Producers that get credit again at one look: each gets a flow frame, and one turn of the loop must stay short.
FREED_AT_ONCE: Final = 500


#: Queues, or windows, that are measured before other work is done. Each takes about a step.
MEASURED_AT_ONCE: Final = 500


class MemoryPart(enum.StrEnum):
    """What memory is used for; the names of metrics and status."""

    BODIES = "bodies"  # of messages, as far as they are not in spill files
    MESSAGES = "messages"  # the index: what each message costs besides its body
    UNSETTLED = "unsettled_deliveries"
    TRANSACTIONS = "open_transactions"
    BRANCHES = "prepared_branches"
    JOURNAL = "journal_in_flight"
    DUPLICATES = "duplicate_windows"
    SELECTORS = "selectors"
    QUEUES = "queues"
    INGRESS = "ingress"
    PARTIAL = "partial_transfers"
    BUFFERS = "write_buffers"
    CONNECTIONS = "connections"
    CACHES = "caches"


class MemoryAccount:
    """What is used of ``limit_bytes``. ``blocked`` says why producers wait; "" while they do not.

    ``shortage`` says why the spill files take no more bodies; "" while they do.
    """

    __slots__ = (
        "_measured", "_measured_bytes", "_waiting", "block_at_bytes", "blocked", "bodies_bytes", "bodies_max_bytes",
        "branches_max_bytes", "credit_max", "entries", "free_at_bytes", "in_flight_max_bytes", "ingress_bytes",
        "limit_bytes", "messages", "on_change", "plans_bytes", "producers", "run", "selector_chars", "selector_chars_max", "shortage",
        "transactions_bytes", "transactions_max_bytes", "unsettled",
    )  # fmt: skip

    def __init__(self, limit_bytes: int = MEMORY_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.block_at_bytes = int(BLOCK_AT * limit_bytes)
        self.free_at_bytes = int(FREE_AT * limit_bytes)
        self.bodies_max_bytes = int(BODIES_SHARE * limit_bytes)
        self.transactions_max_bytes = int(TRANSACTIONS_SHARE * limit_bytes)
        self.branches_max_bytes = int(BRANCHES_SHARE * limit_bytes)
        self.in_flight_max_bytes = int(IN_FLIGHT_SHARE * limit_bytes)
        #: Messages for which all producers together may have credit: what they send after producers are blocked still has room.
        self.credit_max = (limit_bytes - self.block_at_bytes) // (MESSAGE_BYTES + UNSETTLED_BYTES)
        self.bodies_bytes = 0
        self.messages = 0
        self.entries = 0  # places of messages in queues
        self.unsettled = 0  # deliveries
        self.transactions_bytes = 0
        self.plans_bytes = 0  # of commits and branches, whose entries for the journal are made and not yet decided
        self.ingress_bytes = 0
        self.selector_chars = 0  # of consumers and subscriptions
        self.selector_chars_max = int(SELECTORS_SHARE * limit_bytes) // SELECTOR_CHAR_BYTES
        self.producers = 0  # links that get credit
        self.shortage = ""
        self.blocked = ""
        self.on_change: Callable[[], None] = lambda: None
        self.run: Callable[[Callable[[], object]], object] = lambda go_on: go_on()  # an error of one producer concerns no other
        self._measured: dict[MemoryPart, int] = {}
        self._measured_bytes = 0
        self._waiting: dict[object, Callable[[], object]] = {}

    @property
    def used_bytes(self) -> int:
        """What all parts use."""
        return (
            self.bodies_bytes
            + self.messages * MESSAGE_BYTES
            + self.entries * QUEUE_ENTRY_BYTES
            + self.unsettled * UNSETTLED_BYTES
            + self.transactions_bytes
            + self.plans_bytes
            + self.ingress_bytes
            + self.selector_chars * SELECTOR_CHAR_BYTES
            + self._measured_bytes
        )

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left of the limit: not even messages are taken for which their producers had credit."""
        return self.used_bytes >= self.limit_bytes

    def parts(self) -> dict[MemoryPart, int]:
        """What each part uses, in bytes."""
        return {
            **dict.fromkeys(MemoryPart, 0),
            MemoryPart.BODIES: self.bodies_bytes,
            MemoryPart.MESSAGES: self.messages * MESSAGE_BYTES + self.entries * QUEUE_ENTRY_BYTES,
            MemoryPart.UNSETTLED: self.unsettled * UNSETTLED_BYTES,
            MemoryPart.TRANSACTIONS: self.transactions_bytes + self.plans_bytes,
            MemoryPart.INGRESS: self.ingress_bytes,
            MemoryPart.SELECTORS: self.selector_chars * SELECTOR_CHAR_BYTES,
            **self._measured,
        }

    def measured(self, parts: Mapping[MemoryPart, int]) -> None:
        """Take what was measured; parts that are not given stay as they were."""
        self._measured.update(parts)
        self._measured_bytes = sum(self._measured.values())

    def look(self) -> None:
        """Block producers, or free them, by what is used now. To be called in each turn."""
        used = self.used_bytes
        if self.blocked:
            if used <= self.free_at_bytes and not self.shortage:
                self.blocked = ""
                self.on_change()
        elif used >= self.block_at_bytes or self.shortage:
            self.blocked = self.shortage or f"{used} of {self.limit_bytes} bytes of memory (broker.memory_bytes) are used"
            self.on_change()
        if self._waiting and not self.blocked:
            self._free_some()

    def _free_some(self) -> None:
        """Oldest first; those that are left wait for the next look."""
        for waiting in list(self._waiting)[:FREED_AT_ONCE]:
            go_on = self._waiting.pop(waiting, None)
            if go_on is not None:
                self.run(go_on)

    def when_free(self, waiting: object, go_on: Callable[[], object]) -> None:
        """Call ``go_on`` once, when producers are not blocked any more; ``waiting`` is who waits."""
        self._waiting[waiting] = go_on

    def forget(self, waiting: object) -> None:
        """It does not wait any more."""
        self._waiting.pop(waiting, None)

    @property
    def some_wait(self) -> bool:
        """Whether somebody waits until producers are not blocked."""
        return bool(self._waiting)

    def credit(self, wanted: int) -> int:
        """Messages that one producer may have on their way, ``wanted`` at most, 1 at least.

        All producers share what has room before they are blocked, and no more than ``credit_max``, which has room after that.
        """
        room = min(self.credit_max, (self.block_at_bytes - self.used_bytes) // (MESSAGE_BYTES + UNSETTLED_BYTES))
        return max(1, min(wanted, room // max(1, self.producers)))

    def check_selector(self, text: str) -> None:
        """Check that there is room for one more selector. Raises ResourceLimit."""
        if self.selector_chars + len(text) > self.selector_chars_max:
            most = self.selector_chars_max
            raise ResourceLimit(f"the selector has {len(text)} characters; all selectors together may have {most} (broker.memory_bytes)")

    def refusal(self) -> ResourceLimit:
        """The answer to what has no room while producers are blocked."""
        return MemoryLow(f"the broker is short of memory or disk space: {self.blocked}")


class MemoryLow(ResourceLimit):
    """The broker takes no more messages until consumers have made room."""

    retriable = True


def measuring(engine: Engine, parts: dict[MemoryPart, int]) -> Work:
    """Measure those parts of an engine that do not keep their own figures. It looks at each queue and each window once, in turns.

    Caches that take more than their share are emptied before.
    """
    if _cached_bytes(engine) > CACHES_SHARE * engine.memory.limit_bytes:
        caches.forget_peers()
        engine.addresses.forget_routes()
    journaling, addresses, branches = engine.journaling, engine.addresses, engine.branches
    indexed = delayed = digests = 0
    queues = iter(list(addresses.queues.values()))
    while piece := list(islice(queues, MEASURED_AT_ONCE)):
        indexed += sum([queue.indexed_entries for queue in piece])
        delayed += sum([len(queue.delayed) for queue in piece])
        yield len(piece)
    windows = iter(list(engine.windows.by_address.values()))
    while found := list(islice(windows, MEASURED_AT_ONCE)):
        digests += sum([len(window.digests) for window in found])
        yield len(found)
    parts |= {
        MemoryPart.JOURNAL: IN_FLIGHT_COPIES * (journaling.in_flight_bytes + journaling.batch.size_bytes),
        MemoryPart.DUPLICATES: digests * DUPLICATE_BYTES + len(engine.windows.by_address) * WINDOW_BYTES,
        MemoryPart.BRANCHES: branches.prepared_bytes + (len(branches.ended) + len(branches.forced)) * ENDED_BRANCH_BYTES,
        MemoryPart.QUEUES: (
            len(addresses.queues) * QUEUE_BYTES + addresses.names_bytes + indexed * VIEW_ENTRY_BYTES + delayed * DELAYED_BYTES
        ),
        MemoryPart.CACHES: _cached_bytes(engine),
    }


def _cached_bytes(engine: Engine) -> int:
    return engine.addresses.routes_bytes + caches.kept_bytes()
