"""What the links of a connection hold until both ends have detached them, and what the peer leaves unanswered."""

from __future__ import annotations

from sys import getsizeof

from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, SessionFault
from bascule.amqp.link import Link
from bascule.amqp.states import LinkState


class LinkCounts:
    """Running counters over all sessions of a connection.

    ``unanswered`` is the number of links and sessions that this end has ended and whose end the peer has not answered. They are kept until
    then.
    """

    __slots__ = ("_ended", "_ended_before", "count", "names_bytes", "unanswered")

    def __init__(self) -> None:
        self.count = self.names_bytes = self.unanswered = 0
        self._ended = self._ended_before = 0

    def check(self, count_max: int) -> None:
        """Check that the connection may have one more link. Raises SessionFault."""
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
        self.unanswered -= link.state is LinkState.DETACH_SENT

    def end(self) -> None:
        """Count a link or session that this end has ended."""
        self._ended += 1
        self.unanswered += 1

    def overdue(self) -> int:
        """Return the number of ends that were unanswered at the call before, and still are."""
        since, self._ended_before = self._ended - self._ended_before, self._ended
        return max(0, self.unanswered - since)
