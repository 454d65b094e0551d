"""The state machines of connection, session and link as tables (part 2, sections 2.4.6, 2.5.5 and 2.6.4).

A transition that is not in a table is a protocol error of the peer if received, and a bug of ours if sent.
"""

from __future__ import annotations

import enum
from typing import Final


class ConnectionState(enum.Enum):
    """The state of a connection."""

    START = enum.auto()  # no protocol header yet
    SASL = enum.auto()
    AUTHENTICATED = enum.auto()  # SASL has ended, the AMQP header is due
    HEADERS = enum.auto()  # both headers are exchanged, no open
    OPEN_SENT = enum.auto()
    OPEN_RECEIVED = enum.auto()
    LEFT = enum.auto()  # the peer opened and closed before our open
    OPENED = enum.auto()
    CLOSE_PIPED = enum.auto()  # we opened and closed before the peer opened
    CLOSE_SENT = enum.auto()
    CLOSE_RECEIVED = enum.auto()
    ENDED = enum.auto()


class ConnectionInput(enum.Enum):
    """The inputs of a connection's state machine."""

    SASL_HEADER = enum.auto()
    SASL_DONE = enum.auto()
    AMQP_HEADER = enum.auto()
    SEND_OPEN = enum.auto()
    RECV_OPEN = enum.auto()
    RECV_FRAME = enum.auto()  # begin to end
    SEND_CLOSE = enum.auto()
    RECV_CLOSE = enum.auto()
    FAIL = enum.auto()


class SessionState(enum.Enum):
    """The state of a session."""

    UNMAPPED = enum.auto()
    BEGIN_SENT = enum.auto()
    BEGIN_RECEIVED = enum.auto()
    MAPPED = enum.auto()
    END_SENT = enum.auto()  # discards input
    END_RECEIVED = enum.auto()
    ENDED = enum.auto()


class SessionInput(enum.Enum):
    """The inputs of a session's state machine."""

    SEND_BEGIN = enum.auto()
    RECV_BEGIN = enum.auto()
    RECV_FRAME = enum.auto()  # attach to detach
    SEND_END = enum.auto()
    RECV_END = enum.auto()


class LinkState(enum.Enum):
    """The state of a link."""

    UNATTACHED = enum.auto()
    ATTACH_SENT = enum.auto()
    ATTACH_RECEIVED = enum.auto()
    LEFT = enum.auto()  # the peer attached and detached before our answer
    ATTACHED = enum.auto()
    DETACH_SENT = enum.auto()  # discards input
    DETACH_RECEIVED = enum.auto()
    DETACHED = enum.auto()


class LinkInput(enum.Enum):
    """The inputs of a link's state machine."""

    SEND_ATTACH = enum.auto()
    RECV_ATTACH = enum.auto()
    RECV_TRANSFER = enum.auto()
    RECV_FLOW = enum.auto()
    SEND_DETACH = enum.auto()
    RECV_DETACH = enum.auto()


_C, _CI = ConnectionState, ConnectionInput
CONNECTION: Final[dict[tuple[ConnectionState, ConnectionInput], ConnectionState]] = {
    (_C.START, _CI.SASL_HEADER): _C.SASL,
    (_C.START, _CI.AMQP_HEADER): _C.HEADERS,
    (_C.SASL, _CI.SASL_DONE): _C.AUTHENTICATED,
    (_C.AUTHENTICATED, _CI.AMQP_HEADER): _C.HEADERS,
    (_C.HEADERS, _CI.SEND_OPEN): _C.OPEN_SENT,
    (_C.HEADERS, _CI.RECV_OPEN): _C.OPEN_RECEIVED,
    (_C.OPEN_SENT, _CI.RECV_OPEN): _C.OPENED,
    (_C.OPEN_SENT, _CI.SEND_CLOSE): _C.CLOSE_PIPED,
    (_C.OPEN_RECEIVED, _CI.SEND_OPEN): _C.OPENED,
    (_C.OPEN_RECEIVED, _CI.RECV_FRAME): _C.OPEN_RECEIVED,
    (_C.OPEN_RECEIVED, _CI.RECV_CLOSE): _C.LEFT,
    (_C.LEFT, _CI.SEND_OPEN): _C.CLOSE_RECEIVED,
    (_C.OPENED, _CI.RECV_FRAME): _C.OPENED,
    (_C.OPENED, _CI.SEND_CLOSE): _C.CLOSE_SENT,
    (_C.OPENED, _CI.RECV_CLOSE): _C.CLOSE_RECEIVED,
    (_C.CLOSE_PIPED, _CI.RECV_OPEN): _C.CLOSE_SENT,
    (_C.CLOSE_SENT, _CI.RECV_FRAME): _C.CLOSE_SENT,
    (_C.CLOSE_SENT, _CI.RECV_CLOSE): _C.ENDED,
    (_C.CLOSE_RECEIVED, _CI.SEND_CLOSE): _C.ENDED,
    **{(state, _CI.FAIL): _C.ENDED for state in _C},
}

