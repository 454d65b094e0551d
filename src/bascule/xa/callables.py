"""Checks which functions can be transactional: those whose call, or the coroutine that it returns, does all of their work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from bascule.core.errors import InvalidInput

T = TypeVar("T")


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Return whether a call returns a coroutine: of a function, of an object with an asynchronous ``__call__``, of a partial of either."""
    whole = _whole(function)
    return inspect.iscoroutinefunction(whole) or inspect.iscoroutinefunction(getattr(whole, "__call__", None))  # noqa: B004


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a callable for errors and logs."""
    whole = _whole(function)
    return str(getattr(whole, "__qualname__", type(whole).__qualname__))


def refuse_generator(function: Callable[..., Any]) -> None:
    """Raise InvalidInput for a generator function: its body runs when its caller iterates, after the end of the transaction."""
    whole = _whole(function)
    if inspect.isgeneratorfunction(whole) or inspect.isasyncgenfunction(whole):
        raise InvalidInput(
            f"{name_of(function)} is a generator function; its body would run after the commit. Return a list, or begin the transaction in "
            "the code that iterates"
        )


def done(function: Callable[..., Any], result: T) -> T:
    """Return the result of a call that has done its work. Raises InvalidInput for a result that must still be awaited."""
    if not (inspect.isawaitable(result) or inspect.isasyncgen(result)):
        return result
    if inspect.iscoroutine(result):
        result.close()
    raise InvalidInput(
        f"{name_of(function)} returned a {type(result).__name__}; its work would be done after the commit. Make the function an "
        "`async def` function that awaits the result"
    )


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function
