"""Sends of a context. A context keeps its sender links and sends up to a window of messages ahead of the broker's answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final, NamedTuple

from bascule.client.destination import Destination, require_destination
from bascule.client.errors import MessageRefused, TimedOut
from bascule.client.links import PendingSend, SenderState, SessionTransaction
from bascule.client.message import Body, Message, SendOptions, encode, stamp
from bascule.client.operation import Operation
from bascule.client.transactions import Transactions
from bascule.core.errors import BasculeError

#: Maximum number of unanswered messages: enough to hide a round trip, few to send again after a reconnect.
SEND_WINDOW: Final = 1000
#: Maximum number of sender links that a context keeps.
SENDERS_MAX: Final = 32

OnDone = Callable[[Message, BasculeError | None], None]


class SendCompletion(NamedTuple):
    """How a send completes and who gets its result."""

    #: Whether to wait until the broker has stored the message; in a transaction a send returns at once.
    wait: bool = True
    #: Whether the message is sent again under its existing id.
    repeat: bool = False
    #: Called after the answer.
    on_done: OnDone | None = None
    #: Receives the error of the message before ``flush`` returns.
    refusals: list[BasculeError] | None = None
    #: Called when the message is in flight: whatever it sends on a session of the connection follows the message.
    behind: Callable[[], None] | None = None
    #: Whether the broker does not answer the message. If it refuses the message, it detaches the link.
    settled: bool = False


AT_ITS_END: Final = SendCompletion()


def now_ms() -> int:
    """Return the current time in ms since the epoch."""
    return time.time_ns() // 1_000_000


class Sends(Transactions):
    """The sends of a session, in a transaction or outside of one."""

    def send(
        self,
        destination: Destination,
        content: Message | Body,
        options: SendOptions,
        until_s: float,
        completion: SendCompletion = AT_ITS_END,
    ) -> Operation[Message]:
        """Send a message. Raises as Producer.send does."""
        sending = yield from self.begin_send(destination, content, options, until_s, completion)
        if completion.wait and sending.transaction is None:
            yield from self._await_answer(sending, until_s)
        return sending.message

    def begin_send(
        self, destination: Destination, content: Message | Body, options: SendOptions, until_s: float, completion: SendCompletion
    ) -> Operation[PendingSend]:
        """Queue a message, without waiting for the answer. Raises as Producer.send does."""
        self.check()
        require_destination(destination)
        message = Message.of(content)
        transaction = yield from self.transaction_to_send_in(until_s)
        if not (completion.repeat and message.message_id):
            stamp(message, destination, options, self.core.message_id(), now_ms())
            message.user_id = self.core.settings.user_id
        if message.delivery_time_ms and "DELAYED_DELIVERY" not in self.core.offered:
            raise MessageRefused("the broker does not support delivery delay; send with delivery_delay_s = 0")
        with nullcontext() if transaction is None else transaction.send():
            sending = yield from self._put(message, destination, transaction, until_s, completion)
        return sending

    def begin_encoded(
        self, destination: Destination, message: Message, data: bytes, until_s: float, completion: SendCompletion
    ) -> Operation[PendingSend]:
        """Queue an encoded message as it is, outside of transactions. ``message`` is what the completion gets."""
        self.check()
        return (yield from self._put(message, destination, None, until_s, completion, data))

    def _put(
        self,
        message: Message,
        destination: Destination,
        transaction: SessionTransaction | None,
        until_s: float,
        completion: SendCompletion,
        encoded: bytes | None = None,
    ) -> Operation[PendingSend]:
        """Queue a message on the sender link of its destination, as ``encoded`` if it is given."""
        data = encode(message) if encoded is None else encoded
        if transaction is not None:
            yield from self._declare(transaction, until_s)
        yield from self.core.until(lambda: self.unanswered < SEND_WINDOW, "send", until_s)
        sender = yield from self._sender(destination, until_s, settled=completion.settled)
        if sender.error is not None:
            raise type(sender.error)(*sender.error.args)
        if transaction is not None:
            self.check_open(transaction)
        sending = PendingSend(message, data, sender, transaction)
        sending.on_done, sending.refusals = completion.on_done, completion.refusals
        sender.put(sending)
        if completion.behind is not None:
            completion.behind()
        return sending

    def _await_answer(self, sending: PendingSend, until_s: float) -> Operation[None]:
        message_id = sending.message.message_id
        try:
            yield from self.core.until(lambda: sending.done, f"send {message_id}", until_s)
        except TimedOut as error:
            if self._withdrawn(sending):
                raise TimedOut(f"{error}; the message was not sent") from None
            raise TimedOut(f"{error}; the message may or may not be stored, send it again with repeat() under the same id") from None
        except BaseException:
            self._withdrawn(sending)
            raise
        if sending.error is not None:
            raise type(sending.error)(*sending.error.args)

    def _sender(self, destination: Destination, until_s: float, *, settled: bool) -> Operation[SenderState]:
        key = (destination.kind, destination.name, settled)
        if key not in self.senders:
            yield from self._evict(until_s)
        self.check()  # the context may have been closed during the wait
        known = self.senders.pop(key, None)
        sender = known or SenderState(self, destination, self.core.link_name("sender"), settled=settled)
        self.senders[key] = sender  # the dict is in order of last use
        if known is None and self.core.opened:
            sender.attach()
        if known is None or (self.core.up and not sender.decided):  # an existing link sends when it is connected again
            sender.waiting += 1
            try:
                yield from self.core.until(lambda: sender.decided, f"send to {destination.name}", until_s)
            finally:
                sender.waiting -= 1
                self._drop_unused(sender)
            self.check()
        return sender

    def _drop_unused(self, sender: SenderState) -> None:
        """Close a sender link that is not attached yet and that no task waits for."""
        if not sender.decided and sender.idle:
            sender.close()
            self.forget(sender)

    def _withdrawn(self, sending: PendingSend) -> bool:
        """Withdraw a message. Return whether the message was certainly not sent."""
        withdrawn = sending.sender.withdraw(sending)
        self._drop_unused(sending.sender)
        return withdrawn

    def _evict(self, until_s: float) -> Operation[None]:
        if len(self.senders) >= SENDERS_MAX:
            oldest = next((each for each in self.senders.values() if each.attached and each.idle), None)
            if oldest is not None:
                del self.senders[oldest.key]
                yield from self._detach(oldest, until_s)

    def flush(self, until_s: float) -> Operation[None]:
        """Wait until the broker has answered every send."""
        yield from self.core.until(lambda: not self.unanswered, "flush", until_s)
