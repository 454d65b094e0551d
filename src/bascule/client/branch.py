"""Contexts of a transaction manager: they send and receive within a transaction that the manager commits or rolls back."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Protocol, TypeVar

from bascule.client.blocking import Context
from bascule.client.destination import Destination, Queue, TemporaryQueue, TemporaryTopic
from bascule.client.errors import ConnectionLost, Refused
from bascule.client.links import ConsumerState, SessionTransaction, Subscription
from bascule.client.managed import ManagedConsumer, ManagedContext, refused
from bascule.client.message import Body, Message, SendOptions
from bascule.client.operation import Operation
from bascule.client.sends import SendCompletion
from bascule.client.session_links import Acknowledge
from bascule.client.temporary import TemporaryDestinations
from bascule.client.thread import ConnectionThread
from bascule.core.errors import BasculeError

T = TypeVar("T")
#: The error of calls after the end of the branch.
BRANCH_OVER: Final = "the transaction has ended and its context with it; use the context of the next transaction"
#: The address for management requests (docs/reference/amqp.md).
MANAGEMENT: Final = Queue("$management")


class BranchSession:
    """A transacted context and its consumers, used by one branch after another, and a second context for requests to the broker."""

    def __init__(self, connection: Context, consumers_max: int) -> None:
        """Open the contexts on the connection of ``connection``; keep the last ``consumers_max`` consumers used.

        Raises ConnectionLost, TimedOut.
        """
        self._consumers_max = consumers_max
        self.context = connection.create_context(Acknowledge.TRANSACTED)
        try:
            self.control = connection.create_context()
        except BaseException:
            self.context.close()
            raise
        self.consumers: dict[tuple[Subscription, str | None], ConsumerState] = {}
        #: Consumers of the current branch only.
        self.passing: list[ConsumerState] = []

    @property
    def thread(self) -> ConnectionThread:
        """The connection."""
        return self.context._thread

    def end(self) -> None:
        """End the work of the branch: prefetched messages that it did not receive return to the broker."""
        context = self.context
        self._run_held(context._session.set_aside(context._until(None)))
        while self.passing:
            context._run(context._session.close_consumer(self.passing.pop(), context._until(None)))
        while len(self.consumers) > self._consumers_max:
            oldest = self.consumers.pop(next(iter(self.consumers)))
            context._run(context._session.close_consumer(oldest, context._until(None)))

    def hand_over(self, *, answered: bool) -> SessionTransaction | None:
        """Return the branch's transaction, which the next request names by its id, or None if it is empty.

        ``answered``: wait until the broker has accepted all of its messages. Otherwise they precede the next request, and ``refusal``
        returns their outcome. Raises TransactionRolledBack, ConnectionLost, TimedOut.
        """
        context = self.context
        transaction = self._run_held(context._session.hand_over(context._until(None), answered=answered))
        if transaction is None:  # no request follows
            self.thread.flush()
        return transaction

    def refusal(self, transaction: SessionTransaction) -> BasculeError | None:
        """Return why the broker refused a message of a transaction that was handed over, or None. Raises TimedOut."""
        context = self.context
        return context._run(context._session.refusal(transaction, context._until(None)))

    def rollback(self) -> None:
        """Roll back the branch's transaction. Raises TimedOut or ConnectionLost; closing the connection then rolls it back."""
        self.context.rollback()
        self.end()
        self.thread.flush()

    def ask(self, request: Message, *, begins_next: bool = False) -> Message:
        """Return the broker's answer to a management request. Raises ConnectionLost, TimedOut: it may be carried out or not.

        ``begins_next``: the request ends the transaction that was handed over, and the next transaction is declared after it.
        """
        control = self.control
        behind = self.context._session.declare_ahead if begins_next else None
        try:
            operation = control._session.request(MANAGEMENT, request, SendOptions(), control._until(None), behind, settled=True)
            return control._run(operation)
        except Refused as error:
            try:
                self.check()
            except BasculeError:  # the broker ended the connection; it did not refuse the request
                raise ConnectionLost(str(error)) from error
            raise

    def _run_held(self, operation: Operation[T]) -> T:
        """Run an operation whose last frames wait for those that follow."""
        with self.context._one_thread():
            return self.thread.run(operation, holds=True)

    def check(self) -> None:
        """Raise the error that ended the connection or one of the sessions."""
        for each in (self.context, self.control):
            each._call(each._session.check)

    def close(self) -> None:
        """Close both contexts. Open work is rolled back."""
        for each in (self.context, self.control):
            with suppress(BasculeError):
                each.close()


