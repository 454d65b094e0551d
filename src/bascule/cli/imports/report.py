"""The report of an import: a row for each setting of the source, with what became of it."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from bascule.config.fields import is_secret
from bascule.core.masking import MASK

#: Characters of a value in the report.
SHOWN_MAX: Final = 200
#: The columns of the report as a table; the other formats have them, too.
COLUMNS: Final = ("place", "element", "value", "outcome", "setting", "note")
_PASSWORDS = re.compile(r"((?:password|passphrase|secret|token)\w*\s*=\s*)(\"[^\"]*\"|'[^']*'|[^;&,\s]+)", re.IGNORECASE)
#: User and password before the host of a URL.
_USER_OF_URL = re.compile(r"(//)[^/?#@\s]*:[^/?#@\s]*@")


class ImportOutcome(enum.StrEnum):
    """What became of a setting of the source."""

    TAKEN = "taken"
    #: Bascule has the setting, and it works in another way.
    DIFFERS = "differs"
    #: Bascule has no counterpart.
    NONE = "none"


class ImportRow(NamedTuple):
    """One setting of the source. ``setting`` is Bascule's, or "" if there is none to write; ``note`` says what differs and what to do."""

    file: str
    line: int
    element: str
    value: str
    outcome: ImportOutcome
    setting: str
    note: str

    def shown(self) -> dict[str, Any]:
        """Return the row as the command prints it."""
        return {
            "place": f"{self.file}:{self.line}",
            "element": self.element,
            "value": self.value,
            "outcome": self.outcome.value,
            "setting": self.setting,
            "note": self.note,
        }


def shown_value(key: str, value: str) -> str:
    """Return a value of the source on one line, short and without secrets. ``key`` is its name."""
    if is_secret(key):
        return MASK if value else ""
    text = _USER_OF_URL.sub(rf"\1{MASK}@", _PASSWORDS.sub(rf"\1{MASK}", " ".join(value.split())))
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."


class ImportReport:
    """Rows in the order of the source."""

    def __init__(self) -> None:
        self._rows: list[ImportRow] = []

    def add(self, row: ImportRow) -> None:
        """Add a row."""
        self._rows.append(row)

    @property
    def rows(self) -> Sequence[ImportRow]:
        """Return the rows of each file by line; rows of one line stay in the order in which they were added."""
        files = list(dict.fromkeys(row.file for row in self._rows))
        return sorted(self._rows, key=lambda row: (files.index(row.file), row.line))

    def summary(self) -> str:
        """Return how many settings were taken, differ, and have no counterpart."""
        counts = Counter(row.outcome for row in self._rows)
        return (
            f"{counts[ImportOutcome.TAKEN]} taken, {counts[ImportOutcome.DIFFERS]} taken with a difference,"
            f" {counts[ImportOutcome.NONE]} without a counterpart"
        )
