"""Names of transactions: how a manager makes them, and recognises its own."""

from __future__ import annotations

import re
import secrets

from bascule.core.errors import InvalidInput
from bascule.core.xid import Xid

__all__ = [
    "FORMAT_ID",
    "LOG_ID",
    "MANAGER_NAME",
    "NO_LOG",
    "RESOURCE_NAME",
    "Xid",
    "branch",
    "deadline_ms_of",
    "log_id_of_gtrid",
    "manager_of",
    "manager_of_gtrid",
    "may_be_in_database",
    "named",
    "new_gtrid",
    "new_log_id",
]

#: "BASC": identifies a gtrid that ``new_gtrid`` has made.
FORMAT_ID = 0x42415343
#: A gtrid has at most 64 bytes: NAME/ and 32 characters.
MANAGER_NAME = re.compile(r"[A-Za-z0-9._-]{1,31}")
#: A bqual is the name of the resource.
RESOURCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

#: The id of a decision log.
LOG_ID = re.compile(r"[0-9a-f]{8}")
#: NAME/DEADLINE.LOG.RANDOM, in hexadecimal digits. A hyphen before LOG says that the decision may be in a database of the manager.
_GTRID = re.compile(rb"([A-Za-z0-9._-]{1,31})/([0-9a-f]{11})([.-])([0-9a-f]{8})\.[0-9a-f]{11}")
#: Stands for a log without an id.
NO_LOG = "00000000"
#: The form of earlier releases, and of decision logs without an id: NAME/ and the digits of deadline and random number.
_GTRID_WITHOUT_LOG = re.compile(rb"([A-Za-z0-9._-]{1,31})/([0-9a-f]{12})[0-9a-f]{20}")
_DEADLINE_MAX_MS = 16**11 - 1


def new_log_id() -> str:
    """Return the id of a new decision log."""
    return secrets.token_hex(4)


def new_gtrid(manager: str, deadline_ms: int, log_id: str = "", *, decides: bool = False) -> bytes:
    """Return the gtrid of a new transaction, which ends at ``deadline_ms`` (since the epoch) unless it is decided before.

    ``log_id`` is the id of the decision log that has the decision, or "" for a log without an id. ``decides``: the decision may also be in
    a database of the manager.
    """
    if not log_id and not decides:
        return f"{manager}/{deadline_ms:012x}{secrets.token_hex(10)}".encode()
    mark = "-" if decides else "."
    return f"{manager}/{min(deadline_ms, _DEADLINE_MAX_MS):011x}{mark}{log_id or NO_LOG}.{secrets.randbits(44):011x}".encode()


def branch(gtrid: bytes, resource: str) -> Xid:
    """Return the branch of a transaction in a resource."""
    return Xid(FORMAT_ID, gtrid, resource.encode())


def manager_of(xid: Xid) -> str | None:
    """Return the name of the manager that made a branch, or None for a foreign branch."""
    return manager_of_gtrid(xid.gtrid) if xid.format_id == FORMAT_ID else None


def manager_of_gtrid(gtrid: bytes) -> str | None:
    """Return the name of the manager that began a transaction, or None for a foreign transaction."""
    match = _match(gtrid)
    return match[1].decode() if match else None


def log_id_of_gtrid(gtrid: bytes) -> str:
    """Return the id of the decision log with which a transaction was begun, or "" if the gtrid does not contain it."""
    match = _GTRID.fullmatch(gtrid)
    return match[4].decode() if match else ""


def may_be_in_database(gtrid: bytes) -> bool:
    """Return True if the decision of a transaction may be in a database of its manager."""
    match = _GTRID.fullmatch(gtrid)
    return match is not None and match[3] == b"-"


def deadline_ms_of(gtrid: bytes) -> int:
    """Return when a transaction ends unless it is decided before, in milliseconds since the epoch. Raises InvalidInput if it is foreign."""
    match = _match(gtrid)
    if match is None:
        raise InvalidInput(f"{gtrid!r} is not a transaction of Bascule")
    return int(match[2], 16)


def _match(gtrid: bytes) -> re.Match[bytes] | None:
    return _GTRID.fullmatch(gtrid) or _GTRID_WITHOUT_LOG.fullmatch(gtrid)


def named(pattern: re.Pattern[str], name: str, what: str) -> str:
    """Return the name if it can be part of an Xid. Raises InvalidInput."""
    if pattern.fullmatch(name) is None:
        raise InvalidInput(f"{name!r} is not a valid name of a {what}; the name must match {pattern.pattern}")
    return name
