"""File descriptors of the broker process: clients get those that the broker does not need."""

from __future__ import annotations

import resource
from typing import Final

#: Descriptors kept for Kafka's clients (a socket for each Kafka broker and client), spill files, the log and name lookups.
RESERVED: Final = 128
#: Descriptors kept for the admin server, besides those: administrators must get in even if clients have taken their whole share.
RESERVED_FOR_ADMIN: Final = 32
#: If the limit is small, the broker keeps at most this part, so that clients get some descriptors.
_RESERVED_PART_MAX: Final = 2
#: Descriptors of the broker itself when it serves an embedded or a small Kafka; measured: 25 to 60.
_OWN: Final = 64
#: Part of the clients' share that connections before their login may use.
_HANDSHAKES_PART: Final = 4
#: More than any broker can serve. With a higher limit the kernel would only make its table larger.
_LIMIT_MAX: Final = 1 << 20


def raise_limit() -> None:
    """Raise this process's soft limit to its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, _LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Return the maximum number of descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _LIMIT_MAX if soft == resource.RLIM_INFINITY else soft


def left_by(reserved: int) -> int:
    """Return the lowest descriptor that must stay free to keep ``reserved`` ones.

    The kernel gives each new descriptor the lowest free number, so a lower one leaves the reserve untouched.
    """
    most = limit()
    return most - min(reserved, most // _RESERVED_PART_MAX)


def handshake_share(wanted: int) -> int:
    """Return how many of ``wanted`` connections (0: any number) may log in at the same time."""
    most = max(1, _for_clients() // _HANDSHAKES_PART)
    return min(wanted, most) if wanted else most


def client_share(handshakes: int) -> int:
    """Return the maximum number of connections beside ``handshakes`` that are logging in."""
    return max(1, _for_clients() - handshake_share(handshakes))


def _for_clients() -> int:
    return left_by(RESERVED + RESERVED_FOR_ADMIN + _OWN)
