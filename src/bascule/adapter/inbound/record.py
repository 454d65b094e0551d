"""A record as an endpoint gets it, and as it goes to the retry and dead-letter topics when the endpoint fails."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bascule.core.kafka_records import KafkaRecord, Outgoing
from bascule.jms.record_headers import ERRORS, error_headers

if TYPE_CHECKING:
    from bascule.adapter.inbound.spec import ActivationSpec

#: Headers in the retry topic: number of failures, cause of the last one, earliest next try (ms since the epoch), original place.
FAILURES = "bascule.retry.count"
CAUSE = "bascule.retry.cause"
DUE = "bascule.retry.due"
ORIGIN = "bascule.retry.origin"
#: Headers of a dead letter: the topic that returns it to the group; the parts that only its origin has, and why.
RETURN_TO = "bascule.retry.topic"
LEFT_OUT = "bascule.retry.left-out"
_OWN = frozenset({FAILURES, CAUSE, DUE, ORIGIN, RETURN_TO, LEFT_OUT})
#: Numbers have at most as many digits as Kafka's.
_ORIGIN = re.compile(rb"([A-Za-z0-9._-]+)/(\d{1,9})/(\d{1,18})")
_NUMBER = re.compile(rb"\d{1,18}")
#: A header counts towards the maximum record size of a topic.
CAUSE_LENGTH_MAX = 1000
STAGE = "ENDPOINT"
#: The parts that are left out of a dead letter if its topic has no room. The rest fits into ``topics.HEADERS_BYTES_MAX``.
VALUE_AND_HEADERS = "value and headers"
KEY_TOO = "key, value and headers"

Headers = list[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class Record:
    """A Kafka record. ``topic``, ``partition`` and ``offset`` are its original place, even if it comes from the retry topic.

    ``failures`` is how often the record has failed so far. ``redelivered`` says that it may have been delivered before without a failure.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = 0
    failures: int = 0
    redelivered: bool = False

    def header(self, name: str) -> bytes | None:
        """Return the last header with this name, or None."""
        return next((value for each, value in reversed(self.headers) if each == name), None)


def record_of(received: KafkaRecord, retry_topic: str, *, failures: int = 0, redelivered: bool = False) -> tuple[Record, int]:
    """Return the record for an endpoint, and its earliest delivery time (ms since the epoch; 0 for at once).

    Headers about earlier tries count only in the group's own retry topic: in other topics they belong to another group.
    """
    own = {name: value or b"" for name, value in received.headers if name in _OWN} if received.topic == retry_topic else {}
    at, headers = (received.topic, received.partition, received.offset), tuple(received.headers)
    due_ms = 0
    if ORIGIN in own and (match := _ORIGIN.fullmatch(own[ORIGIN])) is not None:
        at = (match[1].decode(), int(match[2]), int(match[3]))
        headers = tuple(header for header in headers if header[0] not in _OWN)
        failures, due_ms = max(failures, number_of(own.get(FAILURES))), number_of(own.get(DUE))
    return Record(*at, received.key, received.value, headers, received.timestamp_ms, failures, redelivered), due_ms


def number_of(header: bytes | None) -> int:
    """Return the number in a header, or 0 if it has none."""
    return int(header) if header and _NUMBER.fullmatch(header) else 0


def cause_of(error: BaseException) -> str:
    """Return the error as one line."""
    return _told(f"{type(error).__name__}: {error}")


def _told(text: str) -> str:
    """Return the text, shortened to the size of a header. An unpaired surrogate, which JSON allows, cannot be encoded and is replaced."""
    return text[:CAUSE_LENGTH_MAX].encode(errors="replace").decode()


def retry_of(record: Record, spec: ActivationSpec, error: BaseException, due_ms: int) -> Outgoing:
    """Return the record for the retry topic."""
    said: Headers = [(CAUSE, cause_of(error).encode())]
    return _outgoing(spec.retry_topic, record, [*_coordinates(record, record.failures + 1), *said, (DUE, str(due_ms).encode())])


def dead_letter_of(record: Record, spec: ActivationSpec, error: BaseException, *, left_out: str = "", why: str = "") -> Outgoing:
    """Return the record for the dead-letter topic, with headers named as in Kafka Connect.

    ``left_out`` (VALUE_AND_HEADERS or KEY_TOO) says which parts it does not contain, ``why`` the reason.
    """
    # Many exceptions cannot be made from a text.
    said = error_headers(spec.group, record.topic, record.partition, record.offset, STAGE, Exception(_told(str(error))))
    said.append((f"{ERRORS}exception.class.name", type(error).__name__.encode()))
    connect: Headers = [(name, value) for name, value in dict(said).items() if isinstance(value, bytes)]
    if left_out:
        record = replace(record, key=None if left_out == KEY_TOO else record.key, value=b"", headers=())
        connect.append((LEFT_OUT, _told(f"{left_out}: {why}").encode()))
    return _outgoing(
        spec.dead_letter_topic, record, [*_coordinates(record, record.failures + 1), (RETURN_TO, spec.retry_topic.encode()), *connect]
    )


def left_out_of(letter: KafkaRecord) -> tuple[str, int, int] | None:
    """Return topic, partition and offset of the record that an incomplete dead letter left out, or None if it is complete."""
    headers = dict(letter.headers)
    origin = _ORIGIN.fullmatch(headers.get(ORIGIN) or b"") if LEFT_OUT in headers else None
    return (origin[1].decode(), int(origin[2]), int(origin[3])) if origin is not None else None


def returned(letter: KafkaRecord) -> Outgoing | None:
    """Return a dead letter for its group's retry topic, as if it had never failed, or None if ``letter`` is no dead letter."""
    headers = dict(letter.headers)
    target, origin = headers.get(RETURN_TO), headers.get(ORIGIN)
    if target is None or origin is None:
        return None
    kept: Headers = [header for header in letter.headers if header[0] not in _OWN and not header[0].startswith(ERRORS)]
    return Outgoing(target.decode(), letter.key, letter.value, [*kept, (ORIGIN, origin)], timestamp_ms=letter.timestamp_ms)


def _coordinates(record: Record, failures: int) -> Headers:
    return [(FAILURES, str(failures).encode()), (ORIGIN, f"{record.topic}/{record.partition}/{record.offset}".encode())]


def _outgoing(topic: str, record: Record, said: Headers) -> Outgoing:
    return Outgoing(topic, record.key, record.value, [*record.headers, *said], timestamp_ms=record.timestamp_ms)
