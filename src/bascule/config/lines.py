"""Line numbers of the keys in a TOML file, which the standard parser does not report."""

from __future__ import annotations

import re
from collections import Counter

Path = tuple[str | int, ...]

_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*(\.?)""")
_HEADER = re.compile(r"\s*(\[\[?)(.+?)\]\]?\s*(?:#.*)?$")


def _dotted(text: str) -> tuple[tuple[str, ...], int]:
    """Return the parts of the dotted key at the start of ``text``, and the index after the key."""
    parts: list[str] = []
    position = 0
    while match := _PART.match(text, position):
        parts.append(next(group for group in match.groups()[:3] if group is not None))
        position = match.end()
        if not match[4]:
            break
    return tuple(parts), position


def key_lines(text: str) -> dict[Path, int]:
    """Return the line number (from 1) of every table and key of a valid TOML text. Tables of an array are counted from 0.

    Keys in inline tables have no entry; callers use the line of the table.
    """
    lines: dict[Path, int] = {}
    tables: Counter[Path] = Counter()
    table: Path = ()
    closing = ""  # end of the current multi-line string
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
    """Return the parents of a header, with the index of the current table for each array of tables."""
    path: Path = ()
    for part in parts:
        path = (*path, part)
        if path in tables:
            path = (*path, tables[path] - 1)
    return path


def line_of(path: Path, lines: dict[Path, int]) -> int | None:
    """Return the line of a key, or of the nearest table around it."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return None
