"""The number of links of a connection, and the memory of their names. A link counts until both ends have detached it."""

from __future__ import annotations

from sys import getsizeof

from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, SessionFault
from bascule.amqp.limits import DETACHING_MAX
from bascule.amqp.link import Link


class LinkCounts:
    """Running counters over all sessions of a connection."""

    __slots__ = ("count", "names_bytes")

    def __init__(self) -> None:
        self.count = self.names_bytes = 0

    def check(self, detaching: int, count_max: int) -> None:
        """Check that a session may have one more link, while ``detaching`` of its links wait for the peer's detach. Raises SessionFault."""
        if detaching > DETACHING_MAX:
            raise SessionFault(RESOURCE_LIMIT_EXCEEDED, f"the peer has not answered the detach of more than {DETACHING_MAX} links")
        if self.count >= count_max:
            raise SessionFault(RESOURCE_LIMIT_EXCEEDED, f"the connection has more than {count_max} links")

    def add(self, link: Link) -> None:
        """Count a link."""
        self.count += 1
        self.names_bytes += getsizeof(link.name)

    def remove(self, link: Link) -> None:
        """Count a link no more."""
        self.count -= 1
        self.names_bytes -= getsizeof(link.name)
