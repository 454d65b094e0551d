"""The engine of the diverts: takes journal records, returns Kafka records. Pure: no Spark, no Kafka, no clock."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bascule.core import crash
from bascule.core.destination import address_matches
from bascule.core.errors import BadRecord, BasculeError, Denied, TopicMissing
from bascule.core.kafka_records import Headers, Output
from bascule.core.log import get_log
from bascule.jms.lookup import selector_lookup
from bascule.jms.record_headers import ADDRESS_HEADER, DIVERT_HEADER, ID_HEADER, ORIGIN_HEADER, error_headers, text_of_error
from bascule.jms.selector import compile_selector
from bascule.jms.to_kafka import record_of, target_topic
from bascule.journal.errors import DamagedRecord, ForeignRecord, NewerRecord
from bascule.journal.fence import Fence
from bascule.journal.records import (
    HEADER,
    HEADER_SIZE,
    MAGIC,
    VERSION,
    Header,
    Kind,
    Op,
    Send,
    SendFlag,
    decode_header,
    decode_json,
    decode_send,
    entries,
    flags_and_address,
)
from bascule.pipelines.spec import DivertSpec
from bascule.writer.position import Position

STATE_KEY = b"S"

#: So many addresses of other diverts' messages are remembered.
_FOREIGN_ADDRESSES: Final = 10_000

_log = get_log(__name__)


def journal_header(key: bytes | None, value: bytes | None) -> Header:
    """Return the header of a journal record. Of a state record, only the header (``HEADER_SIZE`` bytes) is read, which the fence needs.

    Raises ForeignRecord, DamagedRecord or NewerRecord.
    """
    if key != STATE_KEY:
        return decode_header(value)
    if value is None or len(value) < HEADER_SIZE or value[:2] != MAGIC:
        raise ForeignRecord("no Bascule journal record (no magic 'BJ')")
    _, version, kind, epoch, sequence, _, _ = HEADER.unpack_from(value)
    if version > VERSION:
        raise NewerRecord(f"journal format {version}; this version of Bascule reads up to {VERSION}. Upgrade Bascule")
    if kind != Kind.STATE:
        raise DamagedRecord(f"kind {kind} under the key of a state record")
    return Header(Kind.STATE, epoch, sequence)


@dataclass(slots=True)  # not frozen: that makes it several times slower to build
class WantedMessage:
    """A message that counts, with its sender's epoch and the diverts that take it."""

    offset: int
    epoch: int
    sequence: int
    index: int
    send: Send
    diverts: list[DivertSpec]
    #: Diverts whose selector could not be evaluated, with the error.
    faults: dict[str, Exception]

    @property
    def identity(self) -> str:
        """Return the name of the message in the journal, as the audit compares it."""
        return f"{self.epoch}-{self.sequence}-{self.index}"


class JournalReader:
    """Reads journal records in order and returns the messages that count. Tracks the fence and the exclusive diverts in force."""

    def __init__(
        self,
        position: Position,
        diverts: Sequence[DivertSpec],
        answers: Callable[[str, int], bool] = lambda *_: False,
        *,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """Start at a position.

        If ``answers`` returns True for an exclusive divert that is not configured and an epoch, the messages that this divert took in this
        epoch are returned in its name, as faults.
        """
        self._answers = answers
        self.fence = Fence(position.epoch, position.sequence, violations=violations)
        self.exclusive = frozenset(position.exclusive)
        self._journal = position.topic
        self._diverts = [DivertFilter(divert) for divert in diverts]
        #: Encoded addresses that match no divert: each group reads the messages of all others.
        self._foreign: set[bytes] = set()

    def state(self) -> dict[str, Any]:
        """Return the fields of a position that this reader moves, without the offset."""
        return {"epoch": self.fence.epoch, "sequence": self.fence.sequence, "exclusive": tuple(sorted(self.exclusive))}

    def take(self, offset: int, key: bytes | None, value: bytes | None) -> list[WantedMessage]:
        """Return the messages of the record at ``offset`` that a divert takes. Raises DamagedRecord or NewerRecord: the pipeline stops."""
        try:
            header = journal_header(key, value)
        except ForeignRecord as error:
            _log.error("foreign record skipped", topic=self._journal, offset=offset, error=error)
            return []
        except (DamagedRecord, NewerRecord) as error:
            raise type(error)(f"journal offset {offset}: {error}") from error
        if not self.fence.admits(offset, header) or value is None:
            return []
        if header.kind is Kind.EPOCH:
            self.exclusive = exclusive_in_force(self.exclusive, value)
            return []
        if header.kind is Kind.STATE:
            return []
        taken: list[WantedMessage] = []
        index = 0
        for op, start, end in entries(value):
            if op != Op.SEND:
                continue
            flags, address = flags_and_address(value, start)
            if address in self._foreign and not flags & SendFlag.DIVERTS:
                index += 1
                continue
            send = decode_send(value, start, end)
            faults: dict[str, Exception] = {}
            wanted = [choice.divert for choice in self._diverts if choice.wants(send, self.exclusive, faults)]
            if send.diverts:
                wanted += self._removed(send, faults)
            if wanted:
                taken.append(WantedMessage(offset, header.epoch, header.sequence, index, send, wanted, faults))
            elif not any(address_matches(choice.divert.source, send.address) for choice in self._diverts):
                if len(self._foreign) >= _FOREIGN_ADDRESSES:
                    self._foreign.clear()
                self._foreign.add(address)
            index += 1
        return taken

    def _removed(self, send: Send, faults: dict[str, Exception]) -> list[DivertSpec]:
        there = {choice.divert.name for choice in self._diverts}
        names = [name for name in send.diverts if name not in there and self._answers(name, self.fence.epoch)]
        faults |= {name: BadRecord(f"exclusive divert {name!r} took the message and is no longer configured") for name in names}
        return [DivertSpec(name, send.address, "") for name in names]


def exclusive_in_force(before: frozenset[str], value: bytes) -> frozenset[str]:
    """Return the exclusive diverts that the broker applies in the epoch that a record starts. ``before`` were in force until then."""
    exclusive = before
    for op, start, end in entries(value):
        if op == Op.EPOCH:
            said = decode_json(value, start, end)
            # A divert that the broker no longer has takes nothing: messages that match its selector go to the queues again.
            gone = exclusive.difference(said["diverts"]) if "diverts" in said else frozenset()
            exclusive = gone.union(map(str, said.get("exclusive", ())))
    return exclusive


class DivertFilter:
    """Decides whether a divert takes a message."""

    def __init__(self, divert: DivertSpec) -> None:
        self.divert = divert
        self._selector = compile_selector(divert.selector) if divert.selector else None

    def wants(self, send: Send, in_force: frozenset[str], faults: dict[str, Exception]) -> bool:
        """Return True if the divert takes the message. ``in_force`` are the exclusive diverts that the broker applied.

        If the selector cannot be evaluated, the divert takes the message, and ``faults`` gets the error.
        """
        divert = self.divert
        if divert.name in send.diverts:
            return True  # the broker gave it to this divert and to no queue, whatever the divert's configuration is now
        if divert.name in in_force or (send.flags & SendFlag.FROM_KAFKA and not divert.from_kafka):
            return False
        if not address_matches(divert.source, send.address):
            return False
        if self._selector is None:
            return True
        try:
            return self._selector.matches(selector_lookup(send.body))
        except (BasculeError, ValueError) as error:
            faults[divert.name] = error
            return True


class TransformedRecord(NamedTuple):
    """The record that a user's transformation returned for a message. Fields that it left out are as without a transformation."""

    topic: str | None
    has_key: bool
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]


