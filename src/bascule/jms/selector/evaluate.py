"""A syntax tree as nested closures, in SQL's three-valued logic: True, False, and None for unknown.

Section 3.8.1.1 defines the special cases: a comparison with NULL is unknown; a comparison of values of different kinds is false for every
operator; arithmetic on NULL or on a value that is not a number is NULL.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

from bascule.jms.selector.nodes import (
    All,
    Arithmetic,
    Comparison,
    Identifier,
    In,
    IsNull,
    Like,
    Literal,
    Negation,
    Node,
    Not,
    Some,
)  # fmt: skip
from bascule.jms.selector.numbers import RANK, arithmetic, negate, promote

Lookup = Callable[[str], object]
Evaluator = Callable[[Lookup], object]

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def evaluator(node: Node) -> Evaluator:
    """Return the function that evaluates ``node`` for a message given by its lookup."""
    return _BUILD[type(node)](node)


def _literal(node: Literal) -> Evaluator:
    value = node.value
    return lambda _: value


def _identifier(node: Identifier) -> Evaluator:
    name = node.name
    return lambda lookup: lookup(name)


def _negation(node: Negation) -> Evaluator:
    operand = evaluator(node.operand)

    def evaluate(lookup: Lookup) -> object:
        value: Any = operand(lookup)
        return negate(value) if type(value) in RANK else None

    return evaluate


def _arithmetic(node: Arithmetic) -> Evaluator:
    left, right, operate = evaluator(node.left), evaluator(node.right), arithmetic(node.operator)
    return lambda lookup: operate(left(lookup), right(lookup))


def _comparison(node: Comparison) -> Evaluator:
    left, right, compare = evaluator(node.left), evaluator(node.right), _COMPARE[node.operator]
    any_kind = node.operator in ("=", "<>")
    rank_of = RANK.get

    def evaluate(lookup: Lookup) -> bool | None:
        a: Any = left(lookup)
        b: Any = right(lookup)
        if a is None or b is None:
            return None
        rank_a, rank_b = rank_of(type(a)), rank_of(type(b))
        if rank_a is not None and rank_b is not None:
            if rank_a == rank_b:
                return compare(a, b)
            return compare(promote(a, rank_a, rank_b), promote(b, rank_b, rank_a))
        if any_kind and ((isinstance(a, str) and isinstance(b, str)) or (isinstance(a, bool) and isinstance(b, bool))):
            return compare(a, b)
        return False

    return evaluate


def _not(node: Not) -> Evaluator:
    operand = evaluator(node.operand)

    def evaluate(lookup: Lookup) -> bool | None:
        value: object = operand(lookup)
        return not value if value is True or value is False else None

    return evaluate


def _all(node: All) -> Evaluator:
    return _until(False, node.operands)


def _some(node: Some) -> Evaluator:
    return _until(True, node.operands)


def _until(decisive: bool, nodes: tuple[Node, ...]) -> Evaluator:
    """Evaluate AND until the first False, OR until the first True; without one, an unknown operand makes the result unknown."""
    operands = tuple(evaluator(node) for node in nodes)
    otherwise = not decisive

    def evaluate(lookup: Lookup) -> bool | None:
        result: bool | None = otherwise
        for operand in operands:
            value = operand(lookup)
            if value is decisive:
                return decisive
            if value is not otherwise:
                result = None
        return result

    return evaluate


def _is_null(node: IsNull) -> Evaluator:
    name = node.identifier.name
    return lambda lookup: lookup(name) is None


def _in(node: In) -> Evaluator:
    choices = node.choices
    return _on_string(node.identifier, lambda value: value in choices)


def _like(node: Like) -> Evaluator:
    return _on_string(node.identifier, node.pattern.matches)


def _on_string(identifier: Identifier, test: Callable[[str], bool | None]) -> Evaluator:
    name = identifier.name

    def evaluate(lookup: Lookup) -> bool | None:
        value = lookup(name)
        if value is None:
            return None
        return test(value) if isinstance(value, str) else False

    return evaluate


_BUILD: Final[dict[type, Callable[[Any], Evaluator]]] = {
    Literal: _literal,
    Identifier: _identifier,
    Negation: _negation,
    Arithmetic: _arithmetic,
    Comparison: _comparison,
    Not: _not,
    All: _all,
    Some: _some,
    IsNull: _is_null,
    In: _in,
    Like: _like,
}
