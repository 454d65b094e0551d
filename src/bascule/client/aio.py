"""The asyncio face: the same contexts, producers and consumers, on the application's own loop.

A context belongs to the loop it was made on. Several tasks may use one; a transaction is for one task at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
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

log = get_log(__name__)
T = TypeVar("T")


class Runner(Protocol):
    """What runs the operations of asyncio contexts: see ConnectionTask."""

    @property
    def core(self) -> Core:
        """The connection."""

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation in this task."""

    def call(self, function: Callable[[], T]) -> T:
        """Call what waits for nothing."""

    async def stop(self) -> None:
        """End the connection."""


class ConnectionTask:
    """A connection's own task, which pumps the core. Operations run in the tasks of the application."""

    def __init__(self, core: Core, plan: Plan, tls: SSLContext | None) -> None:
        """Start it, on the running loop."""
        self.core = core
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[bool], Wait] = {}
        self._pump = Pump(core, plan, tls, nullcontext(), self._changed)
        self._task = self._loop.create_task(self._pump.run())

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation in this task."""
        if asyncio.get_running_loop() is not self._loop:
            raise IllegalState("this context belongs to another event loop")
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
        """Call what waits for nothing."""
        try:
            return function()
        finally:
            self._stepped()

    def _stepped(self) -> None:
        """Something was done: write what is due, and wake who waits for it."""
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
        """End the task, and the socket with it."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


