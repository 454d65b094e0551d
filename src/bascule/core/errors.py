"""The root of Bascule's errors: each class carries its wire answer."""

from __future__ import annotations

from typing import ClassVar


class BasculeError(Exception):
    """Root of every error that Bascule raises on purpose.

    ``condition`` is the AMQP error condition a peer is told (AMQP 1.0 part 2, section 2.8.14).
    ``exit_code`` is what a command ends with when the error reaches its top.
    """

    condition: ClassVar[str] = "amqp:internal-error"
    exit_code: ClassVar[int] = 1


class InvalidInput(BasculeError):
    """What a user or peer gave cannot be used; the text names it, where it stands and what would be right."""

    condition: ClassVar[str] = "amqp:invalid-field"
    exit_code: ClassVar[int] = 2


class Unavailable(BasculeError):
    """A part that Bascule needs (Kafka, a JDK, a port) is not there."""

    condition: ClassVar[str] = "amqp:connection:forced"
    exit_code: ClassVar[int] = 3


class BadRecord(BasculeError):
    """A message or Kafka record cannot be converted; the text says why."""


class TooLarge(InvalidInput, Unavailable):
    """A record is larger than its topic or the client accepts. It is not stored, and a retry would fail in the same way."""


class TopicMissing(InvalidInput):
    """``topic`` does not exist and must."""

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"topic {topic!r} {reason}")
        self.topic = topic


class Denied(Unavailable):
    """Kafka does not let this client create ``topic``, or write to it."""

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"topic {topic!r} {reason}")
        self.topic = topic
