"""Queues and topics."""

from __future__ import annotations

from typing import ClassVar, Final

from bascule.core.errors import InvalidInput


class Destination:
    """A queue or a topic. Two destinations of the same kind and name are equal."""

    __slots__ = ("name",)

    #: The kind in the message annotations (bascule.jms.message.DESTINATION_KINDS).
    kind: ClassVar[str]

    def __init__(self, name: str) -> None:
        """Name a destination. Raises InvalidInput if ``name`` is empty or not a string."""
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"invalid name of a {self.kind}: {name!r}; it must be a string that is not empty")
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Destination) and self.kind == other.kind and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.kind)  # the name of a temporary destination changes with its connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def require_destination(given: object) -> None:
    """Raise InvalidInput unless ``given`` is a destination. A name alone does not say whether it is a queue or a topic."""
    if not isinstance(given, Destination):
        shown = repr(given) if isinstance(given, str) else "NAME"
        raise InvalidInput(f"invalid destination: {given!r}; use Queue({shown}) or Topic({shown})")


class Queue(Destination):
    """A queue: each message goes to one consumer."""

    __slots__ = ()
    kind: ClassVar[str] = "queue"


class Topic(Destination):
    """A topic: each message goes to every subscription."""

    __slots__ = ()
    kind: ClassVar[str] = "topic"


class TemporaryQueue(Queue):
    """A queue that is deleted with the connection that created it (``context.temporary_queue()``).

    Only that connection may consume from the queue. After a reconnect, the queue is recreated and ``name`` changes.
    """

    __slots__ = ()
    kind: ClassVar[str] = "temporary-queue"


class TemporaryTopic(Topic):
    """A topic that is deleted with the connection that created it (``context.temporary_topic()``)."""

    __slots__ = ()
    kind: ClassVar[str] = "temporary-topic"


_BY_KIND: Final[dict[str, type[Destination]]] = {each.kind: each for each in (Queue, Topic, TemporaryQueue, TemporaryTopic)}


def destination_of(name: str | None, kind: str | None) -> Destination | None:
    """Return the destination named in a message, None without a name. Without a kind, it is a queue."""
    return _BY_KIND[kind or Queue.kind](name) if name else None
