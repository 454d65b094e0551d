"""Reasons why a range of a topic cannot be read."""

from __future__ import annotations

from bascule.core.errors import Scope, Unavailable


class Trimmed(Unavailable):
    """The records to read were deleted."""

    scope = Scope.LINK


class CutOff(Unavailable):
    """The topic ends before the records to read: it was recreated, or has lost its end."""

    retriable = False
    scope = Scope.LINK
