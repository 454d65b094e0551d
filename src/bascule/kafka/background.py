"""Work whose end may not be waited for: what asks Kafka may be without an answer for as long as Kafka is away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Do it in a thread of its own, of this name. Unlike an executor's, it holds up no process that ends."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, name=name, daemon=True).start()
    return future
