"""Properties: files of Java, and ``${name:default}`` in the configuration of Artemis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from bascule.cli.imports.report import shortened
from bascule.core.errors import InvalidInput

#: A properties file, or a configuration: far more than any that a broker can use.
FILE_BYTES_MAX: Final = 8 << 20
ENTRIES_MAX: Final = 50_000
#: Java knows no other ends of lines: str.splitlines would end a password at others.
_LINE_END = re.compile(r"\r\n|\r|\n")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_ENTRY = re.compile(r"((?:\\.|[^\\=:\s])+)\s*[=:\s]?\s*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
#: Properties that one error names.
_MISSING_MAX: Final = 20
_ESCAPED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class PropertyEntry(NamedTuple):
    """One entry of a properties file."""

    line: int
    key: str
    value: str


class PropertyReferences:
    """Replaces references to properties, and collects those that have no value."""

    def __init__(self, values: Mapping[str, str], file: str) -> None:
        self._values = values
        self._file = file
        self._missing: dict[str, int] = {}

    def replaced(self, text: str, line: int) -> tuple[str, tuple[str, ...]]:
        """Return the text with the values of its properties, and the names of those that got their default."""
        defaults: list[str] = []

        def value(found: re.Match[str]) -> str:
            name, colon, default = (part.strip() for part in found[1].partition(":"))
            if name in self._values:
                return self._values[name]
            if colon:
                defaults.append(name)
                return default
            self._missing.setdefault(name, line)
            return ""

        return _REFERENCE.sub(value, text), tuple(defaults)

    def check(self) -> None:
        """Raise InvalidInput if a property has neither a value nor a default."""
        if self._missing:
            shown = [(shortened(name), line) for name, line in list(self._missing.items())[:_MISSING_MAX]]
            errors = [f"{self._file}:{line}: property {name!r} has no value; give it with --property {name}=VALUE" for name, line in shown]
            if len(self._missing) > _MISSING_MAX:
                errors.append(f"and {len(self._missing) - _MISSING_MAX} other properties")
            raise InvalidInput("\n".join(errors))


def property_entries(text: str, file: str) -> Iterator[PropertyEntry]:
    """Yield the entries of a properties file of Java. Raises InvalidInput for a line without a key, and for too many entries."""
    lines = _LINE_END.split(text)
    number = count = 0
    while number < len(lines):
        start, parts = number + 1, [lines[number].lstrip()]
        number += 1
        if not parts[0] or parts[0][0] in "#!":
            continue
        while _continues(parts[-1]) and number < len(lines):
            parts[-1:] = [parts[-1][:-1], lines[number].lstrip()]
            number += 1
        entry = "".join(parts)
        count += 1
        if count > ENTRIES_MAX:
            raise InvalidInput(f"{file}:{start}: the file has more than {ENTRIES_MAX:,} entries")
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise InvalidInput(f"{file}:{start}: not a line of a properties file: a key must precede '='")
        yield PropertyEntry(start, _unescaped(match[1]), _unescaped(match[2]))


def _continues(entry: str) -> bool:
    return (len(entry) - len(entry.rstrip("\\"))) % 2 == 1


def _unescaped(text: str) -> str:
    return whole_characters(
        _ESCAPE.sub(lambda found: chr(int(found[1][1:], 16)) if len(found[1]) == 5 else _ESCAPED.get(found[1], found[1]), text)
    )


def whole_characters(text: str) -> str:
    """Return a text with one character for each pair of surrogates, and U+FFFD for a single one, which no file can have."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
