"""The account of the broker's memory: what the broker holds for its clients, by part, and whether producers must wait.

An account has two kinds of parts. Parts that grow with each message are integers that their owners keep up to date. All other parts are
measured periodically: :func:`measure` measures those of the engine, the shell those of its connections.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from bascule.broker.errors import MemoryLow, ResourceLimit
from bascule.broker.fair_shares import SPARE, USER_SHARE, Beyond, beyond, of_user_beyond
from bascule.broker.selector_use import SELECTOR_CHAR_BYTES, SelectorUse
from bascule.broker.turns import Work
from bascule.core import caches
from bascule.core.defaults import MEMORY_BYTES

if TYPE_CHECKING:
    from bascule.broker.engine import Engine

#: One message in memory without its body: the object, its numbers, the header of the body. Measured: 240 to 275 bytes.
MESSAGE_BYTES: Final = 320
#: The place of a message in one queue, among all messages of its priority.
QUEUE_ENTRY_BYTES: Final = 16
#: The place of a message in an index that does not contain all messages: the view of one selector, the messages set aside for the holder of
#: a group, counts of failed deliveries. Measured: 100 bytes.
VIEW_ENTRY_BYTES: Final = 112
#: The place of a delayed message in its queue, and its entry in the schedule.
DELAYED_BYTES: Final = 640
#: One unsettled delivery: an entry of the session and one of the consumer.
UNSETTLED_BYTES: Final = 400
#: One id in a duplicate window: the digest, an entry of a set, and copies of both for a snapshot.
DUPLICATE_BYTES: Final = 160
#: An answer, or another action, that waits until a record is stored.
ACTION_BYTES: Final = 600
#: A queue or subscription without messages and names.
QUEUE_BYTES: Final = 4096
#: A client id that has durable subscriptions, besides its characters: a counter of its users. Measured: 230 bytes.
CLIENT_ID_BYTES: Final = 320
#: A duplicate window without ids.
WINDOW_BYTES: Final = 1536
#: An open transaction without messages.
TRANSACTION_BYTES: Final = 1024
#: A route that the broker keeps, besides its address and queues.
ROUTE_BYTES: Final = 1024
#: A producer that waits for memory, or for room in the queues of its address.
WAITING_BYTES: Final = 512
#: The outcome of a branch that the broker remembers.
ENDED_BRANCH_BYTES: Final = 512
#: A record in flight is in memory twice: the bodies of its messages wait for delivery, and Kafka's client has the record.
IN_FLIGHT_COPIES: Final = 2

#: Producers wait from the first share of the limit on, until at most the second share is used. The gap avoids quick alternation.
BLOCK_AT: Final = 0.8
FREE_AT: Final = 0.75
#: Share of the limit at which duplicate windows begin to forget ids. Until then there is room for all ids.
FORGET_AT: Final = 0.5
#: Share of the limit that one part may use, so that no single part keeps producers blocked.
BODIES_SHARE: Final = 0.25
FIRST_BODIES_SHARE: Final = 0.015625  # of the first bodies of a queue, and of those of a start: messages behind them wait for long
TRANSACTIONS_SHARE: Final = 0.25
BRANCHES_SHARE: Final = 0.25
SELECTORS_SHARE: Final = 0.125
QUEUES_SHARE: Final = 0.625  # of queues and subscriptions that users have created, with their names: above it further ones are refused
CONNECTIONS_SHARE: Final = 0.5  # above this share connections, sessions and links are refused; the default limits on numbers fit into it
WINDOWS_SHARE: Final = 0.125  # of duplicate windows: above this share the longest ones forget their oldest ids, from FORGET_AT on
CACHES_SHARE: Final = 0.0625  # above this share caches are emptied
IN_FLIGHT_SHARE: Final = 0.0625  # of records in flight to the journal: above this share nothing is read from clients
ACTIONS_SHARE: Final = 0.125  # of answers that wait for records: above this share nothing is read from clients
#: Steps of a producer that gets credit again, besides the search for room in the queues of its address.
FREED_STEPS: Final = 20


#: Queues, or windows, that are measured before other work is done. Each takes about a step.
MEASURED_AT_ONCE: Final = 500


class MemoryPart(enum.StrEnum):
    """The parts of the broker's memory, as metrics and status name them."""

    BODIES = "bodies"  # message bodies that are not in spill files
    MESSAGES = "messages"  # what each message costs besides its body
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
    """The memory in use, of ``limit_bytes``. ``blocked`` says why producers wait; "" if they do not.

    ``shortage`` says why the spill files accept no more bodies; "" if they do.
    """

    __slots__ = (
        "_freeing", "_measured", "_measured_bytes", "_waiting", "actions_max", "begin", "block_at_bytes", "blocked", "bodies_bytes",
        "bodies_max_bytes", "branches_max_bytes", "connections_max_bytes", "credit_max", "entries", "first_bodies_max_bytes",
        "free_at_bytes", "in_flight_max_bytes", "ingress_bytes", "limit_bytes", "messages", "on_change", "plans_bytes", "producers",
        "queues_max_bytes", "run", "selectors", "shortage", "transactions_bytes", "transactions_max_bytes", "transactions_of",
        "transactions_scarce_bytes", "unsettled",
    )  # fmt: skip

    def __init__(self, limit_bytes: int = MEMORY_BYTES) -> None:
        self.selectors = SelectorUse()
        self.limit(limit_bytes)
        self.bodies_bytes = 0
        self.messages = 0
        self.entries = 0  # places of messages in queues
        self.unsettled = 0  # deliveries
        self.transactions_bytes = 0
        self.transactions_of: Counter[str] = Counter()  # of these bytes, by user
        self.plans_bytes = 0  # of plans of commits and branches: encoded entries that are not journaled yet
        self.ingress_bytes = 0
        self.producers = 0  # links that get credit
        self.shortage = ""
        self.blocked = ""
        self.on_change: Callable[[], None] = lambda: None
        self.run: Callable[[Callable[[], object]], object] = lambda go_on: go_on()  # contains the error of one producer
        self.begin: Callable[[Work], object] = sum  # begins work that may take several turns
        self._measured: dict[MemoryPart, int] = {}
        self._measured_bytes = 0
        self._waiting: OrderedDict[object, Callable[[], object]] = OrderedDict()
        self._freeing = False  # waiting producers are being resumed

    def limit(self, limit_bytes: int) -> None:
        """Set the limit. Memory in use beyond it stays in use."""
        self.limit_bytes = limit_bytes
        self.block_at_bytes = int(BLOCK_AT * limit_bytes)
        self.free_at_bytes = int(FREE_AT * limit_bytes)
        self.bodies_max_bytes = int(BODIES_SHARE * limit_bytes)
        self.first_bodies_max_bytes = int(FIRST_BODIES_SHARE * limit_bytes)
        self.transactions_max_bytes = int(TRANSACTIONS_SHARE * limit_bytes)
        self.transactions_scarce_bytes = int((1 - SPARE) * self.transactions_max_bytes)
        self.branches_max_bytes = int(BRANCHES_SHARE * limit_bytes)
        self.connections_max_bytes = int(CONNECTIONS_SHARE * limit_bytes)
        self.queues_max_bytes = int(QUEUES_SHARE * limit_bytes)
        self.in_flight_max_bytes = int(IN_FLIGHT_SHARE * limit_bytes)
        #: Actions that wait for records. Requests without content, such as commits of empty transactions, add nothing but these.
        self.actions_max = int(ACTIONS_SHARE * limit_bytes) // ACTION_BYTES
        #: Messages for which all producers together may have credit. They still fit if they arrive after producers are blocked.
        self.credit_max = (limit_bytes - self.block_at_bytes) // (MESSAGE_BYTES + UNSETTLED_BYTES)
        self.selectors.chars_max = int(SELECTORS_SHARE * limit_bytes) // SELECTOR_CHAR_BYTES

    @property
    def used_bytes(self) -> int:
        """Return the bytes that all parts use."""
        return (
            self.bodies_bytes
            + self.messages * MESSAGE_BYTES
            + self.entries * QUEUE_ENTRY_BYTES
            + self.unsettled * UNSETTLED_BYTES
            + self.transactions_bytes
            + self.plans_bytes
            + self.ingress_bytes
            + self.selectors.size_bytes
            + self._measured_bytes
        )

    @property
    def exhausted(self) -> bool:
        """Return True if the limit is reached: even messages for which producers have credit are refused."""
        return self.used_bytes >= self.limit_bytes

    def used_with(self, part: MemoryPart, size_bytes: int) -> int:
        """Return the bytes that all parts use if a measured part uses ``size_bytes``."""
        return self.used_bytes - self._measured.get(part, 0) + size_bytes

    def parts(self) -> dict[MemoryPart, int]:
        """Return the bytes that each part uses."""
        return {
            **dict.fromkeys(MemoryPart, 0),
            MemoryPart.BODIES: self.bodies_bytes,
            MemoryPart.MESSAGES: self.messages * MESSAGE_BYTES + self.entries * QUEUE_ENTRY_BYTES,
            MemoryPart.UNSETTLED: self.unsettled * UNSETTLED_BYTES,
            MemoryPart.TRANSACTIONS: self.transactions_bytes + self.plans_bytes,
            MemoryPart.INGRESS: self.ingress_bytes,
            MemoryPart.SELECTORS: self.selectors.size_bytes,
            **self._measured,
        }

    def measured(self, parts: Mapping[MemoryPart, int]) -> None:
        """Update measured parts; other parts keep their values."""
        self._measured.update(parts)
        self._measured_bytes = sum(self._measured.values())

    def look(self) -> None:
        """Block producers, or let them continue, according to the memory in use. Called in each turn."""
        used = self.used_bytes
        if self.blocked:
            if used <= self.free_at_bytes and not self.shortage:
                self.blocked = ""
                self.on_change()
        elif used >= self.block_at_bytes or self.shortage:
            self.blocked = self.shortage or f"{used} of {self.limit_bytes} bytes of memory (broker.memory_bytes) are used"
            self.on_change()
        if self._waiting and not self.blocked and not self._freeing:
            self._freeing = True
            self.begin(self._freed())

    def _freed(self) -> Work:
        """Resume the waiting producers, oldest first, until producers are blocked again. Yields steps."""
        try:
            while self._waiting and not self.blocked:
                self.run(self._waiting.popitem(last=False)[1])
                yield FREED_STEPS
        finally:
            self._freeing = False

    def when_free(self, waiting: object, go_on: Callable[[], object]) -> None:
        """Call ``go_on`` once producers are no longer blocked. ``waiting`` identifies the caller."""
        self._waiting[waiting] = go_on

    def forget(self, waiting: object) -> None:
        """Cancel a call of ``when_free``."""
        self._waiting.pop(waiting, None)

    @property
    def waiting(self) -> int:
        """Return the number of callers that wait until producers are no longer blocked."""
        return len(self._waiting)

    def credit(self, wanted: int) -> int:
        """Return the credit of one producer in messages: at most ``wanted``, at least 1.

        All producers share the room that is left before they are blocked, and at most ``credit_max``, for which there is room after that.
        """
        room = min(self.credit_max, (self.block_at_bytes - self.used_bytes) // (MESSAGE_BYTES + UNSETTLED_BYTES))
        return max(1, min(wanted, room // max(1, self.producers)))

    def charge_transaction(self, user: str, change_bytes: int) -> None:
        """Count memory of the open transactions of a user, or count it no more."""
        self.transactions_bytes += change_bytes
        self.transactions_of[user] += change_bytes
        if not self.transactions_of[user]:
            del self.transactions_of[user]

    def transactions_refusal(self, user: str) -> ResourceLimit | None:
        """Return the error if all open transactions, or those of a user, hold too much memory."""
        held, most, own = self.transactions_bytes, self.transactions_max_bytes, self.transactions_of[user]
        found = beyond(0, own, held, most)
        if found is None:
            return None
        whose = "open transactions"
        if found is Beyond.SHARE:
            whose, held, most = f"the open transactions {of_user_beyond(user)}", own, int(USER_SHARE * most)
        return MemoryLow(f"{whose} hold {held} bytes, more than {most}; commit more often")

    def refusal(self) -> ResourceLimit:
        """Return the error for a request that is refused while producers are blocked."""
        return MemoryLow(f"the broker is short of memory or disk space: {self.blocked}")


def measuring(engine: Engine, parts: dict[MemoryPart, int], now_s: float = 0.0) -> Work:
    """Measure the parts of an engine that do not keep their own figures. Looks at each queue and each window once, in turns.

    Caches that take more than their share are emptied first. Duplicate windows that take more than theirs forget ids if memory is short.
    ``now_s`` is the time of a monotonic clock in seconds, which shows how long a window is unused.
    """
    if _cached_bytes(engine) > CACHES_SHARE * engine.memory.limit_bytes:
        caches.forget_peers()
        engine.addresses.forget_routes()
    journaling, addresses, branches = engine.journaling, engine.addresses, engine.branches
    indexed = delayed = digests = 0
    steps = 0
    for queue in list(addresses.queues.values()):
        indexed += queue.indexed_entries
        delayed += len(queue.delayed)
        steps += 1 + queue.ready.take_steps
        if steps >= MEASURED_AT_ONCE:
            yield steps
            steps = 0
    windows = iter(list(engine.windows.by_address.values()))
    digests += sum([len(pending.digests) for pending in engine.windows.pending])
    while found := list(islice(windows, MEASURED_AT_ONCE)):
        digests += sum([window.look(now_s) for window in found])
        yield len(found)
    windows_bytes = digests * DUPLICATE_BYTES + len(engine.windows.by_address) * WINDOW_BYTES
    if engine.memory.used_with(MemoryPart.DUPLICATES, windows_bytes) > FORGET_AT * engine.memory.limit_bytes:
        windows_bytes = yield from _forgetting(engine, windows_bytes, now_s)
    parts |= {
        MemoryPart.JOURNAL: IN_FLIGHT_COPIES * (journaling.in_flight_bytes + journaling.batch.size_bytes)
        + ACTION_BYTES * journaling.actions,
        MemoryPart.DUPLICATES: windows_bytes,
        MemoryPart.BRANCHES: branches.use.size_bytes + (len(branches.ended) + len(branches.forced)) * ENDED_BRANCH_BYTES,
        MemoryPart.QUEUES: (
            len(addresses.queues) * QUEUE_BYTES
            + addresses.names_bytes
            + indexed * VIEW_ENTRY_BYTES
            + delayed * DELAYED_BYTES
            + (engine.room.waiting + engine.memory.waiting) * WAITING_BYTES
        ),
        MemoryPart.CACHES: _cached_bytes(engine),
    }


def _forgetting(engine: Engine, windows_bytes: int, now_s: float) -> Generator[int, None, int]:
    """Let duplicate windows that use ``windows_bytes`` and more than their share forget ids. Yields steps. Returns what they use then."""
    limit_bytes, before, windows = engine.memory.limit_bytes, engine.counters.duplicate_ids_forgotten, engine.windows
    ways = (
        (windows.forgetting_old, WINDOWS_SHARE), (partial(windows.dropping, now_s=now_s), 2 * WINDOWS_SHARE),
        (windows.shortening, 2 * WINDOWS_SHARE),
    )  # fmt: skip
    for forget, share in ways:
        forgotten_bytes = (engine.counters.duplicate_ids_forgotten - before) * DUPLICATE_BYTES
        if (beyond_bytes := windows_bytes - forgotten_bytes - int(share * limit_bytes)) > 0:
            yield from forget(-(-beyond_bytes // DUPLICATE_BYTES), engine.counters.forgotten)
    return windows_bytes - (engine.counters.duplicate_ids_forgotten - before) * DUPLICATE_BYTES


def _cached_bytes(engine: Engine) -> int:
    return engine.addresses.routes_bytes + caches.kept_bytes()
