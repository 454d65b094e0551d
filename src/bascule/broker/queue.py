"""A queue: the messages of a JMS queue, or of one subscription of a JMS topic."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from bascule.broker.delayed import Delayed
from bascule.broker.groups import Groups
from bascule.broker.held import Held
from bascule.broker.matching import wants_what
from bascule.broker.message import BrokerMessage
from bascule.broker.order import Line, QueuePlace
from bascule.broker.policy import DROP, AddressPolicy
from bascule.broker.ports import ConsumerPort
from bascule.broker.ready import Ready, SelectorView
from bascule.broker.schedule import ScheduledAction
from bascule.broker.selector_use import counted_chars
from bascule.broker.turns import Allowance
from bascule.core.destination import Routing
from bascule.jms.lookup import MessageLookup
from bascule.jms.selector import Selector, SelectorError, compile_selector
from bascule.journal.records import INDEX_MAX, mid_of

#: Messages that a reservation covers beyond the one that needs it. One journal entry is written per this many deliveries, and after a crash
#: at most this many messages are marked redelivered without having been delivered.
RESERVE_AHEAD = 1024
#: Sequences that a short queue reserves ahead, so that new messages are delivered without waiting for a reservation.
RESERVE_SEQUENCES = 256
#: Starved consumers that become takers at once, and in one step.
FED_AT_ONCE: Final = 500
FED_PER_STEP: Final = 2


class QueueConsumer:
    """One consumer of a queue. ``unacked`` has its unsettled messages by position."""

    __slots__ = ("port", "queue", "selector_chars", "selector_text", "unacked", "user", "view")

    def __init__(self, queue: BrokerQueue, port: ConsumerPort, selector_text: str = "", user: str = "") -> None:
        self.queue = queue
        self.port = port
        self.selector_text = selector_text
        self.selector_chars = 0  # as SelectorUse counts them
        self.user = user  # to whom the selector counts
        self.view: SelectorView | None = None
        self.unacked: dict[int, BrokerMessage] = {}


class BrokerQueue:
    """Messages in order, their consumers, and the counts of their deliveries.

    ``durable`` queues are in the journal; other queues end with the broker, or with their last consumer. Each message of the queue is in
    exactly one place: ``ready``, set aside in ``groups``, ``delayed``, unsettled by a consumer, or held by a transaction. ``held`` contains
    all journaled messages.
    """

    __slots__ = (
        "_selector", "address", "asking", "auto_created", "blocked", "confirmed", "consumers", "counts", "delayed", "deleted", "dropping",
        "durable", "entering", "expiry_watched", "fed", "groups", "held", "held_bytes", "held_messages", "id", "idle_since_ms",
        "incoming", "incoming_bytes", "name", "no_local_container", "owner", "ready", "recovered_mid", "reserved_mid", "reserving_mid",
        "returning", "routing", "selector_chars", "selector_text", "settings", "shared", "starved", "subscription", "sweep_at_ms",
        "sweeping", "takers", "timer_for", "unused_since_ms", "user", "volatile",
    )  # fmt: skip

    def __init__(self, queue_id: int, name: str, address: str, routing: Routing, settings: AddressPolicy, *, durable: bool) -> None:
        self.id = queue_id
        self.name = name
        self.address = address
        self.routing = routing
        self.settings = settings
        self.durable = durable
        self.auto_created = False
        self.confirmed = not durable  # whether the journal has stored its creation
        self.deleted = False
        self.ready = Ready()
        self.volatile = Line() if settings.when_full == DROP else None  # waiting non-persistent messages, the first to be dropped first
        self.delayed = Delayed()
        self.held = Held()
        self.groups: Groups | None = None
        self.held_messages = 0
        self.held_bytes = 0
        self.incoming = 0  # messages that are decided for the queue and not stored yet
        self.incoming_bytes = 0
        self.consumers: dict[QueueConsumer, None] = {}  # in the order of their attaching
        # Both are no dicts: a dict takes ever longer to find its first entry if that is removed each time.
        self.takers: OrderedDict[QueueConsumer, None] = OrderedDict()  # consumers that may be able to take a message, in rotation
        self.starved: OrderedDict[QueueConsumer, None] = OrderedDict()  # consumers with credit for which the queue had no more messages
        self.fed = 0  # number of the first of ``starved`` that are to be takers again: see feed_some
        self.asking: dict[QueueConsumer, None] = {}  # consumers to be told when the queue has delivered all that it can
        self.returning = 0  # running returns of messages; the queue delivers nothing meanwhile, to keep the order
        self.blocked: dict[object, Callable[[], object]] = {}  # callers that wait for room in the full queue, and their callbacks
        self.timer_for: dict[object, ScheduledAction] = {}  # for the queue, by purpose; they end with the queue
        self.owner: object = None  # of a temporary queue: the only connection that may consume from it
        self.sweep_at_ms = 0  # time of the next sweep for expired messages, 0 if none is scheduled
        self.unused_since_ms = 0  # of a durable subscription: when its last consumer left; 0 while it has one
        self.expiry_watched = False
        self.sweeping = False
        self.dropping = False  # non-persistent messages are being dropped over several turns, because the queue is full
        self.entering = 0  # messages that the journal does not store and that enter over several turns: see FanOut
        self.idle_since_ms = 0  # when the queue was last found unused; 0 while this is not watched
        self.counts: dict[int, int] = {}  # failed deliveries by position, if known: see delivery_count
        self.reserved_mid = -1  # by the journal, messages up to this mid may have been delivered
        self.reserving_mid = -1  # the same, including reservations that are not confirmed yet
        self.recovered_mid = -1  # the reserved mid when the journal was loaded
        self.selector_text = ""  # of a subscription
        self.selector_chars = 0  # as SelectorUse counts them
        self._selector: Selector | None = None  # the compiled selector
        self.no_local_container = ""
        self.shared = False
        self.subscription = ""  # name of the subscription, "" for an anycast queue
        self.user = ""  # the user who has created the queue, "" for the broker's owner

    def keep_timer(self, purpose: object, timer: ScheduledAction) -> None:
        """Keep a scheduled action for the queue, in place of an earlier one for the same purpose.

        Without this, clients could fill the memory with actions that are due in years, also of queues that are deleted.
        """
        earlier = self.timer_for.get(purpose)
        if earlier is not None:
            earlier.cancel()
        self.timer_for[purpose] = timer

    def describe(self) -> dict[str, Any]:
        """Return the description of the queue for the journal."""
        return {
            "id": self.id,
            "name": self.name,
            "address": self.address,
            "routing": int(self.routing),
            "selector": self.selector_text,
            "no_local": self.no_local_container,
            "subscription": self.subscription,
            "auto_created": self.auto_created,
            "shared": self.shared,
            "user": self.user,
        }

    @classmethod
    def from_journal(cls, content: dict[str, Any], settings: AddressPolicy) -> BrokerQueue:
        """Return the queue that a QUEUE_CREATED entry describes.

        Earlier versions accepted names with half of a surrogate pair, which only JSON can hold. Such halves are escaped.
        """
        content = {
            key: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value for key, value in content.items()
        }
        queue = cls(content["id"], content["name"], content["address"], Routing(content["routing"]), settings, durable=True)
        queue.select(content["selector"])
        queue.no_local_container = content["no_local"]
        queue.subscription = content["subscription"]
        queue.auto_created = content.get("auto_created", False)
        queue.shared = content.get("shared", False)
        queue.user = content.get("user", "")
        queue.confirmed = True
        return queue

    def select(self, text: str) -> None:
        """Set the selector of a subscription, "" for none. If an old selector no longer compiles, the subscription takes no messages."""
        self.selector_text, self.selector_chars = text, counted_chars(text)
        if text:
            with suppress(SelectorError):  # an earlier version accepted this selector
                self._selector = compile_selector(text)

    @property
    def wanting_steps(self) -> int:
        """Return the steps to find out whether the queue wants a message."""
        return 1 + self._selector.steps if self._selector is not None else 0

    def wants(self, container: str, lookup: MessageLookup) -> bool:
        """Return True if the subscription takes a message of the connection ``container``."""
        if self.no_local_container and self.no_local_container == container:
            return False
        if not self.selector_text:
            return True
        if self._selector is None:
            self._selector = compile_selector(self.selector_text)
        return wants_what(self._selector, lookup)

    def delivery_count(self, message: BrokerMessage) -> int:
        """Return the number of deliveries of a message that have failed, or may have failed in a crash."""
        count = self.counts.get(message.position)
        return int(-1 < message.mid <= self.recovered_mid) if count is None else count

    def set_counts(self, counts: Mapping[BrokerMessage, int]) -> list[tuple[int, int]]:
        """Set the numbers of failed deliveries. Return the numbers of journaled messages by mid."""
        for message, count in counts.items():
            self.counts[message.position] = count
        journaled = [(message.mid, count) for message, count in counts.items() if message.mid >= 0]
        if self.held.copy is not None:
            self.held.copy.counts.update(journaled)
        return journaled

    def changed(self) -> None:
        """Tell the copy for a snapshot that is being made, if any, that an attribute of the queue has changed."""
        if self.held.copy is not None:
            self.held.copy.on_change()

    def reserved(self, mid: int) -> None:
        """Note that the journal has stored a reservation: messages up to this mid may be delivered."""
        self.reserved_mid = mid
        self.changed()

    def first_due_ms(self, message: BrokerMessage) -> int:
        """Return the delivery time that the sender has set, in ms since the epoch; 0 if the message is not delayed by its sender.

        The time of a redelivery does not count: it concerns only one queue, and a restart does not keep it.
        """
        return 0 if self.counts.get(message.position) else self.delayed.due_ms(message)

    def expect(self, message: BrokerMessage) -> None:
        """Count a message that is decided for the queue and arrives once the decision is stored."""
        self.incoming += 1
        self.incoming_bytes += message.size_bytes

    def unexpect(self, message: BrokerMessage) -> None:
        """Stop counting a message that is not decided for the queue after all."""
        self.incoming -= 1
        self.incoming_bytes -= message.size_bytes

    def hold(self, message: BrokerMessage, *, expected: bool = False) -> None:
        """Hold a message from now on, which ``expect`` may have counted."""
        if expected:
            self.incoming -= 1
            self.incoming_bytes -= message.size_bytes
        message.references += 1
        self.count_held(message)
        if self.durable and message.mid >= 0:
            self.held.add(message)

    def count_held(self, message: BrokerMessage) -> None:
        """Count a message that the queue holds, for its limits and groups."""
        self.held_messages += 1
        self.held_bytes += message.size_bytes
        if message.group is not None and self.groups is None:
            self.groups = Groups(self.ready, self.takers)

    def take_in(self, message: BrokerMessage) -> None:
        """Hold a message that ``expect`` has counted, behind all others of its priority: as ``hold`` and ``add`` do, at less cost."""
        size_bytes = message.size_bytes
        self.incoming -= 1
        self.incoming_bytes -= size_bytes
        message.references += 1
        self.held_messages += 1
        self.held_bytes += size_bytes
        if self.durable and message.mid >= 0:
            self.held.add(message)
        if message.group is not None and self.groups is None:
            self.groups = Groups(self.ready, self.takers)
        self.ready.append(message)
        if self.volatile is not None and not message.durable:
            self.volatile.append(message)
        if self.starved:
            self.feed()

    def uncount(self, messages: int, size_bytes: int) -> None:
        """Stop counting acknowledged messages that leave soon, so that they no longer count for limits."""
        self.held_messages -= messages
        self.held_bytes -= size_bytes

    def drop(self, message: BrokerMessage, *, counted: bool = True) -> None:
        """Remove a message that the queue no longer holds. ``counted`` is false if ``uncount`` was called for the message."""
        if counted:  # as uncount does; a call costs more
            self.held_messages -= 1
            self.held_bytes -= message.size_bytes
        if self.counts:
            self.counts.pop(message.position, None)
        if self.durable and message.mid >= 0:
            self.held.remove(message.mid)

    def full(self) -> bool:
        """Return True if a limit of the queue is reached."""
        limits = self.settings
        return bool(
            (limits.max_messages and self.held_messages + self.incoming >= limits.max_messages)
            or (limits.max_bytes and self.held_bytes + self.incoming_bytes >= limits.max_bytes)
        )

    def room(self, wanted: int) -> int:
        """Return the number of messages of average size that the queue has room for, at most ``wanted``."""
        limits = self.settings
        if limits.max_messages:
            wanted = min(wanted, limits.max_messages - self.held_messages - self.incoming)
        if limits.max_bytes:
            usual_bytes = self.held_bytes // self.held_messages if self.held_messages else 1
            wanted = min(wanted, -((self.held_bytes + self.incoming_bytes - limits.max_bytes) // max(1, usual_bytes)))
        return max(0, wanted)

    def waiting(self) -> list[BrokerMessage]:
        """Return the messages that consumers may get now, in order."""
        if self.groups is None:
            return list(self.ready)
        return sorted((*self.ready, *self.groups.parked()), key=lambda message: (-message.priority, message.position))

    def after(self, place: QueuePlace, count: int) -> list[BrokerMessage]:
        """Return the next messages that wait behind a place, in order, at most ``count``. An empty list means that there are none."""
        found = self.ready.after(place, count)
        if self.groups is None or not self.groups.count:
            return found
        parked = self.groups.after(place, count)
        if not found or not parked:
            return found or parked
        if found[0].priority != parked[0].priority:
            return max(found, parked, key=lambda part: part[0].priority)
        return sorted((*found, *parked), key=lambda message: message.position)[:count]

    def add(self, message: BrokerMessage) -> None:
        """Add a message that waits behind all others of its priority."""
        self.ready.append(message)
        if self.volatile is not None and not message.durable:
            self.volatile.append(message)

    def put_back(self, messages: list[BrokerMessage]) -> None:
        """Put messages back into their places."""
        self.ready.put_back(messages)
        if self.volatile is not None:
            for message in messages:
                if not message.durable:
                    self.volatile.insert(message)

    def oldest_volatile(self) -> BrokerMessage | None:
        """Return the non-persistent message that has waited longest, if the queue drops such messages; else None."""
        return self.volatile.head[0] if self.volatile is not None and self.volatile.head else None

    def take_out(self, message: BrokerMessage) -> bool:
        """Remove a waiting or delayed message. Return False if it neither waits nor is delayed."""
        if self.delayed.remove(message):
            return True
        if not ((self.groups is not None and self.groups.remove(message)) or self.ready.take(message)):
            return False
        if self.volatile is not None and not message.durable:
            self.volatile.remove(message)
        return True

    def may_serve(self, consumer: QueueConsumer) -> bool:
        """Return True if a consumer can take a message and the queue's settings allow it."""
        settings = self.settings
        if consumer.port.credit <= 0 or (settings.prefetch_max and len(consumer.unacked) >= settings.prefetch_max):
            return False
        return not settings.exclusive or consumer is next(iter(self.consumers))

    def next_for(self, consumer: QueueConsumer, search: Allowance) -> BrokerMessage | None:
        """Return the next message for a consumer. None means that there is none, or that the search has spent its allowance."""
        if self.groups is not None:
            return self.groups.peek(consumer, search)
        if not self.ready.count:
            return None
        return self.ready.peek() if consumer.view is None else consumer.view.peek(search)

    def feed(self) -> None:
        """Make starved consumers takers again, because a message has arrived that may be for one of them."""
        starved = self.starved
        if self.ready.views or self.groups is not None:
            self.fed = len(starved)
        else:
            consumer = next(iter(starved))
            del starved[consumer]
            self.takers[consumer] = None

    def feed_some(self, allowance: Allowance) -> bool:
        """Make some of the starved consumers takers that ``feed`` has chosen, the longest starved first. Return True if there are any."""
        starved, takers = self.starved, self.takers
        count = min(self.fed, len(starved), FED_AT_ONCE)
        for _ in range(count):
            takers[starved.popitem(last=False)[0]] = None
        self.fed = min(self.fed - count, len(starved))
        allowance.left -= count // FED_PER_STEP
        return count > 0

    def rotate(self, consumer: QueueConsumer) -> None:
        """Let the other consumers have their turns before a taker, also those that ``feed`` has chosen."""
        del self.takers[consumer]
        if self.fed:
            self.starved[consumer] = None
            self.fed = len(self.starved)
        else:
            self.takers[consumer] = None

    def untouched(self) -> Iterator[BrokerMessage]:
        """Yield every message that neither a consumer nor a transaction holds."""
        yield from self.ready
        yield from self.delayed
        if self.groups is not None:
            yield from self.groups.parked()

    def unacked(self) -> Iterator[BrokerMessage]:
        """Yield every message that a consumer holds."""
        for consumer in self.consumers:
            yield from consumer.unacked.values()

    def holds(self) -> Iterator[BrokerMessage]:
        """Yield every message of the queue, except those that transactions hold."""
        yield from self.untouched()
        yield from self.unacked()

    @property
    def indexed_entries(self) -> int:
        """Return the number of entries in indexes that do not contain all messages."""
        in_views = self.ready.in_views if self.ready.views else 0
        return in_views + len(self.counts) + (self.groups.count + len(self.groups.holders) if self.groups is not None else 0)

    @property
    def delivering_count(self) -> int:
        """Return the number of messages that consumers or transactions hold."""
        return self.held_messages - self.waiting_count - len(self.delayed)

    @property
    def waiting_count(self) -> int:
        """Return the number of messages that consumers may get now."""
        return self.ready.count + (self.groups.count if self.groups is not None else 0)

    def next_reservation(self, message: BrokerMessage, next_sequence: int) -> int:
        """Return the mid to reserve up to, so that ``message`` and the messages behind it can be delivered."""
        if self.ready.count <= RESERVE_AHEAD:
            return mid_of(next_sequence + RESERVE_SEQUENCES, INDEX_MAX)
        highest = message.mid
        for number, other in enumerate(self.ready):
            if number == RESERVE_AHEAD:
                break
            highest = max(highest, other.mid)
        return highest
