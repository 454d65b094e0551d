"""Transaction branch identifiers (X/Open XA, section 4.2): a global transaction, and within it one branch for each resource."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from bascule.core.errors import InvalidInput

#: MAXGTRIDSIZE and MAXBQUALSIZE of the XA specification.
PART_BYTES_MAX = 64
#: A format id has 31 bits: -1 stands for no Xid at all.
FORMAT_ID_MAX = (1 << 31) - 1

_TEXT = re.compile(r"(\d{1,10}):([^:]{1,192}):([^:]{0,192})")


class Xid(NamedTuple):
    """A branch: ``gtrid`` is the global transaction, ``bqual`` the branch in it. ``str`` and ``parse`` are each other's inverse."""

    format_id: int
    gtrid: bytes
    bqual: bytes

    def __str__(self) -> str:
        return f"{self.format_id}:{quote_from_bytes(self.gtrid)}:{quote_from_bytes(self.bqual, safe='')}"

    @classmethod
    def parse(cls, text: str) -> Xid:
        """The Xid that ``str`` gave. Raises InvalidInput."""
        if (match := _TEXT.fullmatch(text)) is None:
            raise InvalidInput(f"{text!r} is no Xid: FORMAT:GTRID:BQUAL is one")
        return cls(int(match[1]), unquote_to_bytes(match[2]), unquote_to_bytes(match[3])).checked()

    def checked(self) -> Xid:
        """Itself, if it keeps to the specification's sizes. Raises InvalidInput."""
        if not 0 < len(self.gtrid) <= PART_BYTES_MAX or len(self.bqual) > PART_BYTES_MAX or not 0 <= self.format_id <= FORMAT_ID_MAX:
            raise InvalidInput(f"'{self}' is no Xid: gtrid and bqual have at most {PART_BYTES_MAX} bytes, the format id 31 bits")
        return self
