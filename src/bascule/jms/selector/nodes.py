"""The syntax tree of a selector. BETWEEN becomes two comparisons, as the specification defines it."""

from __future__ import annotations

from typing import NamedTuple

from bascule.jms.selector.like import Pattern
from bascule.jms.selector.numbers import Number


class Literal(NamedTuple):
    """A number, a string, TRUE or FALSE."""

    value: Number | str | bool


class Identifier(NamedTuple):
    """A header field or property."""

    name: str


class Negation(NamedTuple):
    """Unary minus."""

    operand: Node


class Arithmetic(NamedTuple):
    """``+ - * /``."""

    operator: str
    left: Node
    right: Node


class Comparison(NamedTuple):
    """``= <> < <= > >=``."""

    operator: str
    left: Node
    right: Node


class Not(NamedTuple):
    """NOT."""

    operand: Node


class All(NamedTuple):
    """AND of two or more operands."""

    operands: tuple[Node, ...]


class Some(NamedTuple):
    """OR of two or more operands."""

    operands: tuple[Node, ...]


class IsNull(NamedTuple):
    """IS NULL."""

    identifier: Identifier


class In(NamedTuple):
    """IN (...)."""

    identifier: Identifier
    choices: frozenset[str]


class Like(NamedTuple):
    """LIKE ... [ESCAPE ...]."""

    identifier: Identifier
    pattern: Pattern


Node = Literal | Identifier | Negation | Arithmetic | Comparison | Not | All | Some | IsNull | In | Like

#: Nodes whose value is a truth value.
CONDITIONS = (Comparison, Not, All, Some, IsNull, In, Like)
