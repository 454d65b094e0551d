"""The tokens of a selector's text."""

from __future__ import annotations

import enum
import re
from typing import Final, NamedTuple

from bascule.jms.selector.errors import SelectorError

#: Maximum length of a selector in characters: it is stored per consumer and sent in every attach.
TEXT_MAX = 65_536
#: Maximum number of tokens of a selector, without the choices of IN. A selector is compiled in one turn of the event loop, which must stay
#: below 50 ms, and a token takes up to 5 microseconds, more on a busy machine, for example in BETWEEN, which is two comparisons.
TOKENS_MAX = 4_000
#: Maximum number of choices of all IN lists of a selector: a choice takes less than a microsecond and some 100 bytes of memory.
CHOICES_MAX = 10_000

#: Reserved words, in any case; no property has such a name.
KEYWORDS = frozenset({"NULL", "TRUE", "FALSE", "NOT", "AND", "OR", "BETWEEN", "LIKE", "IN", "IS", "ESCAPE"})


class TokenKind(enum.Enum):
    """The kind of a token."""

    IDENTIFIER = "an identifier"
    NUMBER = "a number"
    STRING = "a string"
    SYMBOL = "a symbol"  # keywords (in upper case), operators and punctuation
    CHOICES = "the strings between the parentheses of IN"
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
    [ \t\f\r\n]*+(?:
      (?P<symbol><>|<=|>=|[=<>+*/(),]|-)
    | (?P<name>(?:[^\W\d]|[$¢-¥₠-⃀])[\w$¢-¥₠-⃀]*)
    | (?P<string>'(?:[^']|'')*')
    | (?P<number>
        0[xX](?:{_HEX}\.?|(?:{_HEX})?\.{_HEX})[pP][+-]?{_DIGITS}[fFdD]?
      | 0[xX]{_HEX}[lL]?
      | 0[bB][01](?:[01_]*[01])?[lL]?
      | (?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?[fFdD]?
      | {_DIGITS}(?:[eE][+-]?{_DIGITS}[fFdD]?|[fFdD])
      | {_DIGITS}[lL]?))
    """,
    re.VERBOSE,
)
_KINDS: Final = (TokenKind.END, TokenKind.SYMBOL, TokenKind.IDENTIFIER, TokenKind.STRING, TokenKind.NUMBER)  # by group of _TOKEN
_NAME, _STRING = 2, 3
_IN, _OPENING = (TokenKind.SYMBOL, "IN"), (TokenKind.SYMBOL, "(")
_SPACE = r"[ \t\f\r\n]*+"
_SPACES = re.compile(_SPACE)
_STRINGS = re.compile(r"'((?:[^']|'')*+)'")
#: Strings separated by commas. No part gives back what it has matched, so the time is proportional to the length.
_CHOICES = re.compile(rf"{_STRINGS.pattern}(?:{_SPACE},{_SPACE}{_STRINGS.pattern})*+")


def tokens(text: str) -> list[Token]:
    """Return the tokens of a selector, the last one END. Raises SelectorError."""
    end = len(text)
    if end > TEXT_MAX:
        raise SelectorError(f"selector of {end} characters exceeds the limit of {TEXT_MAX}", text, TEXT_MAX)
    found: list[Token] = []
    new, match_at = tuple.__new__, _TOKEN.match  # a named tuple is made in Python otherwise
    count = position = choices = 0
    while (match := match_at(text, position)) is not None:
        group = match.lastindex or 0
        position = match.start(group)
        if count == TOKENS_MAX:
            raise SelectorError(f"more than {TOKENS_MAX} identifiers, literals and operators", text, position)
        count += 1
        word, kind = match[group], _KINDS[group]
        if group == _NAME:
            if (upper := word.upper()) in KEYWORDS:
                kind, word = TokenKind.SYMBOL, upper
        elif group == _STRING:
            if count > 2 and found[-1][:2] == _OPENING and found[-2][:2] == _IN and (many := _CHOICES.match(text, position)) is not None:
                match, kind, word = many, TokenKind.CHOICES, many[0]
                choices += len(choices_of(word))
                if choices > CHOICES_MAX:
                    raise SelectorError(f"more than {CHOICES_MAX} choices of IN", text, position)
            else:
                word = word[1:-1].replace("''", "'")
        found.append(new(Token, (kind, word, position)))
        position = match.end()
    if (position := _past_spaces(text, position)) < end:
        raise SelectorError(_complaint(text[position]), text, position)
    found.append(Token(TokenKind.END, "", end))
    return found


def choices_of(text: str) -> list[str]:
    """Return the strings of a token CHOICES."""
    found: list[str] = _STRINGS.findall(text)
    return [each.replace("''", "'") for each in found] if "''" in text else found


def _past_spaces(text: str, position: int) -> int:
    """Return the position of the first character that is no white space, or the length of the text."""
    match = _SPACES.match(text, position)
    return position if match is None else match.end()


def _complaint(character: str) -> str:
    if character == "'":
        return "this string has no closing quote"
    if character == '"':
        return "strings need single quotes: 'text'"
    if character == "!":
        return "unknown operator; use <> for unequal"
    return f"unexpected character {character!r}"
