"""Why a range of a topic cannot be read."""

from __future__ import annotations

from bascule.core.errors import Scope, Unavailable


class Trimmed(Unavailable):
    """What was to be read is not there any more."""

    scope = Scope.LINK


class CutOff(Unavailable):
    """The topic ends before what was to be read: it was deleted and created again, or has lost its end."""

    retriable = False
    scope = Scope.LINK
