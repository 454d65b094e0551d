"""The files of a backup: records of a partition, and the manifest that makes a directory a backup. There is no Kafka client here.

    DIRECTORY/manifest.json          written last: a directory without it is no backup
    DIRECTORY/topics/TOPIC-P.gz      the records of one partition, in the order of offsets
    DIRECTORY/files/                 settings, and on request the files with secrets

A file of records is a gzip stream. Each record is a head (offset and timestamp as i64, length of key and of value as i32 with -1 for none,
number of headers as u32), the key, the value, and for each header the length of its name (u32), the name, the length of its value (i32) and
the value. All integers are big endian.

The manifest has the SHA-256 of each file, and one of its own content. A restore compares all of them before it writes anything.
"""

from __future__ import annotations

import enum
import gzip
import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from bascule.config.private_file import PRIVATE, make_private, replace_private, store_entries
from bascule.core.errors import InvalidInput, Scope

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
TOPICS: Final = "topics"
FILES: Final = "files"
#: The first level costs a third of the time of the default, and its files are a tenth larger.
_LEVEL: Final = 1
_HEAD: Final = struct.Struct(">qqiiI")
_NAME: Final = struct.Struct(">I")
_SIZE: Final = struct.Struct(">i")
#: The field of the manifest with the digest of its other fields.
_DIGEST: Final = "sha256"
#: Names that Kafka allows for a topic, except "." and "..": no name leads to another directory.
_TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")


class InvalidBackup(InvalidInput):
    """A directory is no complete backup, or a file of the backup is damaged."""

    retriable = False
    scope = Scope.PROCESS


class TopicKind(enum.StrEnum):
    """How a topic is restored."""

    #: With the same offsets. The records contain offsets of the journal.
    JOURNAL = "journal"
    #: From the next offset to journal, with new offsets.
    INGRESS = "ingress"
    #: By key, with the id of the new journal.
    SNAPSHOTS = "snapshots"
    POSITIONS = "positions"
    #: In the same order, with new offsets: records are found by key, or read by people.
    PLAIN = "plain"
    #: With the same offsets, which records of another topic contain.
    SIDE = "side"


@dataclass(frozen=True, slots=True)
class CopiedRecord:
    """A record as it was read."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionCopy:
    """The copy of one partition: its offsets, and its file. ``end`` is the offset after the last copied record or marker."""

    partition: int
    first: int
    end: int
    records: int
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class TopicCopy:
    """The copy of a topic, with the settings that somebody has set for it."""

    name: str
    kind: TopicKind
    topic_id: str
    settings: dict[str, str]
    parts: tuple[PartitionCopy, ...]


@dataclass(frozen=True, slots=True)
class JournalCut:
    """The point of a backup: the end of the journal, its fence there, and where the broker would read ``bascule.ingress``."""

    offset: int
    epoch: int
    sequence: int
    ingress_topic_id: str
    ingress_offset: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a backup."""

    version: str
    created: str
    prefix: str
    bridge: str
    partition: int
    cut: JournalCut
    topics: tuple[TopicCopy, ...] = field(default=())
    #: SHA-256 by the name of a file in ``files``.
    files: dict[str, str] = field(default_factory=dict)

    def copy_of(self, name: str) -> TopicCopy | None:
        """Return the copy of a topic, or None if the backup has none."""
        return next((each for each in self.topics if each.name == name), None)

    def digest(self) -> str:
        """Return the SHA-256 of the content, as hexadecimal digits."""
        return digest_of({"format": FORMAT, **asdict(self)})

    def store(self, directory: Path) -> None:
        """Write the manifest, which completes the backup: all files then survive a crash of the machine. Raises OSError."""
        for name in (TOPICS, FILES):
            if (directory / name).exists():
                store_entries(directory / name)
        content = json.dumps({"format": FORMAT, **asdict(self), _DIGEST: self.digest()}, indent=2)
        replace_private(directory / MANIFEST, content.encode())

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read the manifest of a backup, and compare it with its digest. Raises InvalidBackup."""
        path = directory / MANIFEST
        try:
            content: dict[str, Any] = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise InvalidBackup(
                    f"{directory} has format {content['format']!r}; this version of Bascule reads format {FORMAT}. Upgrade Bascule"
                )
            if content.pop(_DIGEST, None) != digest_of(content):
                raise InvalidBackup(f"{path} is damaged or was changed: its content does not have the SHA-256 that it names")
            del content["format"]
            topics = tuple(_topic(each) for each in content.pop("topics"))
            manifest = cls(cut=JournalCut(**content.pop("cut")), topics=topics, **content)
        except FileNotFoundError:
            raise InvalidBackup(f"{directory} is no complete backup: it has no {MANIFEST}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidBackup(f"{path} cannot be read: {error!r}") from error
        if wrong := next((name for name in manifest.files if name != Path(name).name), None):
            raise InvalidBackup(f"{path} names the file {wrong!r}, which is not in {FILES}")
        return manifest


def record_file(topic: str, partition: int) -> str:
    """Return the name of the file of a partition, relative to the backup."""
    return f"{TOPICS}/{topic}-{partition}.gz"


def digest_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of the fields of a manifest, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _topic(content: dict[str, Any]) -> TopicCopy:
    """Return the description of a topic. Raises ValueError if it names a file outside of the backup."""
    parts = tuple(PartitionCopy(**part) for part in content.pop("parts"))
    copy = TopicCopy(kind=TopicKind(content.pop("kind")), parts=parts, **content)
    if not _TOPIC_NAME.fullmatch(copy.name):
        raise ValueError(f"{copy.name!r} is no name of a topic")
    for part in parts:
        if part.file != record_file(copy.name, part.partition) or not 0 <= part.first <= part.end or part.records < 0:
            raise ValueError(f"unexpected copy of topic {copy.name!r}: {part}")
    return copy


class _Digesting:
    """A file to write that computes the digest of its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write bytes."""
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Pass the bytes on."""
        self._file.flush()


