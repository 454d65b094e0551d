"""A context in the hands of a transaction manager: it sends and receives within a transaction that others commit or roll back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn, TypeVar

from bascule.client.blocking import Consumer, Context
from bascule.client.destination import Queue
from bascule.client.errors import ConnectionLost, IllegalState, Refused
from bascule.client.links import ConsumerState, Subscription
from bascule.client.message import Message
from bascule.client.session_links import Acknowledge
from bascule.core.errors import BasculeError

T = TypeVar("T")
#: Where a broker takes requests (docs/reference/amqp.md).
MANAGEMENT: Final = Queue("$management")


class BranchSession:
    """A transacted context that branches use one after the other, with the consumers that they made; and one to ask the broker."""

    def __init__(self, connection: Context, consumers_max: int) -> None:
        """On the connection of a context; of the consumers so many are kept, those used last. Raises ConnectionLost, TimedOut."""
        self._consumers_max = consumers_max
        self.context = connection.create_context(Acknowledge.TRANSACTED)
        try:
            self.control = connection.create_context()
        except BaseException:
            self.context.close()
            raise
        self.consumers: dict[tuple[Subscription, str | None], ConsumerState] = {}

    def end(self) -> None:
        """No more work comes for the branch: messages that it was sent ahead, and did not receive, go back to the broker."""
        context = self.context
        context._run(context._session.set_aside(context._until(None)))
        while len(self.consumers) > self._consumers_max:
            oldest = self.consumers.pop(next(iter(self.consumers)))
            context._run(context._session.close_consumer(oldest, context._until(None)))

    def hand_over(self) -> bytes | None:
        """The id of the branch's transaction, which is whole at the broker; None for an empty one.

        Raises TransactionRolledBack, ConnectionLost, TimedOut.
        """
        context = self.context
        return context._run(context._session.hand_over(context._until(None)))

    def rollback(self) -> None:
        """Undo the branch's transaction. Raises TimedOut, ConnectionLost: then the end of the connection undoes it."""
        self.context.rollback()
        self.end()

    def ask(self, request: Message) -> Message:
        """The broker's answer to a management request. Raises ConnectionLost, TimedOut: it may be carried out or not."""
        try:
            return self.control.request(MANAGEMENT, request)
        except Refused as error:
            try:
                self.check()
            except BasculeError:  # not the request was refused: the broker ended the connection, whatever for
                raise ConnectionLost(str(error)) from error
            raise

    def check(self) -> None:
        """Raises what ended the connection, or one of the sessions."""
        for each in (self.context, self.control):
            each._call(each._session.check)

    def close(self) -> None:
        """Close both contexts. What is open is rolled back."""
        for each in (self.context, self.control):
            with suppress(BasculeError):
                each.close()


def ended(connection: Context) -> bool:
    """Whether the connection of a context is gone for good: not only for as long as its broker is away."""
    return connection._thread.core.error is not None


class BranchContext(Context):
    """What an application works with in a branch. The transaction begins with the first message and ends with the branch."""

    def __init__(self, workplace: BranchSession) -> None:
        """Made by a resource, for one branch."""
        super().__init__(workplace.context._thread, workplace.context._session, None)
        self._workplace = workplace
        self._over = False

    def end_branch(self) -> bool:
        """The branch is over for the application. Return whether no other thread is within a call of the context."""
        self._over = True
        if not self._in_use.acquire(blocking=False):
            return False
        self._in_use.release()
        return True

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        with super()._one_thread():
            self._check()  # who comes after the end of the branch finds it over
            yield

    def _check(self) -> None:
        if self._over:
            raise IllegalState("the transaction is over: enlist the resource in the next one")

    def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> BranchConsumer:
        """Kept for the next branches. Without a word about it nothing is asked for ahead."""
        self._check()
        if wanted.browse:
            return BranchConsumer(self, super()._consumer(wanted, name, prefetch, timeout_s).state)
        kept = self._workplace.consumers
        state = kept.pop((wanted, name), None)
        if state is None or state.error is not None or state.closing:
            state = super()._consumer(wanted, name, prefetch or 0, timeout_s).state
        kept[wanted, name] = state
        state.prefetch = prefetch or 0
        self._thread.call(lambda: self._session.resume(state))
        return BranchConsumer(self, state)

    def _managed(self, *_: Any, **__: Any) -> NoReturn:
        raise IllegalState("this context is part of a transaction over several resources: its manager begins and ends what there is to")

    commit = rollback = transaction = close = start = stop = create_context = _managed


class BranchConsumer(Consumer):
    """A consumer that stays when it is closed, for the next branch."""

    def close(self, *, timeout_s: float | None = None) -> None:
        """Closes a browser; other consumers go with the resource."""
        if self.state.subscription.browse:
            super().close(timeout_s=timeout_s)

    @property
    def listener(self) -> Callable[[Message], Any] | None:
        """There is none: a message is received where the transaction is at work."""
        return None

    @listener.setter
    def listener(self, listener: Callable[[Message], Any] | None) -> None:
        if listener is not None:
            raise IllegalState("a listener has no part in a transaction over several resources: receive() there")
