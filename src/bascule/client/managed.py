"""Contexts lent by a transaction manager or a pool: their session outlives them.

Such a context has the methods of Context. The methods that belong to the lender are refused, as in a container of Jakarta EE (Jakarta
Messaging 3.1, sections 12.2 and 12.3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, cast

from bascule.client.blocking import Consumer, Context
from bascule.client.errors import IllegalState
from bascule.client.links import ConsumerState, Subscription
from bascule.client.message import Message

CallT = TypeVar("CallT", bound=Callable[..., Any])


def refused(method: CallT) -> CallT:
    """Return a method with the signature of ``method`` that raises IllegalState with the reason of its context."""

    @functools.wraps(method)
    def refuse(context: Any, *_: Any, **__: Any) -> NoReturn:
        raise IllegalState(f"{method.__name__}() is refused: {context._refusal}")

    refuse.__doc__ = "Raise IllegalState: only the transaction manager or pool that owns the session may do this."
    return cast("CallT", refuse)


def refuse_listener(listener: object) -> None:
    """Raise IllegalState for a listener (Jakarta Messaging 3.1, section 12.2)."""
    if listener is not None:
        raise IllegalState("a context of a transaction manager or pool cannot have listeners; call receive()")


class ManagedContext(Context):
    """A context that uses the session of another context for a time. Its consumers prefetch nothing unless ``prefetch`` is given."""

    _refusal = "the owner of the session controls this"

    def __init__(self, of: Context) -> None:
        """``of`` is the context that owns the session and outlives this one."""
        super().__init__(of._thread, of._session, None)
        self._over = ""

    def start(self) -> None:
        """Do nothing: delivery is never stopped, because ``stop`` is refused."""
        self._check()

    create_context = refused(Context.create_context)
    commit = refused(Context.commit)
    rollback = refused(Context.rollback)
    transaction = refused(Context.transaction)
    stop = refused(Context.stop)

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        with super()._one_thread():
            self._check()  # within the lock, so that a call after the end is refused
            yield

    def _check(self) -> None:
        """Raise IllegalState if the context has ended."""
        if self._over:
            raise IllegalState(self._over)

    def _end(self, why: str) -> bool:
        """End the context; its calls raise IllegalState with the text ``why``. Return whether no other thread is within a call."""
        self._over = self._over or why
        if not self._in_use.acquire(blocking=False):
            return False
        self._in_use.release()
        return True

    def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> ManagedConsumer:
        with self._one_thread():
            return ManagedConsumer(self, super()._consumer(wanted, name, prefetch or 0, timeout_s).state)


class ManagedConsumer(Consumer):
    """A consumer of a ManagedContext. It cannot have a listener."""

    def __init__(self, context: ManagedContext, state: ConsumerState) -> None:
        """Consumers are created by the context."""
        super().__init__(context, state)
        self._managed = context

    @property
    def prefetch(self) -> int:
        """The number of messages to prefetch; with 0, each receive requests one message."""
        return self.state.prefetch

    @prefetch.setter
    def prefetch(self, count: int) -> None:
        self._managed._check()
        self.state.prefetch = count

    @property
    def listener(self) -> Callable[[Message], Any] | None:
        """Always None: the application receives messages where it does its work."""
        return None

    @listener.setter
    def listener(self, listener: Callable[[Message], Any] | None) -> None:
        refuse_listener(listener)
