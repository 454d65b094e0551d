"""An interrupt (Ctrl-C) at any line of a commit or rollback.

The manager never reports a transaction that may commit as rolled back, leaves no branch open, and recovery ends the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

import pytest

from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager, TransactionRolledBack, two_phase
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


@pytest.mark.parametrize(
    ("names", "parallel"),
    [(("one",), False), (("one", "two"), False), (("one", "two"), True)],
    ids=["in one phase", "in two phases", "in two phases at the same time"],
)
def test_interrupted_commit_that_may_commit_is_never_reported_as_rolled_back(names: tuple[str, ...], parallel: bool) -> None:
    for at in range(1, LINES_MAX):
        resources, interrupt = [ModelResource(name) for name in names], Interrupt(at)
        with TransactionManager("shop", ModelLog(), resources, recovery_interval_s=60, parallel=parallel) as manager:
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
            assert manager._at_work() == set(), f"line {at}: recovery would skip the transaction"
            left = any(resource.recover() for resource in resources)
            assert transaction._protocol.pending or not left, f"line {at}: recovery does not know that a branch is left"
            manager.recoverer().run(manager._at_work)
            assert [resource._active for resource in resources] == [{}] * len(names), f"line {at}: a branch is open"
            committed = {len(resource.durable.committed) for resource in resources}
            assert len(committed) == 1, f"line {at}: the outcome is split"
            assert [resource.recover() for resource in resources] == [[]] * len(names), f"line {at}: a prepared branch is left"
            assert committed == {0} or status in (TransactionStatus.COMMITTED, TransactionStatus.IN_DOUBT), f"line {at}: {status}"
    assert interrupt.left > 0, "the commit has more lines than the loop"
    assert at > 20


@pytest.mark.parametrize("marked", [False, True], ids=["rollback", "commit of a marked transaction"])
def test_interrupted_rollback_leaves_no_branch_open(marked: bool) -> None:
    for at in range(1, LINES_MAX):
        resources, interrupt = [ModelResource(name) for name in ("one", "two", "three")], Interrupt(at)
        with TransactionManager("shop", ModelLog(), resources, recovery_interval_s=60) as manager:
            transaction = manager.begin()
            for resource in resources:
                transaction.enlist(resource).append("work")
            if marked:
                transaction.set_rollback_only()
            try:
                with interrupt(), suppress(TransactionRolledBack):
                    transaction.commit() if marked else transaction.rollback()
            except KeyboardInterrupt:
                if transaction.status in (TransactionStatus.ACTIVE, TransactionStatus.MARKED_ROLLBACK):  # the rollback has not begun
                    transaction.rollback()
            else:
                break
            assert transaction.status is TransactionStatus.ROLLED_BACK, f"line {at}"
            assert manager._at_work() == set(), f"line {at}: recovery would skip the transaction"
            assert [resource._active for resource in resources] == [{}] * len(resources), f"line {at}: a branch is open"
    assert interrupt.left > 0, "the rollback has more lines than the loop"
    assert at > 20
