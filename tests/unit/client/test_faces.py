"""The blocking and the asyncio API have the same methods, with the same parameters, defaults and results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from bascule.client import aio, blocking

API_CLASSES: Final = {
    blocking.Context: aio.AsyncContext,
    blocking.Producer: aio.AsyncProducer,
    blocking.Consumer: aio.AsyncConsumer,
}
#: Names of types of the asyncio API, and the names of their counterparts in the blocking API.
TYPES: Final = {"AsyncIterator": "Iterator", "AsyncContext": "Context", "AsyncProducer": "Producer", "AsyncConsumer": "Consumer"}
#: The futures of the asyncio API belong to an event loop, those of the blocking API to threads.
TYPES_OF_FUTURES: Final = {"asyncio.Future": "Future"}


def public(api_class: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(api_class, name) for name in dir(api_class) if not name.startswith("_")}


def signature(method: Callable[..., Any] | property) -> str:
    """Return the parameters, defaults and result as text, with the names of the blocking API."""
    getter = method.fget if isinstance(method, property) else method
    assert getter is not None
    text = str(inspect.signature(inspect.unwrap(getter) if isinstance(method, property) else method))
    for name, same in {**TYPES_OF_FUTURES, **TYPES}.items():
        text = text.replace(name, same)
    return text


def methods() -> Iterator[tuple[type, str]]:
    for api_class in API_CLASSES:
        yield from ((api_class, name) for name in public(api_class))


@pytest.mark.parametrize("api_class", API_CLASSES, ids=lambda api_class: api_class.__name__)
def test_blocking_and_async_api_have_same_public_names(api_class: type) -> None:
    assert set(public(api_class)) == set(public(API_CLASSES[api_class]))


@pytest.mark.parametrize(("api_class", "name"), list(methods()), ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_blocking_and_async_methods_have_same_signature(api_class: type, name: str) -> None:
    here, there = public(api_class)[name], public(API_CLASSES[api_class])[name]
    assert isinstance(here, property) == isinstance(there, property)
    assert signature(there) == signature(here)
