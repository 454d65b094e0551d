"""The error of an invalid selector."""

from __future__ import annotations

from bascule.core.errors import InvalidInput, Scope

#: Characters shown before and after the error: a selector may be long, but the error message should not be.
_CONTEXT = 60


class SelectorError(InvalidInput):
    """A selector is invalid (Jakarta Messaging 3.1, section 3.8.1.1).

    ``reason`` is the violated rule, ``text`` the selector and ``column`` (from 1) the place of the error.
    The error's text has all three, with a caret under the column.
    """

    scope = Scope.LINK

    def __init__(self, reason: str, text: str, position: int) -> None:
        self.reason = reason
        self.text = text
        self.column = position + 1
        super().__init__(f"selector, column {self.column}: {reason}\n{self.caret()}")

    def caret(self) -> str:
        """Return two lines: the selector around the error, and a caret under it."""
        position = self.column - 1
        start = max(0, position - _CONTEXT)
        shown = "".join(c if c.isprintable() else " " for c in self.text[start : position + _CONTEXT])
        return f"  {shown}\n  {' ' * (position - start)}^"
