"""The parser of selectors: a Pratt parser for Jakarta Messaging 3.1, section 3.8.1.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from bascule.jms.selector.errors import SelectorError
from bascule.jms.selector.lexer import Token, TokenKind, choices_of, tokens
from bascule.jms.selector.like import Pattern
from bascule.jms.selector.nodes import (
    CONDITIONS,
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
from bascule.jms.selector.numbers import literal

#: Maximum nesting depth of expressions, because parser and evaluator recurse on a peer's input.
DEPTH_MAX: Final = 100
#: Maximum total length of the LIKE patterns of a selector: compiling takes up to a microsecond for each.
PATTERNS_LENGTH_MAX: Final = 20_000
#: Maximum cost of an evaluation for one message, in steps of about a microsecond: one for each operator, identifier and literal, and for
#: LIKE the cost of its pattern for the longest text. A scan of a deep queue can only be interrupted between messages.
STEPS_MAX: Final = 20_000

#: Header fields that a selector may use (section 3.8.1.1); others are refused, because they would never match.
HEADERS: Final = frozenset({"JMSDeliveryMode", "JMSPriority", "JMSMessageID", "JMSTimestamp", "JMSCorrelationID", "JMSType"})
_HEADERS_REFUSED: Final = frozenset({"JMSDestination", "JMSReplyTo", "JMSRedelivered", "JMSExpiration", "JMSDeliveryTime"})

_CONDITIONS: Final = frozenset(CONDITIONS)
#: What may stand where a condition is needed: an identifier can have any type.
_TRUTHS: Final = frozenset({*CONDITIONS, Identifier})

#: The binding power of an operator; 0 ends an expression.
_OR, _AND, _NOT, _EQUALITY, _RELATION, _SUM, _PRODUCT, _SIGN = range(1, 9)
_POWER: Final[dict[str, int]] = {
    "OR": _OR, "AND": _AND,
    "=": _EQUALITY, "<>": _EQUALITY, "IS": _EQUALITY,
    "<": _RELATION, "<=": _RELATION, ">": _RELATION, ">=": _RELATION,
    "BETWEEN": _RELATION, "IN": _RELATION, "LIKE": _RELATION, "NOT": _RELATION,
    "+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT,
}  # fmt: skip


class ParsedSelector(NamedTuple):
    """The syntax tree of a selector, the maximum steps of an evaluation, and the header fields and properties it uses."""

    tree: Node
    steps: int
    identifiers: frozenset[str]


def parse(text: str) -> ParsedSelector:
    """Parse a selector that is not blank. Raises SelectorError."""
    parser = _Parser(text)
    tree = parser.condition(parser.expression(0), 0)
    if parser.token.kind is not TokenKind.END:
        raise parser.error(f"expected an operator or the end, found {_shown(parser.token)}")
    depth, steps = _extent(tree)
    if depth > DEPTH_MAX:
        raise parser.error(f"expressions are nested more than {DEPTH_MAX} levels deep", 0)
    if steps > STEPS_MAX:
        raise parser.error(f"an evaluation may take {steps} steps for each message; the limit is {STEPS_MAX}", 0)
    return ParsedSelector(tree, steps, frozenset(parser.identifiers))


def _extent(tree: Node) -> tuple[int, int]:
    """Return the depth of a tree and its steps. (A chain of + makes a deep tree without recursion in the parser.)"""
    deepest = steps = 0
    todo: list[tuple[tuple[object, ...], int]] = [(tree, 1)]
    while todo:
        node, depth = todo.pop()
        if depth > deepest:
            deepest = depth
        steps += node.pattern.steps if type(node) is Like else 1
        depth += 1
        for child in node:
            kind = type(child)
            if kind is Identifier or kind is Literal:  # most nodes: they have no children
                steps += 1
                if depth > deepest:
                    deepest = depth
            elif isinstance(child, tuple):
                todo.append((child, depth))
    return deepest, steps


def _shown(token: Token) -> str:
    if token.kind is TokenKind.END:
        return "the end"
    return f"'{token.text}'" if token.kind is TokenKind.STRING else token.text


class _Parser:
    """A parser in one pass over the tokens. ``token`` is the next token, and ``symbol`` its text if it is a symbol, otherwise ""."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokens(text)
        self.index = 0
        self.token = self.tokens[0]
        self.symbol = self.token.text if self.token.kind is TokenKind.SYMBOL else ""
        self.depth = 0
        self.patterns_length = 0
        self.identifiers: set[str] = set()

    def error(self, reason: str, position: int | None = None) -> SelectorError:
        return SelectorError(reason, self.text, self.token.position if position is None else position)

    def advance(self) -> Token:
        token = self.token
        if token.kind is not TokenKind.END:
            self.index += 1
            kind, text, _ = self.token = self.tokens[self.index]
            self.symbol = text if kind is TokenKind.SYMBOL else ""
        return token

    def accept(self, symbol: str) -> bool:
        if self.symbol == symbol:
            self.advance()
            return True
        return False

    def expect(self, symbol: str) -> None:
        if not self.accept(symbol):
            raise self.error(f"expected {symbol}, found {_shown(self.token)}")

    def string(self, what: str) -> str:
        if self.token.kind is not TokenKind.STRING:
            raise self.error(f"expected {what}, a string in single quotes, found {_shown(self.token)}")
        return self.advance().text

    # The operand type required by an operator; an identifier can have any type.

    def condition(self, node: Node, position: int) -> Node:
        if type(node) in _TRUTHS or (isinstance(node, Literal) and isinstance(node.value, bool)):
            return node
        raise self.error("a condition is needed here, not a value", position)

    def number(self, node: Node, position: int) -> Node:
        kind = type(node)
        if kind is not Identifier and (kind in _CONDITIONS or (isinstance(node, Literal) and isinstance(node.value, (bool, str)))):
            raise self.error("a number is needed here", position)
        return node

    def identifier(self, node: Node, operator: str, position: int) -> Identifier:
        if isinstance(node, Identifier):
            return node
        raise self.error(f"{operator} needs an identifier on its left", position)

    # Expressions

    def expression(self, power: int) -> Node:
        """Parse an expression of operators that bind tighter than ``power``."""
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise self.error(f"expressions are nested more than {DEPTH_MAX} levels deep")
        start = self.token.position
        left, nested = self.prefix(), 0
        while (binds := _POWER.get(self.symbol, 0)) > power:
            nested += 1  # a chain of + is as deep as it is long
            if nested > DEPTH_MAX:
                raise self.error(f"expressions are nested more than {DEPTH_MAX} levels deep", start)
            left = self.infix(left, start, binds)
        self.depth -= 1
        return left

    def prefix(self) -> Node:
        """Parse the first operand of an expression."""
        token = self.advance()
        kind, text, _ = token
        if kind is TokenKind.IDENTIFIER:
            if text in _HEADERS_REFUSED:
                allowed = ", ".join(sorted(HEADERS))
                raise self.error(f"{text} cannot be used in a selector; the allowed header fields are {allowed}", token.position)
            self.identifiers.add(text)
            return Identifier(text)
        if kind is TokenKind.NUMBER:
            return self.literal(token)
        if kind is TokenKind.STRING:
            return Literal(text)
        rule = _PREFIX.get(text) if kind is TokenKind.SYMBOL else None
        if rule is None:
            raise self.error(f"expected a value, found {_shown(token)}", token.position)
        return rule(self)

    def literal(self, token: Token, *, negative: bool = False) -> Literal:
        try:
            return Literal(literal(token.text, negative=negative))
        except ValueError as error:
            raise self.error(str(error), token.position) from None

    def parentheses(self) -> Node:
        inner = self.expression(0)
        self.expect(")")
        return inner

    def negation(self) -> Node:
        if self.token.kind is TokenKind.NUMBER:
            return self.literal(self.advance(), negative=True)
        return Negation(self.signed())

    def signed(self) -> Node:
        start = self.token.position
        return self.number(self.expression(_SIGN), start)

    def inversion(self) -> Node:
        start = self.token.position
        return Not(self.condition(self.expression(_NOT), start))

    def infix(self, left: Node, start: int, power: int) -> Node:
        """Parse the operator after ``left``, which began at ``start``."""
        operator = self.advance()
        rule = _INFIX.get(operator.text)
        if rule is not None:
            return rule(self, left, start)
        if operator.text == "NOT":
            return self.negated(left, start)
        if operator.text in ("AND", "OR"):
            return self.joint(left, start, operator.text)
        right_start = self.token.position
        right = self.expression(power)
        if operator.text not in ("=", "<>"):
            left, right = self.number(left, start), self.number(right, right_start)
        return (Comparison if power <= _RELATION else Arithmetic)(operator.text, left, right)

    def joint(self, left: Node, start: int, operator: str) -> Node:
        """Parse a run of ANDs or of ORs into one node."""
        operands = [self.condition(left, start)]
        more = True
        while more:
            start = self.token.position
            operands.append(self.condition(self.expression(_POWER[operator]), start))
            more = self.accept(operator)
        return (All if operator == "AND" else Some)(tuple(operands))

    def negated(self, left: Node, start: int) -> Node:
        """Parse the operator after ``left NOT``."""
        operator = self.advance()
        if operator.kind is TokenKind.SYMBOL and operator.text == "BETWEEN":
            return self.between(left, start, inside=False)
        if operator.kind is TokenKind.SYMBOL and operator.text in ("IN", "LIKE"):
            return Not(_INFIX[operator.text](self, left, start))
        raise self.error(f"expected BETWEEN, IN or LIKE after NOT, found {_shown(operator)}", operator.position)

    def between(self, left: Node, start: int, *, inside: bool = True) -> Node:
        left = self.number(left, start)
        bounds = []
        for last in (False, True):
            start = self.token.position
            bounds.append(self.number(self.expression(_RELATION), start))
            if not last:
                self.expect("AND")
        low, high = bounds
        if inside:
            return All((Comparison(">=", left, low), Comparison("<=", left, high)))
        return Some((Comparison("<", left, low), Comparison(">", left, high)))

    def membership(self, left: Node, start: int) -> Node:
        identifier = self.identifier(left, "IN", start)
        self.expect("(")
        choices = set(choices_of(self.advance().text)) if self.token.kind is TokenKind.CHOICES else {self.string("a choice")}
        while self.accept(","):
            choices.add(self.string("a choice"))
        self.expect(")")
        return In(identifier, frozenset(choices))

    def pattern(self, left: Node, start: int) -> Node:
        identifier = self.identifier(left, "LIKE", start)
        position = self.token.position
        pattern = self.string("a pattern")
        escape = None
        if self.accept("ESCAPE"):
            position = self.token.position
            escape = self.string("the escape character")
            if len(escape) != 1:
                raise self.error("the escape character must be one character", position)
        self.patterns_length += len(pattern)
        if self.patterns_length > PATTERNS_LENGTH_MAX:
            raise self.error(f"LIKE patterns have more than {PATTERNS_LENGTH_MAX} characters in total", position)
        try:
            return Like(identifier, Pattern(pattern, escape))
        except ValueError as error:
            raise self.error(str(error), position) from None

    def null_test(self, left: Node, start: int) -> Node:
        identifier = self.identifier(left, "IS", start)
        inverted = self.accept("NOT")
        self.expect("NULL")
        return Not(IsNull(identifier)) if inverted else IsNull(identifier)


_PREFIX: Final[dict[str, Callable[[_Parser], Node]]] = {
    "(": _Parser.parentheses,
    "-": _Parser.negation,
    "+": lambda parser: Negation(Negation(parser.signed())),  # the number itself, and NULL for other values
    "NOT": _Parser.inversion,
    "TRUE": lambda _: Literal(True),
    "FALSE": lambda _: Literal(False),
}
_INFIX: Final[dict[str, Callable[[_Parser, Node, int], Node]]] = {
    "BETWEEN": _Parser.between,
    "IN": _Parser.membership,
    "LIKE": _Parser.pattern,
    "IS": _Parser.null_test,
}
