"""The statements of Python's sources. ``ast.walk`` visits their expressions too, which are most of a tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

#: The parts of a statement, of a handler or of a case that contain statements, handlers or cases.
_PARTS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield all statements of a module, also those within functions and classes."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        for part in _PARTS:
            waiting += getattr(node, part, ())
