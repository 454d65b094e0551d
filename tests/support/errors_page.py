"""The page of errors, docs/reference/errors.md: its entries, the answers of the classes, and the texts that the code can raise.

python -m tests.support.errors_page        # writes the lines with the answers anew
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import bascule
from bascule.core.errors import BasculeError, Scope

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
SOURCE: Final = Path(bascule.__file__).parent
#: A text with fewer fixed words than this fits almost anything.
FIXED_WORDS_MIN: Final = 2
_PARAGRAPH: Final = r"(?:[^\n]+\n)+"
_ENTRY: Final = re.compile(
    rf"^### `(?P<name>\w+)`\n\n(?P<meaning>{_PARAGRAPH})\n\*\*What to do:\*\* (?P<remedy>{_PARAGRAPH})\n"
    r"(?P<example>(?: {4}[^\n]*\n)+)\n\*(?P<answers>[^*\n]+)\*$",
    re.MULTILINE,
)
#: What the constructor of a class puts before its text: a transaction, a topic, a condition, an XA code.
_PREFIX: Final = r"(?:transaction \S+ |topic '[^']+' |[a-z:-]+: |XA\w+: )?"


class Entry(NamedTuple):
    """An error class on the page."""

    name: str
    meaning: str
    remedy: str
    example: str
    answers: str


def entries(page: str) -> list[Entry]:
    """Return the entries of the page, in its order."""
    found = [match.groupdict() for match in _ENTRY.finditer(page)]
    return [Entry(**{**each, "example": re.sub(r"^ {4}", "", each["example"], flags=re.MULTILINE).rstrip("\n")}) for each in found]


@cache
def public_errors() -> Mapping[str, type[Exception]]:
    """Return all exception classes of the product, by name. A name with an underscore is not public."""
    found: dict[str, type[Exception]] = {}
    for module in pkgutil.walk_packages(bascule.__path__, "bascule."):
        if not module.name.endswith("__main__"):
            for name, each in vars(importlib.import_module(module.name)).items():
                if isinstance(each, type) and issubclass(each, Exception) and each.__module__ == module.name and not name.startswith("_"):
                    found[name] = each
    return found


def answers(error: type[Exception]) -> str:
    """Return the line with the answers of a class."""
    if not issubclass(error, BasculeError):
        return "Not a `BasculeError`."
    ends = "the " + Scope(error.scope).name.lower()
    return (
        f"Retriable: {'yes' if error.retriable else 'no'}. Ends: {ends}. AMQP condition: `{error.condition}`."
        f" XA code: `{error.xa_code.name}`. HTTP status: {error.http_status}. Exit code: {error.exit_code}."
    )


def with_answers(page: str) -> str:
    """Return the page with the answers of the classes as they are in the code."""
    known = public_errors()

    def written(match: re.Match[str]) -> str:
        start, end = (place - match.start() for place in match.span("answers"))
        return f"{match[0][:start]}{answers(known[match['name']])}{match[0][end:]}" if match["name"] in known else match[0]

    return _ENTRY.sub(written, page)


class Texts(NamedTuple):
    """Patterns of the texts of a class. ``open``: some texts are made elsewhere, for example by Kafka or the broker."""

    patterns: list[str]
    open: bool


def can_raise(name: str, example: str) -> bool:
    """Return whether the code can raise an error of the class with this text."""
    known, raised = public_errors(), texts_by_class()
    below = [each for each, kind in known.items() if issubclass(kind, known[name])]
    own = [raised[each] for each in below if each in raised]
    if any(_compiled(pattern).fullmatch(example) for texts in own for pattern in texts.patterns):
        return True
    return (not own or any(texts.open for texts in own)) and any(_compiled(pattern).fullmatch(example) for pattern in all_texts())


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the pattern of a whole text. The cache of ``re`` is too small for all texts of the product."""
    return re.compile(_PREFIX + pattern, re.DOTALL)


@cache
def texts_by_class() -> Mapping[str, Texts]:
    """Return the texts with which each class is created, in its own constructor or by its callers."""
    found: dict[str, Texts] = {}
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                _add(found, getattr(node.func, "id", getattr(node.func, "attr", "")), node)
            elif isinstance(node, ast.ClassDef):
                for call in ast.walk(node):
                    if (
                        isinstance(call, ast.Call)
                        and getattr(call.func, "attr", "") == "__init__"
                        and ast.unparse(call.func) == "super().__init__"
                    ):
                        _add(found, node.name, call)
    return found


@cache
def all_texts() -> tuple[str, ...]:
    """Return patterns of all texts of the product, without its docstrings."""
    return tuple(pattern for tree in trees() for node in docstrings_left_out(tree) for pattern in patterns_of(node))


def docstrings_left_out(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it, without docstrings."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            yield from docstrings_left_out(child)


@cache
def trees() -> tuple[ast.Module, ...]:
    """Return the modules of the product."""
    return tuple(ast.parse(path.read_bytes()) for path in sorted(SOURCE.rglob("*.py")))


def _add(found: dict[str, Texts], name: str, call: ast.Call) -> None:
    if name not in public_errors():
        return
    patterns = [pattern for argument in call.args for node in _branches(argument) for pattern in patterns_of(node)]
    before = found.get(name, Texts([], open=False))
    found[name] = Texts([*before.patterns, *patterns], before.open or not patterns)


def _branches(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.IfExp):
        yield from _branches(node.body)
        yield from _branches(node.orelse)
    else:
        yield node


def patterns_of(node: ast.AST) -> Iterator[str]:
    """Yield a pattern for a text of the code if it has enough fixed words; a field stands for any text."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    fixed = [each.value if isinstance(each, ast.Constant) and isinstance(each.value, str) else None for each in parts]
    words = re.findall(r"[A-Za-z_.]{2,}", " ".join(each for each in fixed if each is not None))
    if len(words) >= FIXED_WORDS_MIN:
        yield "".join(".*?" if each is None else re.escape(each) for each in fixed)


if __name__ == "__main__":
    PAGE.write_text(with_answers(PAGE.read_text()))
