"""A tree of settings as TOML text, in the order of the reference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(tree: Mapping[str, Any], comment: str) -> str:
    """Return the text of a file: tables, then arrays of tables. ``comment`` has one or more lines and comes first."""
    lines = [f"# {each}".rstrip() for each in comment.splitlines()]
    for name, value in tree.items():
        for table in value if isinstance(value, list) else (value,):
            if table:
                lines += ["", *_table((name,), table, array=isinstance(value, list))]
    return "\n".join(lines) + "\n"


def _table(path: tuple[str, ...], table: Mapping[str, Any], *, array: bool = False) -> Iterator[str]:
    name = ".".join(_key(part) for part in path)
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if values or array:
        yield f"[[{name}]]" if array else f"[{name}]"
    for key, value in values.items():
        yield f"{_key(key)} = {toml_value(value)}"
    for number, (key, nested) in enumerate((key, value) for key, value in table.items() if isinstance(value, Mapping)):
        if values or number:
            yield ""
        yield from _table((*path, key), nested)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml_value(key)


def toml_value(value: object) -> str:
    """Return the text of a value that is no table."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return str(int(value)) if value.is_integer() else repr(value)
        case list() | tuple():
            return f"[{', '.join(toml_value(each) for each in value)}]"
    # JSON's escapes are TOML's; DEL must be escaped in TOML only.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
