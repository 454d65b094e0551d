"""Where in a TOML file a key stands: the standard parser tells values only."""

from __future__ import annotations

import re
from collections import Counter

Path = tuple[str | int, ...]

_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*(\.?)""")
_HEADER = re.compile(r"\s*(\[\[?)(.+?)\]\]?\s*(?:#.*)?$")


def _dotted(text: str) -> tuple[tuple[str, ...], int]:
    """The parts of a dotted key at the start of ``text``, and where they end."""
    parts: list[str] = []
    position = 0
    while match := _PART.match(text, position):
        parts.append(next(group for group in match.groups()[:3] if group is not None))
        position = match.end()
        if not match[4]:
            break
    return tuple(parts), position


def key_lines(text: str) -> dict[Path, int]:
    """Line number (from 1) of every table and key of a valid TOML text, tables of an array counted from 0.

    Keys inside inline tables are not looked for: the line of the table serves.
    """
    lines: dict[Path, int] = {}
    tables: Counter[Path] = Counter()
    table: Path = ()
    closing = ""  # what ends the multi-line string we are in
    for number, line in enumerate(text.splitlines(), start=1):
        if closing:
            closing = "" if closing in line else closing
            continue
        if header := _HEADER.match(line):
            parts, _ = _dotted(header[2])
            table = _resolved(parts[:-1], tables) + parts[-1:]
            if header[1] == "[[":
                tables[table] += 1
                table = (*table, tables[table] - 1)
            lines.setdefault(table, number)
            continue
        parts, end = _dotted(line)
        if parts and line[end:].lstrip().startswith("="):
            for depth in range(1, len(parts) + 1):
                lines.setdefault(table + parts[:depth], number)
            closing = next((quote for quote in ('"""', "'''") if line.count(quote) == 1), "")
    return lines


def _resolved(parts: tuple[str, ...], tables: Counter[Path]) -> Path:
    """A header's parents, with the number of the current table where one is an array."""
    path: Path = ()
    for part in parts:
        path = (*path, part)
        if path in tables:
            path = (*path, tables[path] - 1)
    return path


def line_of(path: Path, lines: dict[Path, int]) -> int | None:
    """The line of a key, else of the nearest table around it."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return None
