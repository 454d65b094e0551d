"""HOCON, the format of ``jms-bridge.conf``, with line numbers: objects, lists, references, ``+=`` and comments; no includes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from bascule.cli.imports.report import shortened
from bascule.cli.imports.substitution import FILE_BYTES_MAX, whole_characters
from bascule.core.errors import InvalidInput

DEPTH_MAX: Final = 64
#: Values after the replacement of references, which may repeat objects.
VALUES_MAX: Final = 20_000
#: Characters of all texts after the replacement of references, which may repeat texts.
TEXT_CHARACTERS_MAX: Final = 2 * FILE_BYTES_MAX
#: Levels of values after the replacement of references.
RESOLVED_DEPTH_MAX: Final = 2 * DEPTH_MAX
KEY_CHARACTERS_MAX: Final = 200
_NOT_UNQUOTED: Final = frozenset('$"{}[]:=,+#`^?!@*&\\')
_BLANKS: Final = " \t\r\ufeff"


class HoconReference(NamedTuple):
    """``${path}`` or ``${?path}``."""

    path: tuple[str, ...]
    optional: bool


class HoconConcatenation(NamedTuple):
    """Values side by side: texts become one text, objects one object, lists one list."""

    parts: tuple[HoconNode, ...]


class HoconOverlay(NamedTuple):
    """Values that are given to one key in turn, and for each whether ``+=`` gave it: objects are merged, other values replaced."""

    parts: list[tuple[HoconNode, bool]]


@dataclass(frozen=True, eq=False)
class HoconNode:
    """One value, and the line where it begins. A number, true and false are text."""

    line: int
    value: str | dict[str, HoconNode] | list[HoconNode] | HoconReference | HoconConcatenation | HoconOverlay | None


class HoconLeaf(NamedTuple):
    """One text of a file, with the keys that lead to it; items of lists are counted from 0."""

    path: tuple[str, ...]
    value: str
    line: int


def read_hocon(text: str, file: str, properties: Mapping[str, str]) -> list[HoconLeaf]:
    """Return the texts of a file. Raises InvalidInput with the line."""
    root = _HoconParser(text, file).parse()
    return list(_leaves(_Resolver(root, file, properties).resolved(root, ())))


def _leaves(node: HoconNode | None, path: tuple[str, ...] = ()) -> Iterator[HoconLeaf]:
    match node.value if node is not None else None:
        case dict() as fields:
            for key, each in fields.items():
                yield from _leaves(each, (*path, key))
        case list() as items:
            for position, each in enumerate(items):
                yield from _leaves(each, (*path, str(position)))
        case str() as value:
            yield HoconLeaf(path, value, node.line if node is not None else 0)


class _HoconParser:
    def __init__(self, text: str, file: str) -> None:
        self._text = text
        self._file = file
        self._at = 0
        self._line = 1
        self._depth = 0

    def parse(self) -> HoconNode:
        self._skip(lines=True)
        braces = self._peek() == "{"
        root = self._object() if braces else HoconNode(1, self._fields(""))
        self._skip(lines=True)
        if self._peek():
            self._fail(f"unexpected {self._peek()!r}")
        return root

    def _fail(self, reason: str) -> None:
        raise InvalidInput(f"{self._file}:{self._line}: {shortened(reason)}")

    def _peek(self, length: int = 1) -> str:
        return self._text[self._at : self._at + length]

    def _next(self, length: int = 1) -> str:
        taken = self._peek(length)
        self._at += length
        self._line += taken.count("\n")
        return taken

    def _skip(self, *, lines: bool = False, commas: bool = False) -> str:
        """Skip blanks, and comments, line ends and commas on request. Return the blanks that were skipped last."""
        start = self._at
        while char := self._peek():
            if char == "#" or self._peek(2) == "//":
                while self._peek() not in ("", "\n"):
                    self._at += 1
            elif char in _BLANKS or (char == "\n" and lines) or (char == "," and commas):
                self._next()
            else:
                break
        return self._text[start : self._at]

    def _object(self) -> HoconNode:
        line = self._line
        self._enter()
        self._next()
        fields = self._fields("}")
        if self._next() != "}":
            self._fail(f"the object that begins in line {line} has no end")
        self._depth -= 1
        return HoconNode(line, fields)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._fail(f"values are nested more than {DEPTH_MAX} deep")

    def _fields(self, end: str) -> dict[str, HoconNode]:
        fields: dict[str, HoconNode] = {}
        while True:
            self._skip(lines=True, commas=True)
            if self._peek() in ("", end):
                return fields
            line = self._line
            keys = self._key()
            if keys == ["include"] and self._peek() not in (":", "=", "{"):
                self._fail("include is not followed; put the content of that file here")
            append = self._peek(2) == "+="
            if append:
                self._next(2)
            elif self._peek() in (":", "="):
                self._next()
            elif self._peek() != "{":
                self._fail(f"expected '=' after {'.'.join(keys)!r}")
            self._skip(lines=True)
            value = self._value()
            self._assign(fields, keys, HoconNode(line, [value]) if append else value, line, append=append)

    def _assign(self, fields: dict[str, HoconNode], keys: list[str], value: HoconNode, line: int, *, append: bool) -> None:
        for key in keys[:-1]:
            inner = fields.get(key)
            if inner is None or not isinstance(inner.value, dict):
                inner = HoconNode(line, {}) if inner is None or isinstance(inner.value, str | None) else _with_object(inner, line)
                fields[key] = inner
            fields = _last_object(inner)
        before = fields.get(keys[-1])
        # An optional reference to nothing leaves the value that the key had.
        if before is not None and (append or isinstance(value.value, HoconReference) or (_may_be_object(before) and _may_be_object(value))):
            value = _overlaid(before, value, append=append)
        fields[keys[-1]] = value

    def _key(self) -> list[str]:
        keys, current, quoted = [], "", False
        while True:
            char = self._peek()
            if char == '"':
                current, quoted = current + self._quoted(), True
            elif char == ".":
                keys.append(current)
                current, quoted = "", False
                self._next()
            elif not char or char in _NOT_UNQUOTED or char in " \t\r\n":
                blanks = self._skip()
                if not blanks or self._peek() in ("", ":", "=", "{", "\n") or self._peek(2) == "+=" or current == "include":
                    break
                current += blanks
            else:
                current += self._next()
        if not quoted and not current:
            self._fail(f"expected a key, and found {self._peek()!r}")
        keys.append(current)
        if len(keys) > DEPTH_MAX or max(map(len, keys)) > KEY_CHARACTERS_MAX:
            self._fail(f"a key has more than {DEPTH_MAX} parts, or a part with more than {KEY_CHARACTERS_MAX} characters")
        return keys

    def _value(self) -> HoconNode:
        line, parts, blanks = self._line, list[HoconNode](), ""
        while char := self._peek():
            if char in ",}]\n" or char == "#" or self._peek(2) == "//":
                break
            part = self._part(char)
            if blanks and parts and isinstance(part.value, str | HoconReference) and isinstance(parts[-1].value, str | HoconReference):
                parts.append(HoconNode(self._line, blanks))
            parts.append(part)
            blanks = self._skip()
        if not parts:
            self._fail("a value is missing")
        return parts[0] if len(parts) == 1 else HoconNode(line, HoconConcatenation(tuple(parts)))

    def _part(self, char: str) -> HoconNode:
        line = self._line
        if char == "{":
            return self._object()
        if char == "[":
            return self._list()
        if char == '"':
            return HoconNode(line, self._quoted())
        if self._peek(2) == "${":
            return HoconNode(line, self._reference())
        text = ""
        while (char := self._peek()) and char not in _NOT_UNQUOTED and char not in " \t\r\n" and self._peek(2) != "//":
            text += self._next()
        if not text:
            self._fail(f"unexpected {char!r}; put the value into quotation marks")
        return HoconNode(line, None if text == "null" else text)

    def _list(self) -> HoconNode:
        line, items = self._line, list[HoconNode]()
        self._enter()
        self._next()
        while True:
            self._skip(lines=True, commas=True)
            if self._peek() in ("", "]"):
                break
            items.append(self._value())
        if self._next() != "]":
            self._fail(f"the list that begins in line {line} has no end")
        self._depth -= 1
        return HoconNode(line, items)

    def _reference(self) -> HoconReference:
        end = self._text.find("}", self._at)
        text = self._text[self._at + 2 : end] if end >= 0 else ""
        if not text or "\n" in text:
            self._fail("a reference ${...} has no end")
        self._next(end + 1 - self._at)
        optional = text.startswith("?")
        return HoconReference(tuple(part.strip('"') for part in text.removeprefix("?").strip().split(".")), optional)

    def _quoted(self) -> str:
        line, triple = self._line, self._peek(3) == '"""'
        start = self._at + (3 if triple else 1)
        end = self._text.find('"""', start) if triple else self._end_of_quoted(start)
        if end < 0:
            self._fail(f"the text that begins in line {line} has no end")
        raw = self._text[start:end]
        self._next(end + (3 if triple else 1) - self._at)
        if triple:
            return raw
        try:
            return whole_characters(str(json.loads(f'"{raw}"')))
        except ValueError:
            raise InvalidInput(f"{self._file}:{line}: the text in quotation marks has an escape that JSON does not know") from None

    def _end_of_quoted(self, start: int) -> int:
        at = start
        while at < len(self._text) and self._text[at] != "\n":
            if self._text[at] == '"':
                return at
            at += 2 if self._text[at] == "\\" else 1
        return -1


