"""Transaction branch identifiers (X/Open XA, section 4.2): a global transaction, and within it one branch for each resource."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from bascule.core.errors import InvalidInput

#: "BASC": says that the gtrid was made by ``new_gtrid``.
FORMAT_ID = 0x42415343
#: MAXGTRIDSIZE and MAXBQUALSIZE of the XA specification.
PART_BYTES_MAX = 64
#: A gtrid is NAME/ and 32 hexadecimal digits.
MANAGER_NAME = re.compile(r"[A-Za-z0-9._-]{1,31}")
#: A bqual is the resource's name.
RESOURCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_GTRID = re.compile(rb"([A-Za-z0-9._-]{1,31})/([0-9a-f]{12})[0-9a-f]{20}")
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
        xid = cls(int(match[1]), unquote_to_bytes(match[2]), unquote_to_bytes(match[3]))
        if max(len(xid.gtrid), len(xid.bqual)) > PART_BYTES_MAX or xid.format_id >= 1 << 31:
            raise InvalidInput(f"{text!r} is no Xid: gtrid and bqual have at most {PART_BYTES_MAX} bytes, the format id 31 bits")
        return xid


def new_gtrid(manager: str, deadline_ms: int) -> bytes:
    """A new global transaction of a manager; ``deadline_ms`` (since the epoch) is when it ends unless it is decided before."""
    return f"{manager}/{deadline_ms:012x}{secrets.token_hex(10)}".encode()


def branch(gtrid: bytes, resource: str) -> Xid:
    """The branch of a transaction in a resource."""
    return Xid(FORMAT_ID, gtrid, resource.encode())


def manager_of(xid: Xid) -> str | None:
    """The name of the manager that made it; None for a foreign one."""
    match = _GTRID.fullmatch(xid.gtrid) if xid.format_id == FORMAT_ID else None
    return match[1].decode() if match else None


def deadline_ms_of(gtrid: bytes) -> int:
    """When a transaction of ours ends unless it is decided before, in ms since the epoch."""
    match = _GTRID.fullmatch(gtrid)
    if match is None:
        raise InvalidInput(f"{gtrid!r} is no transaction of Bascule")
    return int(match[2], 16)


def named(pattern: re.Pattern[str], name: str, what: str) -> str:
    """The name, if it can stand in an Xid. Raises InvalidInput."""
    if pattern.fullmatch(name) is None:
        raise InvalidInput(f"{name!r} cannot be the name of a {what}: {pattern.pattern} is expected")
    return name
