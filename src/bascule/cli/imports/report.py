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
#: Characters of an element's path, and of a setting or a note.
_ELEMENT_MAX: Final = 1000
_TEXT_MAX: Final = 2000
#: A password without quotation marks may contain blanks and commas: it ends where the parameter of a URL ends.
_PASSWORDS = re.compile(r"((?:password|passphrase|secret|token)\w*\s*=\s*)(\"[^\"]*\"|'[^']*'|[^;&]+)", re.IGNORECASE)
#: Characters of a value in which secrets are searched; no more of it are shown.
_CONSIDERED_MAX: Final = 20 * SHOWN_MAX
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
    text = " ".join(value[:_CONSIDERED_MAX].split())
    return shortened(_USER_OF_URL.sub(rf"\1{MASK}@", _PASSWORDS.sub(rf"\1{MASK}", text)))


def shortened(text: str, length: int = SHOWN_MAX) -> str:
    """Return a text, or its beginning with three dots."""
    return text if len(text) <= length else text[:length] + "..."


class ImportReport:
    """Rows in the order of the source."""

    def __init__(self) -> None:
        self._rows: list[ImportRow] = []

    def add(self, row: ImportRow) -> None:
        """Add a row; long texts of the source are shortened."""
        setting, note = shortened(row.setting, _TEXT_MAX), shortened(row.note, _TEXT_MAX)
        self._rows.append(row._replace(element=shortened(row.element, _ELEMENT_MAX), setting=setting, note=note))

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
