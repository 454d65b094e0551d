"""A queue: what a JMS queue holds, or what one subscription of a JMS topic holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from bascule.broker.delayed import Delayed
from bascule.broker.groups import Groups
from bascule.broker.held import Held
from bascule.broker.matching import wants_what
from bascule.broker.message import BrokerMessage
from bascule.broker.order import Line, QueuePlace
from bascule.broker.policy import DROP, AddressPolicy
from bascule.broker.ports import ConsumerPort
from bascule.broker.ready import Ready, SelectorView
from bascule.broker.turns import Allowance
from bascule.core.destination import Routing
from bascule.jms.lookup import MessageLookup
from bascule.jms.selector import Selector, SelectorError, compile_selector
from bascule.journal.records import INDEX_MAX, mid_of

#: Messages that a reservation covers beyond the one that asked for it: one journal entry per so many deliveries, and at most so many
#: messages are marked redelivered after a crash without having been delivered.
RESERVE_AHEAD = 1024
#: Sequences ahead that a short queue reserves: what arrives meanwhile goes out without waiting for a reservation.
RESERVE_SEQUENCES = 256


class QueueConsumer:
    """One consumer of a queue. ``unacked`` holds what it was given and has not settled, by position."""

    __slots__ = ("port", "queue", "selector_text", "unacked", "view")

    def __init__(self, queue: BrokerQueue, port: ConsumerPort, selector_text: str = "") -> None:
        self.queue = queue
        self.port = port
        self.selector_text = selector_text
        self.view: SelectorView | None = None
        self.unacked: dict[int, BrokerMessage] = {}


class BrokerQueue:
    """Messages in order, their consumers, and what is known of their deliveries.

    ``durable`` queues are in the journal; others are gone with the broker, or with their last consumer. A message that the queue holds
    is in exactly one of: ``ready``, what ``groups`` has put aside, ``delayed``, a consumer's or a transaction's hands. ``held`` has all
    journaled ones.
    """

    __slots__ = (
        "_selector", "address", "asking", "auto_created", "blocked", "confirmed", "consumers", "counts", "delayed", "deleted",
        "dropping", "durable", "expiry_watched", "groups", "held", "held_bytes", "held_messages", "id", "idle_since_ms", "incoming",
        "incoming_bytes", "name", "no_local_container", "owner", "ready", "recovered_mid", "reserved_mid", "reserving_mid",
        "returning", "routing", "selector_text", "settings", "shared", "starved", "subscription", "sweep_at_ms", "sweeping",
        "takers", "unused_since_ms", "user", "volatile",
    )  # fmt: skip

    def __init__(self, queue_id: int, name: str, address: str, routing: Routing, settings: AddressPolicy, *, durable: bool) -> None:
        self.id = queue_id
        self.name = name
        self.address = address
        self.routing = routing
        self.settings = settings
        self.durable = durable
        self.auto_created = False
        self.confirmed = not durable  # its creation is in the journal
        self.deleted = False
        self.ready = Ready()
        self.volatile = Line() if settings.when_full == DROP else None  # non-persistent messages that wait, the first to be dropped first
        self.delayed = Delayed()
        self.held = Held()
        self.groups: Groups | None = None
        self.held_messages = 0
        self.held_bytes = 0
        self.incoming = 0  # messages decided for it and not stored yet
        self.incoming_bytes = 0
        self.consumers: dict[QueueConsumer, None] = {}  # in the order in which they came
        self.takers: dict[QueueConsumer, None] = {}  # consumers that may be able to take a message, in the order of their turns
        self.starved: dict[QueueConsumer, None] = {}  # consumers that could take more than the queue had for them
        self.asking: dict[QueueConsumer, None] = {}  # consumers that are to be told when the queue has given all that it can
        self.returning = 0  # works that put messages back: while there are any, a message would overtake those that are not back yet
        self.blocked: dict[object, Callable[[], object]] = {}  # who waits for room in a full queue, and what to call then
        self.owner: object = None  # of a temporary queue: who alone may consume from it
        self.sweep_at_ms = 0  # when expired messages are looked for, 0 for never
        self.unused_since_ms = 0  # of a durable subscription: when its last consumer left, 0 while it has one
        self.expiry_watched = False
        self.sweeping = False
        self.dropping = False  # non-persistent messages go, over several turns, because the queue is full
        self.idle_since_ms = 0  # when it was last found unused, 0 while nobody watches that
        self.counts: dict[int, int] = {}  # failed deliveries by position, where they are known: see delivery_count
        self.reserved_mid = -1  # the journal says that messages up to here may have been delivered
        self.reserving_mid = -1  # the same, not yet confirmed
        self.recovered_mid = -1  # what was reserved when the journal was loaded
        self.selector_text = ""  # a subscription's
        self._selector: Selector | None = None  # the same, compiled
        self.no_local_container = ""
        self.shared = False
        self.subscription = ""  # name of the subscription, "" for an anycast queue
        self.user = ""  # who has created it, "" for the broker's owner

    def describe(self) -> dict[str, Any]:
        """What the journal keeps of it."""
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
        """The queue that a QUEUE_CREATED entry describes.

        Earlier versions took names with half of a surrogate pair, which JSON holds and nothing else: it is escaped.
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
        """The subscription takes only what a selector wants, "" for all. One that does not compile any more wants nothing."""
        self.selector_text = text
        if text:
            with suppress(SelectorError):  # an earlier version took it
                self._selector = compile_selector(text)

    @property
    def wanting_steps(self) -> int:
        """Steps of asking whether the queue wants a message."""
        return 1 + self._selector.steps if self._selector is not None else 0

    def wants(self, container: str, lookup: MessageLookup) -> bool:
        """Whether a subscription takes a message that a container sent."""
        if self.no_local_container and self.no_local_container == container:
            return False
        if not self.selector_text:
            return True
        if self._selector is None:
            self._selector = compile_selector(self.selector_text)
        return wants_what(self._selector, lookup)

    def delivery_count(self, message: BrokerMessage) -> int:
        """Deliveries of the message that have failed, or may have failed in a crash."""
        count = self.counts.get(message.position)
        return int(-1 < message.mid <= self.recovered_mid) if count is None else count

    def set_counts(self, counts: Mapping[BrokerMessage, int]) -> list[tuple[int, int]]:
        """Set the numbers of failed deliveries. Return them by mid, as far as the messages are journaled."""
        for message, count in counts.items():
            self.counts[message.position] = count
        journaled = [(message.mid, count) for message, count in counts.items() if message.mid >= 0]
        if self.held.copy is not None:
            self.held.copy.counts.update(journaled)
        return journaled

    def first_due_ms(self, message: BrokerMessage) -> int:
        """Until when its sender delays the message, 0 where it does not; ms since the epoch.

        Not the time of a next try: that is one queue's alone, and no restart keeps it.
        """
        return 0 if self.counts.get(message.position) else self.delayed.due_ms(message)

    def expect(self, message: BrokerMessage) -> None:
        """The message is decided for the queue, and comes when that is stored."""
        self.incoming += 1
        self.incoming_bytes += message.size_bytes

    def unexpect(self, message: BrokerMessage) -> None:
        """The message is not decided for the queue after all."""
        self.incoming -= 1
        self.incoming_bytes -= message.size_bytes

    def receive(self, message: BrokerMessage) -> None:
        """An expected message is here."""
        self.incoming -= 1
        self.incoming_bytes -= message.size_bytes
        self.hold(message)

    def hold(self, message: BrokerMessage) -> None:
        """The message is the queue's from now on."""
        message.references += 1
        self.held_messages += 1
        self.held_bytes += message.size_bytes
        if self.durable and message.mid >= 0:
            self.held.add(message)
        if message.group is not None and self.groups is None:
            self.groups = Groups(self.ready, self.takers)

    def uncount(self, messages: int, size_bytes: int) -> None:
        """So many messages are acknowledged and leave soon: they count for no limit any more."""
        self.held_messages -= messages
        self.held_bytes -= size_bytes

    def drop(self, message: BrokerMessage, *, counted: bool = True) -> None:
        """The message is the queue's no longer. ``counted``: ``uncount`` has not been told of it."""
        if counted:  # as uncount does; a call costs more
            self.held_messages -= 1
            self.held_bytes -= message.size_bytes
        if self.counts:
            self.counts.pop(message.position, None)
        if self.durable and message.mid >= 0:
            self.held.remove(message.mid)

    def full(self) -> bool:
        """Whether it is at its limit."""
        limits = self.settings
        return bool(
            (limits.max_messages and self.held_messages + self.incoming >= limits.max_messages)
            or (limits.max_bytes and self.held_bytes + self.incoming_bytes >= limits.max_bytes)
        )

    def room(self, wanted: int) -> int:
        """Messages of the usual size that it has room for, ``wanted`` at most."""
        limits = self.settings
        if limits.max_messages:
            wanted = min(wanted, limits.max_messages - self.held_messages - self.incoming)
        if limits.max_bytes:
            usual_bytes = self.held_bytes // self.held_messages if self.held_messages else 1
            wanted = min(wanted, -((self.held_bytes + self.incoming_bytes - limits.max_bytes) // max(1, usual_bytes)))
        return max(0, wanted)

    def waiting(self) -> list[BrokerMessage]:
        """The messages that consumers may have now, in order."""
        if self.groups is None:
            return list(self.ready)
        return sorted((*self.ready, *self.groups.parked()), key=lambda message: (-message.priority, message.position))

    def after(self, place: QueuePlace, count: int) -> list[BrokerMessage]:
        """Return the next messages that wait behind a place, in order, ``count`` at most. An empty list says that there are none."""
        found = self.ready.after(place, count)
        if self.groups is None or not self.groups.count:
            return found
        parts = [part for part in (found, *self.groups.after(place, count)) if part]
        highest = max((part[0].priority for part in parts), default=0)
        merged = [message for part in parts if part[0].priority == highest for message in part]
        return sorted(merged, key=lambda message: message.position)[:count]

    def add(self, message: BrokerMessage) -> None:
        """A message waits, behind all others of its priority."""
        self.ready.append(message)
        if self.volatile is not None and not message.durable:
            self.volatile.append(message)

    def put_back(self, messages: list[BrokerMessage]) -> None:
        """Messages wait again, each in its place."""
        self.ready.put_back(messages)
        if self.volatile is not None:
            for message in messages:
                if not message.durable:
                    self.volatile.insert(message)

    def oldest_volatile(self) -> BrokerMessage | None:
        """The non-persistent message that has waited longest, of a queue that drops them."""
        return self.volatile.head[0] if self.volatile is not None and self.volatile.head else None

    def take_out(self, message: BrokerMessage) -> bool:
        """Take a message out that waits, or waits for its time. False where somebody has it."""
        if self.delayed.remove(message):
            return True
        if not ((self.groups is not None and self.groups.remove(message)) or self.ready.take(message)):
            return False
        if self.volatile is not None and not message.durable:
            self.volatile.remove(message)
        return True

    def may_serve(self, consumer: QueueConsumer) -> bool:
        """Whether a consumer would take a message, and is one that the owner lets be served."""
        settings = self.settings
        if consumer.port.credit <= 0 or (settings.prefetch_max and len(consumer.unacked) >= settings.prefetch_max):
            return False
        return not settings.exclusive or consumer is next(iter(self.consumers))

    def next_for(self, consumer: QueueConsumer, search: Allowance) -> BrokerMessage | None:
        """The next message for a consumer. None says that there is none, or that the search has spent its allowance."""
        if self.groups is not None:
            return self.groups.peek(consumer, search)
        if not self.ready.count:
            return None
        return self.ready.peek() if consumer.view is None else consumer.view.peek(search)

    def feed(self) -> None:
        """Something waits that may be for a consumer that the queue had nothing for."""
        starved = self.starved
        if self.ready.views or self.groups is not None:
            self.takers.update(starved)
            starved.clear()
        else:
            consumer = next(iter(starved))
            del starved[consumer]
            self.takers[consumer] = None

    def untouched(self) -> Iterator[BrokerMessage]:
        """Every message that nobody holds."""
        yield from self.ready
        yield from self.delayed
        if self.groups is not None:
            yield from self.groups.parked()

    def unacked(self) -> Iterator[BrokerMessage]:
        """Every message that a consumer holds."""
        for consumer in self.consumers:
            yield from consumer.unacked.values()

    def holds(self) -> Iterator[BrokerMessage]:
        """Every message of the queue but those in the hands of a transaction."""
        yield from self.untouched()
        yield from self.unacked()

    @property
    def indexed_entries(self) -> int:
        """Entries of indexes that not all messages are in."""
        in_views = self.ready.in_views if self.ready.views else 0
        return in_views + len(self.counts) + (self.groups.count if self.groups is not None else 0)

    @property
    def delivering_count(self) -> int:
        """Messages that consumers hold, or transactions."""
        return self.held_messages - self.waiting_count - len(self.delayed)

    @property
    def waiting_count(self) -> int:
        """Messages that consumers may have now."""
        return self.ready.count + (self.groups.count if self.groups is not None else 0)

    def next_reservation(self, message: BrokerMessage, next_sequence: int) -> int:
        """The mid to reserve up to so that ``message`` and those behind it can go out."""
        if self.ready.count <= RESERVE_AHEAD:
            return mid_of(next_sequence + RESERVE_SEQUENCES, INDEX_MAX)
        highest = message.mid
        for number, other in enumerate(self.ready):
            if number == RESERVE_AHEAD:
                break
            highest = max(highest, other.mid)
        return highest
