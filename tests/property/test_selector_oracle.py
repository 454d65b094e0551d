"""Selectors against a second evaluator, written from the text of the specification: truth is 0, 1/2 (unknown) or 1, numbers are those of C.

Expressions are random trees: the oracle walks the tree, the product gets its text and the encoded message. Repeated expressions are not
counted. BASCULE_SELECTORS sets the number of expressions, BASCULE_SELECTOR_SEED the seed.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bascule.amqp.types import Byte, Float, Int, Short
from bascule.jms.lookup import selector_lookup
from bascule.jms.selector import Lookup, Selector, SelectorError, compile_selector
from bascule.jms.selector import evaluate as evaluate_module
from bascule.jms.selector import parser as parser_module
from bascule.testing.broker import message_bytes

#: Different expressions of the default suite.
EXPRESSIONS = int(os.environ.get("BASCULE_SELECTORS", "30000"))
#: Different expressions of the slow suite.
MANY = max(EXPRESSIONS, 100_000)
SEED = int(os.environ.get("BASCULE_SELECTOR_SEED", "1"))
TIMEOUT_S = 120 + MANY // 500
#: Messages; each expression is evaluated for a few of them.
MESSAGES, ASKED = 400, 4
LEAVES_MAX = 9

#: C's names of the four number types of Java, in the order of promotion.
INT, LONG, FLOAT, DOUBLE = range(4)
_C = (ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_double)
NAMES = ("a", "b", "c", "d", "e", "f", "JMSPriority", "JMSType", "JMSDeliveryMode", "JMSMessageID", "JMSCorrelationID", "JMSXGroupID")
CHARACTERS = "ab%_'"
EDGES = (0, 1, -1, 2, 127, -128, 32767, 2**31 - 1, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63))


class Number(NamedTuple):
    """A number of Java: one of the four types, and the value."""

    rank: int
    value: Any


def number(rank: int, value: Any) -> Number:
    """Return the number wrapped or rounded to its type."""
    return Number(rank, _C[rank](value).value)


# -- random expressions: tuples (operator, binding power, operands...) ------------------------------------------------------


class Maker:
    """Random trees of the language, which separates conditions and numbers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.leaves = 0

    def condition_of(self, leaves: int) -> Any:
        self.leaves = leaves
        return self.condition()

    def text(self) -> str:
        pick = self.random
        return "".join(pick.choice(CHARACTERS) for _ in range(pick.choice((0, 1, 1, 2, 3, 4))))

    def name(self) -> Any:
        return ("name", 9, self.random.choice(NAMES))

    def condition(self) -> Any:
        pick = self.random
        if self.leaves > 0 and pick.random() < 0.45:
            what = pick.choice(("and", "or", "not"))
            self.leaves -= 1
            if what == "not":
                return ("not", 3, self.condition())
            return (what, 2 if what == "and" else 1, self.condition(), self.condition())
        self.leaves -= 1
        return self.random.choice(self.COMPARISONS)(self)

    def relation(self) -> Any:
        return (self.random.choice(("<", "<=", ">", ">=")), 5, self.number(), self.number())

    def equality(self) -> Any:
        sides = [self.name() if self.random.random() < 0.4 else self.operand() for _ in range(2)]
        return (self.random.choice(("=", "<>")), 4, *sides)

    def operand(self) -> Any:
        pick = self.random.random()
        return self.number() if pick < 0.6 else ("string", 9, self.text()) if pick < 0.9 else ("boolean", 9, pick < 0.95)

    def between(self) -> Any:
        return (self.random.choice(("between", "not between")), 5, self.number(), self.number(), self.number())

    def membership(self) -> Any:
        choices = [self.text() for _ in range(self.random.randint(1, 3))]
        return (self.random.choice(("in", "not in")), 5, self.name(), choices)

    def likeness(self) -> Any:
        escape = self.random.choice(("", "", "%", "_", "a", "'"))
        pattern = self.text()
        if escape and re.fullmatch(f"(?:[^{escape}]|{escape}.)*", pattern) is None:
            pattern += self.random.choice(CHARACTERS)
        return (self.random.choice(("like", "not like")), 5, self.name(), pattern, escape)

    def null_test(self) -> Any:
        return (self.random.choice(("is null", "is not null")), 4, self.name())

    def truth_value(self) -> Any:
        return self.name() if self.random.random() < 0.6 else ("boolean", 9, self.random.random() < 0.5)

    COMPARISONS = (relation, relation, equality, equality, between, membership, likeness, null_test, truth_value)

    def number(self) -> Any:
        pick = self.random
        if self.leaves > 0 and pick.random() < 0.4:
            self.leaves -= 1
            what = pick.choice(("+", "-", "*", "/", "negative", "positive"))
            if what in ("negative", "positive"):
                return (what, 8, self.number())
            return (what, 6 if what in "+-" else 7, self.number(), self.number())
        self.leaves -= 1
        return self.name() if pick.random() < 0.5 else self.literal()

    def literal(self) -> Any:
        pick = self.random
        rank = pick.choice((INT, INT, LONG, FLOAT, DOUBLE, DOUBLE))
        if rank in (INT, LONG):
            value = pick.choice((pick.randint(0, 9), pick.randint(0, 9), abs(pick.choice(EDGES)) % (2**31 if rank == INT else 2**63)))
            form = pick.choice((str, str, hex, bin, lambda value: f"0{value:o}"))
            # Beyond int, a literal without a suffix is a long by itself.
            suffix = "" if rank == INT or (value >= 2**31 and pick.random() < 0.5) else pick.choice("lL")
            return ("number", 9, form(value) + suffix, number(rank, value))
        value = pick.randint(0, 60) / 4 if pick.random() < 0.8 else pick.random() * 10 ** pick.randint(-5, 30)
        written = pick.choice((repr, "{:e}".format))(value)
        suffix = pick.choice("fF") if rank == FLOAT else pick.choice(("", "", "d", "D"))
        return ("number", 9, written + suffix, number(rank, float(written)))


