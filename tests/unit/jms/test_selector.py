"""The selector language of Jakarta Messaging 3.1, section 3.8.1."""

from __future__ import annotations

import itertools
import pickle
import re
import tracemalloc
from contextlib import suppress

import pytest

from bascule.amqp.types import Byte, Float, Int, Short
from bascule.broker.memory import SELECTOR_CHAR_BYTES
from bascule.jms.selector import Selector, SelectorError, compile_selector
from bascule.jms.selector.lexer import CHOICES_MAX, TEXT_MAX, TOKENS_MAX
from bascule.jms.selector.numbers import single
from bascule.jms.selector.parser import DEPTH_MAX, PATTERNS_LENGTH_MAX
from tests.support.costs import COST_S_MAX, processor_s
from tests.support.speed import SLOWNESS

MESSAGE = {
    "JMSDeliveryMode": "PERSISTENT", "JMSPriority": Int(4), "JMSType": "car",
    "color": "blue", "weight": Int(2600), "age": Int(17), "price": 99.5, "ratio": single(0.1), "tenth": 0.1,
    "small": Byte(5), "short": Short(-6), "distance": 1 << 53 | 1, "yes": True, "no": False, "under_score": "a_c", "$dollar": Int(1),
    "naïve": "é", "text": "O'Hare", "percent": "100%", "nothing": None, "empty": "",
}  # fmt: skip

TRUE = [
    "JMSType = 'car' AND color = 'blue' AND weight > 2500",
    "JMSDeliveryMode = 'PERSISTENT' and JMSPriority >= 4",
    "under_score = 'a_c' AND $dollar = 1 AND naïve = 'é'",
    "text = 'O''Hare'",
    "color <> 'red' AND NOT color = 'red'",
    "yes AND NOT no AND yes = TRUE AND no = False AND yes <> no",
    "(age > 5) = yes",
    # precedence
    "yes OR no AND no",
    "NOT no AND yes",
    "NOT age = 3",
    "1 + 2 * 3 = 7 AND (1 + 2) * 3 = 9 AND 10 - 4 - 3 = 3 AND 24 / 4 / 2 = 3",
    "-age = -17 AND +age = 17 AND - -age = 17 AND -age * 2 = -34",
    # literals
    "0x1F = 31 AND 017 = 15 AND 0b101 = 5 AND 1_000 = 1000 AND 31L = 31 AND 0XfFl = 255",
    "7. = 7 AND .5 = 5e-1 AND 1E3 = 1000 AND -57.9E2 = -5790 AND 6.2D = 6.2 AND 0x1.8p1 = 3",
    "-9223372036854775808 < 0 AND 9223372036854775807 > 0",
    # Java's numbers
    "7 / 2 = 3 AND -7 / 2 = -3 AND 7 / 2.0 = 3.5",
    "2147483647 + 1 = -2147483648 AND 2147483647L + 1 = 2147483648 AND 9223372036854775807 + 1 < 0",
    "small + short = -1 AND small * 2 = 10",
    "ratio = 0.1F AND tenth = 0.1 AND ratio <> tenth AND ratio <> 0.1",
    "distance = 9007199254740992.0",
    "1 / 0.0 > 1E308 AND 0.0 = -0.0",
    # BETWEEN, IN, LIKE, NULL
    "age BETWEEN 15 AND 19 AND age NOT BETWEEN 18 AND 30 AND age + 1 BETWEEN 18 AND 9 * 2",
    "color IN ('red', 'blue') AND color NOT IN ('green')",
    "missing IS NULL AND nothing IS NULL AND color IS NOT NULL AND no IS NOT NULL AND empty IS NOT NULL",
    "color LIKE 'b%' AND color LIKE '_lue' AND color LIKE '%' AND color NOT LIKE 'b' AND color LIKE '%l%e'",
    "under_score LIKE 'a!_c' ESCAPE '!' AND percent LIKE '%0\\%' ESCAPE '\\' AND color NOT LIKE 'b!_ue' ESCAPE '!'",
    "empty LIKE '' AND empty LIKE '%' AND empty NOT LIKE '_'",
    # different types: the comparison is false, so its negation is true
    "NOT age = 'x' AND NOT age <> 'x' AND NOT color > 5 AND NOT yes = 1",
    "age NOT IN ('17') AND age NOT LIKE '17'",
]  # fmt: skip