HEADER_DUE: Final = frozenset({_C.START, _C.AUTHENTICATED})
#: States in which only SASL frames can be sent, so an error cannot be reported to the peer.
SPEECHLESS: Final = frozenset({_C.START, _C.SASL, _C.AUTHENTICATED})
PEER_NOT_OPEN: Final = SPEECHLESS | {_C.HEADERS, _C.OPEN_SENT, _C.CLOSE_PIPED}
CLOSING: Final = frozenset({_C.CLOSE_PIPED, _C.CLOSE_SENT})

_S, _SI = SessionState, SessionInput
SESSION: Final[dict[tuple[SessionState, SessionInput], SessionState]] = {
    (_S.UNMAPPED, _SI.SEND_BEGIN): _S.BEGIN_SENT,
    (_S.UNMAPPED, _SI.RECV_BEGIN): _S.BEGIN_RECEIVED,
    (_S.BEGIN_SENT, _SI.RECV_BEGIN): _S.MAPPED,
    (_S.BEGIN_SENT, _SI.SEND_END): _S.END_SENT,
    (_S.BEGIN_RECEIVED, _SI.SEND_BEGIN): _S.MAPPED,
    (_S.MAPPED, _SI.RECV_FRAME): _S.MAPPED,
    (_S.MAPPED, _SI.SEND_END): _S.END_SENT,
    (_S.MAPPED, _SI.RECV_END): _S.END_RECEIVED,
    (_S.END_SENT, _SI.RECV_BEGIN): _S.END_SENT,
    (_S.END_SENT, _SI.RECV_FRAME): _S.END_SENT,
    (_S.END_SENT, _SI.RECV_END): _S.ENDED,
    (_S.END_RECEIVED, _SI.SEND_END): _S.ENDED,
}

_L, _LI = LinkState, LinkInput
LINK: Final[dict[tuple[LinkState, LinkInput], LinkState]] = {
    (_L.UNATTACHED, _LI.SEND_ATTACH): _L.ATTACH_SENT,
    (_L.UNATTACHED, _LI.RECV_ATTACH): _L.ATTACH_RECEIVED,
    (_L.ATTACH_SENT, _LI.RECV_ATTACH): _L.ATTACHED,
    (_L.ATTACH_SENT, _LI.SEND_DETACH): _L.DETACH_SENT,
    (_L.ATTACH_RECEIVED, _LI.SEND_ATTACH): _L.ATTACHED,
    (_L.ATTACH_RECEIVED, _LI.RECV_FLOW): _L.ATTACH_RECEIVED,
    (_L.ATTACH_RECEIVED, _LI.RECV_DETACH): _L.LEFT,
    (_L.LEFT, _LI.SEND_ATTACH): _L.DETACH_RECEIVED,
    (_L.ATTACHED, _LI.RECV_TRANSFER): _L.ATTACHED,
    (_L.ATTACHED, _LI.RECV_FLOW): _L.ATTACHED,
    (_L.ATTACHED, _LI.SEND_DETACH): _L.DETACH_SENT,
    (_L.ATTACHED, _LI.RECV_DETACH): _L.DETACH_RECEIVED,
    (_L.DETACH_SENT, _LI.RECV_ATTACH): _L.DETACH_SENT,
    (_L.DETACH_SENT, _LI.RECV_TRANSFER): _L.DETACH_SENT,
    (_L.DETACH_SENT, _LI.RECV_FLOW): _L.DETACH_SENT,
    (_L.DETACH_SENT, _LI.RECV_DETACH): _L.DETACHED,
    (_L.DETACH_RECEIVED, _LI.SEND_DETACH): _L.DETACHED,
}
