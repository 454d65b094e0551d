"""Tell an answer of another server or version from a defect of a command: compare the answers with what the admin server promises."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

#: Statuses of answers that are not errors.
_DONE: Final = (200, 201, 202)

#: The last answer to each request of the command, by method and path: a command may change a document after it has read it.
_answers: ContextVar[dict[tuple[str, str], bytes]] = ContextVar("answers")


def begin_answers() -> None:
    """Forget the answers of an earlier command of this process."""
    _answers.set({})


def note_answer(method: str, path: str, content: bytes) -> None:
    """Take note of an answer, for ``unexpected_answer``."""
    found = _answers.get(None)
    if found is not None:
        found[method, path] = content


def unexpected_answer(error: Exception) -> str | None:
    """Return how an answer that the command got differs from what the admin server promises; None if none does.

    Without the extra of the broker, nothing can be compared: then an answer is the most likely cause of the ``error`` of the command.
    """
    answers = _answers.get({})
    try:
        for (method, path), content in answers.items():
            for type_ in _promised(method, path):
                if (why := next(_differences(json.loads(content), type_, ""), None)) is not None:
                    return f"{method} /{path}: {why}"
    except ImportError:
        return f"{error!r:.100}. With the extra 'broker', the command names the field"
    return None


def _promised(method: str, path: str) -> Iterator[Any]:
    """Yield the type of the answer to a request, if it has one. Raises ImportError."""
    from bascule.server.operations import OPERATIONS  # takes seconds, and needs the extra of the broker

    parts = f"/{path}".split("/")
    for (known_method, template), operation in OPERATIONS.items():
        if known_method == method and _fits(template.split("/"), parts):
            yield from (type_ for status, type_ in operation.answers.items() if status in _DONE and not isinstance(type_, str))
            return


def _fits(words: Sequence[str], parts: Sequence[str]) -> bool:
    return len(words) == len(parts) and all(word.startswith("{") or word == part for word, part in zip(words, parts, strict=True))


def _differences(value: Any, type_: Any, where: str) -> Iterator[str]:
    """Yield how a value differs from a type of ``bascule.server.schemas``. Further fields are those of a later version."""
    origin, arguments = get_origin(type_), get_args(type_)
    if type_ is Any:
        return
    if is_typeddict(type_):
        if not isinstance(value, dict):
            yield _other(value, "an object", where)
            return
        for name, hint in get_type_hints(type_, include_extras=True).items():
            if name in value:
                yield from _differences(value[name], hint, f"{where}.{name}")
            elif get_origin(hint) is not NotRequired:
                yield f"{where[1:] or 'the answer'} has no field {name!r}"
    elif origin is NotRequired:
        yield from _differences(value, arguments[0], where)
    elif origin is list:
        if isinstance(value, list):
            for number, each in enumerate(value):
                yield from _differences(each, arguments[0], f"{where}.{number}")
        else:
            yield _other(value, "an array", where)
    elif origin is dict:
        if isinstance(value, dict):
            for name, each in value.items():
                yield from _differences(each, arguments[1], f"{where}.{name}")
        else:
            yield _other(value, "an object", where)
    elif origin is not None:
        found = [next(_differences(value, each, where), None) for each in arguments]
        yield from found[:1] if None not in found else ()  # type: ignore[misc]
    elif not _is(value, type_):
        yield _other(value, type_.__name__, where)


def _is(value: Any, type_: type) -> bool:
    if type_ is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, type_) and (type_ is bool or not isinstance(value, bool))


def _other(value: Any, wanted: str, where: str) -> str:
    return f"{where[1:] or 'the answer'} is {value!r:.60}, not {wanted}"
