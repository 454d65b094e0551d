"""What one context does: sends, receives, acknowledges, transactions. One AMQP session at a time, over all reconnects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bascule.amqp.performatives import ACCEPTED, Rejected
from bascule.client.destination import Destination, TemporaryQueue
from bascule.client.errors import ConnectionLost, IllegalState, TimedOut, TransactionRolledBack
from bascule.client.links import FAILED, UNDELIVERABLE, ConsumerState, ReceivedDelivery, Subscription
from bascule.client.message import Body, Message, SendOptions
from bascule.client.operation import Operation, Wait
from bascule.client.sends import SendCompletion, Sends, now_ms
from bascule.client.session_links import Acknowledge
from bascule.core.errors import BasculeError
from bascule.core.log import get_log
from bascule.jms.message import decode_message
from bascule.jms.sections import MalformedMessage

if TYPE_CHECKING:
    from bascule.client.core import Core

log = get_log(__name__)

#: What a browser asks for at once.
BROWSE_AHEAD: Final = 100
#: A broker may end a drain before its browser has looked at the queue again (Artemis does, rarely): the end is asked for twice.
BROWSE_ASKS: Final = 2
FOREVER: Final = float("inf")

#: Between an error of what listeners need and the next attempt: a broker may say no as often as it is asked.
LISTENERS_REST_S: Final = 1.0

ExceptionListener = Callable[[BasculeError], None]


class PendingRequest:
    """A request that waits for its answer."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.answer: Message | None = None


