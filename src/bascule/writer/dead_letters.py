"""The records of the dead-letter topic of the pipelines, as plain values. The last headers of a record say what it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bascule.core.kafka_records import KafkaRecord
from bascule.jms.record_headers import (
    ADDRESS_HEADER,
    DIVERT_HEADER,
    ERROR_FACTS,
    ERRORS,
    ID_HEADER,
    ORIGIN_HEADER,
    REDRIVES_HEADER,
    TIMESTAMP_HEADER,
)
from bascule.writer.position import DIVERT, INGRESS

#: Headers that may follow those of the error.
_TRAILING: Final = (REDRIVES_HEADER, TIMESTAMP_HEADER)
_ERROR_NAMES: Final = tuple(f"{ERRORS}{fact}" for fact in ERROR_FACTS)
#: The headers of a dead letter of a divert, before those of the error.
_DIVERT_NAMES: Final = (ORIGIN_HEADER, ID_HEADER, DIVERT_HEADER, ADDRESS_HEADER)
#: The stage of the error if Kafka refused a record. If the dead-letter topic refused it too, the dead letter has no value.
_WRITE_STAGE: Final = "KAFKA_PRODUCE"
#: The stage of the error if the client could not read the headers of a source record. They are then missing in the dead letter.
_HEADER_STAGE: Final = "HEADER_CONVERTER"

Place = tuple[int, int]


class LetterSource(NamedTuple):
    """The record of which a dead letter was made: of a topic of an ingress, or of the journal."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class PipelineDeadLetter:
    """A record that a pipeline could not carry, at ``partition`` and ``offset`` of the dead-letter topic.

    ``pipeline`` is ``divert:NAME`` or ``ingress:NAME``. ``key``, ``value`` and ``headers`` are those of the source record; for a divert,
    ``value`` is the message as its sender encoded it, and ``message_id`` and ``address`` belong to it. ``timestamp_ms`` is the time of the
    message or source record. ``redrives`` counts the attempts to redrive it that have failed. ``incomplete`` says what is missing.
    """

    partition: int
    offset: int
    pipeline: str
    bridge: str
    source: LetterSource
    stage: str
    error: str
    text: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int
    redrives: int = 0
    message_id: str = ""
    address: str = ""
    incomplete: str = ""

    @property
    def size_bytes(self) -> int:
        """Return the size of the value."""
        return len(self.value or b"")

    @property
    def place(self) -> Place:
        """Return partition and offset."""
        return self.partition, self.offset

    @property
    def reason(self) -> str:
        """Return the class and the text of the error."""
        return f"{self.error}: {self.text}"


def dead_letter_of(record: KafkaRecord) -> PipelineDeadLetter | None:
    """Return the dead letter in a record of the topic; None if no pipeline has written the record."""
    headers = list(record.headers)
    after: dict[str, bytes | None] = {}
    while headers and headers[-1][0] in _TRAILING:
        name, value = headers.pop()
        after[name] = value
    count = len(_ERROR_NAMES)
    if tuple(name for name, _ in headers[-count:]) != _ERROR_NAMES:
        return None
    facts = {name: _text(value) for name, (_, value) in zip(ERROR_FACTS, headers[-count:], strict=True)}
    del headers[-count:]
    source = LetterSource(facts["topic"], _number(facts["partition"]), _number(facts["offset"]))
    names = tuple(name for name, _ in headers)
    said = dict(headers)
    divert = names == _DIVERT_NAMES and _text(said[DIVERT_HEADER]) == facts["connector.name"]
    if not divert and names[-1:] != (ORIGIN_HEADER,):
        return None
    bridge = _text(headers[-1][1]) if not divert else _text(said[ORIGIN_HEADER])
    return PipelineDeadLetter(
        record.partition, record.offset, f"{DIVERT if divert else INGRESS}{facts['connector.name']}", bridge, source, facts["stage"],
        facts["exception.class.name"], facts["exception.message"], record.key, record.value,
        () if divert else tuple(headers[:-1]),
        _number(_text(after[TIMESTAMP_HEADER])) if TIMESTAMP_HEADER in after else record.timestamp_ms,
        _number(_text(after.get(REDRIVES_HEADER))), _text(said[ID_HEADER]) if divert else "", _text(said[ADDRESS_HEADER]) if divert else "",
        _incomplete(facts["stage"], record.value, divert=divert),
    )  # fmt: skip


def _incomplete(stage: str, value: bytes | None, *, divert: bool) -> str:
    # The source record of an ingress may be a tombstone, whose value is None.
    if (divert and not value) or (value == b"" and stage == _WRITE_STAGE):
        return "the dead letter has no value: it was too large for the dead-letter topic"
    return "the dead letter has no headers: the client could not read them" if stage == _HEADER_STAGE else ""


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Which dead letters are meant: those that meet all conditions. ``places`` are single ones; None stands for all.

    ``pipeline`` is a full name, ``reason`` a part of class and text of the error in any case, and ``headers`` are headers of the record in
    the dead-letter topic with their values. Times are milliseconds since the epoch, ``until_ms`` is not included; 0 stands for no limit.
    """

    places: tuple[Place, ...] | None = None
    pipeline: str = ""
    reason: str = ""
    since_ms: int = 0
    until_ms: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)

    def matches(self, letter: PipelineDeadLetter, headers: Sequence[tuple[str, bytes | None]]) -> bool:
        """Return whether a dead letter is meant, whose record has these headers."""
        if self.places is not None and letter.place not in self.places:
            return False
        if self.pipeline and letter.pipeline != self.pipeline:
            return False
        if self.reason and self.reason.casefold() not in letter.reason.casefold():
            return False
        if letter.timestamp_ms < self.since_ms or (self.until_ms and letter.timestamp_ms >= self.until_ms):
            return False
        return all(any(name == wanted and _text(value) == text for name, value in headers) for wanted, text in self.headers.items())
