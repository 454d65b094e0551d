"""Temporary destinations on a connection that outlives the context that has created them."""

from __future__ import annotations

import threading
from typing import TypeVar

from bascule.client.destination import TemporaryQueue, TemporaryTopic
from bascule.client.errors import IllegalState, InvalidDestination
from bascule.client.message import Message
from bascule.client.operation import Operation
from bascule.client.thread import ConnectionThread
from bascule.core.errors import BasculeError
from bascule.core.log import get_log

DestinationT = TypeVar("DestinationT", TemporaryQueue, TemporaryTopic)

_log = get_log("bascule.client")


class TemporaryDestinations:
    """The temporary destinations of one context, or of the contexts of one branch. ``deleting`` ends it. Thread-safe."""

    def __init__(self, connection: ConnectionThread) -> None:
        self._connection = connection
        self._made: list[TemporaryQueue | TemporaryTopic] = []
        self._ended = False
        self._lock = threading.Lock()

    def add(self, destination: DestinationT) -> DestinationT:
        """Return the destination, which is deleted with the others. Raises IllegalState if they are gone; ``deleting`` deletes it, too."""
        with self._lock:
            self._made.append(destination)
            if self._ended:
                raise IllegalState("the temporary destination was deleted at the end of its transaction")
        return destination

    def __contains__(self, destination: object) -> bool:
        return any(destination is each for each in self._made)

    def check_reply_to(self, content: object) -> None:
        """Raise IllegalState if the message's reply_to is one of them: an answer could only come after they are gone."""
        if isinstance(content, Message) and content.reply_to in self:
            raise IllegalState(
                "reply_to is a temporary destination of this transaction: the message is sent when the transaction commits, and the "
                "destination is deleted then. Make the destination by a context outside of the transaction"
            )

    def delete(self) -> None:
        """Delete all of them. Those that cannot be deleted end with their connection."""
        with self._lock:
            if not self._made:
                self._ended = True
                return
        core = self._connection.core
        try:
            self._connection.run(self.deleting(core.clock() + core.settings.timeout_s))
        except BasculeError as error:
            _log.warning("could not delete temporary destinations, they end with their connection", error=error)

    def deleting(self, until_s: float) -> Operation[None]:
        """Delete all of them. Raises the first error after all were tried."""
        with self._lock:
            self._ended = True
            made, self._made = self._made, []
        first: BasculeError | None = None
        for each in made:
            try:
                yield from self._connection.core.own.delete_temporary(each, until_s)
            except InvalidDestination:
                continue  # the application has deleted it
            except BasculeError as error:
                first = first or error
        if first is not None:
            raise first
