"""Masks of secrets in texts for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

#: What is shown instead of a secret.
MASK: Final = "********"
_ADDRESSES: Final = ("queue://", "topic://")
_PASSWORD_OPTION: Final = re.compile(r"(password=)[^&)\s]*", re.IGNORECASE)


def mask_url(text: str) -> str:
    """Return a URL, valid or not, or a text that quotes one, without user names and passwords.

    Everything before the last ``@`` is masked, from the first ``//`` on: in an invalid URL nothing else says where a password ends.
    """
    place = r"//.*@" if "//" in text else r"[^\s'\"]*@"
    masked = re.sub(place, f"//{MASK}@" if "//" in text else f"{MASK}@", text, flags=re.DOTALL)
    return _PASSWORD_OPTION.sub(rf"\1{MASK}", masked)


def without_login(text: str) -> str:
    """Return the text of a setting. If it has a URL with a user or a password, these are masked; a JMS address has none."""
    _, _, rest = text.partition("//")
    return mask_url(text) if "@" in rest and not text.startswith(_ADDRESSES) else text


class PropertyMask:
    """The properties of messages whose values are not shown, by patterns of their names: ``*`` and ``?`` as in file names, in any case."""

    __slots__ = ("_patterns",)

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = tuple(pattern.lower() for pattern in patterns)

    def __bool__(self) -> bool:
        """Return whether there is a pattern."""
        return bool(self._patterns)

    def covers(self, name: str) -> bool:
        """Return whether the value of a property is not shown."""
        lowered = name.lower()
        return any(fnmatchcase(lowered, pattern) for pattern in self._patterns)

    def shown(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        """Return properties as people see them."""
        return {name: MASK if self.covers(name) else value for name, value in properties.items()}


#: Shows all properties.
NO_MASK: Final = PropertyMask()
