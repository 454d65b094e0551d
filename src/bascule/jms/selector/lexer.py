"""The tokens of a selector's text."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from bascule.jms.selector.errors import SelectorError

#: Maximum length of a selector in characters: it is stored per consumer and sent in every attach.
TEXT_MAX = 65_536
#: Maximum number of tokens of a selector. A selector is compiled in one turn of the event loop, which must stay below 50 ms, and a token
#: takes up to 12 microseconds on a busy machine, for example in BETWEEN, which is two comparisons.
TOKENS_MAX = 4_000

#: Reserved words, in any case; no property has such a name.
KEYWORDS = frozenset({"NULL", "TRUE", "FALSE", "NOT", "AND", "OR", "BETWEEN", "LIKE", "IN", "IS", "ESCAPE"})


class TokenKind(enum.Enum):
    """The kind of a token."""

    IDENTIFIER = "an identifier"
    NUMBER = "a number"
    STRING = "a string"
    SYMBOL = "a symbol"  # keywords (in upper case), operators and punctuation
    END = "the end"


class Token(NamedTuple):
    """A token: its text (a keyword in upper case, a string without its quotes) and its ``position`` (from 0) in the selector."""

    kind: TokenKind
    text: str
    position: int


# Java's literals (The Java Language Specification, sections 3.10.1 and 3.10.2), and its white space (3.6).
_DIGITS = r"[0-9](?:[0-9_]*[0-9])?"
_HEX = r"[0-9a-fA-F](?:[0-9a-fA-F_]*[0-9a-fA-F])?"
_TOKEN = re.compile(
    rf"""
      (?P<space>[ \t\f\r\n]+)
    | (?P<number>
        0[xX](?:{_HEX}\.?|(?:{_HEX})?\.{_HEX})[pP][+-]?{_DIGITS}[fFdD]?
      | 0[xX]{_HEX}[lL]?
      | 0[bB][01](?:[01_]*[01])?[lL]?
      | (?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?[fFdD]?
      | {_DIGITS}(?:[eE][+-]?{_DIGITS}[fFdD]?|[fFdD])
      | {_DIGITS}[lL]?)
    | (?P<string>'(?:[^']|'')*')
    | (?P<name>(?:[^\W\d]|[$¢-¥₠-⃀])[\w$¢-¥₠-⃀]*)
    | (?P<symbol><>|<=|>=|[=<>+\-*/(),])
    """,
    re.VERBOSE,
)


def tokens(text: str) -> list[Token]:
    """Return the tokens of a selector, the last one END. Raises SelectorError."""
    if len(text) > TEXT_MAX:
        raise SelectorError(f"selector of {len(text)} characters exceeds the limit of {TEXT_MAX}", text, TEXT_MAX)
    found: list[Token] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise SelectorError(_complaint(text[position]), text, position)
        if match.lastgroup != "space":
            if len(found) == TOKENS_MAX:
                raise SelectorError(f"more than {TOKENS_MAX} identifiers, literals and operators", text, position)
            found.append(_token(match))
        position = match.end()
    found.append(Token(TokenKind.END, "", len(text)))
    return found


def _token(match: re.Match[str]) -> Token:
    kind, word, position = match.lastgroup, match.group(), match.start()
    if kind == "name":
        upper = word.upper()
        return Token(TokenKind.SYMBOL, upper, position) if upper in KEYWORDS else Token(TokenKind.IDENTIFIER, word, position)
    if kind == "symbol":
        return Token(TokenKind.SYMBOL, word, position)
    if kind == "string":
        return Token(TokenKind.STRING, word[1:-1].replace("''", "'"), position)
    return Token(TokenKind.NUMBER, word, position)


def _complaint(character: str) -> str:
    if character == "'":
        return "this string has no closing quote"
    if character == '"':
        return "strings need single quotes: 'text'"
    if character == "!":
        return "unknown operator; use <> for unequal"
    return f"unexpected character {character!r}"
