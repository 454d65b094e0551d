"""Errors cross Spark's boundaries as data: from a Python worker, and from a batch function, to the driver.

Spark passes on only the text of what a worker or a batch function raises, inside the text of an exception of the JVM. Bascule therefore
raises a ``CarriedError`` in place of its own error. The text of a ``CarriedError`` is one token of ASCII characters:

    bascule-error:SECRET:CHECKSUM:LENGTH:JSON

SECRET is random for each driver process and is part of the closures that Spark ships to workers. So the text of a message or of a user's
exception, which Spark may quote, cannot imitate such a token. JSON has the class name, the text and the plain attributes of the error.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from bascule.core.errors import BasculeError, Scope, error_classes
from bascule.core.log import configure, configured

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

#: How PySpark reports a failed job: a failure without a class in PySpark arrives as the exception of the gateway.
FAILURES: Final = (PySparkException, Py4JJavaError)
#: Maximum length of a text: on longer ones, the regular expression that Spark applies to a batch function's exception overflows its stack.
TEXT_MAX: Final = 600

_PREFIX = "bascule-error"
#: The secret of this process. A worker process has another value, and uses the value that its closure brings.
_SECRET = secrets.token_hex(16)
_PLAIN = (str, int, float, bool, type(None))
_TRACEBACK = "Traceback (most recent call last):"
_CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\]")
#: Spark's error condition for an exception of a Python worker.
_OF_A_WORKER = "[PYTHON_EXCEPTION]"


class CarriedError(BasculeError):
    """An error of Bascule on its way to the driver. ``error_from_spark`` turns its text into that error again."""

    retriable = True
    scope = Scope.OPERATION


def crossing(task: Callable[[Iterator[T]], Iterator[T]]) -> Callable[[Any], Iterator[T]]:
    """Return ``task`` for a worker process, with its errors encoded for the driver. The process logs with the settings of the driver."""
    secret, log_settings = _SECRET, configured()

    def carried(batches: Iterator[T]) -> Iterator[T]:
        if log_settings is not None and configured() != log_settings:
            configure(log_settings)
        try:
            yield from task(batches)
        except BasculeError as error:
            raise CarriedError(encoded(error, secret)) from error

    return carried


def crossing_batch(batch: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
    """Return ``batch`` for ``foreachBatch``, with its errors encoded for the driver."""

    def carried(frame: DataFrame, batch_id: int) -> None:
        try:
            batch(frame, batch_id)
        except BasculeError as error:
            raise CarriedError(encoded(error, _SECRET)) from None

    return carried


def encoded(error: BasculeError, secret: str = _SECRET) -> str:
    """Return the text of a ``CarriedError`` for ``error``."""
    fields = {name: value for name, value in vars(error).items() if isinstance(value, _PLAIN)}
    said = {"error": type(error).__name__, "text": str(error)[:TEXT_MAX], "retriable": error.retriable, "fields": fields}
    data = json.dumps(said, separators=(",", ":"))
    return f"{_PREFIX}:{secret}:{zlib.crc32(data.encode()):08x}:{len(data)}:{data}"


def error_from_spark(failure: BaseException, secret: str = _SECRET) -> BasculeError | None:
    """Return Bascule's error behind a failure of a query or a job, or None if the failure has another origin.

    An error whose class this process does not know becomes a BasculeError whose text begins with the name of the class.
    """
    if isinstance(failure, BasculeError) and not isinstance(failure, CarriedError):
        return failure
    mark = f"{_PREFIX}:{secret}:"
    for part in str(failure).split(mark)[1:]:
        checksum, _, rest = part.partition(":")
        length, _, rest = rest.partition(":")
        data = rest[: int(length)] if length.isdecimal() else ""
        if data and f"{zlib.crc32(data.encode()):08x}" == checksum:
            return _rebuilt(json.loads(data))
    return None


def _rebuilt(said: dict[str, Any]) -> BasculeError:
    name, text = said["error"], said["text"]
    kind = next((each for each in error_classes() if each.__name__ == name), None)
    if kind is None:
        unknown = BasculeError(f"{name}: {text}")
        unknown.retriable = said["retriable"]
        return unknown
    error = kind.__new__(kind)
    error.args = (text,)
    vars(error).update(said["fields"])
    return error


def described(failure: BaseException) -> str:
    """Return the name and text of the error behind a failure, without stacks, for a log line or a dead letter."""
    error = error_from_spark(failure)
    return short(str(failure)) if error is None else f"{type(error).__name__}: {error}"[:TEXT_MAX]


def short(said: str) -> str:
    """Return the text of a failure without Java stack frames, or the exception line of a Python traceback."""
    raised = _raised(said)
    if raised:
        return raised[:TEXT_MAX]
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.lstrip().startswith(("at ", "..."))]
    return " | ".join(lines[:3])[:TEXT_MAX]


def _raised(said: str) -> str:
    """Return the line of a Python traceback that names the exception, or "" if there is none. This text may quote further tracebacks."""
    before, _, traceback = said.partition(_TRACEBACK)
    condition = _CONDITION.search(before)
    if condition is not None and condition[0] != _OF_A_WORKER:
        return ""
    # The first line that is not indented names the exception.
    return next((line.strip() for line in traceback.splitlines()[1:] if line[:1].strip()), "")
