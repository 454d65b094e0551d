"""Values of a thread or task that a block sets, and that are restored even if the block ends in a different context.

A framework may run the steps of one generator in different threads or tasks, such as a dependency of FastAPI or a fixture of pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Setting(Generic[T]):
    """One call of ``set``, compared by identity."""

    value: T | None


class ContextValue(Generic[T]):
    """A value for the running thread or task, and for tasks that it starts; None if there is no value."""

    def __init__(self, name: str) -> None:
        self._setting: ContextVar[_Setting[T] | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """Return the value, or None."""
        setting = self._setting.get()
        return None if setting is None else setting.value

    def set(self, value: T | None) -> Callable[[], None]:
        """Set the value. Return a function that restores the previous value; it raises no error in any context.

        In another context than this one, the function restores the previous value only if that context has inherited the setting.
        """
        previous, setting = self._setting.get(), _Setting(value)
        token = self._setting.set(setting)

        def restore() -> None:
            try:
                self._setting.reset(token)
            except ValueError:  # another context
                if self._setting.get() is setting:
                    self._setting.set(previous)

        return restore
