"""A queue: what a JMS queue holds, or what one subscription of a JMS topic holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bascule.broker.matching import wants
from bascule.broker.message import Message
from bascule.broker.ports import ConsumerPort
from bascule.broker.ready import Ready, View
from bascule.core.destination import Routing
from bascule.jms.selector import compile_selector
from bascule.journal.records import INDEX_MAX, mid_of

#: Messages that a reservation covers beyond the one that asked for it: one journal entry per so many deliveries, and at most so many
#: messages are marked redelivered after a crash without having been delivered.
RESERVE_AHEAD = 1024
#: Sequences ahead that a short queue reserves: what arrives meanwhile goes out without waiting for a reservation.
RESERVE_SEQUENCES = 256


class Consumer:
    """One consumer of a queue. ``unacked`` holds what it was given and has not settled, by position."""

    __slots__ = ("port", "queue", "selector_text", "unacked", "view")

    def __init__(self, queue: Queue, port: ConsumerPort, selector_text: str = "") -> None:
        self.queue = queue
        self.port = port
        self.selector_text = selector_text
        self.view: View | None = None
        self.unacked: dict[int, Message] = {}


class Queue:
    """Messages in order, their consumers, and what is known of their deliveries.

    ``durable`` queues are in the journal; others are gone with the broker, or with their last consumer.
    """

    __slots__ = (
        "address", "confirmed", "consumers", "counts", "deleted", "durable", "id", "name", "no_local_container", "ready",
        "recovered_mid", "reserved_mid", "reserving_mid", "routing", "selector_text", "settings", "subscription", "turn",
    )  # fmt: skip

    def __init__(self, queue_id: int, name: str, address: str, routing: Routing, *, durable: bool) -> None:
        self.id = queue_id
        self.name = name
        self.address = address
        self.routing = routing
        self.durable = durable
        self.confirmed = not durable  # its creation is in the journal
        self.deleted = False
        self.ready = Ready()
        self.consumers: list[Consumer] = []
        self.turn = 0
        self.counts: dict[int, int] = {}  # failed deliveries, by position; only those above 0
        self.reserved_mid = -1  # the journal says that messages up to here may have been delivered
        self.reserving_mid = -1  # the same, not yet confirmed
        self.recovered_mid = -1  # what was reserved when the journal was loaded
        self.selector_text = ""  # a subscription's
        self.no_local_container = ""
        self.subscription = ""  # name of the subscription, "" for an anycast queue
        self.settings: dict[str, Any] = {}  # what else its creation said

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
            **self.settings,
        }

    @classmethod
    def from_journal(cls, content: dict[str, Any]) -> Queue:
        """The queue that a QUEUE_CREATED entry describes."""
        content = dict(content)
        queue = cls(content.pop("id"), content.pop("name"), content.pop("address"), Routing(content.pop("routing")), durable=True)
        queue.selector_text = content.pop("selector")
        queue.no_local_container = content.pop("no_local")
        queue.subscription = content.pop("subscription")
        queue.settings = content
        queue.confirmed = True
        return queue

    def wants(self, container: str, body: bytes) -> bool:
        """Whether a subscription takes a message that a container sent."""
        if self.no_local_container and self.no_local_container == container:
            return False
        return not self.selector_text or wants(compile_selector(self.selector_text), body)

    def delivery_count(self, message: Message) -> int:
        """Deliveries of the message that have failed, or may have failed in a crash."""
        count = self.counts.get(message.position, 0)
        return count or int(-1 < message.mid <= self.recovered_mid)

    def unacked(self) -> Iterator[Message]:
        """Every message that a consumer holds."""
        for consumer in self.consumers:
            yield from consumer.unacked.values()

    @property
    def delivering_count(self) -> int:
        """Messages that consumers hold."""
        return sum(len(consumer.unacked) for consumer in self.consumers)

    def next_reservation(self, message: Message, next_sequence: int) -> int:
        """The mid to reserve up to so that ``message`` and those behind it can go out."""
        if self.ready.count <= RESERVE_AHEAD:
            return mid_of(next_sequence + RESERVE_SEQUENCES, INDEX_MAX)
        highest = message.mid
        for number, other in enumerate(self.ready):
            if number == RESERVE_AHEAD:
                break
            highest = max(highest, other.mid)
        return highest
