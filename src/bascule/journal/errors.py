"""Errors of journal records."""

from __future__ import annotations

from typing import ClassVar

from bascule.core.errors import BasculeError, Scope


class RecordError(BasculeError):
    """A journal record that cannot be read. ``reason`` is one word for metrics."""

    retriable = False
    scope = Scope.PROCESS
    reason: ClassVar[str] = "damaged"


class ForeignRecord(RecordError):
    """The record was not written by Bascule: it is ignored and reported."""

    scope = Scope.OPERATION

    reason: ClassVar[str] = "foreign"


class DamagedRecord(RecordError):
    """The record was written by Bascule and is damaged: the load stops."""

    reason: ClassVar[str] = "damaged"


class NewerRecord(RecordError):
    """The record was written by a newer Bascule: the load stops."""

    reason: ClassVar[str] = "newer"
