"""The dead letters of a group: count them, list them, send them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bascule.adapter.inbound.record import FAILURES, ORIGIN, left_out_of, number_of, returned
from bascule.core.kafka_records import KafkaRecord, Outgoing
from bascule.core.log import get_log
from bascule.jms.record_headers import ERRORS
from bascule.kafka.consumer import read_again
from bascule.kafka.redrive import Redrive

_log = get_log("bascule.adapter")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that failed too often. ``origin`` is TOPIC/PARTITION/OFFSET, ``at_ms`` the timestamp of the record in milliseconds."""

    partition: int
    offset: int
    origin: str
    failures: int
    error: str
    key: bytes | None
    size_bytes: int
    at_ms: int


class DeadLetters:
    """The dead letters in the topic that were not sent back."""

    def __init__(self, kafka: Mapping[str, Any], group: str, topic: str = "") -> None:
        """Read the dead letters of ``group`` from ``topic`` (default: ``GROUP.dead-letter``)."""
        self.topic = topic or f"{group}.dead-letter"
        self._kafka = kafka
        self._redrive = Redrive(kafka, self.topic, f"{group}.dead-letter.returned")

    def waiting(self) -> list[DeadLetter]:
        """Return all of them. Raises Unavailable."""
        return [_letter(received) for received in self._redrive.waiting()]

    def count(self) -> int:
        """Return their number. Each call reads the records since the previous call. Not thread-safe. Raises Unavailable."""
        return self._redrive.count()

    def send_back(self, count: int | None = None) -> int:
        """Send the oldest ``count`` dead letters, or all, to the retry topic of their group. They are tried as if they had never failed.

        Each is sent once, whatever dies. If a dead letter is incomplete, the record is read from its origin; if that is gone, the dead
        letter is skipped. Returns the number sent. Raises Unavailable, and TooLarge if the retry topic refuses one: then none is sent.
        """
        return self._redrive.move(self._returned, count)

    def _returned(self, letter: KafkaRecord) -> Outgoing | None:
        if (at := left_out_of(letter)) is None:
            return returned(letter)
        topic, partition, offset = at
        if (found := read_again(self._kafka, topic, partition, [offset]).get(offset)) is None:
            _log.error(
                "dead letter not returned, original record deleted", topic=self.topic, offset=letter.offset, origin="/".join(map(str, at))
            )
            return None
        return returned(letter._replace(key=found.key, value=found.value, headers=[*found.headers, *letter.headers]))


def _letter(received: KafkaRecord) -> DeadLetter:
    said = {name: (value or b"").decode(errors="replace") for name, value in received.headers}
    error = f"{said.get(f'{ERRORS}exception.class.name', '')}: {said.get(f'{ERRORS}exception.message', '')}"
    return DeadLetter(
        received.partition, received.offset, said.get(ORIGIN, ""), number_of(dict(received.headers).get(FAILURES)), error, received.key,
        len(received.value or b""), received.timestamp_ms,
    )  # fmt: skip
