"""The session of one context: sends, receives, acknowledgements and transactions, across reconnects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bascule.amqp.performatives import ACCEPTED, Rejected
from bascule.client.destination import Destination, TemporaryQueue
from bascule.client.errors import ConnectionLost, IllegalState, TimedOut, TransactionRolledBack
from bascule.client.links import FAILED, UNDELIVERABLE, ConsumerState, PendingSend, ReceivedDelivery, Subscription
from bascule.client.message import Body, Message, SendOptions
from bascule.client.operation import Operation, Wait
from bascule.client.sends import SendCompletion, Sends, now_ms
from bascule.client.session_links import Acknowledge
from bascule.core.errors import BasculeError
from bascule.core.log import get_log
from bascule.jms.errors import MalformedMessage
from bascule.jms.message import decode_message

if TYPE_CHECKING:
    from bascule.client.core import Core

log = get_log(__name__)

#: Credit of a browser.
BROWSE_AHEAD: Final = 100
#: Number of drains before a browser ends: Artemis may rarely end a drain before the browser has read the queue again.
BROWSE_ASKS: Final = 2
FOREVER: Final = float("inf")

#: Delay after an error of a listener's session, so that a broker that refuses is not asked in a tight loop.
LISTENERS_REST_S: Final = 1.0

ExceptionListener = Callable[[BasculeError], None]


class PendingRequest:
    """A request that waits for its reply."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.answer: Message | None = None


