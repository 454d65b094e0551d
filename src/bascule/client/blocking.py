"""The blocking API: JMSContext, JMSProducer and JMSConsumer of Jakarta Messaging 3.1.

Only one thread at a time may use a context; ``create_context`` returns another context on the same connection. A connection has one
thread for heartbeats, reconnects and completions. A context with listeners has one thread for them. Times are in seconds; the default of
``timeout_s`` is the connection's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from bascule.client.destination import Destination, Queue, TemporaryQueue, TemporaryTopic, Topic
from bascule.client.errors import IllegalState
from bascule.client.links import ConsumerState, Subscription
from bascule.client.message import Body, Message, SendOptions
from bascule.client.operation import Operation
from bascule.client.sends import AT_ITS_END, OnDone, SendCompletion
from bascule.client.session import ClientSession, ExceptionListener
from bascule.client.session_links import Acknowledge
from bascule.client.thread import JOIN_TIMEOUT_S, ConnectionThread
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.log import get_log
from bascule.threads.lasting import lasting_thread

log = get_log(__name__)
T = TypeVar("T")


class SendingContext(Protocol):
    """The part of a context that a producer uses: see Context."""

    def _send(
        self, destination: Destination, content: Message | Body, options: SendOptions, timeout_s: float | None, completion: SendCompletion
    ) -> Message: ...

    def _flush(self, timeout_s: float | None) -> None: ...


class Context:
    """JMSContext: a session on a connection of its own or a shared one. Closing the last context closes the connection."""

    def __init__(self, thread: ConnectionThread, session: ClientSession, on_exception: ExceptionListener | None) -> None:
        """Contexts are created by ``connect`` and ``create_context``."""
        self._thread = thread
        self._session = session
        self._on_exception = on_exception
        self._in_use = threading.RLock()
        self._listener_thread: threading.Thread | None = None
        session.acknowledging = lambda arrived: self._call(lambda: session.acknowledge(arrived))

    def __enter__(self) -> Self:
        """Return the context."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the context. If the block raised, errors of the close are suppressed."""
        if kind is None:
            self.close()
        else:
            with suppress(BasculeError):
                self.close()

    @property
    def client_id(self) -> str | None:
        """The client id, or None if the connection has none."""
        return self._thread.core.settings.client_id

    @property
    def acknowledge_mode(self) -> Acknowledge:
        """The acknowledgement mode."""
        return self._session.mode

    @property
    def connected(self) -> bool:
        """Whether the connection to a broker is open now."""
        return self._thread.core.up

    def create_context(self, acknowledge: Acknowledge = Acknowledge.AUTO, *, timeout_s: float | None = None) -> Context:
        """Return a new context on the same connection, for another thread."""
        session = self._thread.run(self._thread.core.open_session(acknowledge, self._until(timeout_s)))
        return Context(self._thread, session, self._on_exception)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for a running listener and for pending sends, roll back open work, and close. A listener must not call this.

        Raises TimedOut after ``timeout_s`` seconds; the context is closed even then, and calls of a listener that still runs raise
        IllegalState.
        """
        self._not_by_listener("close")
        try:
            self._thread.run(self._session.close(self._until(timeout_s)))
        finally:
            if not self._thread.core.sessions:
                self._thread.stop()
            if self._listener_thread is not None and self._session.listening is None:
                self._listener_thread.join(JOIN_TIMEOUT_S)

    # --- sending -----------------------------------------------------------------------------------------------------------------

    def producer(
        self,
        destination: Destination | None = None,
        *,
        persistent: bool = True,
        priority: int = 4,
        time_to_live_s: float = 0.0,
        delivery_delay_s: float = 0.0,
    ) -> Producer:
        """Return a producer. Without ``destination``, each send names one. The options apply to messages that do not set them."""
        return Producer(self, destination, SendOptions(persistent, priority, time_to_live_s, delivery_delay_s))

    def send(self, destination: Destination, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Send one message, as ``producer().send`` does."""
        return self.producer(destination).send(content, timeout_s=timeout_s)

    def request(self, destination: Destination, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Send a message and return the reply, received from a temporary queue. Raises TimedOut, ConnectionLost."""
        return self._run(self._session.request(destination, content, SendOptions(), self._until(timeout_s)))

    def reply(self, request: Message, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Reply to a received message. Raises InvalidDestination if the message has no ``reply_to``."""
        return self.send(*request.answer(content), timeout_s=timeout_s)

    # --- receiving ---------------------------------------------------------------------------------------------------------------

    def consumer(
        self,
        destination: Destination,
        *,
        selector: str = "",
        no_local: bool = False,
        prefetch: int | None = None,
        timeout_s: float | None = None,
    ) -> Consumer:
        """Return a consumer of a queue, or a nondurable consumer of a topic. Raises InvalidDestination, InvalidSelector, Refused."""
        return self._consumer(Subscription(destination, selector, no_local), None, prefetch, timeout_s)

    def durable_consumer(
        self,
        topic: Topic,
        name: str,
        *,
        selector: str = "",
        no_local: bool = False,
        prefetch: int | None = None,
        timeout_s: float | None = None,
    ) -> Consumer:
        """Return the only consumer of an unshared durable subscription, which keeps messages while it is offline. Needs a client id."""
        return self._consumer(Subscription(topic, selector, no_local, durable=True), name, prefetch, timeout_s)

    def shared_consumer(
        self, topic: Topic, name: str, *, selector: str = "", prefetch: int | None = None, timeout_s: float | None = None
    ) -> Consumer:
        """Return a consumer of a shared subscription, which exists while it has consumers."""
        return self._consumer(Subscription(topic, selector, shared=True), name, prefetch, timeout_s)

    def shared_durable_consumer(
        self, topic: Topic, name: str, *, selector: str = "", prefetch: int | None = None, timeout_s: float | None = None
    ) -> Consumer:
        """Return a consumer of a shared durable subscription."""
        return self._consumer(Subscription(topic, selector, durable=True, shared=True), name, prefetch, timeout_s)

    def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> Consumer:
        # No check for the context's thread: another thread may create consumers to set their listeners.
        return Consumer(self, self._thread.run(self._session.consumer(wanted, name, prefetch, self._until(timeout_s))))

    def unsubscribe(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a durable subscription. Raises InvalidDestination if it does not exist, Refused if it has a consumer."""
        self._run(self._session.unsubscribe(name, self._until(timeout_s)))

    def browse(self, queue: Queue, *, selector: str = "", timeout_s: float | None = None) -> Iterator[Message]:
        """Yield the messages that wait in a queue, in order, without removing them."""
        browser = self._consumer(Subscription(queue, selector, browse=True), None, 0, timeout_s)
        with browser:
            while (message := self._run(self._session.browse(browser.state, self._until(timeout_s)))) is not None:
                yield message

    def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """Create a temporary queue, which is deleted with the connection."""
        queue = TemporaryQueue("temporary")
        self._run(self._session.temporary(queue, self._until(timeout_s)))
        return queue

    def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """Create a temporary topic, which is deleted with the connection."""
        topic = TemporaryTopic("temporary")
        self._run(self._session.temporary(topic, self._until(timeout_s)))
        return topic

    def delete(self, destination: TemporaryQueue | TemporaryTopic, *, timeout_s: float | None = None) -> None:
        """Delete a temporary destination before its connection closes. Raises IllegalState if it has consumers."""
        self._run(self._session.delete_temporary(destination, self._until(timeout_s)))

    def start(self) -> None:
        """Resume delivery after ``stop``."""
        self._thread.call(self._session.start)

    def stop(self, *, timeout_s: float | None = None) -> None:
        """Stop delivery until ``start``, and wait for a running listener. A listener must not call this."""
        self._not_by_listener("stop")
        self._thread.run(self._session.stop(self._until(timeout_s)))

    # --- acknowledging, transactions ---------------------------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """Acknowledge all messages received so far, in mode CLIENT or INDIVIDUAL."""
        self._call(self._session.acknowledge)

    def recover(self, *, timeout_s: float | None = None) -> None:
        """Redeliver all received messages that are not acknowledged, marked as redelivered."""
        self._run(self._session.recover(self._until(timeout_s)))

    def commit(self, *, timeout_s: float | None = None) -> None:
        """Commit the messages sent and received. Raises TransactionRolledBack, TransactionInDoubt."""
        self._run(self._session.commit(self._until(timeout_s)))

    def rollback(self, *, timeout_s: float | None = None) -> None:
        """Roll back the messages sent and received; the received messages are redelivered."""
        self._run(self._session.rollback(self._until(timeout_s)))

    @contextmanager
    def transaction(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Run a block as a transaction: commit at its end, or roll back if it raises.

        Raises TransactionRolledBack or TransactionInDoubt at the end of the block, IllegalState if a transaction is open.
        """
        block = self._call(self._session.begin)
        try:
            try:
                yield
            except BaseException:
                with suppress(BasculeError):  # keep the error of the block; detaching the coordinator link rolls back as well
                    self._run(self._session.end(block, self._until(timeout_s), failed=True))
                raise
            self._run(self._session.end(block, self._until(timeout_s), failed=False))
        finally:  # the end of the block is refused while another thread is within a call
            self._thread.call(lambda: self._session.leave_block(block))

    # --- internal ----------------------------------------------------------------------------------------------------------------

    def _until(self, timeout_s: float | None) -> float:
        core = self._thread.core
        return core.clock() + (core.settings.timeout_s if timeout_s is None else timeout_s)

    def _run(self, operation: Operation[T]) -> T:
        with self._one_thread():
            return self._thread.run(operation)

    def _send(
        self, destination: Destination, content: Message | Body, options: SendOptions, timeout_s: float | None, completion: SendCompletion
    ) -> Message:
        return self._run(self._session.send(destination, content, options, self._until(timeout_s), completion))

    def _flush(self, timeout_s: float | None) -> None:
        self._run(self._session.flush(self._until(timeout_s)))

    def _call(self, function: Callable[[], T]) -> T:
        with self._one_thread():
            return self._thread.call(function)

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        """Guard a call: only one thread at a time may use a context (Jakarta Messaging 3.1, section 2.14). Raises IllegalState."""
        if self._listener_thread not in (None, threading.current_thread()):
            raise IllegalState("the context has listeners, so only they may use it; use another one, made by create_context()")
        if not self._in_use.acquire(blocking=False):
            raise IllegalState("another thread is using the context; use another one, made by create_context()")
        try:
            yield
        finally:
            self._in_use.release()

    @property
    def _in_listener(self) -> bool:
        return threading.current_thread() is self._listener_thread

    def _not_by_listener(self, what: str) -> None:
        """Raise IllegalState within a listener. Jakarta Messaging 3.1, sections 6.1.5 and 6.1.8, allow the call to fail."""
        if self._in_listener:
            raise IllegalState(f"a listener cannot {what} its own context, because {what}() waits for it; use another thread")

    def _listen(self) -> None:
        if self._listener_thread is None:
            failed = partial(self._session.listening_failed, self._thread.call, self._on_exception)
            self._listener_thread = lasting_thread(self._serve_listeners, "bascule-listener", on_failure=failed)
            self._listener_thread.start()

    def _serve_listeners(self) -> None:
        session = self._session
        while True:
            try:
                found = self._thread.run(session.next_for_listener())
            except BasculeError as error:
                if not session.closing:
                    session.tell(self._on_exception, error)
                if session.over:
                    return
                continue
            if found is None:
                return
            listener, message, arrived = found
            failed = True
            try:
                listener(message)
                failed = False
            except BaseException:  # SystemExit would end the listener thread silently
                log.exception("listener failed", message=message.message_id)
            finally:
                self._thread.call(lambda: session.listened(arrived, failed))  # noqa: B023


class Producer:
    """JMSProducer: sends messages."""

    def __init__(self, context: SendingContext, destination: Destination | None, options: SendOptions) -> None:
        """Create a producer; applications call Context.producer."""
        self._context = context
        self._destination = destination
        self._options = options

    def send(self, content: Message | Body, *, to: Destination | None = None, timeout_s: float | None = None) -> Message:
        """Send a message and return it, with its id, when the broker has stored it; in a transaction, return at once.

        With a failover URL, a send whose answer was lost is repeated under the same id until ``timeout_s`` seconds have passed. Raises
        MessageRefused, InvalidDestination, TimedOut, ConnectionLost.
        """
        return self._send(content, to, timeout_s, AT_ITS_END)

    def repeat(self, message: Message, *, timeout_s: float | None = None) -> Message:
        """Send a message in doubt again under the same id. A broker that has stored the message discards the duplicate."""
        return self._send(message, message.destination, timeout_s, SendCompletion(repeat=True))

    def send_async(
        self, content: Message | Body, *, to: Destination | None = None, on_done: OnDone | None = None, timeout_s: float | None = None
    ) -> Future[Message]:
        """Send a message; the future completes when the broker has stored it. Waits only if too many sends are unanswered.

        ``on_done(message, error)`` is called on the connection's thread and must not use the context.
        """
        future: Future[Message] = Future()
        future.set_running_or_notify_cancel()

        def done(message: Message, error: BasculeError | None) -> None:
            if error is None:
                future.set_result(message)
            else:
                future.set_exception(error)
            if on_done is not None:
                on_done(message, error)

        self._send(content, to, timeout_s, SendCompletion(wait=False, on_done=done))
        return future

    def send_many(self, contents: Iterable[Message | Body], *, to: Destination | None = None, timeout_s: float | None = None) -> int:
        """Send messages without waiting for each; return their number when the broker has stored all. Raises the first refusal."""
        refusals: list[BasculeError] = []
        count = 0
        for content in contents:
            self._send(content, to, timeout_s, SendCompletion(wait=False, refusals=refusals))
            count += 1
            if refusals:
                break
        self.flush(timeout_s=timeout_s)
        if refusals:
            raise refusals[0]
        return count

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until the broker has answered every send of the context."""
        self._context._flush(timeout_s)

    def _send(self, content: Message | Body, to: Destination | None, timeout_s: float | None, completion: SendCompletion) -> Message:
        destination = to or self._destination
        if destination is None:
            raise InvalidInput("the producer has no destination; name one in the call, as in send(..., to=Queue(...))")
        return self._context._send(destination, content, self._options, timeout_s, completion)


class Consumer:
    """JMSConsumer: receives messages, by calls or by a listener."""

    def __init__(self, context: Context, state: ConsumerState) -> None:
        """Consumers are created by Context.consumer and the similar methods."""
        self._context = context
        self.state = state

    def __enter__(self) -> Self:
        """Return the consumer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the consumer."""
        with suppress(BasculeError):
            self.close()

    def __iter__(self) -> Iterator[Message]:
        """Yield messages without end; see ``messages`` for an iterator with a timeout."""
        return self.messages(math.inf)

    @property
    def selector(self) -> str:
        """The selector."""
        return self.state.subscription.selector

    @property
    def prefetch(self) -> int:
        """The number of messages to prefetch; with 0, each receive requests one message."""
        return self.state.prefetch

    @prefetch.setter
    def prefetch(self, count: int) -> None:
        self.state.prefetch = count

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None after ``timeout_s`` seconds or if the consumer was closed. ``math.inf`` waits without limit.

        Before it returns None, the client asks a connected broker once more, which may take the connection's timeout.

        Raises TimedOut if the broker does not answer, ConnectionLost, InvalidDestination if the broker deleted the destination, and Refused
        if the broker ended the consumer for another reason.
        """
        self._only_without_listener()
        return self._context._run(self._context._session.receive(self.state, self._context._until(timeout_s)))

    def receive_no_wait(self, *, timeout_s: float | None = None) -> Message | None:
        """Return a message if the broker has one now. The request to the broker takes at most ``timeout_s`` seconds."""
        self._only_without_listener()
        return self._context._run(self._context._session.receive_no_wait(self.state, self._context._until(timeout_s)))

    def messages(self, timeout_s: float | None = None) -> Iterator[Message]:
        """Yield messages until none arrives for ``timeout_s`` seconds."""
        while (message := self.receive(timeout_s)) is not None:
            yield message

    @property
    def listener(self) -> Callable[[Message], Any] | None:
        """The function called with each message, on the context's listener thread. In mode AUTO, an error causes redelivery.

        If the broker ends the consumer, for example because its queue was deleted, ``on_exception`` gets the error once. After that,
        setting a listener raises the error.
        """
        return self.state.listener

    @listener.setter
    def listener(self, listener: Callable[[Message], Any] | None) -> None:
        context = self._context
        context._thread.call(lambda: context._session.listen(self.state, listener))
        if listener is not None:
            context._listen()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Close the consumer and wait for its running listener, unless the listener is the caller.

        A durable subscription remains until ``unsubscribe``. Raises TimedOut after ``timeout_s`` seconds; the consumer is closed even then.
        """
        context = self._context
        context._thread.run(context._session.close_consumer(self.state, context._until(timeout_s), by_listener=context._in_listener))

    def _only_without_listener(self) -> None:
        if self.state.listener is not None:
            raise IllegalState("the consumer has a listener, which gets its messages; set listener = None before receive()")
