"""Containment of errors: an exception that concerns one link, message or request is reported and counted, and everything else continues.

docs/architecture.md, "What ends an epoch", lists the errors that end an epoch. Everything else that the engine calls, or that peers can
influence, is called under an :class:`ErrorContainment`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from typing import Any

from bascule.core.errors import BasculeError, Scope


class ErrorKind(enum.StrEnum):
    """The subject of a contained error; each kind has its own counter."""

    ANSWER = "answer"  # an answer to a client that waits until a record is stored
    TIMER = "timer"
    DELIVERY = "delivery"  # delivery of one message to one consumer
    LINK = "link"  # a call to a client's link, other than a delivery or an answer
    MOVE = "move"  # move of one message to another address
    COMMIT = "commit"  # commit of one transaction
    SELECTOR = "selector"  # evaluation of a selector on one message
    WORK = "work"  # a later slice of long work
    BODY = "body"  # access to a message body in the spill files
    INGRESS = "ingress"  # intake of one chunk of the ingress topic
    REQUEST = "request"  # request of a management client or an administrator
    CONNECTION = "connection"  # connection of one client


#: Gets the kind, the error, and fields that say where it occurred.
Report = Callable[[ErrorKind, Exception, dict[str, object]], None]


def _raise_again(_kind: ErrorKind, error: Exception, _fields: dict[str, object]) -> None:
    raise error


class ErrorContainment:
    """Counts and reports errors by kind. Without ``report`` each error is raised again, so that no test misses one."""

    def __init__(self, report: Report = _raise_again) -> None:
        self.counts: Counter[ErrorKind] = Counter()
        self._report = report

    def contain(self, kind: ErrorKind, error: Exception, **fields: object) -> None:
        """Report and count an error. Raise it again if it ends the epoch or the process."""
        if isinstance(error, BasculeError) and error.scope >= Scope.EPOCH:
            raise error
        self.counts[kind] += 1
        self._report(kind, error, fields)

    def run(self, kind: ErrorKind, action: Callable[..., object], *arguments: Any) -> None:
        """Call ``action`` and contain its errors."""
        try:
            action(*arguments)
        except Exception as error:
            self.contain(kind, error)
