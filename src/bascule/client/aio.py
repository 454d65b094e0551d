"""The asyncio API: contexts, producers and consumers that run on the application's event loop.

A context belongs to the event loop that created it. Several tasks may share a context, but only one task at a time may use its transaction.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from ssl import SSLContext
from typing import Any, Protocol, Self, TypeVar

from bascule.client.core import Core
from bascule.client.destination import Destination, Queue, TemporaryQueue, TemporaryTopic, Topic
from bascule.client.errors import IllegalState
from bascule.client.links import ConsumerState, Subscription
from bascule.client.message import Body, Message, SendOptions
from bascule.client.operation import Operation, Wait
from bascule.client.pump import Pump
from bascule.client.sends import AT_ITS_END, OnDone, SendCompletion
from bascule.client.session import ClientSession, ExceptionListener
from bascule.client.session_links import Acknowledge
from bascule.client.thread import JOIN_TIMEOUT_S
from bascule.client.url import Plan
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.log import get_log
from bascule.threads.lasting import lasting_task

log = get_log(__name__)
T = TypeVar("T")


class Runner(Protocol):
    """Runs the operations of asyncio contexts. ConnectionTask implements it."""

    @property
    def core(self) -> Core:
        """The connection."""

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation in this task."""

    def call(self, function: Callable[[], T]) -> T:
        """Call a function that does not wait."""

    async def stop(self) -> None:
        """Close the connection."""


