"""Address patterns: the addresses that they match, compared with a regular expression, and the cost of a match."""

from __future__ import annotations

import itertools
import re

import pytest

from bascule.core.destination import AddressPattern, address_matches

WORDS = ("a", "b", "*", "#", "")


def as_expression(pattern: str) -> re.Pattern[str]:
    """Return the rule as an expression: ``*`` matches one word, and ``#`` any number of words."""
    out: list[str] = []
    for index, word in enumerate(pattern.split(".")):
        if word == "#":
            out.append(r"(?:\.[^.]+)*" if index else r"(?:[^.]+(?:\.[^.]+)*)?")
        else:
            out.append((r"\." if index else "") + (r"[^.]+" if word == "*" else re.escape(word)))
    return re.compile("".join(out))


def test_address_pattern_agrees_with_the_documented_rule() -> None:
    addresses = [".".join(words) for size in range(1, 6) for words in itertools.product(("a", "b", ""), repeat=size)]
    assert len(addresses) == 3 + 9 + 27 + 81 + 243
    for size in range(1, 5):
        for words in itertools.product(WORDS, repeat=size):
            pattern = ".".join(words)
            rule, compiled = as_expression(pattern), AddressPattern(pattern)
            assert [address for address in addresses if compiled.matches(address)] == [
                address for address in addresses if rule.fullmatch(address)
            ], pattern


class CountedWord(str):
    """A word that counts its look-ups."""

    __slots__ = ()
    looked_up = 0

    def __hash__(self) -> int:
        CountedWord.looked_up += 1
        return super().__hash__()


class CountedAddress(str):
    """An address whose words are counted."""

    __slots__ = ()

    def split(self, *arguments: object) -> list[str]:  # type: ignore[override]
        return [CountedWord(word) for word in super().split(*arguments)]  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["#.a" * 100 + ".b", "#.*" * 100 + ".b", "#." * 200 + "b", "*.#." * 100 + "b"])
def test_pattern_match_takes_at_most_one_step_per_word_of_the_address(pattern: str) -> None:
    CountedWord.looked_up = 0
    assert not AddressPattern(pattern).matches(CountedAddress("a." * 499 + "a"))
    assert CountedWord.looked_up <= 500


def test_address_with_special_characters_matches_itself() -> None:
    assert address_matches("a.+", "a.+")
    assert not address_matches("a.+", "a.aa")
