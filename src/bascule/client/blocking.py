"""The blocking face: JMSContext, JMSProducer and JMSConsumer of Jakarta Messaging 3.1, in Python's ways.

A context is for one thread at a time; ``create_context`` makes another on the same connection. The connection has a thread of its own
for heartbeats, reconnects and completions, and each context with listeners one for them. Times are in seconds; a ``timeout_s`` that is
not given is the connection's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Self, TypeVar

from bascule.client.destination import Destination, Queue, TemporaryQueue, TemporaryTopic, Topic
from bascule.client.errors import ConnectionLost, IllegalState
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
    """What a producer needs of its context: see Context."""

    def _send(
        self, destination: Destination, content: Message | Body, options: SendOptions, timeout_s: float | None, completion: SendCompletion
    ) -> Message: ...

    def _flush(self, timeout_s: float | None) -> None: ...


class Context:
    """JMSContext: a connection, or a part in one, and a session on it. Closing the last context closes the connection."""

    def __init__(self, thread: ConnectionThread, session: ClientSession, on_exception: ExceptionListener | None) -> None:
        """Made by ``connect`` and ``create_context``."""
        self._thread = thread
        self._session = session
        self._on_exception = on_exception
        self._in_use = threading.RLock()
        self._listener_thread: threading.Thread | None = None
        session.acknowledging = lambda arrived: self._call(lambda: session.acknowledge(arrived))

    def __enter__(self) -> Self:
        """The context."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close. What went wrong before is not hidden by what closing says."""
        if kind is None:
            self.close()
        else:
            with suppress(BasculeError):
                self.close()

    @property
    def client_id(self) -> str | None:
        """The client id, where the connection was given one."""
        return self._thread.core.settings.client_id

    @property
    def acknowledge_mode(self) -> Acknowledge:
        """When messages are acknowledged."""
        return self._session.mode

    @property
    def connected(self) -> bool:
        """Whether there is a connection to a broker at this moment."""
        return self._thread.core.up

    def create_context(self, acknowledge: Acknowledge = Acknowledge.AUTO, *, timeout_s: float | None = None) -> Context:
        """Another context on this connection, for another thread."""
        session = self._thread.run(self._thread.core.open_session(acknowledge, self._until(timeout_s)))
        return Context(self._thread, session, self._on_exception)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for a listener at work and for what was sent, roll back what is open, close. From any thread but a listener's.

        Raises TimedOut; it is closed then, too: a listener that is still at work meets with IllegalState.
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
        """A producer for one destination, or for one that each send names; the rest is for messages that do not say otherwise."""
        return Producer(self, destination, SendOptions(persistent, priority, time_to_live_s, delivery_delay_s))

    def send(self, destination: Destination, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Send one message, as ``producer().send`` does."""
        return self.producer(destination).send(content, timeout_s=timeout_s)

    def request(self, destination: Destination, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Send a message and return the answer to it, which comes by a temporary queue. Raises TimedOut, ConnectionLost."""
        return self._run(self._session.request(destination, content, SendOptions(), self._until(timeout_s)))

    def reply(self, request: Message, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Answer a message that was received. Raises InvalidDestination where it does not say where to."""
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
        """A consumer of a queue, or of a topic while it lives. Raises InvalidDestination, InvalidSelector, Refused."""
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
        """The one consumer of a durable subscription, which gathers messages while nobody is there. Needs a client id."""
        return self._consumer(Subscription(topic, selector, no_local, durable=True), name, prefetch, timeout_s)

    def shared_consumer(
        self, topic: Topic, name: str, *, selector: str = "", prefetch: int | None = None, timeout_s: float | None = None
    ) -> Consumer:
        """One of the consumers of a subscription, which lasts while it has any."""
        return self._consumer(Subscription(topic, selector, shared=True), name, prefetch, timeout_s)

    def shared_durable_consumer(
        self, topic: Topic, name: str, *, selector: str = "", prefetch: int | None = None, timeout_s: float | None = None
    ) -> Consumer:
        """One of the consumers of a durable subscription."""
        return self._consumer(Subscription(topic, selector, durable=True, shared=True), name, prefetch, timeout_s)

    def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> Consumer:
        # Not kept to the context's thread: listeners are set up from outside theirs.
        return Consumer(self, self._thread.run(self._session.consumer(wanted, name, prefetch, self._until(timeout_s))))

    def unsubscribe(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a durable subscription. Raises InvalidDestination where there is none, Refused where it has a consumer."""
        self._run(self._session.unsubscribe(name, self._until(timeout_s)))

    def browse(self, queue: Queue, *, selector: str = "", timeout_s: float | None = None) -> Iterator[Message]:
        """The messages that wait in a queue now, in order; they stay there."""
        browser = self._consumer(Subscription(queue, selector, browse=True), None, 0, timeout_s)
        with browser:
            while (message := self._run(self._session.browse(browser.state, self._until(timeout_s)))) is not None:
                yield message

    def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """A queue that goes with this connection."""
        queue = TemporaryQueue("temporary")
        self._run(self._session.temporary(queue, self._until(timeout_s)))
        return queue

    def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """A topic that goes with this connection."""
        topic = TemporaryTopic("temporary")
        self._run(self._session.temporary(topic, self._until(timeout_s)))
        return topic

    def delete(self, destination: TemporaryQueue | TemporaryTopic, *, timeout_s: float | None = None) -> None:
        """Delete a temporary destination before its connection ends. Raises IllegalState while it has consumers."""
        self._run(self._session.delete_temporary(destination, self._until(timeout_s)))

    def start(self) -> None:
        """Hand messages over again after ``stop``."""
        self._thread.call(self._session.start)

    def stop(self, *, timeout_s: float | None = None) -> None:
        """Hand over no messages until ``start``; returns when no listener is at work. From any thread but a listener's."""
        self._not_by_listener("stop")
        self._thread.run(self._session.stop(self._until(timeout_s)))

    # --- acknowledging, transactions ---------------------------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """CLIENT, INDIVIDUAL: acknowledge every message received so far."""
        self._call(self._session.acknowledge)

    def recover(self, *, timeout_s: float | None = None) -> None:
        """Have every message that was received and not acknowledged delivered again, marked as redelivered."""
        self._run(self._session.recover(self._until(timeout_s)))

    def commit(self, *, timeout_s: float | None = None) -> None:
        """Commit what was sent and received. Raises TransactionRolledBack, TransactionInDoubt."""
        self._run(self._session.commit(self._until(timeout_s)))

    def rollback(self, *, timeout_s: float | None = None) -> None:
        """Undo what was sent and received; what was received comes again."""
        self._run(self._session.rollback(self._until(timeout_s)))

    @contextmanager
    def transaction(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """A block whose sends and receives happen together at its end, or not at all where it raises.

        Raises TransactionRolledBack, TransactionInDoubt at its end; IllegalState within another.
        """
        block = self._call(self._session.begin)
        try:
            try:
                yield
            except BaseException:
                with suppress(BasculeError):  # what went wrong in the block is what counts; the end of its link rolls back, too
                    self._run(self._session.end(block, self._until(timeout_s), failed=True))
                raise
            self._run(self._session.end(block, self._until(timeout_s), failed=False))
        finally:  # another thread may be within a call: then the end of the block was refused
            self._thread.call(lambda: self._session.leave_block(block))

    # --- inside ------------------------------------------------------------------------------------------------------------------

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
        """A context is for one thread (Jakarta Messaging 3.1, section 2.14). Raises IllegalState."""
        if self._listener_thread not in (None, threading.current_thread()):
            raise IllegalState("this context has listeners and is theirs: use another one here, by create_context()")
        if not self._in_use.acquire(blocking=False):
            raise IllegalState("this context is in use by another thread: use another one here, by create_context()")
        try:
            yield
        finally:
            self._in_use.release()

    @property
    def _in_listener(self) -> bool:
        return threading.current_thread() is self._listener_thread

    def _not_by_listener(self, what: str) -> None:
        """Jakarta Messaging 3.1, sections 6.1.5 and 6.1.8 leave it to fail or to succeed."""
        if self._in_listener:
            raise IllegalState(f"a listener cannot {what} its own context: it would wait for itself")

    def _listen(self) -> None:
        if self._listener_thread is None:
            self._listener_thread = lasting_thread(self._serve_listeners, "bascule-listener", on_failure=self._listening_failed)
            self._listener_thread.start()

    def _listening_failed(self, error: BaseException) -> None:
        """No listener of this context gets a message any more: the application is told, and the connection ends."""
        failure = ConnectionLost(f"the thread of the listeners failed: {error!r}")
        self._thread.call(lambda: self._thread.core.fail(failure))
        self._session.tell(self._on_exception, failure)

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
            except BaseException:  # SystemExit would end this thread, without a word
                log.exception("listener failed", message=message.message_id)
            finally:
                self._thread.call(lambda: session.listened(arrived, failed))  # noqa: B023


class Producer:
    """JMSProducer: sends messages."""

    def __init__(self, context: SendingContext, destination: Destination | None, options: SendOptions) -> None:
        """Made by Context.producer."""
        self._context = context
        self._destination = destination
        self._options = options

    def send(self, content: Message | Body, *, to: Destination | None = None, timeout_s: float | None = None) -> Message:
        """Send, and return when the broker has the message (in a transaction: at once). Gives the message, with its id.

        Raises MessageRefused, InvalidDestination, TimedOut, ConnectionLost. Over a failover URL a send that lost its answer is repeated
        under the same id until ``timeout_s`` is over.
        """
        return self._send(content, to, timeout_s, AT_ITS_END)

    def repeat(self, message: Message, *, timeout_s: float | None = None) -> Message:
        """Send a message again whose fate is not known, under the same id: a broker that has it takes it for what it is."""
        return self._send(message, message.destination, timeout_s, SendCompletion(repeat=True))

    def send_async(
        self, content: Message | Body, *, to: Destination | None = None, on_done: OnDone | None = None, timeout_s: float | None = None
    ) -> Future[Message]:
        """Send; the future is done when the broker has the message. Waits only where too many are on their way.

        ``on_done(message, error)`` is called on the connection's thread: it may not use the context.
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
        """Send one after the other without waiting for each; returns how many when the broker has all. Raises the first refusal."""
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
        """Return when everything that the context sent has its answer."""
        self._context._flush(timeout_s)

    def _send(self, content: Message | Body, to: Destination | None, timeout_s: float | None, completion: SendCompletion) -> Message:
        destination = to or self._destination
        if destination is None:
            raise InvalidInput("this producer has no destination of its own: send(..., to=Queue(...))")
        return self._context._send(destination, content, self._options, timeout_s, completion)


class Consumer:
    """JMSConsumer: receives messages, one after the other or by a listener."""

    def __init__(self, context: Context, state: ConsumerState) -> None:
        """Made by Context.consumer and its kin."""
        self._context = context
        self.state = state

    def __enter__(self) -> Self:
        """The consumer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        with suppress(BasculeError):
            self.close()

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come, for ever; ``messages`` ends."""
        return self.messages(math.inf)

    @property
    def selector(self) -> str:
        """The selector."""
        return self.state.subscription.selector

    @property
    def prefetch(self) -> int:
        """How many messages are asked for ahead; 0: each when it is waited for."""
        return self.state.prefetch

    @prefetch.setter
    def prefetch(self, count: int) -> None:
        self.state.prefetch = count

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when there was none in time, or the consumer was closed. ``math.inf`` waits for ever.

        A broker that is connected is asked once more before None is said, which may take the connection's time-out.

        Raises TimedOut where it does not answer that, ConnectionLost, and what the broker has ended the consumer with: InvalidDestination
        where it has deleted what that consumes from, else Refused.
        """
        self._only_without_listener()
        return self._context._run(self._context._session.receive(self.state, self._context._until(timeout_s)))

    def receive_no_wait(self, *, timeout_s: float | None = None) -> Message | None:
        """A message if the broker has one now: it is asked, which may take ``timeout_s``."""
        self._only_without_listener()
        return self._context._run(self._context._session.receive_no_wait(self.state, self._context._until(timeout_s)))

    def messages(self, timeout_s: float | None = None) -> Iterator[Message]:
        """Messages until none comes for ``timeout_s``."""
        while (message := self.receive(timeout_s)) is not None:
            yield message

    @property
    def listener(self) -> Callable[[Message], Any] | None:
        """Called with each message, on the context's own listener thread. AUTO: a message on which it raises comes again.

        Where the broker ends the consumer (its queue is deleted, say), ``on_exception`` is told why, once; to set one then raises it.
        """
        return self.state.listener

    @listener.setter
    def listener(self, listener: Callable[[Message], Any] | None) -> None:
        context = self._context
        context._thread.call(lambda: context._session.listen(self.state, listener))
        if listener is not None:
            context._listen()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Close; returns when its listener, unless that calls this, has returned. A durable subscription stays, ``unsubscribe`` deletes it.

        Raises TimedOut; it is closed then, too.
        """
        context = self._context
        context._thread.run(context._session.close_consumer(self.state, context._until(timeout_s), by_listener=context._in_listener))

    def _only_without_listener(self) -> None:
        if self.state.listener is not None:
            raise IllegalState("this consumer has a listener: its messages go there")
