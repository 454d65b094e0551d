"""Files of messages: JSON lines with encoded AMQP messages in base64 between a head and an end, so that a cut file is recognised.

{"format": "bascule-messages", "version": 1, "queue": QUEUE, "exported_ms": TIME}
{"message_id": ID, "message": BASE64}
{"end": true, "messages": COUNT, "sha256": DIGEST of all encoded messages}
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from bascule.config.private_file import PRIVATE, store_entries
from bascule.core.defaults import DUPLICATE_WINDOW_COUNT
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.topics import MESSAGE_BYTES_MAX
from bascule.jms.sections import message_id_of, scan

FORMAT: Final = "bascule-messages"
VERSION: Final = 1
#: Longest line that is read, in bytes. Base64 makes a message longer by a third.
LINE_BYTES_MAX: Final = 2 * MESSAGE_BYTES_MAX
#: A property by which the broker recognises a message of any client.
_DUPLICATE_ID: Final = b"_AMQ_DUPL_ID"
#: Errors of a file system without hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK})


class MessageFileHead(NamedTuple):
    """The queue that a file names, the number of its messages, and how many of them seem to have the property ``_AMQ_DUPL_ID``."""

    queue: str
    messages: int
    duplicate_ids: int


class FileMessage(NamedTuple):
    """An encoded message with the number of its line. ``message_id`` is the encoded id, which can only be compared."""

    line: int
    data: bytes
    message_id: bytes | None


class MessageFileWriter:
    """Writes messages one by one. ``count`` is their number."""

    def __init__(self, file: IO[bytes], queue: str) -> None:
        self.count = 0
        self._file = file
        self._digest = hashlib.sha256()
        self._line({"format": FORMAT, "version": VERSION, "queue": queue, "exported_ms": time.time_ns() // 1_000_000})

    def add(self, data: bytes) -> None:
        """Write an encoded message."""
        self.count += 1
        self._digest.update(data)
        self._line({"message_id": message_id_of(data), "message": base64.b64encode(data).decode()})

    def end(self) -> None:
        """Write the end, without which a file is incomplete."""
        self._line({"end": True, "messages": self.count, "sha256": self._digest.hexdigest()})

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace") + b"\n")


@contextmanager
def new_message_file(path: Path, queue: str) -> Iterator[MessageFileWriter]:
    """Yield the writer of a new file, which gets its name when it is complete. Only its owner may read it. Raises InvalidInput."""
    if path.exists():
        raise InvalidInput(f"{path} exists; choose another name, or delete the file")
    draft = path.with_name(f"{path.name}.part")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    except FileExistsError:
        raise InvalidInput(f"{draft} exists: another export writes it, or one was killed; if none runs, delete the file") from None
    except OSError as error:
        raise InvalidInput(f"{draft}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            writer = MessageFileWriter(file, queue)
            yield writer
            writer.end()
            file.flush()
            os.fsync(file.fileno())
        _name(draft, path)
    except FileExistsError:
        raise InvalidInput(f"{path} exists; choose another name, or delete the file") from None
    except OSError as error:
        raise InvalidInput(f"{draft}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _name(draft: Path, path: Path) -> None:
    """Give a complete file its name, so that the name survives a crash of the machine. Raises FileExistsError, OSError."""
    try:
        os.link(draft, path)  # fails if the file exists by now
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))  # fails if the file exists by now
        draft.replace(path)
    store_entries(path.parent)


def check_message_file(path: Path, *, distinct: bool = False) -> MessageFileHead:
    """Read a file once, and return what it says of itself. Raises InvalidInput with the number of the first line that is wrong.

    ``distinct``: also raise InvalidInput for a message that the broker would take for the repetition of another one in the file.
    """
    seen: OrderedDict[bytes, int] = OrderedDict()  # the line of each id, for as many ids as the broker remembers by default
    count = duplicate_ids = 0
    with _opened(path) as file:
        reader = _MessageFileReader(path, file)
        queue = reader.head()
        for message in reader.messages():
            count += 1
            duplicate_ids += _DUPLICATE_ID in message.data
            if distinct and message.message_id is not None:
                digest = hashlib.blake2b(message.message_id, digest_size=16).digest()
                if (first := seen.setdefault(digest, message.line)) != message.line:
                    raise InvalidInput(
                        f"{path}, line {message.line}: the message has the same message id as that of line {first}, so the broker would "
                        "store only one of them. Add --allow-duplicates to store both"
                    )
                if len(seen) > DUPLICATE_WINDOW_COUNT:
                    seen.popitem(last=False)
        return MessageFileHead(queue, count, duplicate_ids)


def messages_in(path: Path) -> Iterator[FileMessage]:
    """Yield the messages of a file, one at a time. Raises InvalidInput with the number of the line that is wrong."""
    with _opened(path) as file:
        reader = _MessageFileReader(path, file)
        reader.head()
        yield from reader.messages()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error
    with file:
        yield file


class _MessageFileReader:
    """Reads a file line by line."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._number = 0

    def head(self) -> str:
        """Return the queue that the first line names. Raises InvalidInput."""
        content = self._next()
        if content is None or content.get("format") != FORMAT:
            raise self._wrong(f"is not the head of a file of messages; `bascule export messages` writes such files (format {FORMAT!r})")
        if content.get("version") != VERSION:
            raise self._wrong(f"has version {content.get('version')!r:.20}; this program reads version {VERSION}")
        queue = content.get("queue", "")
        if not isinstance(queue, str):
            raise self._wrong('"queue" is not a string')
        return queue

    def messages(self) -> Iterator[FileMessage]:
        """Yield all messages, and check the end. Raises InvalidInput."""
        digest, count = hashlib.sha256(), 0
        while (content := self._next()) is not None and "end" not in content:
            message = self._decoded(content)
            digest.update(message.data)
            count += 1
            yield message
        if content is None:
            raise self._wrong("the file ends here without its last line: it is incomplete. Export the messages again")
        if (content.get("messages"), content.get("sha256")) != (count, digest.hexdigest()):
            raise self._wrong(f"the last line does not fit the {count} messages before it: lines were changed or removed")
        if self._next() is not None:
            raise self._wrong("there are lines behind the end of the file")

    def _decoded(self, content: dict[str, Any]) -> FileMessage:
        given = content.get("message")
        if not isinstance(given, str):
            raise self._wrong('there is no "message"')
        try:
            data = base64.b64decode(given, validate=True)
        except ValueError:
            raise self._wrong('"message" is not base64') from None
        try:
            return FileMessage(self._number, data, scan(data).message_id)
        except BasculeError as error:
            raise self._wrong(f'"message" is not an encoded AMQP message: {error}') from None

    def _next(self) -> dict[str, Any] | None:
        """Return the next line; None at the end. Raises InvalidInput."""
        line = self._file.readline(LINE_BYTES_MAX)
        self._number += 1
        if not line:
            return None
        if not line.endswith(b"\n"):
            raise self._wrong("the line is cut or too long: the file is incomplete. Export the messages again")
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise self._wrong("is not a JSON object")
        return content

    def _wrong(self, why: str) -> InvalidInput:
        return InvalidInput(f"{self._path}, line {self._number}: {why}")
