"""The memory that selectors use, in total and by user."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from bascule.broker.errors import ResourceLimit
from bascule.broker.fair_shares import Beyond, beyond
from bascule.core.user_limits import ANONYMOUS

#: A compiled selector, for each character of its text.
SELECTOR_CHAR_BYTES: Final = 150
#: A string in a selector of more characters counts by its bytes: it is compiled to nothing but a copy.
LONG_STRING: Final = 64
#: Copies of such a string: in the text, in the compiled selector, and one while it is stored.
STRING_COPIES: Final = 3
#: Share of the characters of all selectors that one user may have while others have selectors.
SELECTORS_USER_SHARE: Final = 0.25
#: A string, perhaps a pattern. No part gives back what it has matched, so a search takes time proportional to the length.
_STRING: Final = re.compile(r"(LIKE[ \t\f\r\n]*+)?'((?:[^']|'')*+)'", re.IGNORECASE)


def counted_chars(text: str) -> int:
    """Return the number of characters that a selector counts as: long strings count as fewer, except in LIKE."""
    count = len(text)
    if count <= LONG_STRING:
        return count
    long = sum(len(string) for like, string in _STRING.findall(text) if not like and len(string) > LONG_STRING)
    width = 1 if text.isascii() else 2 if max(text) <= "\uffff" else 4  # bytes of a character in memory
    return count - long - (-STRING_COPIES * width * long // SELECTOR_CHAR_BYTES)


class SelectorUse:
    """The characters of the selectors of consumers and subscriptions, with the limit ``chars_max``."""

    __slots__ = ("_chars_of", "chars", "chars_max")

    def __init__(self) -> None:
        self.chars = 0
        self.chars_max = 0
        self._chars_of: Counter[str] = Counter()  # by user

    @property
    def size_bytes(self) -> int:
        """Return the memory of all selectors."""
        return self.chars * SELECTOR_CHAR_BYTES

    def check(self, text: str, user: str) -> None:
        """Check that there is room for one more selector of a user. Raises ResourceLimit."""
        found = beyond(counted_chars(text), self._chars_of[user], self.chars, self.chars_max, SELECTORS_USER_SHARE)
        if found is None:
            return
        of, most = "all selectors together", self.chars_max
        if found is Beyond.SHARE:
            of, most = f"while others have selectors, those of user {user or ANONYMOUS!r}", int(SELECTORS_USER_SHARE * most)
        raise ResourceLimit(f"the selector has {len(text)} characters; {of} may have {most} (broker.memory_bytes)")

    def add(self, text: str, user: str) -> None:
        """Count a selector, "" for none."""
        self._count(counted_chars(text), user)

    def remove(self, text: str, user: str) -> None:
        """Count a selector no more."""
        self._count(-counted_chars(text), user)

    def _count(self, change: int, user: str) -> None:
        if change:
            self.chars += change
            self._chars_of[user] += change
            if not self._chars_of[user]:
                del self._chars_of[user]
