"""Functions that an application has registered to be called before and after the end of a transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bascule.core.log import get_log
from bascule.xa.transaction_states import TransactionStatus

Before = Callable[[], object]
After = Callable[[TransactionStatus], object]

_log = get_log("bascule.xa")


class CompletionHooks:
    """The hooks of one transaction. Thread-safe: one thread may add a hook while another one ends the transaction."""

    def __init__(self, transaction_id: str) -> None:
        """``transaction_id`` appears in log lines."""
        self._transaction_id = transaction_id
        self._before: list[Before] = []
        self._after: list[After] = []
        self._lock = threading.Lock()
        self._called = False

    def add_before(self, hook: Before) -> None:
        """Register ``hook`` for the next ``call_before``."""
        self._before.append(hook)

    def add_after(self, hook: After) -> bool:
        """Register ``hook`` for ``call_after``. Return False if the hooks were called already."""
        with self._lock:
            if not self._called:
                self._after.append(hook)
            return not self._called

    def call_before(self, goes_on: Callable[[], bool]) -> None:
        """Call each hook, and those that hooks add, while ``goes_on()``. Raises the error of a hook."""
        while self._before and goes_on():
            self._before.pop(0)()

    def call_after(self, status: TransactionStatus) -> None:
        """Call each hook, and those that hooks add. An error is logged; an interrupt is raised after all were called."""
        interrupts: list[BaseException] = []
        while (hook := self._next_after()) is not None:
            try:
                hook(status)
            except Exception as error:
                _log.error("after_completion hook failed", transaction=self._transaction_id, status=status.value, error=repr(error))
            except BaseException as error:
                interrupts.append(error)
        for each in interrupts:
            raise each

    def _next_after(self) -> After | None:
        with self._lock:
            self._called = not self._after
            return self._after.pop(0) if self._after else None
