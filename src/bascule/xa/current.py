"""The current transaction of a thread or task: who has entered it, and what may run within it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import NamedTuple

from bascule.xa.context_value import ContextValue
from bascule.xa.errors import NoTransaction, OutOfOrder
from bascule.xa.propagation import APART, USES, Propagation, TransactionUse
from bascule.xa.transaction import FollowsTransaction, Transaction


class _Entered(NamedTuple):
    """A transaction, and the thread or task that has entered it."""

    transaction: Transaction
    here: object


class CurrentTransaction:
    """The current transaction of one manager, for each thread and task. Tasks inherit it from the task that starts them."""

    def __init__(self, name: str, following: Collection[FollowsTransaction]) -> None:
        """``name`` is the manager's name; ``following`` are resources that work in the current transaction without a handle."""
        self._entered: ContextValue[_Entered] = ContextValue(f"bascule.xa.{name}")
        self._following = following

    def get(self) -> Transaction | None:
        """Return the transaction whose block this thread or task is in, which may have ended."""
        entered = self._entered.get()
        return None if entered is None else entered.transaction

    def running(self) -> Transaction | None:
        """Return the transaction whose block this thread or task is in, unless it is over.

        Raises TransactionTimedOut if it was rolled back at its timeout and its block still runs: later work would commit alone.
        """
        transaction = self.get()
        if transaction is None or transaction.over:
            return None
        transaction.check_open()
        return transaction

    def enter(self, transaction: Transaction) -> Callable[[], None]:
        """Make a transaction the current one. Return a function that undoes this. Raises OutOfOrder, TransactionTimedOut."""
        entered, here = self._entered.get(), _here()
        if entered is not None and entered.here == here and self.running() is not None:
            raise OutOfOrder("a transaction is active in this thread or task, and transactions do not nest; use `suspended()`")
        return self._set(_Entered(transaction, here))

    def set_aside(self) -> Callable[[], None]:
        """Make no transaction the current one. Return a function that undoes this."""
        return self._set(None)

    def clear(self) -> None:
        """Forget the current transaction of this thread in the child of a fork. The resources are reset separately."""
        self._entered.set(None)

    def use_of(self, propagation: Propagation) -> TransactionUse:
        """Return where a function with this propagation runs here. Raises NoTransaction, OutOfOrder, TransactionTimedOut."""
        transaction = self.get() if propagation in APART else self.running()
        use = USES[propagation][1 if transaction is None else 0]
        if use is not None:
            return use
        if transaction is not None:
            raise OutOfOrder("a function with Propagation.NEVER was called within a transaction")
        raise NoTransaction("a function with Propagation.MANDATORY was called, and there is no transaction in this thread or task")

    def _set(self, entered: _Entered | None) -> Callable[[], None]:
        """Set the current transaction, also for the resources that follow it."""
        with ExitStack() as undo:
            undo.callback(self._entered.set(entered))
            for each in self._following:
                undo.callback(each.follow(None if entered is None else entered.transaction))
            return undo.pop_all().close


def _here() -> object:
    """Return the running task, or else the thread."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()
