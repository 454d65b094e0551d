"""The links of a client, and the memory of attaches that wait for the journal."""

from __future__ import annotations

from collections.abc import Callable
from sys import getsizeof
from typing import Final

from bascule.amqp.link import Link
from bascule.amqp.session import Session
from bascule.server.usage import Holdings

#: Memory of a decoded attach, in bytes for each byte that was received.
ATTACH_MEMORY: Final = 16
#: Memory of the attaches of one connection that wait for the journal: beyond it, the broker reads nothing more from the connection. The
#: second value counts while producers are blocked, because the broker has little memory left.
ATTACHES_BYTES_MAX: Final = 4 << 20
ATTACHES_SHORT_BYTES_MAX: Final = 256 << 10


class ClientLinks(Holdings[Link, None]):
    """The links of one client, indexed by session: a client may have thousands of links and sessions."""

    __slots__ = ("_by_session", "_unanswered", "attach_bytes", "full", "names_bytes", "on_full", "on_room")

    def __init__(self) -> None:
        super().__init__()
        self.names_bytes = 0  # bytes of the names of the links
        self._unanswered: dict[Link, int] = {}
        self.attach_bytes = 0  # memory of attaches that wait for the journal
        #: Whether nothing more is to be read, because too many attaches wait; the other two are called when this changes.
        self.full = False
        self.on_full: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: None
        self._by_session: dict[Session, dict[Link, None]] = {}

    def __setitem__(self, link: Link, value: None) -> None:
        if link not in self:
            self.names_bytes += getsizeof(link.name)
        super().__setitem__(link, value)
        self._by_session.setdefault(link.session, {})[link] = None

    def __delitem__(self, link: Link) -> None:
        super().__delitem__(link)
        self.answered(link)
        self.names_bytes -= getsizeof(link.name)
        of_session = self._by_session[link.session]
        del of_session[link]
        if not of_session:
            del self._by_session[link.session]

    def waits(self, link: Link, *, short: bool) -> None:
        """Count the attach of a link whose answer waits for the journal. ``short``: there is little memory."""
        self._unanswered[link] = size = ATTACH_MEMORY * link.attach_bytes
        self.attach_bytes += size
        if not self.full and self.attach_bytes > (ATTACHES_SHORT_BYTES_MAX if short else ATTACHES_BYTES_MAX):
            self.full = True
            self.on_full()

    def answered(self, link: Link) -> None:
        """Count the attach of a link no more."""
        self.attach_bytes -= self._unanswered.pop(link, 0)
        if self.full and self.attach_bytes <= ATTACHES_SHORT_BYTES_MAX // 2:
            self.full = False
            self.on_room()

    def of(self, session: Session) -> list[Link]:
        """Return the links of a session."""
        return list(self._by_session.get(session, ()))
