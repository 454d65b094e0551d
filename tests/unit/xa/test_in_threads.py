"""Steps in parallel threads: all of them end before the call returns or raises."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final

import pytest

from bascule.core.effects import run_blocking
from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads import background
from bascule.xa import TransactionManager, blocking
from bascule.xa.blocking import in_threads
from bascule.xa.errors import ResourceFailed
from bascule.xa.two_phase import TransactionStatus
from tests.support.speed import SLOWNESS

WAIT_S: Final = 20.0 * SLOWNESS
#: How long a step waits for an event that must not happen.
NEVER_S: Final = 0.02
LINES_MAX: Final = 200
Step = Callable[[], Coroutine[Any, Any, str]]


class Steps:
    """Steps that take a moment, and record in ``outlived`` if the call ended before them."""

    def __init__(self) -> None:
        self.call_ended = threading.Event()
        self.began: list[str] = []
        self.outlived: list[str] = []

    def step(self, name: str) -> Step:
        async def take() -> str:
            self.began.append(name)
            if self.call_ended.wait(NEVER_S):
                self.outlived.append(name)
            return name

        return take


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at a line of the module under test, or of the module that starts threads; yield the number of lines left."""
    left, before = [line], sys.gettrace()
    files = {blocking.__file__, background.__file__}

    def called(frame: FrameType, _event: str, _argument: object) -> Any:
        return traced if frame.f_code.co_filename in files else None

    def traced(_frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return traced

    sys.settrace(called)
    try:
        yield left
    finally:
        sys.settrace(before)


def test_results_of_parallel_steps_keep_order_of_steps_and_errors() -> None:
    async def fails() -> str:
        raise ResourceFailed("gone")

    steps = Steps()
    first, failed, last = run_blocking(in_threads([steps.step("first"), fails, steps.step("last")]))
    assert (first, last) == ("first", "last")
    assert isinstance(failed, ResourceFailed)


def test_no_parallel_step_outlives_interrupted_call() -> None:
    for line in range(1, LINES_MAX):
        steps = Steps()
        threads = threading.active_count()
        with interrupted_at(line) as left:
            try:
                results = run_blocking(in_threads([steps.step(name) for name in ("first", "second", "third")]))
            except KeyboardInterrupt:
                results = None
            steps.call_ended.set()
        assert steps.outlived == [], f"line {line}"
        for thread in threading.enumerate()[threads:]:
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"line {line}: a thread never ends"
        assert steps.outlived == [], f"line {line}"
        if left[0] > 0:
            assert results == ["first", "second", "third"]
            break
    assert left[0] > 0, "the call has more than LINES_MAX lines"
    assert line > 10


def test_parallel_steps_finish_when_call_is_interrupted_repeatedly() -> None:
    """The signal of Ctrl-C arrives several times while the calling thread waits for the others."""
    interrupts, over, ended = 3, threading.Event(), threading.Event()
    handled: SimpleQueue[None] = SimpleQueue()  # another signal may interrupt its ``put``
    calling = threading.get_ident()

    def handler(_signal: int, _frame: FrameType | None) -> None:
        handled.put(None)
        if not over.is_set():
            raise KeyboardInterrupt

    async def quick() -> str:
        return "quick"

    async def slow() -> str:
        for _ in range(interrupts):
            interrupt()
        ended.set()
        return "slow"

    def interrupt() -> None:
        """Repeat the signal until it is handled: Python handles a signal that arrives just before the wait only after the wait."""
        for _ in range(1000):
            signal.pthread_kill(calling, signal.SIGINT)
            with suppress(Empty):
                handled.get(timeout=NEVER_S)
                return

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_blocking(in_threads([quick, slow]))
        over.set()
        outlived = not ended.is_set()
        assert ended.wait(WAIT_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not outlived


def test_parallel_steps_run_in_calling_thread_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    steps, names = Steps(), ["first", "second", "third", "fourth"]
    assert run_blocking(in_threads([steps.step(name) for name in names])) == names
    assert sorted(steps.began) == sorted(names)


def test_interrupted_transaction_rolls_back_after_pending_prepare_has_answered() -> None:
    seen: list[str] = []
    waiting, rolled_back = threading.Event(), threading.Event()

    def watch(point: str) -> None:
        seen.append(point)
        if point == "slow.prepare.before":
            assert waiting.wait(WAIT_S)
            assert not rolled_back.wait(NEVER_S), "the manager rolled back a branch during its prepare"
        if point == "slow.rollback.before":
            rolled_back.set()
        if point == "quick.prepare.before":
            waiting.set()
            raise KeyboardInterrupt

    quick, slow = ModelResource("quick", watch=watch), ModelResource("slow", watch=watch)
    with TransactionManager("shop", ModelLog(), [quick, slow], parallel=True) as manager:
        transaction = manager.begin()
        for resource in (quick, slow):
            transaction.enlist(resource).append("work")
        with pytest.raises(KeyboardInterrupt):
            transaction.commit()
        assert transaction.status is TransactionStatus.ROLLED_BACK
    assert seen.index("slow.prepare.after") < seen.index("slow.rollback.before")
    assert quick.durable.committed == slow.durable.committed == []
    assert slow.recover() == []
