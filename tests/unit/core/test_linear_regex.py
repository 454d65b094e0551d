"""Regular expressions of settings and requests: the results are those of Python, and the time is bounded."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.core import linear_regex
from bascule.core.linear_regex import INSTRUCTIONS_MAX, PATTERN_LENGTH_MAX, LinearRegex
from tests.support.costs import COST_S_MAX, processor_s

_ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\.", r"\w", "[]a]", r"[\]b]", "-", "^", "$", r"\A", r"\Z", "{", "a{}", "é"])
_QUANTIFIERS = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{1,2}", "{1,}", "{,2}", "{,}", "??", "*?", "+?", "{0,2}?"])
_PARTS = st.recursive(
    _ATOMS,
    lambda parts: st.one_of(
        st.builds("({})".format, parts), st.builds("(?:{})".format, parts), st.builds("{}|{}".format, parts, parts),
        st.builds("{}{}".format, parts, parts), st.builds("(?:{}){}".format, parts, _QUANTIFIERS),
        st.builds("({}){}".format, parts, _QUANTIFIERS),
    ),
    max_leaves=8,
)  # fmt: skip


@given(st.sampled_from(["", "", "(?i)", "(?s)", "(?is)"]), _PARTS, st.lists(st.text("aAb.-é\n]{}", max_size=6), min_size=1, max_size=5))
def test_match_is_that_of_python(flags: str, pattern: str, texts: list[str]) -> None:
    compiled = re.compile(flags + pattern)
    linear = LinearRegex(flags + pattern)
    for text in texts:
        assert (linear.fullmatch(text) is not None) == (compiled.fullmatch(text) is not None), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"CN=(.*?),(?:OU=(.*?),)?O=(.*?),L=(.*?),ST=(.*?),C=(.*?)", "CN=kafka,O=Org,L=Town,ST=State,C=DE"),
        (r"CN=([a-zA-Z0-9.-]*).*", "CN=broker.example,OU=x"),
        (r"(a|ab)(c|bcd)(d*)", "abcd"), ("(a*?)(a*)", "aaa"), ("(?P<name>a)|(b)", "b"), ("(a)+(b)?", "aaa"), ("(?i)CN=(.*)", "cn=Ann"),
        ("(a{٢})", "a{٢}"),
    ],
)  # fmt: skip
def test_groups_are_those_of_python(pattern: str, text: str) -> None:
    found, expected = LinearRegex(pattern).fullmatch(text), re.fullmatch(pattern, text)
    assert expected is not None
    assert found == [text, *expected.groups()]


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a*)*b", "(.*a){20}b", "(a?){60}a{60}b", "((a+)*)*b"])
def test_time_is_bounded_by_the_length_of_the_text(pattern: str) -> None:
    class Counted(list[linear_regex.Instruction]):
        steps = 0

        def __getitem__(self, place: Any) -> Any:
            Counted.steps += 1
            return super().__getitem__(place)

    regex = LinearRegex(pattern)
    regex._program = Counted(regex._program)
    assert regex.fullmatch("a" * 249) is None
    assert Counted.steps <= 250 * 2 * len(regex._program)
    assert len(regex._program) <= INSTRUCTIONS_MAX + 1


@pytest.mark.parametrize("pattern", [r"\(?if", "(?i)[\u0430-\u044f]+", r"(?i)[^\x00-\x1f]*", "(?i)[\u4e00-\u9fff]x", r"(?i)[]A-Z\]-]+"])
def test_expressions_that_look_costly_are_accepted(pattern: str) -> None:
    linear, compiled = LinearRegex(pattern), re.compile(pattern)
    for text in ("if", "(if", "ЖУК", "A]-", "\u4e01X", "\n"):
        assert (linear.fullmatch(text) is not None) == (compiled.fullmatch(text) is not None), text


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)" + "[ -\uffff]" * 500, "(?i:" + "[ -\uffff]" * 500 + ")", "a(?i:" + "[\0-\uffff]" * 500 + ")",
        "(?s-i:a)" + "(?mi:[ -\uffff])" * 200, "[" * 65_536, "(?i)" + "[ -\uffff]" * 12_000, "(" * 65_536,
    ],
)  # fmt: skip
def test_costly_expression_is_refused_before_python_compiles_it(pattern: str) -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match=r"too large|not supported|column"):
            LinearRegex(pattern)

    re.purge()
    assert processor_s(refused) < COST_S_MAX


@pytest.mark.parametrize(
    "pattern",
    [
        "(?!a).*", "(?=a)a", "(?<=a)b", "(?<!a)b", r"(a)\1", "(?P<x>a)(?P=x)", r"\ba", r"a\B", "(?x)a b", "(?m)^a$", "(?i:a)",
        "(a)(?(1)b|c)",
        *(["a*+", "(?>a)"] if hasattr(re, "NOFLAG") else []),
        "(?#comment)a",
    ],
)  # fmt: skip
def test_what_needs_to_go_back_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="are not supported"):
        LinearRegex(pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a(", "column 2: missing"), ("[", "column 1: unterminated"), ("a**", "column 3: multiple repeat"),
        ("(" * 5_000 + ")" * 5_000, "not supported|too large"), ("((a{50}){50}){50}", "too large"),
        ("a{99999999999999999999}", "too large"), ("(?:){0,4000000000}", "too large"), ("(?:a{0}){0,4000000000}", "too large"),
        ("a" * 2_000, "too large"), ("[" + "a" * PATTERN_LENGTH_MAX + "]", "too large: 4002 characters; at most 4000"),
        ("(?i)" + "[ -\uffff]" * 2, "classes without regard to case have more than 65536"),
        (r"(?i)[\N{NULL}-\N{LATIN SMALL LETTER Z}]", "classes without regard to case"),
        (r"(?i)[\x00-\U0010ffffa]", "classes without regard to case"), (r"(\(?if]", "column 1|not supported"),
        (r"[z-a]\(?i", "column 2: bad character range"),
    ],
)  # fmt: skip
def test_invalid_and_oversized_patterns_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LinearRegex(pattern)