#: Returns the records of a divert's transformation for a message. Raises BadRecord if the transformation failed on the message.
Transformed = Callable[[WantedMessage, DivertSpec], Sequence[TransformedRecord]]
_PLAIN = (TransformedRecord(None, False, None, None, {}),)


class DivertEngine:
    """Converts messages to Kafka records."""

    def __init__(
        self, bridge_id: str, journal: tuple[str, int], dead_letter_topic: str | None, own_topics: frozenset[str] = frozenset()
    ) -> None:
        """Write for the bridge ``bridge_id`` from ``journal`` (topic and partition), with ``own_topics`` of Bascule as forbidden targets.

        Without a dead-letter topic, a message that cannot be carried raises BadRecord.
        """
        self._origin = (ORIGIN_HEADER, bridge_id.encode())
        self._journal = journal
        self._dead_letter_topic = dead_letter_topic
        self._own_topics = own_topics

    def outputs(self, taken: WantedMessage, transformed: Transformed | None = None) -> list[tuple[DivertSpec, Output]]:
        """Return the records of a message: one for each plain divert, and those that ``transformed`` returns for the other diverts."""
        made: list[tuple[DivertSpec, Output]] = []
        for divert in taken.diverts:
            if divert.transformed and transformed is None:
                continue
            try:
                if divert.name in taken.faults:
                    raise taken.faults[divert.name]
                records = transformed(taken, divert) if divert.transformed and transformed is not None else _PLAIN
                outputs = [self._record(taken, divert, record) for record in records]
            except (BasculeError, ValueError) as error:
                outputs = [self.dead_letter(taken, divert, "TRANSFORMATION" if divert.transformed else "VALUE_CONVERTER", error)]
            made += [(divert, output) for output in outputs]
        return made

    def _record(self, taken: WantedMessage, divert: DivertSpec, record: TransformedRecord) -> Output:
        marks: Headers = [self._origin, (ID_HEADER, taken.identity.encode()), (DIVERT_HEADER, divert.name.encode())]
        topic = target_topic(record.topic or divert.target, taken.send.address, divert.source, self._own_topics)
        output = record_of(taken.send.body, topic, divert.key, marks, taken.send.timestamp_ms)
        if record is _PLAIN[0]:
            return output
        if record.value is None:
            raise BadRecord("the transformation returned a null value, which Kafka treats as a deletion")
        key = record.key if record.has_key else output.key
        headers = [*(each for each in output.headers if each[0] not in record.headers), *record.headers.items()]
        return output._replace(key=key, value=record.value, headers=headers)

    def dead_letter(self, taken: WantedMessage, divert: DivertSpec, stage: str, error: Exception) -> Output:
        """Return the message as its sender encoded it, for the dead-letter topic. Raises BadRecord if there is none: the pipeline stops.

        Raises ``error`` if it is Denied or TopicMissing for the one topic that the configuration names, which is not the message's fault. A
        missing permission may still be granted; a missing topic stops the pipeline.
        """
        if isinstance(error, Denied | TopicMissing) and error.topic == divert.target:
            raise error
        crash.point("divert.dead_letter")
        if self._dead_letter_topic is None:
            raise BadRecord(text_of_error(error)) from None
        marks: Headers = [
            self._origin,
            (ID_HEADER, taken.identity.encode()),
            (DIVERT_HEADER, divert.name.encode()),
            (ADDRESS_HEADER, taken.send.address.encode()),
        ]
        marks += error_headers(divert.name, *self._journal, taken.offset, stage, error)
        return Output(self._dead_letter_topic, None, taken.send.body, marks, taken.send.timestamp_ms)
