"""LIKE patterns as a matcher without backtracking."""

from __future__ import annotations

from collections.abc import Callable


class _Piece:
    """What stands between two ``%``: a fixed number of characters, some of them any character (``_``)."""

    __slots__ = ("anchor", "length", "runs")

    def __init__(self, characters: list[str | None]) -> None:
        self.length = len(characters)
        self.runs: list[tuple[int, str]] = []  # (offset in the piece, literal characters)
        start = 0
        for index in range(self.length + 1):
            if index == self.length or characters[index] is None:
                if index > start:
                    self.runs.append((start, "".join(c for c in characters[start:index] if c is not None)))
                start = index + 1
        #: The longest run is searched for first: where it is not, the piece is not.
        self.anchor = max(self.runs, key=lambda run: len(run[1]), default=(0, ""))

    def at(self, text: str, position: int) -> bool:
        """Whether the piece stands at ``position``, which leaves room for it."""
        return all(text.startswith(run, position + offset) for offset, run in self.runs)

    def find(self, text: str, position: int, end: int) -> int:
        """The first position from ``position`` on where the piece stands and ends at ``end`` at the latest; -1 for none."""
        offset, run = self.anchor
        while position + self.length <= end:
            found = text.find(run, position + offset, end - self.length + offset + len(run))
            if found < 0:
                return -1
            position = found - offset
            if self.at(text, position):
                return position
            position += 1
        return -1


def _pieces(pattern: str, escape: str | None) -> list[_Piece]:
    """The pieces between the pattern's ``%``. Raises ValueError when the escape character escapes nothing."""
    pieces: list[list[str | None]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            literal = next(characters, None)
            if literal is None:
                raise ValueError("the pattern ends with its escape character, which escapes nothing")
            pieces[-1].append(literal)
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if character == "_" else character)
    return [_Piece(piece) for piece in pieces]


def like(pattern: str, escape: str | None = None) -> Callable[[str], bool]:
    """A function that says whether a text matches: ``_`` is any character, ``%`` any number of them.

    Each piece between two ``%`` is taken at the first place where it fits, never again later: the work is bounded by
    text length times piece length for any pattern. Raises ValueError when the escape character escapes nothing.
    """
    first, *rest = _pieces(pattern, escape)
    if not rest:
        return lambda text: len(text) == first.length and first.at(text, 0)
    *middle, last = rest
    middle = [piece for piece in middle if piece.length]
    shortest = first.length + last.length

    def matches(text: str) -> bool:
        end = len(text) - last.length
        if len(text) < shortest or not first.at(text, 0) or not last.at(text, end):
            return False
        position = first.length
        for piece in middle:
            position = piece.find(text, position, end)
            if position < 0:
                return False
            position += piece.length
        return True

    return matches
