"""Return codes of X/Open XA (The XA Specification, section 4.3), with their names and numbers."""

from __future__ import annotations

import enum
from typing import Final

#: Success.
XA_OK: Final = 0
#: Success of the prepare of a branch without changes.
XA_RDONLY: Final = 3


class Code(enum.IntEnum):
    """Return codes of failure."""

    XA_RBROLLBACK = 100
    XA_RBCOMMFAIL = 101
    XA_RBDEADLOCK = 102
    XA_RBINTEGRITY = 103
    XA_RBOTHER = 104
    XA_RBPROTO = 105
    XA_RBTIMEOUT = 106
    XA_RBTRANSIENT = 107
    XA_HEURHAZ = 8
    XA_HEURCOM = 7
    XA_HEURRB = 6
    XA_HEURMIX = 5
    XA_RETRY = 4
    XAER_RMERR = -3
    XAER_NOTA = -4
    XAER_INVAL = -5
    XAER_PROTO = -6
    XAER_RMFAIL = -7
    XAER_DUPID = -8
    XAER_OUTSIDE = -9
