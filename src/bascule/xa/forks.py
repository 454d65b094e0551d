"""Objects that a child process inherits from its parent in a fork and must neither use nor free.

Connections are shared with the parent, whose sessions would end. The parent's threads do not exist in the child, and may hold locks.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol, runtime_checkable


@runtime_checkable
class Forks(Protocol):
    """An object that must be reset in the child of a fork."""

    def after_fork(self) -> None:
        """Forget, in the child, everything that belongs to the parent. No IO; takes no lock of the parent."""


def abandon(*inherited: object) -> None:
    """Never free these objects in this process: their destructors would contact the parent's servers, or wait for its threads."""
    for each in inherited:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def register_for_forks(each: Forks) -> None:
    """Call ``after_fork`` of an object in each child of a fork, for as long as the object is in use."""
    _forgetting.add(each)


def _forget_the_parent() -> None:
    failures: list[Exception] = []
    for each in list(_forgetting):
        try:
            each.after_fork()
        except Exception as error:
            failures.append(error)  # continue: the other objects must not go on as in the parent
    if failures:
        raise ExceptionGroup("could not discard all objects of the parent process after a fork", failures)


_forgetting: weakref.WeakSet[Forks] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_the_parent)
