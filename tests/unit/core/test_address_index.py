"""The index of address patterns agrees with the matcher of single patterns, and its cost does not grow with their number."""

from __future__ import annotations

import itertools
import random

import pytest

from bascule.core.address_index import AddressIndex
from bascule.core.destination import address_matches
from tests.support.costs import calls_of

WORDS = ("a", "b", "*", "#", "")
PATTERNS = [".".join(words) for size in range(1, 5) for words in itertools.product(WORDS, repeat=size)]
ADDRESSES = [".".join(words) for size in range(1, 6) for words in itertools.product(("a", "b", ""), repeat=size)]


def matching(patterns: list[str], address: str) -> list[str]:
    return [pattern for pattern in patterns if address_matches(pattern, address)]


def test_index_agrees_with_single_pattern_matcher_in_order_of_addition() -> None:
    chance = random.Random(1)
    patterns = chance.sample(PATTERNS, len(PATTERNS))
    index = AddressIndex((pattern, pattern) for pattern in patterns)
    for address in (*ADDRESSES[:39], *chance.sample(ADDRESSES, 60), *chance.sample(PATTERNS, 60)):
        assert index.matching(address) == matching(patterns, address), address


@pytest.mark.parametrize("seed", range(20))
def test_index_is_correct_after_random_additions_and_removals(seed: int) -> None:
    chance = random.Random(seed)
    words = ("a", "b", "c", "aa", "*", "#", "##", "a*", "", "é")
    index, by_number = AddressIndex[int](), dict[int, str]()
    for number in range(300):
        if by_number and chance.random() < 0.45:
            gone = chance.choice(list(by_number))
            index.remove(by_number.pop(gone), gone)
        else:
            by_number[number] = ".".join(chance.choices(words, k=chance.randrange(1, 9)))
            index.add(by_number[number], number)
        address = ".".join(chance.choices(("a", "b", "c", "aa", "", "##", "*"), k=chance.randrange(1, 9)))
        assert index.matching(address) == [each for each, pattern in by_number.items() if address_matches(pattern, address)], address
        assert index.under(address) == [each for each, pattern in by_number.items() if pattern == address]
    for number, pattern in by_number.items():
        index.remove(pattern, number)
    assert not any(root.children or root.values for root in index._roots)


def test_removal_of_absent_value_changes_nothing() -> None:
    index = AddressIndex((("a.#", 1), ("b", 2)))
    for pattern, value in (("a.#", 2), ("b", 1), ("c", 1), ("a.*", 1)):
        index.remove(pattern, value)
    assert index.matching("a.x") == [1]
    assert index.matching("b") == [2]


@pytest.mark.parametrize(
    "form", ["#.x{0}", "x{0}.#", "news.*.x{0}.#", "*.{0}.*.y", "#.x{0}.#.y{0}.#", "*.*.{0}", "{0}.*.a.a.a.#.b", "a.a.#.{0}.*"]
)
@pytest.mark.parametrize("address", ["news.uk.x7.a", "a." * 20 + "b", "x7.a.a.y7", "7.a.7"])
def test_cost_of_matching_an_address_is_independent_of_the_number_of_patterns(form: str, address: str) -> None:
    few, many = (AddressIndex((form.format(number), number) for number in range(count)) for count in (30, 10_000))
    few_calls, many_calls = (calls_of(lambda index=index: index.matching(address)) for index in (few, many))  # type: ignore[misc]
    assert many_calls <= few_calls + 2 * len(address.split("."))


def test_each_pattern_that_matches_up_to_its_last_word_is_visited_once() -> None:
    """A pattern with a leading ``#`` may begin to match at each word of the address."""
    patterns = ["#." + ".".join("*a"[number >> bit & 1] for bit in range(10)) + ".z" for number in range(1 << 10)]
    index = AddressIndex((pattern, number) for number, pattern in enumerate(patterns))
    assert calls_of(lambda: index.matching("a." * 499 + "a")) < 40 * len(patterns)


def test_long_patterns_take_little_more_memory_than_their_text() -> None:
    index = AddressIndex((f"{number}." + "abc." * 240 + "#", number) for number in range(100))
    nodes = [child for root in index._roots for child in root.children.values()]
    assert len(nodes) == 100
    assert sum(len(node.label) for node in nodes) < 100 * 1000
