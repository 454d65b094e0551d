"""Rules that map a name in a certificate to a user, in the notation of Kafka's ``ssl.principal.mapping.rules``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from bascule.core.linear_regex import LinearRegex

#: The rule that leaves a name as it is.
DEFAULT: Final = "DEFAULT"

_ESCAPED = r"((?:\\.|[^\\/])*)"
_RULE = re.compile(rf"RULE:{_ESCAPED}/{_ESCAPED}/([LU]?)")
_PART = re.compile(r"\\(.)|\$(\d)")


@dataclass(frozen=True, slots=True)
class UserRule:
    """One rule: ``RULE:PATTERN/REPLACEMENT/``, and ``L`` or ``U`` for lower or upper case; or ``DEFAULT``."""

    pattern: LinearRegex
    replacement: str
    case: str = ""

    @classmethod
    def parse(cls, text: str) -> UserRule:
        """Parse a rule. Raises ValueError."""
        if text == DEFAULT:
            return cls(LinearRegex("(?s)(.*)"), "$1")
        found = _RULE.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} must be {DEFAULT} or RULE:PATTERN/REPLACEMENT/, with L (lower case), U (upper case) or nothing at its end;"
                " write a slash within it as \\/"
            )
        pattern, replacement, case = found.groups()
        try:
            rule = cls(LinearRegex(pattern), replacement, case)
        except ValueError as error:
            raise ValueError(f"{text!r}: the pattern is no regular expression that can be used: {error}") from None
        for part in _PART.finditer(replacement):
            if part[2] and int(part[2]) > rule.pattern.groups:
                raise ValueError(f"{text!r}: ${part[2]} names a group that the pattern does not have")
        return rule

    def user(self, name: str) -> str | None:
        """Return the user for a name; None if the pattern does not match the whole name."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        user = _PART.sub(lambda part: part[1] or found[int(part[2])] or "", self.replacement)
        return _in_case(user, str.lower) if self.case == "L" else _in_case(user, str.upper) if self.case == "U" else user


def _in_case(name: str, change: Callable[[str], str]) -> str:
    """Return a name in lower or upper case. No other letter becomes one of ASCII, as the Kelvin sign would, since names must stay apart."""
    return "".join(each if changed.isascii() and not each.isascii() else changed for each in name for changed in (change(each),))


def mapped(rules: Iterable[UserRule], name: str) -> str | None:
    """Return the user by the first rule that matches a name; None if none matches."""
    return next((user for rule in rules if (user := rule.user(name)) is not None), None)
