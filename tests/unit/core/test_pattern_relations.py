"""Relations of two patterns, compared with the addresses that the patterns match."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from bascule.core.access import AccessRule, AccessRules
from bascule.core.destination import address_matches
from bascule.core.pattern_relations import covers, overlaps
from bascule.core.permissions import Permission
from bascule.core.roles import UserRoles

P = Permission
_ROLES = {True: frozenset({"in"}), False: frozenset({"out"})}
#: All patterns of up to three of these words, and all addresses of up to four words, with empty ones.
PATTERNS = [".".join(words) for count in (1, 2, 3) for words in itertools.product(("a", "b", "*", "#"), repeat=count)]
ADDRESSES = [".".join(words) for count in (1, 2, 3, 4) for words in itertools.product(("a", "b", "c", ""), repeat=count)]
MATCHED = {pattern: frozenset(each for each in ADDRESSES if address_matches(pattern, each)) for pattern in PATTERNS}


def test_pattern_that_covers_another_matches_all_its_addresses_without_empty_words() -> None:
    whole = frozenset(each for each in ADDRESSES if "" not in each.split("."))
    wrong = [(one, other) for one in PATTERNS for other in PATTERNS if covers(one, other) and not MATCHED[one] >= MATCHED[other] & whole]
    assert wrong == []


def test_patterns_that_match_the_same_address_overlap() -> None:
    wrong = [(one, other) for one in PATTERNS for other in PATTERNS if not overlaps(one, other) and MATCHED[one] & MATCHED[other]]
    assert wrong == []


def test_subscriber_of_a_pattern_may_consume_from_each_address_that_somebody_may_use() -> None:
    random = Random(19)
    allowed = 0
    for _ in range(3000):
        given = {match: random.random() < 0.7 for match in random.sample(PATTERNS, 3)}
        rules = AccessRules((AccessRule(match, {P.CONSUME: _ROLES[gives]}) for match, gives in given.items()), UserRoles({"in": ["ann"]}))
        pattern = random.choice(PATTERNS)
        if rules.decide("ann", P.CONSUME, pattern).allowed:
            allowed += 1
            decisions = {each: rules.decide("ann", P.CONSUME, each) for each in MATCHED[pattern]}
            leaks = [each for each, (may, rule, _) in decisions.items() if not may and rule is not None]
            assert leaks == [], (given, pattern)
    assert allowed > 100


@pytest.mark.parametrize(
    ("pattern", "other", "covered", "overlapping"),
    [
        ("#", "news.#", True, True),
        ("news.#", "#", False, True),
        ("news.#", "news.#", True, True),
        ("news.#", "news.*", True, True),
        ("news.#", "news.*.late", True, True),
        ("news.*", "news.#", False, True),
        ("news.uk", "news.*", False, True),
        ("news.*", "*.uk", False, True),
        ("news.#.late", "news.uk.#", False, True),
        ("news.#", "sport.#", False, False),
        ("news.*", "news.uk.*", False, False),
        ("news.uk", "news.de", False, False),
        ("a..b", "a..b", True, True),
        ("#", "a..#", False, True),
    ],
)
def test_relation_of_two_patterns(pattern: str, other: str, covered: bool, overlapping: bool) -> None:
    assert (covers(pattern, other), overlaps(pattern, other)) == (covered, overlapping)
