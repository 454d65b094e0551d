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

    __slots__ = ("_masks", "_runs", "_text", "length")

    def __init__(self, runs: list[tuple[int, str]], length: int) -> None:
        """Take the literal characters between two ``_`` (``runs``), with their offsets in the piece."""
        self.length = length
        self._runs = runs
        #: The characters of a piece that has only literal ones.
        self._text = runs[0][1] if len(runs) == 1 and len(runs[0][1]) == length else None
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
        placed = [(index, character) for offset, run in self._runs for index, character in enumerate(run, offset)]
        others = (1 << self.length) - 1 - sum(1 << index for index, _ in placed)
        masks: dict[str, int] = {}
        for index, character in placed:
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
    if escape is None or escape not in pattern:
        return list(map(_plain_piece, pattern.split("%")))
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
    return list(map(_escaped_piece, pieces))


def _plain_piece(text: str) -> _Piece:
    """Return the piece of a text in which each ``_`` is any character."""
    if "_" not in text:
        return _Piece([(0, text)] if text else [], len(text))
    runs, offset = [], 0
    for run in text.split("_"):
        if run:
            runs.append((offset, run))
        offset += len(run) + 1
    return _Piece(runs, len(text))


def _escaped_piece(characters: list[str | None]) -> _Piece:
    """Return the piece of characters; None is any character."""
    runs: list[tuple[int, str]] = []
    start: int | None = None
    for index, character in enumerate([*characters, None]):
        if character is None:
            if start is not None:
                runs.append((start, "".join(filter(None, characters[start:index]))))
            start = None
        elif start is None:
            start = index
    return _Piece(runs, len(characters))


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
