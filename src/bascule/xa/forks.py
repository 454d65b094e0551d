"""What a child process inherits of its parent by a fork: it must neither use it nor free it.

Connections are shared with the parent, whose sessions would end; threads are not there any more, and locks may be held by them.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol, runtime_checkable


@runtime_checkable
class Forks(Protocol):
    """What starts anew in the child of a fork."""

    def after_fork(self) -> None:
        """Forget, in the child, all that belongs to the parent. No IO; no lock of the parent's is taken."""


def abandon(*inherited: object) -> None:
    """Never free these objects in this process: their destructors would speak to the parent's servers, or wait for its threads."""
    for each in inherited:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def register_for_forks(each: Forks) -> None:
    """Have ``after_fork`` of an object called in each child of a fork, for as long as the object is used."""
    _forgetting.add(each)


def _forget_the_parent() -> None:
    failures: list[Exception] = []
    for each in list(_forgetting):
        try:
            each.after_fork()
        except Exception as error:
            failures.append(error)  # the others must not go on as the parent
    if failures:
        raise ExceptionGroup("could not discard all objects of the parent process after a fork", failures)


_forgetting: weakref.WeakSet[Forks] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_the_parent)
