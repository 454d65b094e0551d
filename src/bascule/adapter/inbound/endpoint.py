"""An endpoint: a function, a coroutine function, or a class of which each worker has an instance."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from bascule.adapter.inbound.record import Record
from bascule.core.errors import InvalidInput

#: A function of a record, or a class with a method ``on_record(record)`` (and ``close()``, if it likes); each may be ``async``.
Endpoint = Callable[[Record], Any] | type


def name_of(endpoint: Endpoint) -> str:
    """In logs and names of threads."""
    return getattr(endpoint, "__qualname__", type(endpoint).__qualname__)


def check(endpoint: Endpoint) -> None:
    """Raises InvalidInput for what cannot take a record."""
    method = getattr(endpoint, "on_record", None) if isinstance(endpoint, type) else endpoint
    if not callable(method):
        raise InvalidInput(f"endpoint {name_of(endpoint)} must be a function of a record, or a class with on_record(record)")


class Instance:
    """An endpoint in the hands of one worker."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._object: Any = endpoint() if isinstance(endpoint, type) else None
        self._call: Callable[[Record], Any] = endpoint if self._object is None else self._object.on_record
        self._runner = asyncio.Runner()

    def __call__(self, record: Record) -> None:
        """Returns when the record is handled; raises whatever the endpoint raises."""
        self._finish(self._call(record))

    def close(self) -> None:
        """Closes the object, if it can be closed."""
        with suppress(BaseException):  # of a cancelled task, for one: the worker has to come to its end
            self._finish(getattr(self._object, "close", lambda: None)())
        self._runner.close()

    def _finish(self, result: Any) -> None:
        """What is asked is the result, not the endpoint: a decorated coroutine function, for one, looks like a plain one."""
        if inspect.isawaitable(result):
            # In a copy of the context: the current transaction is that of the worker.
            self._runner.run(_awaited(result), context=contextvars.copy_context())


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