def ended(connection: Context) -> bool:
    """Return whether the connection of a context has ended for good; a connection that is reconnecting has not."""
    return connection._thread.core.error is not None


class EndingContext(Protocol):
    """A context of a branch, blocking or for asyncio."""

    def _end(self, why: str) -> bool: ...


def end_branch(context: EndingContext) -> bool:
    """End the branch for the application. Return whether no other thread or task is within a call of its context."""
    return context._end(BRANCH_OVER)


class BranchContext(ManagedContext):
    """The context of an application within a branch. The transaction begins with the first message and ends with the branch."""

    _refusal = "the context takes part in a distributed transaction; commit and rollback are controlled by the transaction manager"

    def __init__(self, workplace: BranchSession, temporary: TemporaryDestinations) -> None:
        """Contexts are created by a resource, for one branch, whose end deletes ``temporary``."""
        super().__init__(workplace.context)
        self._workplace = workplace
        self._temporary = temporary

    close = refused(Context.close)

    def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> BranchConsumer:
        """Return a consumer that is kept for the next branches if ``_keeps`` allows it."""
        with self._one_thread():
            if not self._keeps(wanted):
                own = super()._consumer(wanted, name, prefetch, timeout_s).state
                self._workplace.passing.append(own)
                return BranchConsumer(self, own)
            kept = self._workplace.consumers
            state = kept.pop((wanted, name), None)
            if state is None or state.error is not None or state.closing:
                state = super()._consumer(wanted, name, prefetch, timeout_s).state
            kept[wanted, name] = state
            state.prefetch = prefetch or 0
            self._thread.call(lambda: self._session.resume(state))
            return BranchConsumer(self, state)

    def _keeps(self, wanted: Subscription) -> bool:
        """Return whether the consumer is kept for the next branches. A browser, or a consumer of what ends with the branch, never is."""
        return not wanted.browse and wanted.destination not in self._temporary

    def _run(self, operation: Operation[T]) -> T:
        """Run an operation. Its last frames may wait for the next ones: nobody sees them before the end of the branch, which is a write."""
        with self._one_thread():
            prefetching = any(each.prefetch for each in self._session.consumers)  # their credit goes out at once
            return self._thread.run(operation, holds=not prefetching)

    def _send(
        self, destination: Destination, content: Message | Body, options: SendOptions, timeout_s: float | None, completion: SendCompletion
    ) -> Message:
        self._temporary.check_reply_to(content)
        sent = super()._send(destination, content, options, timeout_s, completion)
        if completion.on_done is not None:  # the application may wait for the answer
            self._thread.flush()
        return sent

    def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """Return a temporary queue that ends with the transaction."""
        return self._temporary.add(super().temporary_queue(timeout_s=timeout_s))

    def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """Return a temporary topic that ends with the transaction."""
        return self._temporary.add(super().temporary_topic(timeout_s=timeout_s))


class BranchConsumer(ManagedConsumer):
    """A consumer that stays open for the next branch after ``close``, if its context keeps it."""

    def __init__(self, context: BranchContext, state: ConsumerState) -> None:
        """Consumers are created by the context."""
        super().__init__(context, state)
        self._kept = context._keeps(state.subscription)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Close the consumer, unless it is kept; a kept consumer is closed with the resource."""
        if not self._kept:
            super().close(timeout_s=timeout_s)
