"""One import: the source, its report, the settings that it makes, and the ways to report an element."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from bascule.cli.imports.draft import SettingsDraft
from bascule.cli.imports.report import ImportOutcome, ImportReport, ImportRow, shortened, shown_value
from bascule.cli.imports.toml_text import toml_value
from bascule.cli.imports.xml_tree import XmlNode
from bascule.config.fields import check_pattern

_UNKNOWN: Final = "not known to Bascule, and not taken"


@dataclass(frozen=True)
class AddressSyntax:
    """How the source writes addresses: the mark between words, and the wildcards."""

    delimiter: str = "."
    any_words: str = "#"
    single_word: str = "*"
    #: Two characters that make a match literal, or "".
    literal_marks: str = ""

    @property
    def usual(self) -> bool:
        """Return whether words and wildcards are written as in Bascule."""
        return (self.delimiter, self.any_words, self.single_word) == (".", "#", "*")

    def name(self, text: str) -> str:
        """Return the name of an address with dots between its words. Raises ValueError."""
        return self._translated(text, {})

    def pattern(self, text: str, *, literals: bool = True) -> str:
        """Return a pattern of addresses in the syntax of Bascule. Without ``literals``, the marks have no meaning. Raises ValueError."""
        if "::" in text:
            raise ValueError(f"{text!r} is one queue of an address; in Bascule an address has one queue, with its name")
        marks = self.literal_marks if literals else ""
        if marks and len(text) > 1 and text[0] == marks[0] and text[-1] == marks[1]:
            name = self.name(text[1:-1])
            if set(name.split(".")) & {"*", "#"}:
                raise ValueError(f"{text!r} is one address whose name has a wildcard as a word; no pattern of Bascule means this address")
            return check_pattern(name)
        return check_pattern(self._translated(text, {self.any_words: "#", self.single_word: "*"}))

    def _translated(self, text: str, wildcards: dict[str, str]) -> str:
        if self.usual:
            return text
        words = text.split(self.delimiter)
        for word in words:
            if word not in wildcards and (word in ("*", "#") or "." in word):
                raise ValueError(f"the word {word!r} would have another meaning, because Bascule writes addresses with '.', '*' and '#'")
        return ".".join(wildcards.get(word, word) for word in words)


@dataclass
class ImportContext:
    """The state of one import."""

    file: str
    report: ImportReport
    draft: SettingsDraft
    syntax: AddressSyntax = field(default_factory=AddressSyntax)

    def taken(self, node: XmlNode, setting: str = "", note: str = "", *, attribute: str = "") -> None:
        """Report an element, or one of its attributes, as taken."""
        self._add(node, ImportOutcome.TAKEN, setting, note, attribute)

    def differs(self, node: XmlNode, setting: str, note: str, *, attribute: str = "") -> None:
        """Report an element as taken with a difference."""
        self._add(node, ImportOutcome.DIFFERS, setting, note, attribute)

    def none(self, node: XmlNode, note: str, *, attribute: str = "") -> None:
        """Report an element without a counterpart. An element with children covers them, and its line names them."""
        if not attribute and (covered := dict.fromkeys(each.name for each in node.all() if each is not node)):
            note = "; ".join(filter(None, (note, f"with {', '.join(covered)}")))
        self._add(node, ImportOutcome.NONE, "", note, attribute)
        if not attribute:
            for each in node.all():
                each.reported |= {"", *each.attributes}

    def remark(self, node: XmlNode, setting: str, note: str, *, part: str = "", value: str = "") -> None:
        """Report a difference that no single element of the source causes, at the element that is nearest."""
        self.report.add(ImportRow(self.file, node.line, node.path + part, value, ImportOutcome.DIFFERS, setting, note))

    def row(self, node: XmlNode, part: str, value: str, outcome: ImportOutcome, setting: str = "", note: str = "") -> None:
        """Report a part of the text of an element, such as a parameter of a URL."""
        node.reported.add("")
        self.report.add(ImportRow(self.file, node.line, f"{node.path}{part}", shown_value(part, value), outcome, setting, note))

    def set(self, node: XmlNode, section: str, key: str, value: Any, *, differs: str = "", attribute: str = "", note: str = "") -> bool:
        """Set a value and report it; if the settings refuse the value, report that. Return whether it was set."""
        try:
            self.draft.set(section, key, value)
        except ValueError as error:
            self.none(node, f"{section}.{key} cannot have this value: {error}", attribute=attribute)
            return False
        setting = f"{section}.{key} = {toml_value(value)}"
        if differs:
            self.differs(node, setting, differs, attribute=attribute)
        else:
            self.taken(node, setting, note, attribute=attribute)
        return True

    def rest(self, root: XmlNode) -> None:
        """Report every element and attribute that nothing has reported, so that no setting is left out silently.

        A value is masked if anything around it, such as ``key="password"``, indicates a secret.
        """
        for node in root.all():
            key = " ".join([node.path, *node.attributes, *node.attributes.values()])
            for name in [name for name in node.attributes if name not in node.reported]:
                node.reported.add(name)
                self._unknown(node, f"@{name}", shown_value(key, node.attributes[name]))
            if "" not in node.reported and (node.text or not (node.children or node.attributes)):
                self._unknown(node, "", shown_value(key, node.text))

    def _unknown(self, node: XmlNode, part: str, value: str) -> None:
        self.report.add(ImportRow(self.file, node.line, node.path + part, value, ImportOutcome.NONE, "", _UNKNOWN))

    def _add(self, node: XmlNode, outcome: ImportOutcome, setting: str, note: str, attribute: str) -> None:
        node.reported.add(attribute)
        path = f"{node.path}@{attribute}" if attribute else node.path
        value = node.attributes.get(attribute, "") if attribute else node.text
        if node.defaults:
            note = "; ".join(filter(None, (note, f"with the default of {_named(node.defaults)}")))
        self.report.add(ImportRow(self.file, node.line, path, shown_value(attribute or node.name, value), outcome, setting, note))


def whole_number(text: str) -> int:
    """Return a whole number of at most 64 bits, as in Java. Raises ValueError."""
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{shortened(text)!r} is not a whole number") from None
    if abs(number) >= 1 << 63:
        raise ValueError("the number has more than 64 bits")
    return number


def seconds(text: str) -> float:
    """Return seconds of a number of milliseconds; a negative number means that there is no limit, which is 0. Raises ValueError."""
    return max(whole_number(text), 0) / 1000


def true_or_false(text: str) -> bool:
    """Return a truth value. Raises ValueError."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{shortened(text)!r} is neither true nor false")
    return text.lower() == "true"


_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_bytes(text: str) -> int:
    """Return a size in bytes: ``10M``, ``10Mb`` and ``10MiB`` are the same; a negative size is no limit, 0. Raises ValueError."""
    return max(signed_bytes(text), 0)


def signed_bytes(text: str) -> int:
    """Return a size as ``size_bytes`` does, but a negative size as it is. Raises ValueError."""
    digits = text.strip().lower().removesuffix("ib").removesuffix("b").rstrip()
    unit = digits[-1:] if digits[-1:] in ("k", "m", "g", "t") else ""
    return whole_number(str(whole_number(digits.removesuffix(unit).strip()) * _UNITS[unit]))


def words_of(text: str) -> list[str]:
    """Return the parts of a list with commas."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"${{{name}}}" for name in dict.fromkeys(names))
