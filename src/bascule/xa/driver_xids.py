"""Xids in the form of a database driver, and the branches of checks, in which no application works."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

from bascule.xa.xid import FORMAT_ID, Xid

#: A branch of a check: the time of its begin, in seconds since the epoch, and a random number.
_TRIAL: Final = re.compile(rb"bascule-check/([0-9a-f]+)\.[0-9a-f]{16}")
#: After this time, in seconds, a branch of a check is taken for the remains of a process that has died.
TRIAL_MAX_S: Final = 600


def driver_xid(raw: Any, xid: Xid) -> Any:
    """Return an Xid in the driver's form."""
    return raw.xid(xid.format_id, xid.gtrid.decode(), xid.bqual.decode())


def recovered(row: Sequence[Any]) -> Xid:
    """Return an Xid of ``tpc_recover``: its three parts, or a row of XA RECOVER in MySQL and MariaDB, with the lengths of two parts."""
    if isinstance(row[1], int):
        format_id, gtrid_size, bqual_size, data = row
        octets = _octets(data)
        return Xid(format_id, octets[:gtrid_size], octets[gtrid_size : gtrid_size + bqual_size])
    return Xid(row[0], _octets(row[1]), _octets(row[2]))


def _octets(part: str | bytes | bytearray | memoryview) -> bytes:
    """Return a part of an Xid as bytes: some drivers return text, others bytes."""
    return part.encode() if isinstance(part, str) else bytes(part)


def trial_xid(resource: str) -> Xid:
    """Return the branch of a check."""
    return Xid(FORMAT_ID, f"bascule-check/{int(time.time()):x}.{secrets.token_hex(8)}".encode(), resource.encode())


def is_left_trial(xid: Xid, resource: str) -> bool:
    """Return True for a branch that the check of a dead process has left."""
    left = _TRIAL.fullmatch(xid.gtrid)
    return left is not None and xid.bqual == resource.encode() and int(left[1], 16) < time.time() - TRIAL_MAX_S
