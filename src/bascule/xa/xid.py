"""Names of transactions: how a manager makes them, and knows its own among others'."""

from __future__ import annotations

import re
import secrets

from bascule.core.errors import InvalidInput
from bascule.core.xid import Xid

__all__ = [
    "FORMAT_ID",
    "MANAGER_NAME",
    "RESOURCE_NAME",
    "Xid",
    "branch",
    "deadline_ms_of",
    "manager_of",
    "manager_of_gtrid",
    "named",
    "new_gtrid",
]

#: "BASC": says that the gtrid was made by ``new_gtrid``.
FORMAT_ID = 0x42415343
#: A gtrid is NAME/ and 32 hexadecimal digits.
MANAGER_NAME = re.compile(r"[A-Za-z0-9._-]{1,31}")
#: A bqual is the resource's name.
RESOURCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_GTRID = re.compile(rb"([A-Za-z0-9._-]{1,31})/([0-9a-f]{12})[0-9a-f]{20}")


def new_gtrid(manager: str, deadline_ms: int) -> bytes:
    """A new global transaction of a manager; ``deadline_ms`` (since the epoch) is when it ends unless it is decided before."""
    return f"{manager}/{deadline_ms:012x}{secrets.token_hex(10)}".encode()


def branch(gtrid: bytes, resource: str) -> Xid:
    """The branch of a transaction in a resource."""
    return Xid(FORMAT_ID, gtrid, resource.encode())


def manager_of(xid: Xid) -> str | None:
    """The name of the manager that made it; None for a foreign one."""
    return manager_of_gtrid(xid.gtrid) if xid.format_id == FORMAT_ID else None


def manager_of_gtrid(gtrid: bytes) -> str | None:
    """The name of the manager that began a transaction; None for a foreign one."""
    match = _GTRID.fullmatch(gtrid)
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
