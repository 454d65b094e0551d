"""What is said of a selector that cannot be used."""

from __future__ import annotations

from bascule.core.errors import InvalidInput, Scope

#: Characters shown on either side of the fault: a selector may be long, the message of an error must not be.
_CONTEXT = 60


class SelectorError(InvalidInput):
    """A selector that breaks the language's rules (Jakarta Messaging 3.1, section 3.8.1.1).

    ``reason`` says which one, ``text`` is the selector and ``column`` (from 1) where it goes wrong.
    The error's text holds all three, with a caret under the column.
    """

    scope = Scope.LINK

    def __init__(self, reason: str, text: str, position: int) -> None:
        self.reason = reason
        self.text = text
        self.column = position + 1
        super().__init__(f"selector, column {self.column}: {reason}\n{self.caret()}")

    def caret(self) -> str:
        """Two lines: the selector around the fault, and a caret under it."""
        position = self.column - 1
        start = max(0, position - _CONTEXT)
        shown = "".join(c if c.isprintable() else " " for c in self.text[start : position + _CONTEXT])
        return f"  {shown}\n  {' ' * (position - start)}^"
