"""Incomplete messages: their memory over all connections that share one budget."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING

from bascule.amqp.performatives import TransactionalState

if TYPE_CHECKING:
    from bascule.amqp.connection import Connection
    from bascule.amqp.hot import TransferTail
    from bascule.amqp.link import ReceiverLink


class Partial:
    """A message with missing frames. Its data is collected in one buffer, so that the overhead of tiny frames is small.

    The buffer returns its content without a copy, which takes 50 ms for 64 MiB.
    """

    __slots__ = ("delivery_id", "octets", "size_bytes", "tag", "tail")

    def __init__(self, delivery_id: int, tag: bytes, tail: TransferTail) -> None:
        """Start with the first frame."""
        self.delivery_id = delivery_id
        self.tag = tag
        state = tail.state  # only its transaction matters, and a state may be as long as a frame
        lean = TransactionalState(state.txn_id) if type(state) is TransactionalState else None
        self.tail = tail._replace(state=lean)
        self.octets = BytesIO()
        self.size_bytes = 0

    def goes_on_with(self, tail: TransferTail) -> bool:
        """Return whether a later frame has the message format and the transaction of the first one, or none.

        AMQP 1.0 part 2, section 2.7.5, and part 4, section 4.4.1. A message of which only a part is in a transaction has no meaning.
        """
        if tail.message_format and tail.message_format != self.tail.message_format:
            return False
        state, first = tail.state, self.tail.state
        return type(state) is not TransactionalState or (type(first) is TransactionalState and first.txn_id == state.txn_id)


class PartialBudget:
    """The memory budget of incomplete messages. Beyond ``bytes_max``, the links whose messages wait longest for a frame are detached.

    One message always has room. ``on_detached(connection)`` is called for a connection that has to send a detach.
    """

    __slots__ = ("_links", "bytes_max", "on_detached", "used_bytes")

    def __init__(self, bytes_max: int | None = None, on_detached: Callable[[Connection], None] = lambda _: None) -> None:
        """``bytes_max`` None: no limit."""
        self.bytes_max = bytes_max
        self.on_detached = on_detached
        self.used_bytes = 0
        self._links: dict[ReceiverLink, None] = {}  # in the order of their last frames

    def grow(self, link: ReceiverLink, size_bytes: int) -> None:
        """Add a frame of an incomplete message."""
        links = self._links
        links.pop(link, None)
        links[link] = None
        self.used_bytes += size_bytes
        while self.bytes_max is not None and self.used_bytes > self.bytes_max and len(links) > 1:
            oldest = next(iter(links))
            oldest.give_way(self.bytes_max)
            self.on_detached(oldest.session.connection)

    def drop(self, link: ReceiverLink, size_bytes: int) -> None:
        """Remove a message that is complete or abandoned."""
        self._links.pop(link, None)
        self.used_bytes -= size_bytes
