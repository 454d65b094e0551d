"""Regular expressions that match in a time proportional to the length of the text, whatever the expression is.

The engine of Python tries all ways to match one after the other: ``(a+)+b`` takes seconds for thirty letters. An expression of a setting or
of a request must not stop the process, so all ways are tried at once (a "Pike VM"). What this engine cannot do is refused: look-around,
back-references, possessive quantifiers and word boundaries. All other expressions match the texts that they match in Python. Only a group
within a repetition of what may be empty can have another text, as in ``(a*)*``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple

#: Instructions of a compiled expression: a match takes at most so many steps for each character. A repetition ``{m,n}`` has n copies.
INSTRUCTIONS_MAX: Final = 1_000
#: Characters of an expression. It is checked first, because all further checks take a time that grows with the length.
PATTERN_LENGTH_MAX: Final = 4_000
#: Characters in the ranges of all classes of an expression without regard to case: the compiler of Python handles them one by one, and
#: takes 20 ms for this many. A range counts as at most this many.
CASELESS_CHARACTERS_MAX: Final = 1 << 16
#: Levels of groups in each other.
GROUP_DEPTH_MAX: Final = 50
_FLAGS: Final = re.compile(r"\(\?([ais]+)\)")
#: One character, or a class of characters: an escape, a set, or a literal.
_ATOM: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[dDwWsSnrtfva]|[^0-9A-Za-z])|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[(|)]", re.DOTALL
)
_GROUP: Final = re.compile(r"\((?:\?(?::|P<\w+>))?(?!\?)")
_QUANTIFIER: Final = re.compile(r"([*+?]|\{([0-9]*)(,?)([0-9]*)\})([?+]?)")
#: What may be flags within an expression, which are refused: an escaped bracket looks the same.
_INNER_CASELESS: Final = re.compile(r"\(\?[a-zA-Z-]*i")
#: A character or a range in a class.
_MEMBER: Final = r"(\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.)"
_MEMBERS: Final = re.compile(rf"{_MEMBER}(?:-{_MEMBER})?", re.DOTALL)
_ASSERTIONS: Final = ("^", "$", r"\A", r"\Z")


class Instruction(NamedTuple):
    """A step: take a character that ``takes`` accepts, go on at both of two places, the first one preferred, or do what ``does`` says."""

    does: str
    takes: Callable[[str], object] | None = None
    first: int = 0
    second: int = 0


class LinearRegex:
    """A compiled regular expression."""

    def __init__(self, pattern: str) -> None:
        """Compile a pattern in the notation of Python. Raises ValueError for one that is invalid or not supported."""
        self.pattern = pattern
        if len(pattern) > PATTERN_LENGTH_MAX:
            raise ValueError(f"the regular expression is too large: {len(pattern)} characters; at most {PATTERN_LENGTH_MAX} are allowed")
        flags = _FLAGS.match(pattern)
        start = flags.end() if flags else 0
        if _INNER_CASELESS.search(pattern, start):
            with suppress(re.error):  # which is reported below, with its position
                _Compiler(pattern).program()  # refuses such flags before Python may take seconds for them
        self.groups = _checked_groups(pattern, start)
        self._program = _Compiler(pattern).program()

    def __eq__(self, other: object) -> bool:
        """Return whether another expression has the same pattern."""
        return isinstance(other, LinearRegex) and self.pattern == other.pattern

    def __hash__(self) -> int:
        """Return a hash of the pattern."""
        return hash(self.pattern)

    def fullmatch(self, text: str) -> Sequence[str | None] | None:
        """Return the whole text and the texts of the groups, None for a group that takes no part; None if not the whole text matches."""
        places = (-1,) * (2 * self.groups + 2)
        threads: dict[int, tuple[int, ...]] = {}
        self._follow(0, places, text, 0, threads, set())
        for at, character in enumerate(text):
            after: dict[int, tuple[int, ...]] = {}
            seen: set[int] = set()
            for place, saved in threads.items():
                takes = self._program[place].takes
                if takes is not None and takes(character):
                    self._follow(place + 1, saved, text, at + 1, after, seen)
            threads = after
            if not threads:
                return None
        found = threads.get(len(self._program) - 1)
        if found is None:
            return None
        inner = [text[found[n] : found[n + 1]] if found[n + 1] >= 0 else None for n in range(2, len(found), 2)]
        return [text, *inner]

    def _follow(
        self, place: int, saved: tuple[int, ...], text: str, at: int, threads: dict[int, tuple[int, ...]], seen: set[int]
    ) -> None:  # fmt: skip
        """Add the steps that take a character, or are the end, and that follow without one. The order is that of preference.

        A step is ``seen`` once for each character: a way that comes later matches nothing that the first one does not.
        """
        waiting = [(place, saved)]
        while waiting:
            place, saved = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            step = self._program[place]
            match step.does:
                case "split":
                    waiting += [(step.second, saved), (step.first, saved)]
                case "jump":
                    waiting.append((step.first, saved))
                case "save":
                    waiting.append((place + 1, (*saved[: step.first], at, *saved[step.first + 1 :])))
                case "^" | r"\A":
                    waiting += [(place + 1, saved)] if at == 0 else []
                case r"\Z":
                    waiting += [(place + 1, saved)] if at == len(text) else []
                case "$":
                    waiting += [(place + 1, saved)] if at == len(text) or (at == len(text) - 1 and text[at] == "\n") else []
                case _:
                    threads[place] = saved


def _checked_groups(pattern: str, start: int) -> int:
    """Return the number of groups of a pattern, whose flags end at ``start``. Raises ValueError for an invalid pattern.

    The flags are left out, because Python takes long to compile large classes without regard to case.
    """
    try:
        return re.compile(pattern[start:]).groups
    except re.error as error:
        position = start + (error.pos or 0)
        raise ValueError(f"column {position + 1}: {error.msg}\n{pattern}\n{' ' * position}^") from None
    except (RecursionError, OverflowError) as error:
        raise ValueError(f"the regular expression is too large: {error}") from None


class _Compiler:
    """Compiles one pattern, which Python accepts. Places of jumps are relative until the end, so a part can be copied."""

    def __init__(self, pattern: str) -> None:
        flags = _FLAGS.match(pattern)
        self._at = flags.end() if flags else 0
        self._flags = sum((getattr(re, letter.upper()) for letter in set(flags[1])), re.RegexFlag(0)) if flags else re.RegexFlag(0)
        self._pattern = pattern
        self._group = self._depth = 0
        self._caseless_characters = 0

    def program(self) -> list[Instruction]:
        """Return the instructions. Raises ValueError."""
        code = self._either()
        if self._at < len(self._pattern):
            raise self._refused()
        return [
            step._replace(first=place + step.first, second=place + step.second) if step.does in ("split", "jump") else step
            for place, step in enumerate([*code, Instruction("end")])
        ]

    def _either(self) -> list[Instruction]:
        ways = [self._sequence()]
        while self._pattern[self._at : self._at + 1] == "|":
            self._at += 1
            ways.append(self._sequence())
        code = ways.pop()
        while ways:
            way = ways.pop()
            code = self._sized([Instruction("split", None, 1, len(way) + 2), *way, Instruction("jump", None, len(code) + 1), *code])
        return code

    def _sequence(self) -> list[Instruction]:
        code: list[Instruction] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            code += self._repeated(self._part())
            self._sized(code)
        return code

    def _part(self) -> list[Instruction]:
        """Return the code of a group, an assertion or a character, and go behind it."""
        assertion = next((each for each in _ASSERTIONS if self._pattern.startswith(each, self._at)), None)
        if assertion is not None:
            self._at += len(assertion)
            return [Instruction(assertion)]
        if (atom := _ATOM.match(self._pattern, self._at)) is not None:
            self._at = atom.end()
            if atom[0][0] == "[" and self._flags & re.IGNORECASE:
                self._count_caseless(atom[0])
            return [Instruction("take", lru_cache(256)(re.compile(atom[0], self._flags).fullmatch))]
        group = _GROUP.match(self._pattern, self._at)
        if group is None or self._depth >= GROUP_DEPTH_MAX:
            raise self._refused()
        self._at = group.end()
        captures = group[0] != "(?:"
        self._group += captures
        number = self._group
        self._depth += 1
        code = self._either()
        self._depth -= 1
        self._at += 1  # the bracket, which Python has checked
        return [Instruction("save", None, 2 * number), *code, Instruction("save", None, 2 * number + 1)] if captures else code

    def _count_caseless(self, characters: str) -> None:
        """Count the characters of a class without regard to case. Raises ValueError if they are too many."""
        for found in _MEMBERS.finditer(characters[1:-1].removeprefix("^")):
            width = _code_point(found[2]) - _code_point(found[1]) + 1 if found[2] else 1
            self._caseless_characters += min(width, CASELESS_CHARACTERS_MAX)
        if self._caseless_characters > CASELESS_CHARACTERS_MAX:
            raise ValueError(
                "the regular expression is too large: its classes without regard to case have more than"
                f" {CASELESS_CHARACTERS_MAX} characters"
            )

    def _repeated(self, code: list[Instruction]) -> list[Instruction]:
        """Return the code of a part with the quantifier that follows it."""
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None or found[1] == "{}":  # which are two literals
            return code
        if found[5] == "+":
            raise self._refused()
        self._at = found.end()
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[1]) or _bounds(found)
        lazy = found[5] == "?"
        size = len(code)
        # Before the copies are made: also the copies of nothing need a step each if they may be left out.
        if least * size + max(0, (most or 0) - least) * (size + 1) > INSTRUCTIONS_MAX:
            raise self._too_large()
        repeated = code * least
        if most is None:
            repeated += [_split(1, size + 2, lazy=lazy), *code, Instruction("jump", None, -size - 1)]
        else:
            for left in range(most - least, 0, -1):
                repeated += [_split(1, left * (size + 1), lazy=lazy), *code]
        return self._sized(repeated)

    def _sized(self, code: list[Instruction]) -> list[Instruction]:
        if len(code) > INSTRUCTIONS_MAX:
            raise self._too_large()
        return code

    def _too_large(self) -> ValueError:
        return ValueError(f"the regular expression is too large: it has more than {INSTRUCTIONS_MAX} steps with its repetitions")

    def _refused(self) -> ValueError:
        what = "look-around, back-references, possessive quantifiers, word boundaries and flags within the expression are not supported"
        return ValueError(f"column {self._at + 1}: {what}\n{self._pattern}\n{' ' * self._at}^")


def _code_point(member: str) -> int:
    """Return the number of a character in a class. A name (``\\N{...}``) counts as the highest one."""
    if member[:2] == r"\N":
        return sys.maxunicode
    return int(member[2:], 16) if member[0] == "\\" and len(member) > 2 else ord(member[-1])


def _split(go: int, skip: int, *, lazy: bool) -> Instruction:
    return Instruction("split", None, skip, go) if lazy else Instruction("split", None, go, skip)


def _bounds(found: re.Match[str]) -> tuple[int, int | None]:
    """Return the bounds of ``{m,n}``."""
    least = int(found[2] or 0)
    return least, (least if not found[3] else int(found[4]) if found[4] else None)
