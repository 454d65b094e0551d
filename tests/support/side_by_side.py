"""Cases that wait for time to pass, run side by side: a test of many takes as long as the longest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Case = TypeVar("Case")


def side_by_side(run: Callable[[Case], object], cases: Sequence[Case], *, at_once: int = 0) -> None:
    """Run all cases in threads, ``at_once`` of them at a time; 0 is all.

    Raises an ExceptionGroup with the errors of the cases that fail, each with its case as a note.
    """
    with ThreadPoolExecutor(at_once or len(cases)) as threads:
        running = [(case, threads.submit(run, case)) for case in cases]
    errors = []
    for case, future in running:
        if error := future.exception():
            error.add_note(f"in the case {case!r}")
            errors.append(error)
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {len(cases)} cases failed", errors)
