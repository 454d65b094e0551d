"""Contexts that a transaction manager or a pool lends to an application: the session goes on when the context is over.

Such a context has the methods of Context. What belongs to the lender is refused, as in a container of Jakarta EE: Jakarta Messaging 3.1,
sections 12.2 and 12.3.
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
    """Return a method with the signature of ``method`` that raises IllegalState, with the reason that its context has."""

    @functools.wraps(method)
    def refuse(context: Any, *_: Any, **__: Any) -> NoReturn:
        raise IllegalState(f"{method.__name__}() is refused: {context._refusal}")

    refuse.__doc__ = "Raise IllegalState: only whoever lends this context may do so."
    return cast("CallT", refuse)


def refuse_listener(listener: object) -> None:
    """Raise IllegalState for a listener (Jakarta Messaging 3.1, section 12.2)."""
    if listener is not None:
        raise IllegalState("a listener is refused: a context of a transaction manager or of a pool has none; call receive()")


class ManagedContext(Context):
    """A context on the session of another one, for a time. A consumer asks for no message ahead unless it is given a ``prefetch``."""

    _refusal = "whoever lends this context does so"

    def __init__(self, of: Context) -> None:
        """``of`` is the context that has the session, and goes on."""
        super().__init__(of._thread, of._session, None)
        self._over = ""

    def start(self) -> None:
        """Return at once: messages are handed over, for ``stop`` is refused."""
        self._check()

    create_context = refused(Context.create_context)
    commit = refused(Context.commit)
    rollback = refused(Context.rollback)
    transaction = refused(Context.transaction)
    stop = refused(Context.stop)

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        with super()._one_thread():
            self._check()  # who comes after the end finds it over
            yield

    def _check(self) -> None:
        """Raise IllegalState if the context is over."""
        if self._over:
            raise IllegalState(self._over)

    def _end(self, why: str) -> bool:
        """The context is over, and ``why`` is what its calls say. Return whether no other thread is within a call."""
        self._over = self._over or why
        if not self._in_use.acquire(blocking=False):
            return False
        self._in_use.release()
        return True

    def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> ManagedConsumer:
        with self._one_thread():
            return ManagedConsumer(self, super()._consumer(wanted, name, prefetch or 0, timeout_s).state)


class ManagedConsumer(Consumer):
    """A consumer of a ManagedContext. It has no listener."""

    def __init__(self, context: ManagedContext, state: ConsumerState) -> None:
        """Made by the context."""
        super().__init__(context, state)
        self._managed = context

    @property
    def prefetch(self) -> int:
        """How many messages are asked for ahead; 0: each when it is waited for."""
        return self.state.prefetch

    @prefetch.setter
    def prefetch(self, count: int) -> None:
        self._managed._check()
        self.state.prefetch = count

    @property
    def listener(self) -> Callable[[Message], Any] | None:
        """There is none: a message is received where the work is done."""
        return None

    @listener.setter
    def listener(self, listener: Callable[[Message], Any] | None) -> None:
        refuse_listener(listener)
