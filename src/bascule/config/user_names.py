"""Names of users and roles, in the settings and in the file of users."""

from __future__ import annotations

import unicodedata
from typing import Final

from bascule.core.access import ANY_ROLE
from bascule.core.user_limits import ANONYMOUS as ANONYMOUS

#: Characters of the name of a user or role: a name is part of log lines, errors and tables.
NAME_LENGTH_MAX: Final = 200


def check_name(name: str, what: str) -> str:
    """Return a valid name of a user or role. Raises ValueError."""
    if not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable() or name != name.strip():
        raise ValueError(f"a {what} must have 1 to {NAME_LENGTH_MAX} printable characters, without a blank at its start or end")
    if name != unicodedata.normalize("NFKC", name):
        raise ValueError(f"the {what} {name!r} has characters with a simpler form; write {unicodedata.normalize('NFKC', name)!r}")
    if what == "user" and name == ANONYMOUS:
        raise ValueError(f"{ANONYMOUS!r} is the user of a client without a login; choose another name")
    if what == "role" and name == ANY_ROLE:
        raise ValueError(f"{ANY_ROLE!r} stands for all clients and cannot be a role")
    return name