class RecordFileWriter:
    """Writes the records of one partition."""

    def __init__(self, directory: Path, name: str) -> None:
        """Create the file, or replace it. Raises OSError."""
        self.name = name
        self.records = 0
        make_private((directory / name).parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(directory / name, flags, PRIVATE), "wb")
        self._digesting = _Digesting(self._file)
        stream: Any = self._digesting
        self._gzip = gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=stream, mtime=0)

    def write(self, record: CopiedRecord) -> None:
        """Append a record. Raises OSError."""
        key, value = record.key, record.value
        sizes = (-1 if key is None else len(key), -1 if value is None else len(value))
        parts = [_HEAD.pack(record.offset, record.timestamp_ms, *sizes, len(record.headers)), key or b"", value or b""]
        for name, content in record.headers:
            encoded = name.encode()
            parts += (_NAME.pack(len(encoded)), encoded, _SIZE.pack(-1 if content is None else len(content)), content or b"")
        self._gzip.write(b"".join(parts))
        self.records += 1

    def copied(self, partition: int, first: int, end: int) -> PartitionCopy:
        """Close the file, and return its description. The file then survives a crash of the machine. Raises OSError."""
        self._gzip.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return PartitionCopy(partition, first, end, self.records, self.name, self._digesting.digest.hexdigest())

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file."""
        self._file.close()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(directory: Path, manifest: Manifest, progress: Callable[[str, int], None] = lambda *_: None) -> None:
    """Compare all files of a backup with their digests. Raises InvalidBackup.

    ``progress`` receives a text with the topic, and the number of records in its file.
    """
    for copy in manifest.topics:
        for part in copy.parts:
            progress(f"checking {copy.name}", part.records)
            _check_file(directory / part.file, part.sha256)
    for name, sha256 in manifest.files.items():
        _check_file(directory / FILES / name, sha256)


def _check_file(path: Path, sha256: str) -> None:
    try:
        found = file_digest(path)
    except OSError as error:
        raise InvalidBackup(f"{path} cannot be read: {error.strerror}") from error
    if found != sha256:
        raise InvalidBackup(f"{path} is damaged: its SHA-256 is not {sha256}, which {MANIFEST} names")


def records_of(directory: Path, part: PartitionCopy) -> Iterator[CopiedRecord]:
    """Yield the records of a partition. Raises InvalidBackup."""
    path = directory / part.file
    try:
        with gzip.open(path, "rb") as file:
            for _ in range(part.records):
                yield _read(file)
            if file.read(1):
                raise InvalidBackup(f"{path} has more than {part.records} records")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise InvalidBackup(f"{path} cannot be read: {error}") from error


def _read(file: gzip.GzipFile) -> CopiedRecord:
    offset, timestamp_ms, key_size, value_size, header_count = _HEAD.unpack(file.read(_HEAD.size))
    key, value = _content(file, key_size), _content(file, value_size)
    headers = []
    for _ in range(header_count):
        name = file.read(*_NAME.unpack(file.read(_NAME.size))).decode()
        headers.append((name, _content(file, *_SIZE.unpack(file.read(_SIZE.size)))))
    return CopiedRecord(offset, timestamp_ms, key, value, tuple(headers))


def _content(file: gzip.GzipFile, size: int) -> bytes | None:
    if size < 0:
        return None
    content = file.read(size)
    if len(content) < size:
        raise EOFError("the file ends within a record")
    return content
