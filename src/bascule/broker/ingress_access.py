"""The permissions of the users of ingresses: a refused message goes to the dead-letter address. A part of the engine.

The decision is made when the broker is about to take a message, and the journal stores its result: the message in the queue of its
destination, or in the dead-letter queue, in one record with the position behind it. A broker that loads the journal decides nothing again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from bascule.amqp.types import Timestamp, UByte
from bascule.broker.addresses import TEMPORARY_PREFIX, AddressBook
from bascule.core.destination import Routing
from bascule.core.permissions import AllowAll, Permission, Permissions, Unauthorized
from bascule.jms.annotate import MOVED_AT, ORIGINAL_ADDRESS, ORIGINAL_EXPIRY, ORIGINAL_QUEUE, ORIGINAL_ROUTING, REASON, annotated
from bascule.jms.errors import MalformedMessage
from bascule.journal.records import Send

#: The first word of the reason of a dead letter that its user was not allowed to send.
UNAUTHORIZED: Final = "unauthorized"


class Arrival(NamedTuple):
    """A message of the ingress topic.

    ``keep``: whether it is kept if no queue is bound to its address. ``user`` is the user of its ingress, "" for the owner of the broker.
    ``refusal`` is why the user may not send it; the message is a dead letter then.
    """

    send: Send
    keep: bool
    user: str = ""
    refusal: Unauthorized | None = None


class IngressAccess:
    """Decides which messages reach their destination. ``permissions`` are those of the broker's clients."""

    def __init__(self, addresses: AddressBook, clock: Callable[[], int], bytes_max: Callable[[], int]) -> None:
        """``bytes_max`` returns the size of the largest message for which the journal has room."""
        self.permissions: Permissions = AllowAll()
        self.on_refused: Callable[[Unauthorized], None] = lambda _refusal: None
        self._addresses = addresses
        self._clock = clock
        self._bytes_max = bytes_max

    def decided(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Return the messages of a record, with a dead letter in place of each message that its user may not send.

        All messages of a record have the same user. The records of an ingress have one message each.
        """
        return [self._decided(arrival) for arrival in arrivals] if arrivals and arrivals[0].user else arrivals

    def _decided(self, arrival: Arrival) -> Arrival:
        try:
            self._authorize(arrival)
        except Unauthorized as error:
            return self._dead_letter(arrival, error)
        return arrival

    def _authorize(self, arrival: Arrival) -> None:
        """Check what a client needs to send the message, and to create its address if the message does so. Raises Unauthorized."""
        user, address, routing = arrival.user, arrival.send.address, Routing(arrival.send.routing)
        self.permissions.authorize(user, Permission.SEND, address)
        if not arrival.keep or self._addresses.knows(address, routing):
            return  # a message that is not kept creates nothing
        self.permissions.authorize(user, Permission.CREATE_ADDRESS, address)
        if routing is Routing.ANYCAST:
            self.permissions.authorize(user, Permission.CREATE_DURABLE_QUEUE, address)

    def _dead_letter(self, arrival: Arrival, refusal: Unauthorized) -> Arrival:
        """Return the message as a dead letter, which needs no permission. Its address is "" if the settings name no dead-letter address."""
        send = arrival.send
        address = self._addresses.policy.of(send.address).dead_letter_address
        annotations = {
            ORIGINAL_ADDRESS: send.address, ORIGINAL_ROUTING: UByte(send.routing),
            ORIGINAL_QUEUE: send.address if send.routing == Routing.ANYCAST else None,
            REASON: f"{UNAUTHORIZED}: {refusal}", MOVED_AT: Timestamp(self._clock()),
            ORIGINAL_EXPIRY: Timestamp(send.expiry_ms) if send.expiry_ms else None,
        }  # fmt: skip
        body = send.body
        try:
            changed = annotated(body, annotations)
            if len(changed) <= self._bytes_max():  # otherwise the journal might never take the message, and would block all behind it
                body = changed
        except MalformedMessage:
            pass  # the message is kept as it is
        dead = send._replace(address=address, routing=Routing.ANYCAST, expiry_ms=0, delivery_time_ms=0, body=body)
        return arrival._replace(send=dead, keep=bool(address) and not address.startswith(TEMPORARY_PREFIX), refusal=refusal)
