"""Threads that wait, one after the other, for a service that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.support.system import wait_for

THREADS = 8
WAIT_S = 30.0


class Door:
    """A lock that counts the threads that came to it."""

    def __init__(self) -> None:
        self.came = 0
        self._counting, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._counting:
            self.came += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Service:
    """A service that answers or fails when the test lets it. It accepts any arguments."""

    def __init__(self, error: Exception | None = None) -> None:
        self.tries, self.answers = 0, threading.Event()
        self.error = error

    def __call__(self, *_: object, **__: object) -> str:
        self.tries += 1
        assert self.answers.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return "there"


def told_together(door: Door, service: Service, call: Callable[[], object]) -> list[BaseException | None]:
    """Return the results of several threads that were all at the door before the service answered the first of them."""
    with ThreadPoolExecutor(THREADS) as threads:
        answers = [threads.submit(call) for _ in range(THREADS)]
        wait_for(lambda: door.came == THREADS, "all to wait")
        service.answers.set()
        return [answer.exception(WAIT_S) for answer in answers]
