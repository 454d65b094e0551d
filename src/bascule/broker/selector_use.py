"""The memory that selectors use, in total and by user."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from bascule.broker.errors import ResourceLimit
from bascule.broker.fair_shares import USER_SHARE, Beyond, beyond, of_user_beyond

#: A compiled selector, for each character of its text.
SELECTOR_CHAR_BYTES: Final = 150
#: A string in a selector of more characters counts by its bytes: it is compiled to nothing but a copy.
LONG_STRING: Final = 64
#: Copies of such a string: in the text, in the compiled selector, and one while it is stored.
STRING_COPIES: Final = 3
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
    """The counted characters of the selectors of consumers and subscriptions, with the limit ``chars_max``, and their memory."""

    __slots__ = ("_chars_of", "chars", "chars_max", "size_bytes")

    def __init__(self) -> None:
        self.chars = self.size_bytes = 0
        self.chars_max = 0
        self._chars_of: Counter[str] = Counter()  # by user

    def check(self, text: str, user: str) -> int:
        """Return the characters that a selector counts as, if there is room for one more selector of a user. Raises ResourceLimit."""
        chars = counted_chars(text)
        found = beyond(chars, self._chars_of[user], self.chars, self.chars_max)
        if found is None:
            return chars
        whose, most = "all selectors together", self.chars_max
        if found is Beyond.SHARE:
            whose, most = f"the selectors {of_user_beyond(user)}", int(USER_SHARE * most)
        raise ResourceLimit(f"the selector has {len(text)} characters; {whose} may have {most} (broker.memory_bytes)")

    def add(self, change: int, user: str) -> None:
        """Count the characters of a selector, as ``check`` returned them. A negative number counts them no more."""
        if change:
            self.chars += change
            self.size_bytes = self.chars * SELECTOR_CHAR_BYTES
            self._chars_of[user] += change
            if not self._chars_of[user]:
                del self._chars_of[user]
