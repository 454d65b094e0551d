"""Containment of errors: an exception that concerns one link, message or request is reported and counted, and the rest goes on.

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
    """What a contained error concerned; each kind has a counter of its own."""

    ANSWER = "answer"  # to whoever waits until a record is stored
    TIMER = "timer"
    DELIVERY = "delivery"  # of one message to one consumer
    LINK = "link"  # a call to a client's link, other than a delivery or an answer
    MOVE = "move"  # of one message to another address
    COMMIT = "commit"  # of one transaction
    SELECTOR = "selector"  # on one message
    BODY = "body"  # a message body in the spill files
    INGRESS = "ingress"  # one chunk of the ingress topic
    REQUEST = "request"  # of a management client or an administrator
    CONNECTION = "connection"  # of one client


#: Is told the kind, the error, and fields that say where.
Report = Callable[[ErrorKind, Exception, dict[str, object]], None]


def _raise_again(_kind: ErrorKind, error: Exception, _fields: dict[str, object]) -> None:
    raise error


class ErrorContainment:
    """Counts errors by kind, and reports them. Without ``report`` each is raised again: so no test misses one."""

    def __init__(self, report: Report = _raise_again) -> None:
        self.counts: Counter[ErrorKind] = Counter()
        self._report = report

    def contain(self, kind: ErrorKind, error: Exception, **fields: object) -> None:
        """Report and count an error. Raises it again where it ends the epoch, or the process."""
        if isinstance(error, BasculeError) and error.scope >= Scope.EPOCH:
            raise error
        self.counts[kind] += 1
        self._report(kind, error, fields)

    def run(self, kind: ErrorKind, action: Callable[..., object], *arguments: Any) -> None:
        """Call ``action``, and contain what it raises."""
        try:
            action(*arguments)
        except Exception as error:
            self.contain(kind, error)
