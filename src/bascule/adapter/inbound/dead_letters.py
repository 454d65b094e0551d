"""The dead letters of a group: how many wait, what they are, and the way back."""

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
    """A record that failed too often. ``origin`` is TOPIC/PARTITION/OFFSET, ``at_ms`` the record's own time."""

    partition: int
    offset: int
    origin: str
    failures: int
    error: str
    key: bytes | None
    size_bytes: int
    at_ms: int


class DeadLetters:
    """Those that are in the topic and not sent back."""

    def __init__(self, kafka: Mapping[str, Any], group: str, topic: str = "") -> None:
        """``topic`` is ``GROUP.dead-letter`` unless told otherwise."""
        self.topic = topic or f"{group}.dead-letter"
        self._kafka = kafka
        self._redrive = Redrive(kafka, self.topic, f"{group}.dead-letter.returned")

    def waiting(self) -> list[DeadLetter]:
        """All of them. Raises Unavailable."""
        return [_letter(received) for received in self._redrive.waiting()]

    def count(self) -> int:
        """How many; each call reads what has come since the last one. For one thread. Raises Unavailable."""
        return self._redrive.count()

    def send_back(self, count: int | None = None) -> int:
        """The oldest ``count``, or all, go to the retry topic of their group, and are tried as if they had never failed.

        Each once, whatever dies. Of one that is not whole, what its origin has; without that, it is passed over. Gives how many.
        Raises Unavailable; TooLarge for one that the retry topic does not take: then none is sent back.
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
