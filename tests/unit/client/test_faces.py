"""The blocking and the asyncio face have the same methods, with the same parameters, defaults and results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from bascule.client import aio, blocking

FACES: Final = {
    blocking.Context: aio.AsyncContext,
    blocking.Producer: aio.AsyncProducer,
    blocking.Consumer: aio.AsyncConsumer,
}
#: Names of the one face's types by those of the other.
TYPES: Final = {"AsyncIterator": "Iterator", "AsyncContext": "Context", "AsyncProducer": "Producer", "AsyncConsumer": "Consumer"}
#: The future of the one face is that of threads, of the other that of a loop.
TYPES_OF_FUTURES: Final = {"asyncio.Future": "Future"}


def public(face: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(face, name) for name in dir(face) if not name.startswith("_")}


def signature(method: Callable[..., Any] | property) -> str:
    """The parameters, defaults and result as text, in the words of the blocking face."""
    getter = method.fget if isinstance(method, property) else method
    assert getter is not None
    text = str(inspect.signature(inspect.unwrap(getter) if isinstance(method, property) else method))
    for name, same in {**TYPES_OF_FUTURES, **TYPES}.items():
        text = text.replace(name, same)
    return text


def methods() -> Iterator[tuple[type, str]]:
    for face in FACES:
        yield from ((face, name) for name in public(face))


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_blocking_and_async_api_have_same_public_names(face: type) -> None:
    assert set(public(face)) == set(public(FACES[face]))


@pytest.mark.parametrize(("face", "name"), list(methods()), ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_blocking_and_async_methods_have_same_signature(face: type, name: str) -> None:
    here, there = public(face)[name], public(FACES[face])[name]
    assert isinstance(here, property) == isinstance(there, property)
    assert signature(there) == signature(here)
