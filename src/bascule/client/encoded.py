"""Encoded messages, which are read and sent without a change: for files of messages. Not a part of the public interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bascule.client.blocking import Context
from bascule.client.destination import Queue
from bascule.client.errors import ConnectionLost
from bascule.client.links import PendingSend, Subscription
from bascule.client.message import Message
from bascule.client.sends import SendCompletion
from bascule.client.session import BROWSE_AHEAD
from bascule.jms.sections import message_id_of

#: Bytes of messages that a browser reads ahead, if they are as large as the largest one before.
AHEAD_BYTES: Final = 8 << 20


def browse_encoded(context: Context, queue: Queue, selector: str = "") -> Iterator[bytes]:
    """Yield the messages that wait in a queue as the broker sends them, in order, without removing them.

    The number of messages that are read ahead follows from the size of the largest one until then. Raises as ``Context.browse``, and
    ConnectionLost also if the connection is made again: the browser would begin at the front of the queue again.
    """
    session, ahead, largest_bytes = context._session, 1, 1
    with context._consumer(Subscription(queue, selector, browse=True), None, 0, None) as browser:
        link = browser.state.link
        while True:
            payload = context._run(session.browse_encoded(browser.state, context._until(None), ahead))
            if link is None or browser.state.link is not link:
                raise ConnectionLost(f"the connection was lost before the last message of queue {queue.name!r}")
            if payload is None:
                return
            largest_bytes = max(largest_bytes, len(payload))
            ahead = max(1, min(2 * ahead, BROWSE_AHEAD, AHEAD_BYTES // largest_bytes))
            yield payload


class EncodedSender:
    """Sends encoded messages to a queue outside of transactions, up to a window ahead of the broker's answers."""

    def __init__(self, context: Context, queue: Queue) -> None:
        self._context = context
        self._queue = queue

    def send(self, data: bytes) -> PendingSend:
        """Send a message. The result is ``done`` when the broker has stored the message, or has refused it with ``error``."""
        context = self._context
        message = Message(message_id=message_id_of(data) or None)
        return context._run(context._session.begin_encoded(self._queue, message, data, context._until(None), SendCompletion()))

    def flush(self) -> None:
        """Wait until every message is ``done``. Raises ConnectionLost, TimedOut."""
        self._context._run(self._context._session.flush(self._context._until(None)))