class AsyncContext:
    """JMSContext for asyncio: a connection, or a part in one, and a session on it. Closing the last context closes the connection."""

    def __init__(self, task: Runner, session: ClientSession, on_exception: ExceptionListener | None) -> None:
        """Made by ``connect_async`` and ``create_context``."""
        self._task = task
        self._session = session
        self._on_exception = on_exception
        self._listener_task: asyncio.Task[None] | None = None
        session.acknowledging = lambda arrived: task.call(lambda: session.acknowledge(arrived))

    async def __aenter__(self) -> Self:
        """The context."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close. What went wrong before is not hidden by what closing says."""
        if kind is None:
            await self.close()
        else:
            with suppress(BasculeError):
                await self.close()

    @property
    def client_id(self) -> str | None:
        """The client id, where the connection was given one."""
        return self._task.core.settings.client_id

    @property
    def acknowledge_mode(self) -> Acknowledge:
        """When messages are acknowledged."""
        return self._session.mode

    @property
    def connected(self) -> bool:
        """Whether there is a connection to a broker at this moment."""
        return self._task.core.up

    async def create_context(self, acknowledge: Acknowledge = Acknowledge.AUTO, *, timeout_s: float | None = None) -> AsyncContext:
        """Another context on this connection."""
        session = await self._run(self._task.core.open_session(acknowledge, self._until(timeout_s)))
        return AsyncContext(self._task, session, self._on_exception)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for a listener at work and for what was sent, roll back what is open, close. As Context.close."""
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
        """A producer for one destination, or for one that each send names; the rest is for messages that do not say otherwise."""
        return AsyncProducer(self, destination, SendOptions(persistent, priority, time_to_live_s, delivery_delay_s))

    async def send(self, destination: Destination, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Send one message, as ``producer().send`` does."""
        return await self.producer(destination).send(content, timeout_s=timeout_s)

    async def request(self, destination: Destination, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Send a message and return the answer to it, which comes by a temporary queue. Raises TimedOut, ConnectionLost."""
        return await self._run(self._session.request(destination, content, SendOptions(), self._until(timeout_s)))

    async def reply(self, request: Message, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Answer a message that was received. Raises InvalidDestination where it does not say where to."""
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
        """A consumer of a queue, or of a topic while it lives. Raises InvalidDestination, InvalidSelector, Refused."""
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
        """The one consumer of a durable subscription, which gathers messages while nobody is there. Needs a client id."""
        return await self._consumer(Subscription(topic, selector, no_local, durable=True), name, prefetch, timeout_s)

    async def shared_consumer(
        self, topic: Topic, name: str, *, selector: str = "", prefetch: int | None = None, timeout_s: float | None = None
    ) -> AsyncConsumer:
        """One of the consumers of a subscription, which lasts while it has any."""
        return await self._consumer(Subscription(topic, selector, shared=True), name, prefetch, timeout_s)

    async def shared_durable_consumer(
        self, topic: Topic, name: str, *, selector: str = "", prefetch: int | None = None, timeout_s: float | None = None
    ) -> AsyncConsumer:
        """One of the consumers of a durable subscription."""
        return await self._consumer(Subscription(topic, selector, durable=True, shared=True), name, prefetch, timeout_s)

    async def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> AsyncConsumer:
        return AsyncConsumer(self, await self._run(self._session.consumer(wanted, name, prefetch, self._until(timeout_s))))

    async def unsubscribe(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a durable subscription. Raises InvalidDestination where there is none, Refused where it has a consumer."""
        await self._run(self._session.unsubscribe(name, self._until(timeout_s)))

    async def browse(self, queue: Queue, *, selector: str = "", timeout_s: float | None = None) -> AsyncIterator[Message]:
        """The messages that wait in a queue now, in order; they stay there."""
        browser = await self._consumer(Subscription(queue, selector, browse=True), None, 0, timeout_s)
        async with browser:
            while (message := await self._run(self._session.browse(browser.state, self._until(timeout_s)))) is not None:
                yield message

    async def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """A queue that goes with this connection."""
        queue = TemporaryQueue("temporary")
        await self._run(self._session.temporary(queue, self._until(timeout_s)))
        return queue

    async def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """A topic that goes with this connection."""
        topic = TemporaryTopic("temporary")
        await self._run(self._session.temporary(topic, self._until(timeout_s)))
        return topic

    async def delete(self, destination: TemporaryQueue | TemporaryTopic, *, timeout_s: float | None = None) -> None:
        """Delete a temporary destination before its connection ends. Raises IllegalState while it has consumers."""
        await self._run(self._session.delete_temporary(destination, self._until(timeout_s)))

    def start(self) -> None:
        """Hand messages over again after ``stop``."""
        self._task.call(self._session.start)

    async def stop(self, *, timeout_s: float | None = None) -> None:
        """Hand over no messages until ``start``; returns when no listener is at work. From any task but a listener's."""
        self._not_by_listener("stop")
        await self._run(self._session.stop(self._until(timeout_s)))

    # --- acknowledging, transactions ---------------------------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """CLIENT, INDIVIDUAL: acknowledge every message received so far."""
        self._task.call(self._session.acknowledge)

    async def recover(self, *, timeout_s: float | None = None) -> None:
        """Have every message that was received and not acknowledged delivered again, marked as redelivered."""
        await self._run(self._session.recover(self._until(timeout_s)))

    async def commit(self, *, timeout_s: float | None = None) -> None:
        """Commit what was sent and received. Raises TransactionRolledBack, TransactionInDoubt."""
        await self._run(self._session.commit(self._until(timeout_s)))

    async def rollback(self, *, timeout_s: float | None = None) -> None:
        """Undo what was sent and received; what was received comes again."""
        await self._run(self._session.rollback(self._until(timeout_s)))

    @asynccontextmanager
    async def transaction(self, *, timeout_s: float | None = None) -> AsyncIterator[None]:
        """A block whose sends and receives happen together at its end, or not at all where it raises.

        Raises TransactionRolledBack, TransactionInDoubt at its end; IllegalState within another.
        """
        block = self._task.call(self._session.begin)
        try:
            yield
        except BaseException:
            with suppress(BasculeError):  # what went wrong in the block is what counts; the end of its link rolls back, too
                await self._run(self._session.end(block, self._until(timeout_s), failed=True))
            raise
        await self._run(self._session.end(block, self._until(timeout_s), failed=False))

    # --- inside ------------------------------------------------------------------------------------------------------------------

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
            raise IllegalState(f"a listener cannot {what} its own context: it would wait for itself")

    def _listen(self) -> None:
        if self._listener_task is None:
            self._listener_task = asyncio.get_running_loop().create_task(self._serve_listeners())

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
                    raise  # else something was cancelled that the listener waited for
                log.exception("listener failed", message=message.message_id)
            finally:
                self._task.call(lambda: session.listened(arrived, failed))  # noqa: B023


class AsyncProducer:
    """JMSProducer for asyncio."""

    def __init__(self, context: AsyncContext, destination: Destination | None, options: SendOptions) -> None:
        """Made by AsyncContext.producer."""
        self._context = context
        self._destination = destination
        self._options = options

    async def send(self, content: Message | Body, *, to: Destination | None = None, timeout_s: float | None = None) -> Message:
        """Send, and return when the broker has the message (in a transaction: at once). As Producer.send."""
        return await self._send(content, to, timeout_s, AT_ITS_END)

    async def repeat(self, message: Message, *, timeout_s: float | None = None) -> Message:
        """Send a message again whose fate is not known, under the same id: a broker that has it takes it for what it is."""
        return await self._send(message, message.destination, timeout_s, SendCompletion(repeat=True))

    async def send_async(
        self, content: Message | Body, *, to: Destination | None = None, on_done: OnDone | None = None, timeout_s: float | None = None
    ) -> asyncio.Future[Message]:
        """Send; the future is done when the broker has the message. Waits only where too many are on their way."""
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def done(message: Message, error: BasculeError | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(message)
                else:
                    future.set_exception(error)
            if on_done is not None:
                if error is not None and not future.cancelled():
                    future.exception()  # on_done is told: the application need not await the future as well
                on_done(message, error)

        await self._send(content, to, timeout_s, SendCompletion(wait=False, on_done=done))
        return future

    async def send_many(self, contents: Iterable[Message | Body], *, to: Destination | None = None, timeout_s: float | None = None) -> int:
        """Send one after the other without waiting for each; returns how many when the broker has all. Raises the first refusal."""
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
        """Return when everything that the context sent has its answer."""
        await self._context._run(self._context._session.flush(self._context._until(timeout_s)))

    async def _send(self, content: Message | Body, to: Destination | None, timeout_s: float | None, completion: SendCompletion) -> Message:
        destination = to or self._destination
        if destination is None:
            raise InvalidInput("this producer has no destination of its own: send(..., to=Queue(...))")
        return await self._context._send(destination, content, self._options, timeout_s, completion)


class AsyncConsumer:
    """JMSConsumer for asyncio."""

    def __init__(self, context: AsyncContext, state: ConsumerState) -> None:
        """Made by AsyncContext.consumer and its kin."""
        self._context = context
        self.state = state

    async def __aenter__(self) -> Self:
        """The consumer."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        with suppress(BasculeError):
            await self.close()

    def __aiter__(self) -> AsyncIterator[Message]:
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

    async def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when there was none in time, or the consumer was closed. As Consumer.receive."""
        self._only_without_listener()
        return await self._context._run(self._context._session.receive(self.state, self._context._until(timeout_s)))

    async def receive_no_wait(self, *, timeout_s: float | None = None) -> Message | None:
        """A message if the broker has one now: it is asked, which may take ``timeout_s``."""
        self._only_without_listener()
        return await self._context._run(self._context._session.receive_no_wait(self.state, self._context._until(timeout_s)))

    async def messages(self, timeout_s: float | None = None) -> AsyncIterator[Message]:
        """Messages until none comes for ``timeout_s``."""
        while (message := await self.receive(timeout_s)) is not None:
            yield message

    @property
    def listener(self) -> Callable[[Message], Any] | None:
        """Called, and awaited where it can be, with each message. AUTO: a message on which it raises comes again. As Consumer.listener."""
        return self.state.listener

    @listener.setter
    def listener(self, listener: Callable[[Message], Any] | None) -> None:
        context = self._context
        context._task.call(lambda: context._session.listen(self.state, listener))
        if listener is not None:
            context._listen()

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Close; returns when its listener, unless that calls this, has returned. As Consumer.close."""
        context = self._context
        await context._run(context._session.close_consumer(self.state, context._until(timeout_s), by_listener=context._in_listener))

    def _only_without_listener(self) -> None:
        if self.state.listener is not None:
            raise IllegalState("this consumer has a listener: its messages go there")
