"""Transaction branch identifiers (X/Open XA, section 4.2): a global transaction, and within it one branch for each resource."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from bascule.core.errors import InvalidInput

#: MAXGTRIDSIZE and MAXBQUALSIZE of the XA specification.
PART_BYTES_MAX = 64
#: A format id has 31 bits; -1 means no Xid.
FORMAT_ID_MAX = (1 << 31) - 1

_TEXT = re.compile(r"(\d{1,10}):([^:]{1,192}):([^:]{0,192})")


class Xid(NamedTuple):
    """A transaction branch: ``gtrid`` is the global transaction, ``bqual`` the branch in it. ``parse`` reverses ``str``."""

    format_id: int
    gtrid: bytes
    bqual: bytes

    def __str__(self) -> str:
        return f"{self.format_id}:{quote_from_bytes(self.gtrid)}:{quote_from_bytes(self.bqual, safe='')}"

    @classmethod
    def parse(cls, text: str) -> Xid:
        """Parse the text form that ``str`` returns. Raises InvalidInput."""
        if (match := _TEXT.fullmatch(text)) is None:
            raise InvalidInput(f"invalid Xid {text!r}; use FORMAT:GTRID:BQUAL")
        return cls(int(match[1]), unquote_to_bytes(match[2]), unquote_to_bytes(match[3])).checked()

    def checked(self) -> Xid:
        """Return self if its sizes are allowed by the specification. Raises InvalidInput."""
        if not 0 < len(self.gtrid) <= PART_BYTES_MAX or len(self.bqual) > PART_BYTES_MAX or not 0 <= self.format_id <= FORMAT_ID_MAX:
            raise InvalidInput(f"invalid Xid '{self}': gtrid and bqual have at most {PART_BYTES_MAX} bytes, the format id 31 bits")
        return self
