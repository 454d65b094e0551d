"""Selectors against a second evaluator, written from the specification's text: truth is 0, 1/2 (unknown) or 1, numbers are fractions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from bascule.jms.selector import SelectorError, compile_selector

UNKNOWN = Fraction(1, 2)
NAMES = st.sampled_from(["a", "b", "c", "d"])
STRINGS = st.text("ab%_'", max_size=4)
VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.integers(-40, 40).map(lambda quarter: quarter / 4) | STRINGS
MESSAGES = st.dictionaries(NAMES, VALUES)

# Nodes are tuples: (operator, binding power, operands...). Conditions and numbers are generated apart, as the language keeps them.
NUMBERS = st.recursive(
    NAMES.map(lambda name: ("name", 9, name))
    | st.integers(0, 9).map(lambda value: ("number", 9, f"{value}L", Fraction(value), True))
    | st.integers(0, 40).map(lambda quarters: ("number", 9, str(quarters / 4), Fraction(quarters, 4), False)),
    lambda inner: (
        st.tuples(st.sampled_from(["+", "-"]), st.just(6), inner, inner)
        | st.tuples(st.just("*"), st.just(7), inner, inner)
        | st.tuples(st.just("negative"), st.just(8), inner)
    ),
    max_leaves=5,
)


def comparisons() -> st.SearchStrategy[Any]:
    string = STRINGS.map(lambda text: ("string", 9, text))
    name = NAMES.map(lambda text: ("name", 9, text))
    return (
        st.tuples(st.sampled_from(["<", "<=", ">", ">="]), st.just(5), NUMBERS, NUMBERS)
        | st.tuples(st.sampled_from(["=", "<>"]), st.just(4), NUMBERS | string, NUMBERS | string)
        | st.tuples(st.sampled_from(["between", "not between"]), st.just(5), NUMBERS, NUMBERS, NUMBERS)
        | st.tuples(st.sampled_from(["in", "not in"]), st.just(5), name, st.lists(STRINGS, min_size=1, max_size=3))
        | st.tuples(st.sampled_from(["like", "not like"]), st.just(5), name, STRINGS)
        | st.tuples(st.sampled_from(["is null", "is not null"]), st.just(4), name)
    )


CONDITIONS = st.recursive(
    comparisons() | NAMES.map(lambda name: ("name", 9, name)) | st.booleans().map(lambda value: ("boolean", 9, value)),
    lambda inner: (
        st.tuples(st.just("and"), st.just(2), inner, inner)
        | st.tuples(st.just("or"), st.just(1), inner, inner)
        | st.tuples(st.just("not"), st.just(3), inner)
    ),
    max_leaves=8,
)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def printed(node: Any, power: int = 0) -> str:
    """The expression with no more parentheses than precedence asks for (operators of equal power group to the left)."""
    operator, binds, *operands = node
    match operator:
        case "name" | "number":
            return str(operands[0])
        case "string":
            return quoted(operands[0])
        case "boolean":
            return str(operands[0])
        case "negative" | "not":
            text = f"{'-' if operator == 'negative' else 'Not '}{printed(operands[0], binds - 1)}"
        case "between" | "not between":
            text = " ".join((printed(operands[0], 5), operator, printed(operands[1], 5), "AND", printed(operands[2], 5)))
        case "in" | "not in":
            text = f"{printed(operands[0])} {operator} ({', '.join(map(quoted, operands[1]))})"
        case "like" | "not like":
            text = f"{printed(operands[0])} {operator} {quoted(operands[1])}"
        case "is null" | "is not null":
            text = f"{printed(operands[0])} {operator.upper()}"
        case _:
            text = f"{printed(operands[0], binds - 1)} {operator} {printed(operands[1], binds)}"
    return f"({text})" if binds <= power else text


def value(node: Any, message: dict[str, Any]) -> Any:
    """None, bool, str, or a number as a fraction."""
    operator, _, *operands = node
    if operator == "name":
        found = message.get(operands[0])
        return found if found is None or isinstance(found, bool | str) else Fraction(found)
    if operator == "number":
        return operands[1]
    if operator in ("string", "boolean"):
        return operands[0]
    numbers = [value(operand, message) for operand in operands]
    if not all(isinstance(number, Fraction) for number in numbers):
        return None
    if operator == "negative":
        return -numbers[0]
    a, b = numbers
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def compared(operator: str, a: Any, b: Any) -> Fraction:
    if a is None or b is None:
        return UNKNOWN
    if type(a) is not type(b) or (operator not in ("=", "<>") and not isinstance(a, Fraction)):
        return Fraction(0)
    return Fraction({"=": a == b, "<>": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[operator])


def like(text: str, pattern: str) -> bool:
    return re.fullmatch("".join({"%": ".*", "_": "."}.get(each, re.escape(each)) for each in pattern), text, re.DOTALL) is not None


def truth(node: Any, message: dict[str, Any]) -> Fraction:
    operator, _, *operands = node
    match operator:
        case "and":
            return min(truth(operands[0], message), truth(operands[1], message))
        case "or":
            return max(truth(operands[0], message), truth(operands[1], message))
        case "not":
            return 1 - truth(operands[0], message)
        case "boolean" | "name":
            found = value(node, message)
            return Fraction(found) if isinstance(found, bool) else UNKNOWN
        case "is null" | "is not null":
            return Fraction((value(operands[0], message) is None) == (operator == "is null"))
        case "between":
            x, low, high = (value(operand, message) for operand in operands)
            return min(compared(">=", x, low), compared("<=", x, high))
        case "not between":
            x, low, high = (value(operand, message) for operand in operands)
            return max(compared("<", x, low), compared(">", x, high))
        case "in" | "not in" | "like" | "not like":
            x = value(operands[0], message)
            if x is None:
                return UNKNOWN
            inside = isinstance(x, str) and (x in operands[1] if operator.endswith("in") else like(x, operands[1]))
            return Fraction(inside != operator.startswith("not"))
        case _:
            return compared(operator, value(operands[0], message), value(operands[1], message))


@settings(deadline=None)
@given(CONDITIONS, MESSAGES)
def test_both_evaluators_agree(node: Any, message: dict[str, Any]) -> None:
    text = printed(node)
    assert compile_selector(text).matches(message.get) is (truth(node, message) == 1), text
    assert compile_selector(f"NOT ({text})").matches(message.get) is (truth(node, message) == 0), text


PIECES = st.sampled_from(
    ["a", "1", "0x", "1.", "1e", "'", "'x'", "(", ")", "+", "-", "*", "/", "=", "<>", "<", ",", " ", "AND ", "OR ", "NOT ", "BETWEEN ",
     "LIKE ", "IN ", "IS ", "NULL ", "ESCAPE ", "TRUE ", "\n", "\x00", "é", "€"]
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=20))
@example("a LIKE '%" + "a%" * 50 + "'")
def test_any_text_is_a_selector_or_a_selector_error(text: str) -> None:
    try:
        selector = compile_selector(text)
    except SelectorError as error:
        columns = range(1, len(text) + 2)
        if error.column not in columns:
            raise
        return
    for found in (None, True, 1, 1.5, "a"):
        assert selector.matches(lambda _, found=found: found) in (True, False)