FALSE_OR_UNKNOWN = [
    "color = 'Blue'", "COLOR = 'blue'", "missing = 1", "missing <> 1", "NOT missing = 1", "NOT missing", "missing", "color",
    "age", "nothing IN ('x')", "nothing NOT IN ('x')", "missing LIKE '%'", "missing NOT LIKE '%'", "missing BETWEEN 1 AND 2",
    "missing NOT BETWEEN 1 AND 2", "age BETWEEN missing AND 20", "missing + 1 = 1 OR missing + 1 <> 1", "age / 0 = 1 OR age / 0 <> 1",
    "color + 1 = 1", "-color = 1", "age = 'x'", "age <> 'x'", "color BETWEEN 1 AND 2", "color NOT BETWEEN 1 AND 2", "yes = 1",
    "age IN ('17')", "age LIKE '17'", "percent LIKE '100!%%_' ESCAPE '!'",
    "empty LIKE '%_%'", "color LIKE 'bl%___%'", "+color = 'blue'", "+yes = TRUE",
]  # fmt: skip


@pytest.mark.parametrize("text", TRUE)
def test_selector_matches_message(text: str) -> None:
    assert compile_selector(text).matches(MESSAGE.get)


@pytest.mark.parametrize("text", FALSE_OR_UNKNOWN)
def test_selector_that_is_false_or_unknown_does_not_match(text: str) -> None:
    assert not compile_selector(text).matches(MESSAGE.get)


AND = {(True, True): True, (True, None): None, (None, None): None}
OR = {(False, False): False, (False, None): None, (None, None): None}


@pytest.mark.parametrize(("a", "b"), list(itertools.product((True, False, None), repeat=2)))
def test_truth_tables_of_and_or_and_not_hold(a: bool | None, b: bool | None) -> None:
    lookup = {"a": a, "b": b}.get
    conjunction = False if False in (a, b) else AND.get((a, b), AND.get((b, a)))
    disjunction = True if True in (a, b) else OR.get((a, b), OR.get((b, a)))
    for text, truth in (("a AND b", conjunction), ("a OR b", disjunction), ("a AND b AND a", conjunction), ("b OR a OR b", disjunction)):
        assert compile_selector(text).matches(lookup) is (truth is True), text
        assert compile_selector(f"NOT ({text})").matches(lookup) is (truth is False), text
    assert compile_selector("NOT a").matches(lookup) is (a is False)


@pytest.mark.parametrize("text", [None, "", " \t\n\f\r "])
def test_blank_selector_matches_every_message(text: str | None) -> None:
    assert compile_selector(text).matches({}.get)
    assert compile_selector(text).identifiers == frozenset()


def test_selector_lists_the_identifiers_in_its_text() -> None:
    selector = compile_selector("a > 1 AND (b IS NULL OR c LIKE 'x%') AND d IN ('e') AND -f BETWEEN g AND 3")
    assert selector.identifiers == {"a", "b", "c", "d", "f", "g"}


def test_selector_is_compiled_once_and_pickled_by_its_text() -> None:
    selector = compile_selector("age > 3")
    assert compile_selector("age > 3") is selector
    assert pickle.loads(pickle.dumps(selector)) is selector


