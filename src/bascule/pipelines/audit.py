"""The audit of diverts: compares the records that the journal asks for with the records that a read_committed reader finds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bascule.core.errors import InvalidInput
from bascule.core.kafka_records import Output
from bascule.jms.record_headers import DIVERT_HEADER, ID_HEADER, ORIGIN_HEADER, REDRIVES_HEADER
from bascule.kafka.history import TopicHistory, content_of, known_offset
from bascule.pipelines.defined_specs import with_defined
from bascule.pipelines.divert import DivertEngine, JournalReader
from bascule.pipelines.positions import Positions
from bascule.pipelines.registry import journal_position
from bascule.pipelines.spec import DivertSpec, PipelinesSpec, from_settings
from bascule.writer.position import GROUP, Position

if TYPE_CHECKING:
    from bascule.config.settings import Settings

#: Sequence and index of a message: a divert writes messages in this order.
_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of the audit of one divert over the journal offsets ``start`` to ``end`` (not included).

    ``expected`` counts the messages that the journal assigns to the divert, ``found`` those of them that the divert's topics contain, and
    ``dead_lettered`` those that only the dead-letter topic contains. If the result is exact, ``lost``, ``duplicated``, ``unexpected``,
    ``different`` (key or value differ from the journal) and ``out_of_order`` are zero. The digests cover the identities of the messages
    and, for a divert without a transformation, keys and values. Messages that a Python function leaves out do not count as lost.
    """

    divert: str
    start: int
    end: int
    expected: int
    found: int
    dead_lettered: int
    lost: int
    duplicated: int
    unexpected: int
    different: int
    out_of_order: int
    journal_digest: str
    topic_digest: str
    first_difference: str

    @property
    def exact(self) -> bool:
        """Return True if the topics contain each message once, unchanged and in order."""
        return not (self.lost or self.duplicated or self.unexpected or self.different or self.out_of_order)


@dataclass(slots=True)
class _Tally:
    divert: DivertSpec
    start: int
    end: int
    expected: dict[str, bytes] = field(default_factory=dict)
    places: dict[str, _Place] = field(default_factory=dict)
    topics: set[str] = field(default_factory=set)
    found: dict[str, bytes] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    duplicated: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    out_of_order: list[str] = field(default_factory=list)

    def result(self) -> AuditResult:
        """Return the counts and digests of the divert."""
        missing = (identity for identity in self.expected if identity not in self.found and identity not in self.dead)
        lost = [] if self.divert.function else list(missing)
        different = [identity for identity, digest in self.found.items() if digest != self.expected.get(identity, digest)]
        kinds = {"lost": lost, "duplicated": self.duplicated, "unexpected": self.unexpected, "different": different}
        kinds["out of order"] = self.out_of_order
        first = min(
            ((self.places.get(identity, (0, 0)), f"{identity} {kind}") for kind, some in kinds.items() for identity in some),
            default=(None, ""),
        )
        there = {identity: digest for identity, digest in self.expected.items() if identity in self.found or identity not in self.dead}
        return AuditResult(
            self.divert.name, self.start, self.end, len(self.expected), len(self.found), len(self.dead - self.found.keys()), len(lost),
            len(self.duplicated), len(self.unexpected), len(different), len(self.out_of_order), _digest(there), _digest(self.found),
            first[1],
        )  # fmt: skip


def audit(
    settings: Settings, names: Sequence[str] | None = None, from_offset: int | None = None, to_offset: int | None = None
) -> list[AuditResult]:
    """Verify all diverts of a configuration and those that are defined at run time, or those named in ``names``. See ``audit_diverts``."""
    servers = settings.kafka.bootstrap_servers
    if servers is None:
        raise InvalidInput("no Kafka configured; set kafka.bootstrap_servers")
    return audit_diverts(with_defined(from_settings(settings, servers)), names, from_offset, to_offset)


def audit_diverts(
    pipelines: PipelinesSpec, names: Sequence[str] | None = None, from_offset: int | None = None, to_offset: int | None = None
) -> list[AuditResult]:
    """Compare the journal between two offsets with the target topics.

    By default the audit of a divert begins at the offset where the divert began, or at the oldest record that the journal still has, and
    ends at the divert's position. Raises Unavailable if Kafka does not answer.
    """
    history = TopicHistory(pipelines.kafka, pipelines.topics.journal, pipelines.topics.partition)
    oldest = history.earliest()
    positions = Positions(pipelines, "")
    stored = positions.stored()
    tallies = []
    for divert in pipelines.diverts:
        if names and divert.name not in names:
            continue
        begun, reached = extent_of(divert, positions, stored)
        start = max(oldest, begun, from_offset or 0)
        end = min(reached, to_offset if to_offset is not None else reached)
        tallies.append(_Tally(divert, start, max(start, end)))
    if not tallies:
        return []
    _expect(pipelines, tallies, history)
    _find(pipelines, {tally.divert.name: tally for tally in tallies})
    return [tally.result() for tally in tallies]


