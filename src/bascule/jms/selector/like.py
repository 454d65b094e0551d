"""LIKE patterns: the matching time is limited by text length times pattern length, in machine words, for any pattern and text."""

from __future__ import annotations

from typing import Final

#: Maximum length of a property for LIKE; for a longer text the result is unknown. Texts for routing are shorter.
LIKE_TEXT_MAX: Final = 16_384
#: Characters of a text that a search handles in a microsecond: for a piece with ``_``, and in the worst case per character of one without.
_SEARCHED_PER_STEP: Final = 6
_COMPARED_PER_STEP: Final = 1_300
#: Pieces without ``_`` up to this length are found in time proportional to the text.
_LINEAR_FROM: Final = 100
#: This many characters of a piece double the time of a search with ``_``.
_DOUBLE_AT: Final = 256


class _Piece:
    """The part between two ``%``: a fixed number of characters, some of them any character (``_``)."""

    __slots__ = ("_characters", "_masks", "_runs", "_text", "length")

    def __init__(self, characters: list[str | None]) -> None:
        self.length = len(characters)
        self._runs: list[tuple[int, str]] = []  # (offset in the piece, literal characters)
        start = 0
        for index in range(self.length + 1):
            if index == self.length or characters[index] is None:
                if index > start:
                    self._runs.append((start, "".join(c for c in characters[start:index] if c is not None)))
                start = index + 1
        #: The characters of a piece that has only literal ones.
        self._text = self._runs[0][1] if self._runs and len(self._runs[0][1]) == self.length else None
        self._characters = characters if self._text is None else []
        self._masks: tuple[dict[str, int], int] | None = None

    @property
    def steps(self) -> int:
        """The maximum cost of a search for the piece, in steps of about a microsecond."""
        if not self._runs:
            return 0
        if self._text is not None:
            return LIKE_TEXT_MAX * min(self.length, _LINEAR_FROM) // _COMPARED_PER_STEP
        return LIKE_TEXT_MAX // _SEARCHED_PER_STEP * (_DOUBLE_AT + self.length) // _DOUBLE_AT

    def at(self, text: str, position: int) -> bool:
        """Return whether the piece matches at ``position``, where it has room."""
        return all(text.startswith(run, position + offset) for offset, run in self._runs)

    def find(self, text: str, position: int, end: int) -> int:
        """Return the first position at or after ``position`` where the piece matches and ends at ``end`` at the latest; -1 if none."""
        if position + self.length > end:
            return -1
        if self._text is not None:
            return text.find(self._text, position, end)
        return self._search(text, position, end) if self._runs else position

    def _make_masks(self) -> tuple[dict[str, int], int]:
        """Return, by character, the indexes it may have; and the indexes of any other character.

        The masks are made for the first search: their size is the square of the piece's length, and the steps of a selector limit the
        pieces.
        """
        others = sum(1 << index for index, character in enumerate(self._characters) if character is None)
        masks: dict[str, int] = {}
        for index, character in enumerate(self._characters):
            if character is not None:
                masks[character] = masks.get(character, others) | 1 << index
        return masks, others

    def _search(self, text: str, position: int, end: int) -> int:
        """Search with Shift-And: bit ``n`` means that the last ``n + 1`` characters match the beginning of the piece."""
        if self._masks is None:
            self._masks = self._make_masks()
        (masks, others), whole = self._masks, 1 << (self.length - 1)
        state = 0
        for index in range(position, end):
            state = (state << 1 | 1) & masks.get(text[index], others)
            if state & whole:
                return index + 1 - self.length
        return -1


def _pieces(pattern: str, escape: str | None) -> list[_Piece]:
    """Return the pieces between the ``%`` of the pattern. Raises ValueError if the escape character is last."""
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


class Pattern:
    """A LIKE pattern: ``_`` matches any character, ``%`` any number of them.

    Each piece between two ``%`` is matched at its first place, without backtracking. ``steps`` is the maximum cost of a match.
    """

    __slots__ = ("_first", "_last", "_middle", "steps")

    def __init__(self, pattern: str, escape: str | None = None) -> None:
        """Compile a pattern. Raises ValueError if the pattern ends with the escape character."""
        self._first, *rest = _pieces(pattern, escape)
        self._last = rest.pop() if rest else None
        self._middle = [piece for piece in rest if piece.length]
        self.steps = 2 + len(self._middle) + max((piece.steps for piece in self._middle), default=0)

    def matches(self, text: str) -> bool | None:
        """Return whether the text matches; None (unknown) for a text of more than LIKE_TEXT_MAX characters."""
        if len(text) > LIKE_TEXT_MAX:
            return None
        first, last = self._first, self._last
        if last is None:
            return len(text) == first.length and first.at(text, 0)
        end = len(text) - last.length
        if end < first.length or not first.at(text, 0) or not last.at(text, end):
            return False
        position = first.length
        for piece in self._middle:
            position = piece.find(text, position, end)
            if position < 0:
                return False
            position += piece.length
        return True
