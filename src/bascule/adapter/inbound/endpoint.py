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

#: A function of a record, or a class with a method ``on_record(record)`` and optionally ``close()``. Each may be ``async``.
Endpoint = Callable[[Record], Any] | type


def name_of(endpoint: Endpoint) -> str:
    """Return the name of an endpoint for logs and thread names."""
    return getattr(endpoint, "__qualname__", type(endpoint).__qualname__)


def check(endpoint: Endpoint) -> None:
    """Raise InvalidInput if the endpoint cannot take a record."""
    method = getattr(endpoint, "on_record", None) if isinstance(endpoint, type) else endpoint
    if not callable(method):
        raise InvalidInput(f"endpoint {name_of(endpoint)} must be a function of a record, or a class with on_record(record)")


class Instance:
    """An endpoint as one worker uses it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._object: Any = endpoint() if isinstance(endpoint, type) else None
        self._call: Callable[[Record], Any] = endpoint if self._object is None else self._object.on_record
        self._runner = asyncio.Runner()

    def __call__(self, record: Record) -> None:
        """Return when the record is handled. Raises the error of the endpoint."""
        self._finish(self._call(record))

    def close(self) -> None:
        """Close the object if it can be closed."""
        with suppress(BaseException):  # an endpoint may raise anything, such as the cancellation of a task; the worker must still end
            self._finish(getattr(self._object, "close", lambda: None)())
        self._runner.close()

    def _finish(self, result: Any) -> None:
        """Await the result if necessary.

        This checks the result, not the endpoint: a decorated coroutine function may look like a plain one.
        """
        if inspect.isawaitable(result):
            # In a copy of the context: the current transaction is the worker's.
            self._runner.run(_awaited(result), context=contextvars.copy_context())


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
