"""Names of transactions: how a manager makes them, and recognises its own."""

from __future__ import annotations

import functools
import hashlib
import random
import re
import secrets
from collections.abc import Collection
from itertools import combinations

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
    "lacks_decider",
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
#: NAME/DEADLINE.LOG.RANDOM, in hexadecimal digits. A hyphen before LOG: the form of earlier releases for a decision that may be in a
#: database of the manager.
_GTRID = re.compile(rb"([A-Za-z0-9._-]{1,31})/([0-9a-f]{11})([.-])([0-9a-f]{8})\.[0-9a-f]{11}")
#: NAME/DEADLINE-LOG-CODE and 9 random digits: the decision may be in one of the databases for whose names CODE stands. LOG has hexadecimal
#: digits. The others are digits of base 36, because a gtrid of 64 bytes has no room for as many bits in hexadecimal digits.
_GTRID_WITH_DECIDERS = re.compile(rb"([A-Za-z0-9._-]{1,31})/([0-9a-z]{9})-([0-9a-f]{8})-([0-9a-z]{4})[0-9a-z]{9}")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
#: Gtrids of a manager with more deciding databases do not say which: recovery tries the code of each subset of the names that it has.
DECIDERS_MAX = 10
#: Stands for a log without an id.
NO_LOG = "00000000"
#: The form of earlier releases, and of decision logs without an id: NAME/ and the digits of deadline and random number.
_GTRID_WITHOUT_LOG = re.compile(rb"([A-Za-z0-9._-]{1,31})/([0-9a-f]{12})[0-9a-f]{20}")
_DEADLINE_MAX_MS = 16**11 - 1
_SYSTEM_RANDOM = secrets.SystemRandom()


def new_log_id() -> str:
    """Return the id of a new decision log."""
    return secrets.token_hex(4)


def new_gtrid(
    manager: str, deadline_ms: int, log_id: str = "", *, deciders: Collection[str] = (), numbers: random.Random = _SYSTEM_RANDOM
) -> bytes:
    """Return the gtrid of a new transaction, which ends at ``deadline_ms`` (since the epoch) unless it is decided before.

    ``log_id`` is the id of the decision log that has the decision, or "" for a log without an id. ``deciders`` has the names of the
    databases of the manager that may have the decision instead. ``numbers`` makes the random number; a simulation repeats its run.
    """
    if deciders:
        code = _code(deciders if len(deciders) <= DECIDERS_MAX else ())
        number = numbers.randrange(36**9)
        return f"{manager}/{_base36(min(deadline_ms, _DEADLINE_MAX_MS), 9)}-{log_id or NO_LOG}-{code}{_base36(number, 9)}".encode()
    if not log_id:
        return f"{manager}/{deadline_ms:012x}{numbers.getrandbits(80):020x}".encode()
    return f"{manager}/{min(deadline_ms, _DEADLINE_MAX_MS):011x}.{log_id}.{numbers.getrandbits(44):011x}".encode()


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
    if (match := _GTRID_WITH_DECIDERS.fullmatch(gtrid)) is not None:
        return match[3].decode()
    match = _GTRID.fullmatch(gtrid)
    return match[4].decode() if match else ""


def may_be_in_database(gtrid: bytes) -> bool:
    """Return True if the decision of a transaction may be in a database of its manager."""
    match = _GTRID.fullmatch(gtrid)
    return match[3] == b"-" if match else _GTRID_WITH_DECIDERS.fullmatch(gtrid) is not None


def lacks_decider(gtrid: bytes, names: Collection[str]) -> bool:
    """Return True if the decision of a transaction may be in a database that is not among those with these names.

    A database that was renamed counts as another one. Gtrids of earlier releases do not say which databases may have the decision: for
    them, and for a manager with more than ``DECIDERS_MAX`` deciding databases, the result is True only if there are no names.
    """
    if not may_be_in_database(gtrid):
        return False
    match = _GTRID_WITH_DECIDERS.fullmatch(gtrid)
    code = match[4].decode() if match else _code(())
    return not names or (code != _code(()) and code not in _codes(frozenset(names)))


def deadline_ms_of(gtrid: bytes) -> int:
    """Return when a transaction ends unless it is decided before, in milliseconds since the epoch. Raises InvalidInput if it is foreign."""
    match = _match(gtrid)
    if match is None:
        raise InvalidInput(f"{gtrid!r} is not a transaction of Bascule")
    return int(match[2], 36 if match.re is _GTRID_WITH_DECIDERS else 16)


def _match(gtrid: bytes) -> re.Match[bytes] | None:
    return _GTRID.fullmatch(gtrid) or _GTRID_WITH_DECIDERS.fullmatch(gtrid) or _GTRID_WITHOUT_LOG.fullmatch(gtrid)


def _code(names: Collection[str]) -> str:
    """Return the code of a set of names: 4 digits of base 36. Two sets have the same code with a probability of 1 in 1.7 million."""
    digest = hashlib.sha256("/".join(sorted(names)).encode()).digest()
    return _base36(int.from_bytes(digest[:8], "big") % 36**4, 4)


@functools.lru_cache(maxsize=64)
def _codes(names: frozenset[str]) -> frozenset[str]:
    """Return the codes of the sets of databases with which a transaction may have begun: databases may have been added since.

    With more than ``DECIDERS_MAX`` names, transactions of larger sets wait, because there would be too many codes.
    """
    sizes = range(1, 1 + (len(names) if len(names) <= DECIDERS_MAX else 2))
    return frozenset(_code(each) for size in sizes for each in combinations(sorted(names), size))


def _base36(number: int, digits: int) -> str:
    text = ""
    for _ in range(digits):
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text


def named(pattern: re.Pattern[str], name: str, what: str) -> str:
    """Return the name if it can be part of an Xid. Raises InvalidInput."""
    if pattern.fullmatch(name) is None:
        raise InvalidInput(f"{name!r} is not a valid name of a {what}; the name must match {pattern.pattern}")
    return name