class ConnectionTask:
    """The task of a connection. It runs the pump of the core; operations run in the tasks of the application."""

    def __init__(self, core: Core, plan: Plan, tls: SSLContext | None) -> None:
        """Start the task on the running event loop."""
        self.core = core
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[bool], Wait] = {}
        self._pump = Pump(core, plan, tls, nullcontext(), self._changed)
        self._task = self._loop.create_task(self._pump.run())

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation in this task."""
        if asyncio.get_running_loop() is not self._loop:
            raise IllegalState("the context belongs to another event loop; use it on the loop that created it")
        try:
            wait = next(operation)
            while True:
                self._stepped()
                wait = operation.send(await self._wait(wait))
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            operation.close()
            self._stepped()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function that does not wait."""
        try:
            return function()
        finally:
            self._stepped()

    def _stepped(self) -> None:
        """Write pending bytes and wake the waiting tasks after a step of an operation."""
        self._pump.flush()
        self._changed()

    async def _wait(self, wait: Wait) -> bool:
        if wait.condition():
            return True
        future: asyncio.Future[bool] = self._loop.create_future()
        self._waiting[future] = wait
        try:
            async with asyncio.timeout(None if wait.until_s == math.inf else max(wait.until_s - self.core.clock(), 0.0)):
                return await future
        except TimeoutError:
            return wait.condition()
        finally:
            del self._waiting[future]

    def _changed(self) -> None:
        for future, wait in self._waiting.items():
            if not future.done() and wait.condition():
                future.set_result(True)

    async def stop(self) -> None:
        """End the task and close its socket."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


class AsyncContext:
    """JMSContext for asyncio: a session on a connection of its own or a shared one. Closing the last context closes the connection."""

    def __init__(self, task: Runner, session: ClientSession, on_exception: ExceptionListener | None) -> None:
        """Contexts are created by ``connect_async`` and ``create_context``."""
        self._task = task
        self._session = session
        self._on_exception = on_exception
        self._listener_task: asyncio.Task[None] | None = None
        session.acknowledging = lambda arrived: task.call(lambda: session.acknowledge(arrived))

    async def __aenter__(self) -> Self:
        """Return the context."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the context. If the block raised, errors of the close are suppressed."""
        if kind is None:
            await self.close()
        else:
            with suppress(BasculeError):
                await self.close()

    @property
    def client_id(self) -> str | None:
        """The client id, or None if the connection has none."""
        return self._task.core.settings.client_id

    @property
    def acknowledge_mode(self) -> Acknowledge:
        """The acknowledgement mode."""
        return self._session.mode

    @property
    def connected(self) -> bool:
        """Whether the connection to a broker is open now."""
        return self._task.core.up

    async def create_context(self, acknowledge: Acknowledge = Acknowledge.AUTO, *, timeout_s: float | None = None) -> AsyncContext:
        """Return a new context on the same connection."""
        session = await self._run(self._task.core.open_session(acknowledge, self._until(timeout_s)))
        return AsyncContext(self._task, session, self._on_exception)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for a running listener and for pending sends, roll back open work, and close. See Context.close."""
        self._not_by_listener("close")
        try:
            await self._run(self._session.close(self._until(timeout_s)))
        finally:
            try:
                if self._listener_task is not None and self._session.listening is None:
                    await asyncio.wait([self._listener_task], timeout=JOIN_TIMEOUT_S)
            finally:
                if not self._task.core.sessions:
                    await self._task.stop()

    # --- sending -----------------------------------------------------------------------------------------------------------------

    def producer(
        self,
        destination: Destination | None = None,
        *,
        persistent: bool = True,
        priority: int = 4,
        time_to_live_s: float = 0.0,
        delivery_delay_s: float = 0.0,
    ) -> AsyncProducer:
        """Return a producer. Without ``destination``, each send names one. The options apply to messages that do not set them."""
        return AsyncProducer(self, destination, SendOptions(persistent, priority, time_to_live_s, delivery_delay_s))

    async def send(self, destination: Destination, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Send one message, as ``producer().send`` does."""
        return await self.producer(destination).send(content, timeout_s=timeout_s)

    async def request(self, destination: Destination, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Send a message and return the reply, received from a temporary queue. Raises TimedOut, ConnectionLost."""
        return await self._run(self._session.request(destination, content, SendOptions(), self._until(timeout_s)))

    async def reply(self, request: Message, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Reply to a received message. Raises InvalidDestination if the message has no ``reply_to``."""
        return await self.send(*request.answer(content), timeout_s=timeout_s)

    # --- receiving ---------------------------------------------------------------------------------------------------------------

    async def consumer(
        self,
        destination: Destination,
        *,
        selector: str = "",
        no_local: bool = False,
        prefetch: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncConsumer:
        """Return a consumer of a queue, or a nondurable consumer of a topic. Raises InvalidDestination, InvalidSelector, Refused."""
        return await self._consumer(Subscription(destination, selector, no_local), None, prefetch, timeout_s)

    async def durable_consumer(
        self,
        topic: Topic,
        name: str,
        *,
        selector: str = "",
        no_local: bool = False,
        prefetch: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncConsumer:
        """Return the only consumer of an unshared durable subscription, which keeps messages while it is offline. Needs a client id."""
        return await self._consumer(Subscription(topic, selector, no_local, durable=True), name, prefetch, timeout_s)

    async def shared_consumer(
        self, topic: Topic, name: str, *, selector: str = "", prefetch: int | None = None, timeout_s: float | None = None
    ) -> AsyncConsumer:
        """Return a consumer of a shared subscription, which exists while it has consumers."""
        return await self._consumer(Subscription(topic, selector, shared=True), name, prefetch, timeout_s)

    async def shared_durable_consumer(
        self, topic: Topic, name: str, *, selector: str = "", prefetch: int | None = None, timeout_s: float | None = None
    ) -> AsyncConsumer:
        """Return a consumer of a shared durable subscription."""
        return await self._consumer(Subscription(topic, selector, durable=True, shared=True), name, prefetch, timeout_s)

    async def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> AsyncConsumer:
        return AsyncConsumer(self, await self._run(self._session.consumer(wanted, name, prefetch, self._until(timeout_s))))

    async def unsubscribe(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a durable subscription. Raises InvalidDestination if it does not exist, Refused if it has a consumer."""
        await self._run(self._session.unsubscribe(name, self._until(timeout_s)))

    async def browse(self, queue: Queue, *, selector: str = "", timeout_s: float | None = None) -> AsyncIterator[Message]:
        """Yield the messages that wait in a queue, in order, without removing them."""
        browser = await self._consumer(Subscription(queue, selector, browse=True), None, 0, timeout_s)
        async with browser:
            while (message := await self._run(self._session.browse(browser.state, self._until(timeout_s)))) is not None:
                yield message

    async def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """Create a temporary queue, which is deleted with the connection."""
        queue = TemporaryQueue("temporary")
        await self._run(self._session.temporary(queue, self._until(timeout_s)))
        return queue

    async def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """Create a temporary topic, which is deleted with the connection."""
        topic = TemporaryTopic("temporary")
        await self._run(self._session.temporary(topic, self._until(timeout_s)))
        return topic

    async def delete(self, destination: TemporaryQueue | TemporaryTopic, *, timeout_s: float | None = None) -> None:
        """Delete a temporary destination before its connection closes. Raises IllegalState if it has consumers."""
        await self._run(self._session.delete_temporary(destination, self._until(timeout_s)))

    def start(self) -> None:
        """Resume delivery after ``stop``."""
        self._task.call(self._session.start)

    async def stop(self, *, timeout_s: float | None = None) -> None:
        """Stop delivery until ``start``, and wait for a running listener. A listener must not call this."""
        self._not_by_listener("stop")
        await self._run(self._session.stop(self._until(timeout_s)))

    # --- acknowledging, transactions ---------------------------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """Acknowledge all messages received so far, in mode CLIENT or INDIVIDUAL."""
        self._task.call(self._session.acknowledge)

    async def recover(self, *, timeout_s: float | None = None) -> None:
        """Redeliver all received messages that are not acknowledged, marked as redelivered."""
        await self._run(self._session.recover(self._until(timeout_s)))

    async def commit(self, *, timeout_s: float | None = None) -> None:
        """Commit the messages sent and received. Raises TransactionRolledBack, TransactionInDoubt."""
        await self._run(self._session.commit(self._until(timeout_s)))

    async def rollback(self, *, timeout_s: float | None = None) -> None:
        """Roll back the messages sent and received; the received messages are redelivered."""
        await self._run(self._session.rollback(self._until(timeout_s)))

    @asynccontextmanager
    async def transaction(self, *, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Run a block as a transaction: commit at its end, or roll back if it raises.

        Raises TransactionRolledBack or TransactionInDoubt at the end of the block, IllegalState if a transaction is open.
        """
        block = self._task.call(self._session.begin)
        try:
            yield
        except BaseException:
            with suppress(BasculeError):  # keep the error of the block; detaching the coordinator link rolls back as well
                await self._run(self._session.end(block, self._until(timeout_s), failed=True))
            raise
        await self._run(self._session.end(block, self._until(timeout_s), failed=False))

    # --- internal ----------------------------------------------------------------------------------------------------------------

    def _until(self, timeout_s: float | None) -> float:
        core = self._task.core
        return core.clock() + (core.settings.timeout_s if timeout_s is None else timeout_s)

    async def _run(self, operation: Operation[T]) -> T:
        return await self._task.run(operation)

    async def _send(
        self, destination: Destination, content: Message | Body, options: SendOptions, timeout_s: float | None, completion: SendCompletion
    ) -> Message:
        return await self._run(self._session.send(destination, content, options, self._until(timeout_s), completion))

    @property
    def _in_listener(self) -> bool:
        return asyncio.current_task() is self._listener_task

    def _not_by_listener(self, what: str) -> None:
        if self._in_listener:
            raise IllegalState(f"a listener cannot {what} its own context, because {what}() waits for it; use another task")

    def _listen(self) -> None:
        if self._listener_task is None:
            failed = partial(self._session.listening_failed, self._task.call, self._on_exception)
            self._listener_task = lasting_task(self._serve_listeners(), "bascule-listener", on_failure=failed)

    async def _serve_listeners(self) -> None:
        session = self._session
        while True:
            try:
                found = await self._run(session.next_for_listener())
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
                returned = listener(message)
                if inspect.isawaitable(returned):
                    await returned
                failed = False
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # otherwise a task that the listener awaited was cancelled
                log.exception("listener failed", message=message.message_id)
            finally:
                self._task.call(lambda: session.listened(arrived, failed))  # noqa: B023


class AsyncProducer:
    """JMSProducer for asyncio."""

    def __init__(self, context: AsyncContext, destination: Destination | None, options: SendOptions) -> None:
        """Create a producer; applications call AsyncContext.producer."""
        self._context = context
        self._destination = destination
        self._options = options

    async def send(self, content: Message | Body, *, to: Destination | None = None, timeout_s: float | None = None) -> Message:
        """Send a message and wait until the broker has stored it; in a transaction, return at once. See Producer.send."""
        return await self._send(content, to, timeout_s, AT_ITS_END)

    async def repeat(self, message: Message, *, timeout_s: float | None = None) -> Message:
        """Send a message in doubt again under the same id. A broker that has stored the message discards the duplicate."""
        return await self._send(message, message.destination, timeout_s, SendCompletion(repeat=True))

    async def send_async(
        self, content: Message | Body, *, to: Destination | None = None, on_done: OnDone | None = None, timeout_s: float | None = None
    ) -> asyncio.Future[Message]:
        """Send a message; the future completes when the broker has stored it. Waits only if too many sends are unanswered."""
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def done(message: Message, error: BasculeError | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(message)
                else:
                    future.set_exception(error)
            if on_done is not None:
                if error is not None and not future.cancelled():
                    future.exception()  # on_done gets the error, so the application need not await the future
                on_done(message, error)

        await self._send(content, to, timeout_s, SendCompletion(wait=False, on_done=done))
        return future

    async def send_many(self, contents: Iterable[Message | Body], *, to: Destination | None = None, timeout_s: float | None = None) -> int:
        """Send messages without waiting for each; return their number when the broker has stored all. Raises the first refusal."""
        refusals: list[BasculeError] = []
        count = 0
        for content in contents:
            await self._send(content, to, timeout_s, SendCompletion(wait=False, refusals=refusals))
            count += 1
            if refusals:
                break
        await self.flush(timeout_s=timeout_s)
        if refusals:
            raise refusals[0]
        return count

    async def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until the broker has answered every send of the context."""
        await self._context._run(self._context._session.flush(self._context._until(timeout_s)))

    async def _send(self, content: Message | Body, to: Destination | None, timeout_s: float | None, completion: SendCompletion) -> Message:
        destination = to or self._destination
        if destination is None:
            raise InvalidInput("the producer has no destination; name one in the call, as in send(..., to=Queue(...))")
        return await self._context._send(destination, content, self._options, timeout_s, completion)


class AsyncConsumer:
    """JMSConsumer for asyncio."""

    def __init__(self, context: AsyncContext, state: ConsumerState) -> None:
        """Consumers are created by AsyncContext.consumer and the similar methods."""
        self._context = context
        self.state = state

    async def __aenter__(self) -> Self:
        """Return the consumer."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the consumer."""
        with suppress(BasculeError):
            await self.close()

    def __aiter__(self) -> AsyncIterator[Message]:
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

    async def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None after the timeout or if the consumer was closed. See Consumer.receive."""
        self._only_without_listener()
        return await self._context._run(self._context._session.receive(self.state, self._context._until(timeout_s)))

    async def receive_no_wait(self, *, timeout_s: float | None = None) -> Message | None:
        """Return a message if the broker has one now. The request to the broker takes at most ``timeout_s``."""
        self._only_without_listener()
        return await self._context._run(self._context._session.receive_no_wait(self.state, self._context._until(timeout_s)))

    async def messages(self, timeout_s: float | None = None) -> AsyncIterator[Message]:
        """Yield messages until none arrives for ``timeout_s`` seconds."""
        while (message := await self.receive(timeout_s)) is not None:
            yield message

    @property
    def listener(self) -> Callable[[Message], Any] | None:
        """The function or coroutine called with each message. In mode AUTO, an error causes redelivery. See Consumer.listener."""
        return self.state.listener

    @listener.setter
    def listener(self, listener: Callable[[Message], Any] | None) -> None:
        context = self._context
        context._task.call(lambda: context._session.listen(self.state, listener))
        if listener is not None:
            context._listen()

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Close the consumer and wait for its running listener, unless the listener is the caller. See Consumer.close."""
        context = self._context
        await context._run(context._session.close_consumer(self.state, context._until(timeout_s), by_listener=context._in_listener))

    def _only_without_listener(self) -> None:
        if self.state.listener is not None:
            raise IllegalState("the consumer has a listener, which gets its messages; set listener = None before receive()")