def _may_be_object(node: HoconNode) -> bool:
    return isinstance(node.value, dict | HoconReference | HoconConcatenation | HoconOverlay)


def _overlaid(before: HoconNode, value: HoconNode, *, append: bool = False) -> HoconNode:
    if isinstance(before.value, HoconOverlay):  # one list for all, because a file may append to a key a thousand times
        before.value.parts.append((value, append))
        return before
    return HoconNode(before.line, HoconOverlay([(before, False), (value, append)]))


def _with_object(node: HoconNode, line: int) -> HoconNode:
    return _overlaid(node, HoconNode(line, {}))


def _last_object(node: HoconNode) -> dict[str, HoconNode]:
    match node.value:
        case HoconOverlay(assigned):
            value = assigned[-1][0].value
        case HoconConcatenation(joined):
            value = joined[-1].value
        case _:
            value = node.value
    return value if isinstance(value, dict) else {}


def _field(node: HoconNode, key: str) -> HoconNode | None:
    """Return the value that a key has last, in an object or in objects side by side."""
    match node.value:
        case dict() as fields:
            return fields.get(key)
        case HoconOverlay(assigned):
            parts = [part for part, _ in assigned]
        case HoconConcatenation(joined):
            parts = list(joined)
        case _:
            return None
    objects = (part.value for part in reversed(parts))
    return next((fields[key] for fields in objects if isinstance(fields, dict) and key in fields), None)