class ClientSession(Sends):
    """The session of a context: its sends, receives and acknowledgements.

    A message's own ``acknowledge`` calls ``acknowledging``, which holds the lock of the API.
    """

    def __init__(self, core: Core, mode: Acknowledge) -> None:
        super().__init__(core, mode)
        self.acknowledging: Callable[[ReceivedDelivery], None] = self.acknowledge
        self.answers: ConsumerState | None = None  # consumer of replies
        self.asked: list[PendingRequest] = []  # requests that wait for a reply
        self.preparing = False  # a task is creating the consumer of replies
        self.listening: ConsumerState | None = None  # the consumer whose listener runs
        self.listeners_next = True  # whether listeners get further messages
        self._rest_until_s = 0.0  # pause of the listeners after an error

    # --- requests ----------------------------------------------------------------------------------------------------------------

    def request(
        self,
        destination: Destination,
        content: Message | Body,
        options: SendOptions,
        until_s: float,
        behind: Callable[[], None] | None = None,
        *,
        settled: bool = False,
    ) -> Operation[Message]:
        """Send a message with a temporary queue for the reply, and return the reply. Raises TimedOut, ConnectionLost.

        See SendCompletion for ``behind``. ``settled``: the reply is the only answer to the message, and the broker does not wait for its
        acknowledgement. All requests of a session have the same ``settled``.
        """
        if self.transaction is not None:
            raise IllegalState("request() is not possible in a transaction: the broker delivers the request only after the commit")
        answers = yield from self._answers(until_s, settled=settled)
        generation = self.core.generation
        asked = PendingRequest(Message.of(content))
        asked.message.reply_to = answers.subscription.destination
        self.asked.append(asked)
        sending: PendingSend | None = None

        def refused() -> BasculeError | None:
            return None if sending is None else sending.error or sending.sender.error

        def over() -> bool:
            ended = self._ended(answers) or refused() is not None
            return asked.answer is not None or answers.available or ended or self.core.generation != generation

        try:
            if settled:
                completion = SendCompletion(behind=behind, settled=True)
                sending = yield from self.begin_send(destination, asked.message, options, until_s, completion)
            else:
                yield from self.send(destination, asked.message, options, until_s, SendCompletion(behind=behind))
            while asked.answer is None:
                came = yield Wait(over, until_s)
                self._hand_out(answers)
                if asked.answer is not None:
                    break
                if self.core.generation != generation:
                    raise ConnectionLost("connection and temporary queue lost before the reply arrived; send the request again")
                self._check_consumer(answers)
                if (error := refused()) is not None:
                    raise type(error)(*error.args)
                if not came:
                    raise TimedOut(f"no reply to {asked.message.message_id} from {destination.name} before the timeout")
            return asked.answer
        finally:
            self.asked.remove(asked)
            if sending is not None:
                sending.sender.withdraw(sending)

    def _answers(self, until_s: float, *, settled: bool) -> Operation[ConsumerState]:
        """Return the consumer of the replies to all requests. It always prefetches, because no other consumer wants these messages."""
        yield from self.core.until(lambda: not self.preparing, "request", until_s)  # while another task creates it
        if self.answers is None or self.answers.error is not None:
            self.preparing = True
            try:
                queue = TemporaryQueue("temporary")
                yield from self.temporary(queue, until_s)
                self.answers = yield from self.consumer(
                    Subscription(queue, settled=settled), None, self.core.settings.prefetch or 1, until_s
                )
            finally:
                self.preparing = False
        return self.answers

    def _hand_out(self, answers: ConsumerState) -> None:
        """Give each reply to its request, acknowledge it in every mode, and drop replies to unknown requests."""
        while answers.available:
            arrived = answers.buffer.popleft()
            with suppress(MalformedMessage):  # rejected; the broker moves it to the dead letters
                answer = self._read(arrived)
                if answer is not None:
                    if not arrived.settled:
                        arrived.link.settle(arrived.delivery_id, ACCEPTED)
                    asked = self._asker(answer.correlation_id)
                    if asked is not None:
                        asked.answer = answer
        answers.top_up()

    def _asker(self, correlation_id: str | bytes | None) -> PendingRequest | None:
        """Return the request with this id. A reply without an id belongs to the only waiting request."""
        waiting = [each for each in self.asked if each.answer is None]
        if correlation_id is None:
            return waiting[0] if len(waiting) == 1 else None
        return next((each for each in waiting if correlation_id in (each.message.message_id, each.message.correlation_id)), None)

    # --- consumers ---------------------------------------------------------------------------------------------------------------

    def close_consumer(self, consumer: ConsumerState, until_s: float, *, by_listener: bool = False) -> Operation[None]:
        """Close a consumer. Received messages can still be acknowledged; the link is closed after the last of them.

        Waits until the consumer's listener has returned (Jakarta Messaging 3.1, JMSConsumer.close), unless the listener is the caller.
        Raises TimedOut.
        """
        if consumer.closing:
            pass
        elif consumer in self.unacknowledged.values():
            consumer.closing = True
            try:
                yield from self._suspend([consumer], until_s)
            finally:
                consumer.give_back()
        else:
            yield from self._detach(consumer, until_s)
        if not by_listener:
            yield from self._await_listener("close", lambda: self.listening is not consumer, until_s)

    def receive(self, consumer: ConsumerState, until_s: float) -> Operation[Message | None]:
        """Return the next message, or None after the timeout or if the consumer is closed. Raises the error that ended the consumer."""
        self._check_consumer(consumer)
        with consumer.receives():
            while True:
                came = consumer.available or (yield from self._await_message(consumer, until_s))
                if consumer.available:
                    message = yield from self._take(consumer, ACCEPTED)
                    if message is not None:
                        return message
                elif consumer.closing or self.closing:
                    return None
                else:
                    self._check_consumer(consumer)
                    if not came:  # otherwise another task has taken the message
                        return None

    def _await_message(self, consumer: ConsumerState, until_s: float) -> Operation[bool]:
        """Return whether a message arrived, or the consumer ended, before the timeout."""
        consumer.waiting += 1
        consumer.top_up()
        try:
            came = yield Wait(lambda: consumer.available or consumer.closing or self._ended(consumer), until_s)
        finally:
            consumer.waiting -= 1
        if not came and self.started:
            yield from self._drain(consumer, 0, self.core.clock() + self.core.settings.timeout_s)
        return came

    def receive_no_wait(self, consumer: ConsumerState, until_s: float) -> Operation[Message | None]:
        """Return a message if the broker has one now."""
        self._check_consumer(consumer)
        with consumer.receives():
            while self.started:
                if not consumer.buffer:
                    yield from self._drain(consumer, consumer.prefetch or 1, until_s)
                if not consumer.available:
                    break
                message = yield from self._take(consumer, ACCEPTED)
                if message is not None:
                    return message
            consumer.top_up()
            return None

    def browse(self, consumer: ConsumerState, until_s: float) -> Operation[Message | None]:
        """Return the next message of a browser, or None after the last."""
        payload = yield from self.browse_encoded(consumer, until_s)
        return None if payload is None else Message.received(decode_message(payload))

    def browse_encoded(self, consumer: ConsumerState, until_s: float, ahead: int = BROWSE_AHEAD) -> Operation[bytes | None]:
        """Return the next message of a browser as the broker sends it, or None after the last. At most ``ahead`` messages are held."""
        for _ in range(BROWSE_ASKS):
            if not consumer.buffer:
                yield from self._drain(consumer, ahead, until_s)
                self._check_consumer(consumer)
        return consumer.buffer.popleft().payload if consumer.buffer else None

    def _ended(self, consumer: ConsumerState) -> bool:
        return consumer.error is not None or self.over

    def _check_consumer(self, consumer: ConsumerState) -> None:
        if consumer.closing:
            raise IllegalState("the consumer is closed")
        self.check()
        if consumer.error is not None:
            raise type(consumer.error)(*consumer.error.args)

    def _take(self, consumer: ConsumerState, outcome: Any) -> Operation[Message | None]:
        """Deliver the oldest message, acknowledged as the mode requires. Waits only if a transaction has to begin.

        Returns None if the message has expired or a transaction had to begin first; the caller then looks at the consumer again.
        """
        transaction = self.transaction
        if transaction is not None:
            if transaction.id is None:
                yield from self._declare(transaction, self.core.clock() + self.core.settings.timeout_s)
                return None
            transaction.check()
        arrived = consumer.buffer.popleft()
        consumer.top_up()
        message = self._read(arrived)
        if message is None or arrived.settled:
            return message
        if transaction is not None:
            arrived.link.settle(arrived.delivery_id, transaction.accepted)
        elif self.mode in (Acknowledge.CLIENT, Acknowledge.INDIVIDUAL):
            self.unacknowledged[arrived] = consumer
            message._acknowledge = partial(self._acknowledge_message, arrived)
        elif outcome is None:  # for a listener, which has not seen the message yet
            self.unacknowledged[arrived] = consumer
        elif self.mode is Acknowledge.DUPS_OK:
            consumer.accept_lazily(arrived)
        else:
            arrived.link.settle(arrived.delivery_id, ACCEPTED)
        return message

    def _read(self, arrived: ReceivedDelivery) -> Message | None:
        """Return the message, or None if it has expired. Raises MalformedMessage. Neither is redelivered."""
        try:
            message = Message.received(decode_message(arrived.payload))
        except MalformedMessage:
            arrived.link.settle(arrived.delivery_id, Rejected())
            raise
        if message.expiration_ms and message.expiration_ms <= now_ms():
            arrived.link.settle(arrived.delivery_id, UNDELIVERABLE)
            return None
        return message

    def _acknowledge_message(self, arrived: ReceivedDelivery) -> None:
        self.acknowledging(arrived)

    # --- listeners ---------------------------------------------------------------------------------------------------------------

    def listen(self, consumer: ConsumerState, listener: Callable[[Message], Any] | None) -> None:
        """Set or remove the listener of a consumer. Raises the error that ended the consumer."""
        if listener is not None:
            self._check_consumer(consumer)
        consumer.listener = listener
        consumer.top_up()

    def next_for_listener(self) -> Operation[tuple[Callable[[Message], Any], Message, ReceivedDelivery] | None]:
        """Return the next message of any consumer with a listener, or None if the context is closed.

        Raises the error that ended the session, which is ``over`` then, or the error that ended a consumer, once. After any other error,
        the next call tries again. After TransactionRolledBack the next transaction has begun, and the messages of the last one are
        redelivered.
        """

        def ready() -> ConsumerState | None:
            if not self.listeners_next:
                return None
            return next((each for each in self.consumers if each.listener is not None and each.available and not each.closing), None)

        while True:
            if self._rest_until_s > self.core.clock():
                yield Wait(lambda: self.over, self._rest_until_s)
            yield Wait(lambda: ready() is not None or bool(self.untold) or self.over, FOREVER)
            if self.closing:
                return None
            self.check()
            if self.untold:
                raise self.untold.popleft()
            consumer = ready()
            if consumer is None or (listener := consumer.listener) is None:
                continue
            arrived = consumer.buffer[0]
            transaction = self.transaction
            try:
                message = yield from self._take(consumer, None)
            except MalformedMessage:
                continue  # rejected; the broker moves it to the dead letters
            except BasculeError as error:
                if isinstance(error, TransactionRolledBack):
                    # another task's block: its end reports the rollback, and must not commit only the second half
                    if self.block is not None:
                        yield Wait(lambda: self.transaction is not transaction or self.over, FOREVER)  # noqa: B023
                        continue
                    self._next_transaction()
                self._rest_until_s = self.core.clock() + LISTENERS_REST_S
                raise
            if message is not None:
                self.consumers.remove(consumer)
                self.consumers.append(consumer)  # round robin over the consumers
                self.listening = consumer
                return listener, message, arrived

    def listened(self, arrived: ReceivedDelivery, failed: bool) -> None:
        """Handle the return of a listener.

        After an error the message is redelivered, unless the application acknowledges messages itself.
        """
        self.listening = None
        if self.mode in (Acknowledge.CLIENT, Acknowledge.INDIVIDUAL):
            return
        consumer = self.unacknowledged.pop(arrived, None)
        if consumer is None:
            return
        if failed:
            arrived.link.settle(arrived.delivery_id, FAILED)
        elif self.mode is Acknowledge.DUPS_OK:
            consumer.accept_lazily(arrived)
        else:
            arrived.link.settle(arrived.delivery_id, ACCEPTED)
        self._detach_done()

    def tell(self, on_exception: ExceptionListener | None, error: BasculeError) -> None:
        """Report an error of the listeners to the application.

        Must run outside the lock, because the callback is code of the application.
        """
        if on_exception is None:
            log.error("listener did not get a message", listeners="end" if self.over else "go on", error=error)
            return
        try:
            on_exception(error)
        except Exception:
            log.exception("on_exception failed", told=error)

    def listening_failed(
        self, call: Callable[[Callable[[], None]], object], on_exception: ExceptionListener | None, error: BaseException
    ) -> None:
        """End the connection and report why: the thread or task that calls the listeners has failed.

        ``call`` calls a function with the lock of the API.
        """
        failure = ConnectionLost(f"no listener is called any more: {error!r}")
        call(lambda: self.core.fail(failure))
        self.tell(on_exception, failure)

    # --- acknowledging -----------------------------------------------------------------------------------------------------------

    def acknowledge(self, arrived: ReceivedDelivery | None = None) -> None:
        """Acknowledge all received messages, or in mode INDIVIDUAL the given one. Deliveries of an earlier connection are redelivered."""
        self.check()
        chosen = [arrived] if arrived is not None and self.mode is Acknowledge.INDIVIDUAL else list(self.unacknowledged)
        for each in chosen:
            if self.unacknowledged.pop(each, None) is not None:
                each.link.settle(each.delivery_id, ACCEPTED)
        self._detach_done()

    def recover(self, until_s: float) -> Operation[None]:
        """Redeliver all received messages that are not acknowledged, marked as redelivered."""
        self.check()
        if self.transaction is not None:
            raise IllegalState("recover() is not possible in a transaction; call rollback()")
        consumers = list(self.consumers)
        try:
            yield from self._suspend(consumers, until_s)
            for each in self.unacknowledged:
                each.link.settle(each.delivery_id, FAILED)
            self.unacknowledged.clear()
            self._detach_done()
            self.engine.flush_settled()  # before new credit, so that the broker has all messages back when it delivers again
        finally:
            self._resume(consumers)

    def _detach_done(self) -> None:
        """Close the links of closed consumers whose last message is acknowledged."""
        busy = set(map(id, self.unacknowledged.values()))
        for consumer in list(self.consumers):
            if consumer.closing and consumer.link is not None and id(consumer) not in busy:
                consumer.close()

    def stop(self, until_s: float) -> Operation[None]:
        """Stop delivery and wait for a running listener. Until it returns, the listener can use the whole context."""
        self.check()
        try:
            yield from self._quiet("stop", until_s)
        finally:
            self.started = False

    def _quiet(self, what: str, until_s: float) -> Operation[None]:
        """Start no other listener call and wait for the running one, which can use the whole context. Raises TimedOut."""
        self.listeners_next = False
        yield from self._await_listener(what, lambda: self.listening is None, until_s)

    def _await_listener(self, what: str, returned: Callable[[], bool], until_s: float) -> Operation[None]:
        """Wait until a listener has returned, even if the session has ended: a listener is code of the application."""
        if not returned() and not (yield Wait(returned, until_s)):
            raise TimedOut(f"{what}: a listener is still running")

    def start(self) -> None:
        """Start or resume delivery."""
        self.check()
        self.started = self.listeners_next = True
        for consumer in self.consumers:
            consumer.top_up()

    # --- closing -----------------------------------------------------------------------------------------------------------------

    def close(self, until_s: float) -> Operation[None]:
        """Flush, roll back open work, release unacknowledged messages and close. The connection ends with its last context.

        A running listener can use the whole context until it returns (Jakarta Messaging 3.1, JMSContext.close) or the timeout is reached.
        """
        if self.closing:
            return
        try:
            yield from self._quiet("close", until_s)
            if not self.over:
                yield from self.flush(until_s)
        finally:  # do not wait here: a cancelled caller would not return
            for consumer in list(self.consumers):
                consumer.accept_lazy()
                consumer.give_back()
            self.leave()
        if not self.core.sessions:
            yield from self.core.gone(until_s)

    def leave(self) -> None:
        """End the session, whether it has begun or not. The connection ends with its last session."""
        if self.closing:  # another task has closed it
            return
        self.closing = True
        if self.core.opened:
            self.engine.end()
        self._drop_answers()
        if self in self.core.sessions:
            self.core.sessions.remove(self)
        self.failed(ConnectionLost("the context was closed before the broker's answer came"))
        if not self.core.sessions:
            self.core.shut()

    def _drop_answers(self) -> None:
        """Delete the temporary queue of replies. It belongs to the connection and would remain."""
        link = None if self.answers is None else self._temporary_link(self.answers.subscription.destination)
        if link is not None:
            link.close()
            if link.gone:  # without a connection; the next one must not recreate the queue
                self.core.own.forget(link)