class Printer:
    """Trees as text: random case and space, and some unnecessary parentheses."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def word(self, text: str) -> str:
        return self.random.choice((str.upper, str.upper, str.lower, str.title))(text)

    def printed(self, node: Any, power: int = 0) -> str:
        """Add the parentheses that precedence requires (operators of equal power group to the left)."""
        operator_, binds, *operands = node
        words = f" {self.word(operator_)} "
        match operator_:
            case "name" | "number":
                return str(operands[0])
            case "string":
                return quoted(operands[0])
            case "boolean":
                return self.word(str(operands[0]))
            case "negative" | "positive":
                text = f"{'-' if operator_ == 'negative' else '+'}{self.printed(operands[0], binds - 1)}"
            case "not":
                text = f"{self.word('not')} {self.printed(operands[0], binds - 1)}"
            case "between" | "not between":
                low, high = (self.printed(operand, 5) for operand in operands[1:])
                text = f"{self.printed(operands[0], 5)}{words}{low} {self.word('and')} {high}"
            case "in" | "not in":
                text = f"{self.printed(operands[0])}{words}({', '.join(map(quoted, operands[1]))})"
            case "like" | "not like":
                escape = f" {self.word('escape')} {quoted(operands[2])}" if operands[2] else ""
                text = f"{self.printed(operands[0])}{words}{quoted(operands[1])}{escape}"
            case "is null" | "is not null":
                text = f"{self.printed(operands[0])}{words.rstrip()}"
            case _:
                space = self.random.choice((" ", "  ", "\n")) if operator_.isalpha() else self.random.choice(("", " "))
                text = f"{self.printed(operands[0], binds - 1)}{space}{words.strip()}{space}{self.printed(operands[1], binds)}"
        return f"({text})" if binds <= power or self.random.random() < 0.03 else text


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# -- the oracle -------------------------------------------------------------------------------------------------------------

_ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_RELATIONS = {"=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

#: Truth, doubled: false, unknown, true.
FALSE, UNKNOWN, TRUE = 0, 1, 2
Facts = dict[str, Any]


def value(node: Any, message: Facts) -> Any:
    """Return None, a bool, a str or a Number."""
    what, _, *operands = node
    if what == "name":
        return message.get(operands[0])
    if what == "number":
        return operands[1]
    if what in ("string", "boolean"):
        return operands[0]
    numbers = [value(operand, message) for operand in operands]
    if not all(type(each) is Number for each in numbers):
        return None
    if what == "positive":
        return numbers[0]
    if what == "negative":
        return number(numbers[0].rank, -numbers[0].value)
    (rank_a, a), (rank_b, b) = numbers
    rank = max(rank_a, rank_b)
    a, b = _C[rank](a).value, _C[rank](b).value
    if what != "/":
        return number(rank, _ARITHMETIC[what](a, b))
    if rank in (FLOAT, DOUBLE):
        return number(rank, a / b if b else a * math.copysign(math.inf, b))
    return number(rank, int(Fraction(a, b))) if b else None  # toward zero, as int() does


def compared(relation: str, a: Any, b: Any) -> int:
    if a is None or b is None:
        return UNKNOWN
    if type(a) is not type(b) or (relation not in ("=", "<>") and type(a) is not Number):
        return FALSE
    if type(a) is Number:
        rank = max(a.rank, b.rank)
        a, b = _C[rank](a.value).value, _C[rank](b.value).value
    return 2 * _RELATIONS[relation](a, b)


def like(text: str, pattern: str, escape: str) -> bool:
    parts: list[str] = []
    characters = iter(pattern)
    for each in characters:
        parts.append(re.escape(next(characters)) if each == escape else {"%": ".*", "_": "."}.get(each, re.escape(each)))
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def truth(node: Any, message: Facts) -> int:
    what, _, *operands = node
    match what:
        case "and":
            return min(truth(operands[0], message), truth(operands[1], message))
        case "or":
            return max(truth(operands[0], message), truth(operands[1], message))
        case "not":
            return 2 - truth(operands[0], message)
        case "boolean" | "name":
            found = value(node, message)
            return 2 * found if type(found) is bool else UNKNOWN
        case "is null" | "is not null":
            return 2 * ((value(operands[0], message) is None) == (what == "is null"))
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
            inside = type(x) is str and (x in operands[1] if what.endswith("in") else like(x, operands[1], operands[2]))
            return 2 * (inside != what.startswith("not"))
        case _:
            return compared(what, value(operands[0], message), value(operands[1], message))


# -- messages: encoded for the product, as facts for the oracle -------------------------------------------------------------

_TYPED: tuple[tuple[int, Callable[[Any], Any]], ...] = ((INT, Byte), (INT, Short), (INT, Int), (LONG, int), (FLOAT, Float), (DOUBLE, float))
_BITS = {Byte: 7, Short: 15, Int: 31, int: 63}


def some_messages(seed: int) -> list[tuple[Lookup, Facts]]:
    """What the product reads from an encoded message, and what the oracle knows of the message."""
    pick, texts = random.Random(seed), Maker(seed)
    messages = []
    for index in range(MESSAGES):
        properties: Facts = {}
        facts: Facts = {"JMSPriority": number(INT, pick.randrange(10)), "JMSMessageID": f"ID:{index}"}
        durable = pick.random() < 0.5
        facts["JMSDeliveryMode"] = "PERSISTENT" if durable else "NON_PERSISTENT"
        for name in NAMES[:6]:
            kind = pick.choice(("none", "bool", "text", "number", "number"))
            if kind == "bool":
                facts[name] = properties[name] = pick.random() < 0.5
            elif kind == "text":
                facts[name] = properties[name] = texts.text()
            elif kind == "number":
                rank, of = pick.choice(_TYPED)
                near = pick.choice((pick.randint(-9, 9), pick.choice(EDGES)))
                found = near / 4 if rank >= FLOAT else near if -(1 << _BITS[of]) <= near < 1 << _BITS[of] else 5
                facts[name] = number(rank, found)
                properties[name] = of(facts[name].value)
        body = message_bytes("x", durable=durable, priority=facts["JMSPriority"].value, message_id=f"ID:{index}", properties=properties)
        lookup = selector_lookup(body)
        messages.append(({name: lookup(name) for name in NAMES}.get, facts))
    return messages


class Disagreement(AssertionError):
    """Raised if the evaluators give different results for one expression and one message."""


def compare(count: int, seed: int) -> tuple[int, int]:
    """Run both evaluators. Return the number of expressions, of true results, and of all results."""
    maker, printer, pick = Maker(seed), Printer(seed), random.Random(seed)
    messages = some_messages(seed)
    seen: set[str] = set()
    true = 0
    while len(seen) < count:
        node = maker.condition_of(pick.randint(1, LEAVES_MAX))
        if pick.random() < 0.5:
            node = ("not", 3, node)  # distinguishes false from unknown
        text = printer.printed(node)
        if text in seen:
            continue
        seen.add(text)
        selector = Selector(text)
        for lookup, facts in pick.choices(messages, k=ASKED):
            expected = truth(node, facts)
            if selector.matches(lookup) != (expected == TRUE):
                raise Disagreement(f"seed {seed}: {text!r} of {facts}: the oracle says {('false', 'unknown', 'true')[expected]}")
            true += expected == TRUE
    return len(seen), true


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("expressions", [EXPRESSIONS, pytest.param(MANY, id="many", marks=pytest.mark.slow)])
def test_both_evaluators_agree_on_every_expression(expressions: int) -> None:
    asked, true = compare(expressions, SEED)
    assert asked == expressions
    # Neither result is rare: expressions that are nearly always false would show little.
    assert 0.1 < true / (asked * ASKED) < 0.9


def unknown_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    build = {**evaluate_module._BUILD}
    for kind, make in build.items():
        if kind.__name__ == "Comparison":
            build[kind] = lambda node, make=make: (lambda evaluate: lambda lookup: evaluate(lookup) or False)(make(node))
    monkeypatch.setattr(evaluate_module, "_BUILD", build)


def and_binds_as_or(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parser_module._POWER, "AND", parser_module._POWER["OR"])


def division_rounds_down(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = evaluate_module.arithmetic.__globals__
    monkeypatch.setitem(numbers["_OPERATIONS"], "/", (operator.floordiv, numbers["_OPERATIONS"]["/"][1]))


def integers_do_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evaluate_module.arithmetic.__globals__, "wrap", lambda value, bits: value)


def like_knows_no_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = parser_module.Pattern
    monkeypatch.setattr(parser_module, "Pattern", lambda pattern, escape: whole(pattern))


def between_excludes_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evaluate_module._COMPARE, ">=", operator.gt)


FAULTS = (unknown_is_false, and_binds_as_or, division_rounds_down, integers_do_not_wrap, like_knows_no_escape, between_excludes_its_bounds)


@pytest.mark.interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_oracle_detects_planted_selector_fault(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(Disagreement):
        compare(20_000, SEED)


# -- texts that nobody meant as a selector ----------------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["a", "1", "0x", "1.", "1e", "'", "'x'", "(", ")", "+", "-", "*", "/", "=", "<>", "<", ",", " ", "AND ", "OR ", "NOT ", "BETWEEN ",
     "LIKE ", "IN ", "IS ", "NULL ", "ESCAPE ", "TRUE ", "\n", "\x00", "é", "€"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=20))
@example("a LIKE '%" + "a%" * 50 + "'")
def test_any_text_compiles_to_a_selector_or_raises_selector_error(text: str) -> None:
    try:
        selector = compile_selector(text)
    except SelectorError as error:
        columns = range(1, len(text) + 2)
        if error.column not in columns:
            raise
        return
    for found in (None, True, 1, 1.5, "a"):
        assert selector.matches(lambda _, found=found: found) in (True, False)