WRONG = [
    ("age >", 6, "expected a value, found the end"),
    ("age > 3 AND", 12, "expected a value"),
    ("age > 3 color", 9, "expected an operator or the end, found color"),
    ("'text'", 1, "a condition is needed"),
    ("5", 1, "a condition is needed"),
    ("age + 1", 1, "a condition is needed"),
    ("age + 1 AND TRUE", 1, "a condition is needed"),
    ("TRUE AND 5", 10, "a condition is needed"),
    ("NOT 'a'", 5, "a condition is needed"),
    ("color > 'red'", 9, "a number is needed"),
    ("TRUE < age", 1, "a number is needed"),
    ("1 + (age > 3) = 2", 5, "a number is needed"),
    ("color = 'red", 9, "no closing quote"),
    ('color = "red"', 9, "single quotes"),
    ("age != 3", 5, "use <> for unequal"),
    ("age = 3;", 8, "unexpected character ';'"),
    ("age == 3", 6, "expected a value, found ="),
    ("(age = 3", 9, "expected ), found the end"),
    ("age = 3)", 8, "expected an operator or the end, found )"),
    ("9223372036854775808 = age", 1, "beyond the range of long"),
    ("age = -9223372036854775809", 8, "beyond the range of long"),
    ("age = 089", 7, "octal"),
    ("age = 1E999", 7, "beyond the range of double"),
    ("age = 1E39F", 7, "beyond the range of float"),
    ("age = 0x1p9999", 7, "beyond the range of double"),
    ("color LIKE age", 12, "a pattern"),
    ("color LIKE 'a' ESCAPE 'xx'", 23, "one character"),
    ("color LIKE 'a!' ESCAPE '!'", 24, "escapes nothing"),
    ("'a' LIKE 'a'", 1, "LIKE needs an identifier"),
    ("color IN ()", 11, "a choice"),
    ("color IN ('a' 'b')", 15, "expected )"),
    ("age IN (1, 2)", 9, "a choice"),
    ("5 IN ('5')", 1, "IN needs an identifier"),
    ("age + 1 IS NULL", 1, "IS needs an identifier"),
    ("age IS 5", 8, "expected NULL"),
    ("age NOT 5", 9, "expected BETWEEN, IN or LIKE after NOT"),
    ("age BETWEEN 1", 14, "expected AND"),
    ("age BETWEEN 1 OR 2", 15, "expected AND, found OR"),
    ("JMSExpiration > 0", 1, "cannot be used in a selector"),
    ("(" * (DEPTH_MAX + 1) + "TRUE" + ")" * (DEPTH_MAX + 1), DEPTH_MAX + 1, "deep"),
    ("+".join(["1"] * 200) + " = 200", 1, "deep"),
    ("NOT " * 200 + "yes", 4 * DEPTH_MAX + 1, "deep"),
    ("a" * (TEXT_MAX + 1), TEXT_MAX + 1, "exceeds the limit"),
    ("a," * TOKENS_MAX, TOKENS_MAX + 1, "more than 4000 identifiers"),
    ("1" + "+1" * (TOKENS_MAX // 2 - 1), 1, "deep"),
    ("a LIKE '" + "%x" * (PATTERNS_LENGTH_MAX // 2) + "' OR a LIKE '%'", 8 + PATTERNS_LENGTH_MAX + 13, "LIKE patterns have more than"),
]


@pytest.mark.parametrize(("text", "column", "reason"), WRONG, ids=[text[:30] for text, _, _ in WRONG])
def test_invalid_selector_is_refused_with_column_and_reason(text: str, column: int, reason: str) -> None:
    with pytest.raises(SelectorError) as caught:
        compile_selector(text)
    assert (caught.value.column, reason in caught.value.reason) == (column, True), caught.value
    shown, caret = str(caught.value).splitlines()[1:]
    assert shown[caret.index("^") : caret.index("^") + 1] == text[column - 1 : column]


def test_long_chain_of_or_conditions_is_not_nested_too_deeply() -> None:
    selector = compile_selector(" OR ".join(f"age = {number}" for number in range(1000)))
    assert selector.matches({"age": Int(999)}.get)
    assert not selector.matches({"age": Int(1000)}.get)


def test_steps_of_like_grow_with_the_pieces_of_its_pattern() -> None:
    few, many = (compile_selector(f"x LIKE '{'%a' * count}%'") for count in (10, 5_000))
    assert many.steps - few.steps >= 4_990


LONGEST = {
    "or": " OR ".join(["a=1"] * 3000), "and": " AND ".join(["a"] * 6000), "in": "a IN (" + ",".join(["'x'"] * 5990) + ")",
    "like": f"a LIKE '{'%_x' * 6000}'", "pieces": f"a LIKE '{'%x' * 9000}'", "sum": "a=" + "+".join(["1"] * 30_000),
    "not": "NOT " * 16_000 + "a", "signs": "a=" + "-" * 60_000 + "1", "hexadecimal": "a=0x" + "f" * 60_000,
}  # fmt: skip


@pytest.mark.parametrize("text", LONGEST.values(), ids=LONGEST)
def test_longest_selectors_are_compiled_or_refused_in_little_time(text: str) -> None:
    def compile_or_refuse() -> None:
        with suppress(SelectorError):
            compile_selector(text)

    assert processor_s(compile_or_refuse) < COST_S_MAX


@pytest.mark.parametrize("pattern", ["%a%a%a%a%a%a%a%a%a%a%b", "%_a_a_a_a%_b%", "%" * 500 + "b", "_%" * 30 + "b"])
def test_like_matches_costly_patterns_in_little_time(pattern: str) -> None:
    selector = compile_selector(f"x LIKE '{pattern}'")
    matched: list[object] = []
    limit_s = 1.0 * SLOWNESS
    assert processor_s(lambda: matched.append(selector.matches({"x": "a" * 20_000}.get)), limit_s) < limit_s
    assert not any(matched)


def test_memory_of_like_pattern_is_proportional_to_its_length() -> None:
    text = f"x LIKE '{''.join(chr(0x4E00 + number) for number in range(20_000))}'"
    tracemalloc.start()
    try:
        selector = compile_selector(text)
        assert tracemalloc.get_traced_memory()[0] < SELECTOR_CHAR_BYTES * len(text)
    finally:
        tracemalloc.stop()
    assert not selector.matches({"x": "x"}.get)


def test_float_values_are_compared_as_in_java() -> None:
    nan = compile_selector("x = x OR x < 1 OR x >= 1")
    assert not nan.matches({"x": float("nan")}.get)
    assert compile_selector("x <> x").matches({"x": float("nan")}.get)
    assert compile_selector("x > 3E38 AND x * 10 > 3E38").matches({"x": Float(3.2e38)}.get)


def test_short_selectors_are_cached_and_long_ones_are_not() -> None:
    long = "a = '" + "x" * 1024 + "'"
    assert compile_selector("a = 1") is compile_selector("a = 1")
    assert compile_selector(long) is not compile_selector(long)
    assert compile_selector(long).matches({"a": "x" * 1024}.get)


@pytest.mark.parametrize("many", [2_001, CHOICES_MAX - 3])
def test_choices_of_in_have_a_limit_of_their_own(many: int) -> None:
    choices = ",".join(f"'{chr(0x4E00 + number)}'" for number in range(many))
    selector = Selector(f"NOT a\t NOT  IN\n( {choices} ) AND b IN ('it''s', 'x'\t ,'y')")
    assert [selector.matches({"a": a, "b": b}.get) for a, b in [("一", "y"), (chr(0x4E00 + many - 1), "it's"), ("-", "y")]] == [
        True,
        True,
        False,
    ]
    assert selector.identifiers == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("a IN (" + ",".join(["''"] * (CHOICES_MAX + 1)) + ")", 7, f"more than {CHOICES_MAX} choices of IN"),
        ("a IN ('x', 'y' 'z')", 16, "expected ), found 'z'"),
        ("a IN ('x', 5)", 12, "expected a choice"),
        ("a IN ('x',)", 11, "expected a choice"),
        ("a IN ('x', 'y", 12, "no closing quote"),
        ("a IN ('x''", 10, "no closing quote"),
        ("a IN ('x'", 10, "expected ), found the end"),
        ("1 IN ('x')", 1, "needs an identifier"),
        ("a = IN ('x')", 5, "expected a value, found IN"),
        ("'IN' ('x')", 1, "a condition is needed"),
    ],
)
def test_lists_of_choices_are_refused_where_they_are_wrong(text: str, column: int, reason: str) -> None:
    with pytest.raises(SelectorError, match=re.escape(reason)) as caught:
        Selector(text)
    assert caught.value.column == column


def longest(unit: str, operator: str, tokens: int) -> str:
    """Return as many units as a selector may have, joined by an operator."""
    return operator.join([unit] * ((TOKENS_MAX + 1) // (tokens + 1)))


@pytest.mark.parametrize(
    "text",
    [
        longest("a BETWEEN 1.5 AND 2L", " OR ", 5),
        longest("a NOT BETWEEN -1 AND -2", " OR ", 8),
        longest("a = 'x'", " AND ", 3),
        longest("+ + + + + +a < 1", " OR ", 9),
        longest("a", " OR ", 1),
        "a IN (" + ",".join(["'x'"] * CHOICES_MAX) + ")",
        "a LIKE '" + "%a_" * 6_000 + "' OR " + longest("a BETWEEN 1 AND 2", " OR ", 5)[:15_000].rpartition(" OR ")[0],
    ],
    ids=range(7),
)
def test_longest_selectors_are_compiled_in_one_turn(text: str) -> None:
    def compile_or_refuse() -> None:
        with suppress(SelectorError):  # the steps for each message are known after all of the work
            Selector(text)

    assert processor_s(compile_or_refuse) < 0.05 * SLOWNESS  # the longest turn