class _Resolver:
    """Replaces references by the values to which they point."""

    def __init__(self, root: HoconNode, file: str, properties: Mapping[str, str]) -> None:
        self._root = root
        self._file = file
        self._properties = properties
        self._values = 0
        self._characters = 0
        self._depth = 0

    def resolved(self, node: HoconNode, through: tuple[tuple[str, ...], ...]) -> HoconNode | None:
        """Return a value without references; None if it is an optional reference to nothing."""
        self._values += 1
        if self._values > VALUES_MAX:
            raise InvalidInput(f"{self._file}:{node.line}: the file has more than {VALUES_MAX:,} values")
        if self._depth >= RESOLVED_DEPTH_MAX:
            raise InvalidInput(f"{self._file}:{node.line}: values and references are nested more than {RESOLVED_DEPTH_MAX} deep")
        self._depth += 1
        found = self._resolved(node, through)
        self._depth -= 1
        if found is not None and isinstance(found.value, str):
            self._characters += len(found.value)
            if self._characters > TEXT_CHARACTERS_MAX:
                raise InvalidInput(f"{self._file}:{node.line}: the references make more than {TEXT_CHARACTERS_MAX >> 20} Mi characters")
        return found

    def _resolved(self, node: HoconNode, through: tuple[tuple[str, ...], ...]) -> HoconNode | None:
        match node.value:
            case dict() as fields:
                values = {key: self.resolved(each, through) for key, each in fields.items()}
                return HoconNode(node.line, {key: each for key, each in values.items() if each is not None})
            case list() as items:
                return HoconNode(node.line, [each for each in (self.resolved(item, through) for item in items) if each is not None])
            case HoconReference() as reference:
                return self._referred(node, reference, through)
            case HoconConcatenation(parts):
                return _joined(node.line, [each for each in (self.resolved(part, through) for part in parts) if each is not None])
            case HoconOverlay(assigned):
                found: HoconNode | None = None
                for part, append in assigned:
                    value = self.resolved(part, through)
                    found = value if found is None else found if value is None else _assigned(found, value, append=append)
                return found
        return node

    def _referred(self, node: HoconNode, reference: HoconReference, through: tuple[tuple[str, ...], ...]) -> HoconNode | None:
        name = ".".join(reference.path)
        shown = shortened(name)
        if reference.path in through:
            raise InvalidInput(f"{self._file}:{node.line}: the reference ${{{shown}}} leads to itself")
        if name in self._properties:
            return HoconNode(node.line, self._properties[name])
        target: HoconNode | None = self._root
        for key in reference.path:
            # Objects on the way may come from other references; only plain ones are searched.
            target = _field(target, key) if target is not None else None
        if target is not None:
            return self.resolved(target, (*through, reference.path))
        if reference.optional:
            return None
        raise InvalidInput(f"{self._file}:{node.line}: ${{{shown}}} has no value; give it with --property {shown}=VALUE")


def _assigned(before: HoconNode, value: HoconNode, *, append: bool) -> HoconNode:
    """Return what a key has after a second assignment."""
    if append and isinstance(before.value, list) and isinstance(value.value, list):
        before.value.extend(value.value)  # the list is that of this resolution
        return before
    if isinstance(before.value, dict) and isinstance(value.value, dict):
        return HoconNode(before.line, _merged(before.value, value.value))
    return value


def _joined(line: int, parts: list[HoconNode]) -> HoconNode | None:
    if not parts:
        return None
    if all(isinstance(part.value, str | None) for part in parts):
        return HoconNode(line, "".join(part.value or "" for part in parts if isinstance(part.value, str | None)))
    if isinstance(parts[-1].value, list):
        return HoconNode(line, [item for part in parts if isinstance(part.value, list) for item in part.value])
    merged: dict[str, HoconNode] = {}
    for part in parts:
        if isinstance(part.value, dict):
            merged = _merged(merged, part.value)
    return HoconNode(line, merged)


def _merged(under: dict[str, HoconNode], over: dict[str, HoconNode]) -> dict[str, HoconNode]:
    result = dict(under)
    for key, node in over.items():
        below = result.get(key)
        if below is not None and isinstance(below.value, dict) and isinstance(node.value, dict):
            result[key] = HoconNode(node.line, _merged(below.value, node.value))
        else:
            result[key] = node
    return result