class ClientSession(Sends):
    """One session: what a context sends, receives and acknowledges.

    ``acknowledging`` is how a message's own ``acknowledge`` gets here, through the face's lock.
    """

    def __init__(self, core: Core, mode: Acknowledge) -> None:
        super().__init__(core, mode)
        self.acknowledging: Callable[[ReceivedDelivery], None] = self.acknowledge
        self.answers: ConsumerState | None = None  # to requests
        self.asked: list[PendingRequest] = []  # requests that wait
        self.preparing = False  # for answers
        self.listening: ConsumerState | None = None  # whose listener has a message in its hands
        self.listeners_next = True  # listeners get another message
        self._rest_until_s = 0.0  # of listeners

    # --- requests ----------------------------------------------------------------------------------------------------------------

    def request(
        self,
        destination: Destination,
        content: Message | Body,
        options: SendOptions,
        until_s: float,
        behind: Callable[[], None] | None = None,
    ) -> Operation[Message]:
        """Send a message with a temporary queue to answer to, and return the answer. Raises TimedOut, ConnectionLost.

        For ``behind`` see SendCompletion.
        """
        if self.transaction is not None:
            raise IllegalState("a request in a transaction is not sent before the commit: nobody can answer it")
        answers = yield from self._answers(until_s)
        generation = self.core.generation
        asked = PendingRequest(Message.of(content))
        asked.message.reply_to = answers.subscription.destination
        self.asked.append(asked)

        def over() -> bool:
            return asked.answer is not None or answers.available or self._ended(answers) or self.core.generation != generation

        try:
            yield from self.send(destination, asked.message, options, until_s, SendCompletion(behind=behind))
            while asked.answer is None:
                came = yield Wait(over, until_s)
                self._hand_out(answers)
                if asked.answer is not None:
                    break
                if self.core.generation != generation:
                    raise ConnectionLost("the connection was lost before the answer came, and its temporary queue with it: ask again")
                self._check_consumer(answers)
                if not came:
                    raise TimedOut(f"no answer to {asked.message.message_id} from {destination.name} in time")
            return asked.answer
        finally:
            self.asked.remove(asked)

    def _answers(self, until_s: float) -> Operation[ConsumerState]:
        """The one consumer of the answers to all requests. Nobody else wants them, so some are always asked for ahead."""
        yield from self.core.until(lambda: not self.preparing, "request", until_s)  # by another task
        if self.answers is None or self.answers.error is not None:
            self.preparing = True
            try:
                queue = TemporaryQueue("temporary")
                yield from self.temporary(queue, until_s)
                self.answers = yield from self.consumer(Subscription(queue), None, self.core.settings.prefetch or 1, until_s)
            finally:
                self.preparing = False
        return self.answers

    def _hand_out(self, answers: ConsumerState) -> None:
        """To each request its answer, whichever task finds it here; one that nobody waits for is dropped. Done with, whatever the mode."""
        while answers.available:
            arrived = answers.buffer.popleft()
            with suppress(MalformedMessage):  # rejected: the broker keeps it among the dead letters
                answer = self._read(arrived)
                if answer is not None:
                    arrived.link.settle(arrived.delivery_id, ACCEPTED)
                    asked = self._asker(answer.correlation_id)
                    if asked is not None:
                        asked.answer = answer
        answers.top_up()

    def _asker(self, correlation_id: str | bytes | None) -> PendingRequest | None:
        """Whose answer has this id. One without an id is for the only request that waits."""
        waiting = [each for each in self.asked if each.answer is None]
        if correlation_id is None:
            return waiting[0] if len(waiting) == 1 else None
        return next((each for each in waiting if correlation_id in (each.message.message_id, each.message.correlation_id)), None)

    # --- consumers ---------------------------------------------------------------------------------------------------------------

    def close_consumer(self, consumer: ConsumerState, until_s: float, *, by_listener: bool = False) -> Operation[None]:
        """Close a consumer; what of it was received and not acknowledged can still be: the link goes with the last of it.

        Returns when its listener has returned (Jakarta Messaging 3.1, JMSConsumer.close), unless that is the caller. Raises TimedOut.
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
        """The next message, None when time is up or the consumer is closed. Raises what ended the consumer."""
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
                    if not came:  # else another task was faster
                        return None

    def _await_message(self, consumer: ConsumerState, until_s: float) -> Operation[bool]:
        """Whether one came, or the end of the consumer, before time was up."""
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
        """A message if the broker has one now."""
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
        """The next message of a browser, None after the last."""
        for _ in range(BROWSE_ASKS):
            if not consumer.buffer:
                yield from self._drain(consumer, BROWSE_AHEAD, until_s)
                self._check_consumer(consumer)
        return Message.received(decode_message(consumer.buffer.popleft().payload)) if consumer.buffer else None

    def _ended(self, consumer: ConsumerState) -> bool:
        return consumer.error is not None or self.over

    def _check_consumer(self, consumer: ConsumerState) -> None:
        if consumer.closing:
            raise IllegalState("the consumer is closed")
        self.check()
        if consumer.error is not None:
            raise type(consumer.error)(*consumer.error.args)

    def _take(self, consumer: ConsumerState, outcome: Any) -> Operation[Message | None]:
        """Hand the oldest message over, acknowledged as the mode has it; it waits for nothing then.

        None where the caller is to look again: it has expired, or a transaction had to begin first, and much may have changed meanwhile.
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
        elif outcome is None:  # of a listener, which has not seen it yet
            self.unacknowledged[arrived] = consumer
        elif self.mode is Acknowledge.DUPS_OK:
            consumer.accept_lazily(arrived)
        else:
            arrived.link.settle(arrived.delivery_id, ACCEPTED)
        return message

    def _read(self, arrived: ReceivedDelivery) -> Message | None:
        """A message; None for one that has expired meanwhile. Raises MalformedMessage. Neither of them comes again."""
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
        """Messages of a consumer go to a listener from now on, or to none any more. Raises what has ended the consumer."""
        if listener is not None:
            self._check_consumer(consumer)
        consumer.listener = listener
        consumer.top_up()

    def next_for_listener(self) -> Operation[tuple[Callable[[Message], Any], Message, ReceivedDelivery] | None]:
        """The next message of any consumer that has a listener; None when the context is closed.

        Raises what ended the session, which is ``over`` then; what ended a consumer, once; else what kept the message, which waits for the
        next call. After TransactionRolledBack the next transaction has begun: what was received in the last one comes again.
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
                continue  # rejected: the broker keeps it among the dead letters
            except BasculeError as error:
                if isinstance(error, TransactionRolledBack):
                    if self.block is not None:  # another task's: the end of the block tells that one, which must not commit its second half
                        yield Wait(lambda: self.transaction is not transaction or self.over, FOREVER)  # noqa: B023
                        continue
                    self._next_transaction()
                self._rest_until_s = self.core.clock() + LISTENERS_REST_S
                raise
            if message is not None:
                self.consumers.remove(consumer)
                self.consumers.append(consumer)  # the others have their turn first
                self.listening = consumer
                return listener, message, arrived

    def listened(self, arrived: ReceivedDelivery, failed: bool) -> None:
        """A listener returned, or raised: then the message comes again, where it is not for the application to acknowledge."""
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
        """Tell the application what listeners met with, in its own code: outside the lock."""
        if on_exception is None:
            log.error("transaction of a listener failed", listeners="end" if self.over else "go on", error=error)
            return
        try:
            on_exception(error)
        except Exception:
            log.exception("on_exception failed", told=error)

    # --- acknowledging -----------------------------------------------------------------------------------------------------------

    def acknowledge(self, arrived: ReceivedDelivery | None = None) -> None:
        """Acknowledge all that was received, or with INDIVIDUAL the one given. What an earlier connection delivered comes again."""
        self.check()
        chosen = [arrived] if arrived is not None and self.mode is Acknowledge.INDIVIDUAL else list(self.unacknowledged)
        for each in chosen:
            if self.unacknowledged.pop(each, None) is not None:
                each.link.settle(each.delivery_id, ACCEPTED)
        self._detach_done()

    def recover(self, until_s: float) -> Operation[None]:
        """Have everything that was received and not acknowledged delivered again, marked."""
        self.check()
        if self.transaction is not None:
            raise IllegalState("recover() is not for transactions: roll back")
        consumers = list(self.consumers)
        try:
            yield from self._suspend(consumers, until_s)
            for each in self.unacknowledged:
                each.link.settle(each.delivery_id, FAILED)
            self.unacknowledged.clear()
            self._detach_done()
            self.engine.flush_settled()  # before new credit: the broker is to have all of them back when it delivers again
        finally:
            self._resume(consumers)

    def _detach_done(self) -> None:
        """Close the links of closed consumers whose last message is acknowledged."""
        busy = set(map(id, self.unacknowledged.values()))
        for consumer in list(self.consumers):
            if consumer.closing and consumer.link is not None and id(consumer) not in busy:
                consumer.close()

    def stop(self, until_s: float) -> Operation[None]:
        """Hand over no more messages; returns when no listener has one in its hands. Until then it has everything, answers, too."""
        self.check()
        try:
            yield from self._quiet("stop", until_s)
        finally:
            self.started = False

    def _quiet(self, what: str, until_s: float) -> Operation[None]:
        """Give listeners no other message; returns when the one at work, which may use everything, has returned. Raises TimedOut."""
        self.listeners_next = False
        yield from self._await_listener(what, lambda: self.listening is None, until_s)

    def _await_listener(self, what: str, returned: Callable[[], bool], until_s: float) -> Operation[None]:
        """Also where the session has ended: what a listener does is the application's."""
        if not returned() and not (yield Wait(returned, until_s)):
            raise TimedOut(f"{what}: a listener is still at work")

    def start(self) -> None:
        """Hand messages over (again)."""
        self.check()
        self.started = self.listeners_next = True
        for consumer in self.consumers:
            consumer.top_up()

    # --- the end -----------------------------------------------------------------------------------------------------------------

    def close(self, until_s: float) -> Operation[None]:
        """Flush, roll back what is open, give back what was not acknowledged; the connection goes with its last context.

        A listener at work has all of the context until it returns (Jakarta Messaging 3.1, JMSContext.close), or time is up.
        """
        if self.closing:
            return
        try:
            yield from self._quiet("close", until_s)
            if not self.over:
                yield from self.flush(until_s)
        finally:  # without a wait: a caller that was cancelled does not come back here
            for consumer in list(self.consumers):
                consumer.accept_lazy()
                consumer.give_back()
            self.leave()
        if not self.core.sessions:
            yield from self.core.gone(until_s)

    def leave(self) -> None:
        """End, begun or not; the connection goes with its last session."""
        if self.closing:  # by another task, meanwhile
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
        """The temporary queue of the answers to requests is the connection's: it would stay there, and nobody else knows of it."""
        link = None if self.answers is None else self._temporary_link(self.answers.subscription.destination)
        if link is not None:
            link.close()
            if link.gone:  # there is no connection now, and the next one need not make the queue again
                self.core.own.forget(link)
