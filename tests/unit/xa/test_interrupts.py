"""An interrupt (Ctrl-C) at any line of a commit: no transaction that may commit is told as rolled back, and recovery ends all of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import pytest

from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager, two_phase
from bascule.xa.two_phase import ENDED, TransactionStatus

LINES_MAX: Final = 500


class Interrupt:
    """Raises KeyboardInterrupt at a line of ``two_phase``, counted from the beginning of the block."""

    def __init__(self, at: int) -> None:
        self.left = at

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, _event: str, _argument: object) -> Any:
        return self._line if frame.f_code.co_filename == two_phase.__file__ else None

    def _line(self, _frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("names", [("one",), ("one", "two")], ids=["in one phase", "in two phases"])
def test_interrupted_commit_is_never_told_as_rolled_back_where_it_may_commit(names: tuple[str, ...]) -> None:
    for at in range(1, LINES_MAX):
        resources, interrupt = [ModelResource(name) for name in names], Interrupt(at)
        with TransactionManager("shop", ModelLog(), resources, recovery_interval_s=60) as manager:
            transaction = manager.begin()
            for resource in resources:
                transaction.enlist(resource).append("work")
            try:
                with interrupt():
                    transaction.commit()
            except KeyboardInterrupt:
                status = transaction.status
            else:
                break
            if status is TransactionStatus.ACTIVE:
                transaction.rollback()
            assert transaction.status in ENDED, f"line {at}"
            assert manager._at_work() == set(), f"line {at}: recovery passes it over"
            manager.recoverer().run(manager._at_work)
            committed = {len(resource.durable.committed) for resource in resources}
            assert len(committed) == 1, f"line {at}: split"
            assert [resource.recover() for resource in resources] == [[]] * len(names), f"line {at}: left behind"
            assert committed == {0} or status in (TransactionStatus.COMMITTED, TransactionStatus.IN_DOUBT), f"line {at}: told {status}"
    assert interrupt.left > 0, "the commit has more lines"
    assert at > 20