def extent_of(divert: DivertSpec, positions: Positions, stored: Mapping[str, Position]) -> tuple[int, int]:
    """Return the journal offset at which a divert once began, and the next one that it takes; 0 if no position says so."""
    begun = stored.get(positions.begun_key(divert.name))
    # A divert whose group was changed in the file has its position in the earlier group until the pipelines start again.
    shared = (at for key, at in stored.items() if key == positions.common_key or key.startswith(GROUP))
    at = stored.get(positions.own_key(divert.name)) or next((at for at in shared if divert.name in at.members), None)
    return (begun.offset if begun else 0), (at.offset if at else 0)


def _expect(pipelines: PipelinesSpec, tallies: list[_Tally], history: TopicHistory) -> None:
    asked = [tally for tally in tallies if tally.start < tally.end]
    if not asked:
        return  # a read up to an offset that the journal has not reached would wait for this offset
    start, end = min(tally.start for tally in asked), max(tally.end for tally in asked)
    position = journal_position(pipelines.topics.journal, "", pipelines.topics.partition, start, history)
    by_name = {tally.divert.name: tally for tally in tallies}
    reader = JournalReader(position, [tally.divert for tally in tallies])
    source = (pipelines.topics.journal, pipelines.topics.partition)
    engine = DivertEngine(pipelines.bridge_id, source, pipelines.topics.dead_letters, pipelines.topics.reserved)
    for message in history.records(start, end):
        offset = known_offset(message)
        for taken in reader.take(offset, *content_of(message)):
            outputs: dict[str, Output] = {divert.name: output for divert, output in engine.outputs(taken)}
            for divert in taken.diverts:
                tally = by_name[divert.name]
                if not tally.start <= offset < tally.end:
                    continue
                output = outputs.get(divert.name)
                tally.expected[taken.identity] = _content(output.key, output.value) if output else b""
                tally.places[taken.identity] = (taken.sequence, taken.index)
                if output is not None and output.topic != pipelines.topics.dead_letters:
                    tally.topics.add(output.topic)


def _find(pipelines: PipelinesSpec, tallies: dict[str, _Tally]) -> None:
    positions = Positions(pipelines, "")
    partitions = positions.topics.partitions()
    topics = {topic for tally in tallies.values() for topic in tally.topics}
    topics |= {tally.divert.target for tally in tallies.values() if "${" not in tally.divert.target}
    origin = pipelines.bridge_id.encode()
    for topic in sorted(topics | {pipelines.topics.dead_letters}):
        for partition in range(partitions.get(topic, 0)):
            last: dict[str, _Place] = {}
            for headers, key, value in _records(pipelines, topic, partition):
                tally = tallies.get((headers.get(DIVERT_HEADER) or b"").decode())
                if tally is None or headers.get(ORIGIN_HEADER) != origin:
                    continue
                identity = (headers.get(ID_HEADER) or b"").decode()
                if topic == pipelines.topics.dead_letters:
                    if identity in tally.expected:
                        tally.dead.add(identity)
                else:
                    # A record that was redriven is behind later ones.
                    _count(tally, identity, _content(key, value), {} if REDRIVES_HEADER in headers else last)


def _count(tally: _Tally, identity: str, content: bytes, last: dict[str, _Place]) -> None:
    expected = tally.expected.get(identity)
    if expected is None:
        # Most likely a message outside the offsets of this audit. It is unexpected only between the first and the last expected message.
        if tally.places and min(tally.places.values()) < place_of_identity(identity) < max(tally.places.values()):
            tally.unexpected.append(identity)
        return
    if identity in tally.found and not tally.divert.transformed:
        tally.duplicated.append(identity)
        return
    place = tally.places[identity]
    if place < last.get(tally.divert.name, (-1, -1)):
        tally.out_of_order.append(identity)
    last[tally.divert.name] = place
    tally.found[identity] = b"" if tally.divert.transformed else content


def _records(pipelines: PipelinesSpec, topic: str, partition: int) -> Iterator[tuple[dict[str, bytes], bytes | None, bytes]]:
    history = TopicHistory(pipelines.kafka, topic, partition)
    for message in history.records(history.earliest(), history.latest(), committed=True):
        headers: Any = message.headers() or []
        key, value = content_of(message)
        yield dict(headers), key, value or b""


def place_of_identity(identity: str) -> _Place:
    """Return sequence and index of the header ``bascule.id``, which identify a message; (-1, -1) if it is no such header."""
    try:
        _, sequence, index = identity.split("-")
        return int(sequence), int(index)
    except ValueError:
        return -1, -1


def _content(key: bytes | None, value: bytes | None) -> bytes:
    return hashlib.blake2b(value or b"", digest_size=16, key=(key or b"")[:64]).digest()


def _digest(contents: dict[str, bytes]) -> str:
    """Return one digest for many records. It does not depend on their order, because records of different partitions have no order."""
    total = 0
    for identity, content in contents.items():
        total ^= int.from_bytes(hashlib.blake2b(identity.encode() + content, digest_size=16).digest(), "big")
    return f"{total:032x}"
