"""Queues and topics, as an application names them."""

from __future__ import annotations

from typing import ClassVar, Final

from bascule.core.errors import InvalidInput


class Destination:
    """A queue or a topic, by its name. Two of the same kind and name are equal."""

    __slots__ = ("name",)

    #: As the annotations of a message have it (bascule.jms.message.DESTINATION_KINDS).
    kind: ClassVar[str]

    def __init__(self, name: str) -> None:
        """Raises InvalidInput for a name that is none."""
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"a {self.kind} has a name, not {name!r}")
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Destination) and self.kind == other.kind and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.kind)  # the name of a temporary one changes with its connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Queue(Destination):
    """Each message goes to one consumer."""

    __slots__ = ()
    kind: ClassVar[str] = "queue"


class Topic(Destination):
    """Each message goes to every subscription."""

    __slots__ = ()
    kind: ClassVar[str] = "topic"


class TemporaryQueue(Queue):
    """A queue that goes with the connection that made it (``context.temporary_queue()``); only that one may consume from it.

    After a reconnect it is made anew, and ``name`` is another.
    """

    __slots__ = ()
    kind: ClassVar[str] = "temporary-queue"


class TemporaryTopic(Topic):
    """A topic that goes with the connection that made it (``context.temporary_topic()``)."""

    __slots__ = ()
    kind: ClassVar[str] = "temporary-topic"


_BY_KIND: Final[dict[str, type[Destination]]] = {each.kind: each for each in (Queue, Topic, TemporaryQueue, TemporaryTopic)}


def destination_of(name: str | None, kind: str | None) -> Destination | None:
    """The destination that a message names. A queue where nobody says what it is."""
    return _BY_KIND[kind or Queue.kind](name) if name else None
