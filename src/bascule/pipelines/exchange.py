"""How a resident task gets messages transformed: it hands them to a waiting Spark task over a local socket, and gets their records back.

A waiting task has two ends, functions of two worker processes: the source, which passes messages to the user's plan, and the sink, which
takes its records. Each connects to the resident task once for each batch. The records of a batch are complete when the sink says so, which
it does when Spark has no further row of the batch. Nothing here knows Spark.
"""

from __future__ import annotations

import marshal
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from bascule.core.errors import BasculeError, Scope

SOURCE: Final = "source"
SINK: Final = "sink"
#: How long a resident task waits for a waiting task, in seconds.
READY_S: Final = 60.0
#: How long a resident task waits for the records of a batch, in seconds: a waiting task that hangs must not stop its diverts.
ANSWER_S: Final = 60.0
#: How long a waiting task may take to receive the messages of a batch, in seconds. The transaction of the batch before may be open
#: meanwhile, and Kafka aborts it after 30 s.
SEND_S: Final = 10.0
#: How long all hand-overs of a batch may take together, in seconds, until the caller ends the transaction of the batch before. With the
#: hand-over that is under way then, the transaction is open for at most SEND_S longer.
SENDS_S: Final = 2.0
#: Interval, in seconds, at which a resident task that waits looks whether Spark lives.
LOOK_S: Final = 1.0
#: How long the ends of a waiting task try to reach the resident task, which starts at the same time.
CONNECT_S: Final = 60.0
CONNECT_PAUSE_S: Final = 0.05
_LENGTH: Final = struct.Struct("!Q")
_READ_BYTES: Final = 1 << 20
_BACKLOG: Final = 128


class NotTransformed(BasculeError):
    """The waiting task of a divert gave no complete answer: the transformation failed on a message, or a process has ended.

    The journal records from ``start`` up to ``end`` (not included) were not carried.
    """

    retriable = True
    scope = Scope.OPERATION

    def __init__(self, text: str, start: int = 0, end: int = 0) -> None:
        super().__init__(text)
        self.start, self.end = start, end


class AskedMessage(NamedTuple):
    """A message for a transformation, with its place in the journal."""

    offset: int
    epoch: int
    sequence: int
    index: int  # type: ignore[assignment]  # nobody needs the method of tuples
    address: str
    timestamp_ms: int
    body: bytes


#: A record as the sink sends it: the columns of transformation.RECORD_SCHEMA without the divert.
MadeRow = tuple[int, int, str | None, bool, bytes | None, bytes | None, Sequence[tuple[str, str | None]] | None]


def send(connection: socket.socket, said: Any) -> None:
    """Send a value of plain types. Both sides run the same Python, and the socket lies in a directory of their own."""
    data = marshal.dumps(said)
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket, alive: Callable[[], None] = lambda: None, deadline_s: float | None = None) -> Any:
    """Return the next value. Raises EOFError, and TimeoutError at ``deadline_s`` of the monotonic clock; ``alive`` is called meanwhile."""
    length = _LENGTH.unpack(_exactly(connection, _LENGTH.size, alive, deadline_s))[0]
    return marshal.loads(_exactly(connection, length, alive, deadline_s))


def _exactly(connection: socket.socket, size: int, alive: Callable[[], None], deadline_s: float | None) -> bytearray:
    found = bytearray()
    while len(found) < size:
        try:
            part = connection.recv(min(size - len(found), _READ_BYTES))
        except TimeoutError:
            alive()
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise
            continue
        except ConnectionError:
            raise EOFError from None
        if not part:
            raise EOFError
        found += part
    return found


def connected(path: str, role: str, divert: str, job: str) -> socket.socket:
    """Connect an end of a waiting task to the resident task. Raises OSError if nobody listens for CONNECT_S."""
    deadline_s = time.monotonic() + CONNECT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            send(connection, (role, divert, job))
            return connection
        except OSError:
            connection.close()
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(CONNECT_PAUSE_S)


@dataclass(slots=True)
class _Waiting:
    """The ends of the waiting tasks of a divert that have connected, by job."""

    ends: dict[str, dict[str, socket.socket]] = field(default_factory=dict)


class _Once:
    """An action that is done at the first call only."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class Transformer:
    """The side of the resident task. Use it from one thread, as a context manager."""

    def __init__(self, path: str, diverts: Sequence[str], alive: Callable[[], None] = lambda: None) -> None:
        """Listen on a socket at ``path``. ``alive`` raises an error when there is no need to wait any more.

        Raises NotTransformed if the socket cannot be used, for example because its path is too long.
        """
        self.took_s = 0.0  # from the hand-over of the last batch to its answer
        self._alive = alive
        self._waiting = {divert: _Waiting() for divert in diverts}
        self._listener = _listener(path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close all connections, which ends the waiting tasks."""
        self._selector.close()
        self._listener.close()
        for waiting in self._waiting.values():
            for ends in waiting.ends.values():
                _close(ends)

    def records(
        self, asked: Mapping[str, Sequence[AskedMessage]], bytes_max: int, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, list[MadeRow]]:
        """Return the records of messages, both by divert. Raises NotTransformed, also for records of more than ``bytes_max``.

        ``meanwhile`` is called once, before this call waits: most often when all waiting tasks have their messages. If the tasks are slow
        to take them, it is called between two diverts after SENDS_S.
        """
        before_wait = _Once(meanwhile)
        begun_s = time.monotonic()
        with ExitStack() as opened:
            pairs = {}
            for divert, messages in asked.items():
                if time.monotonic() - begun_s >= SENDS_S:
                    before_wait()
                pairs[divert] = ends = self._handed_over(divert, messages, before_wait)
                opened.callback(_close, ends)
            before_wait()
            handed_over_s = time.monotonic()
            deadline_s = handed_over_s + ANSWER_S
            found: dict[str, list[MadeRow]] = {}
            for divert, ends in pairs.items():
                found[divert], size = self._answer(divert, ends[SINK], bytes_max, deadline_s)
                bytes_max -= size
            self.took_s = time.monotonic() - handed_over_s
            return found

    def ready(self, diverts: Iterable[str], within_s: float) -> bool:
        """Return whether a waiting task of each of these diverts is ready, at the latest after ``within_s``."""
        deadline_s = time.monotonic() + within_s
        self._accept(0.0)
        while not all(any(len(ends) == 2 for ends in self._waiting[divert].ends.values()) for divert in diverts):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._accept(left_s)
        return True

    def _handed_over(self, divert: str, messages: Sequence[AskedMessage], before_wait: Callable[[], None]) -> dict[str, socket.socket]:
        """Give messages to a waiting task of the divert, and return its ends."""
        deadline_s = time.monotonic() + READY_S
        said = [tuple(message) for message in messages]
        while True:
            ends = self._ready(divert, deadline_s, before_wait)
            try:
                ends[SOURCE].settimeout(SEND_S)  # it covers the whole of what is sent, not each part
                send(ends[SOURCE], said)
                return ends
            except OSError:  # it has ended since it connected
                _close(ends)
                before_wait()  # another attempt may take as long

    def _ready(self, divert: str, deadline_s: float, before_wait: Callable[[], None]) -> dict[str, socket.socket]:
        found = self._waiting[divert].ends
        while True:
            self._accept(0.0)
            for job, ends in list(found.items()):
                ended = any(map(_has_ended, ends.values()))
                if ended or len(ends) == 2:
                    del found[job]
                    if not ended:
                        return ends
                    _close(ends)
            if time.monotonic() >= deadline_s:
                raise NotTransformed(f"no waiting task of divert {divert!r} was ready within {READY_S:.0f} s")
            before_wait()
            self._accept(LOOK_S)
            self._alive()

    def _accept(self, timeout_s: float) -> None:
        """Take connections that are there. Wait for one if there is none."""
        while self._selector.select(timeout_s):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.settimeout(LOOK_S)
            timeout_s = 0.0
            try:
                role, divert, job = receive(connection, deadline_s=time.monotonic() + LOOK_S)
            except (EOFError, OSError):
                connection.close()
                continue
            if divert not in self._waiting:
                connection.close()
                continue
            ends = self._waiting[divert].ends.setdefault(job, {})
            if role in ends:
                ends[role].close()
            ends[role] = connection

    def _answer(self, divert: str, sink: socket.socket, bytes_max: int, deadline_s: float) -> tuple[list[MadeRow], int]:
        """Return the records of a divert, and their size in bytes."""
        made: list[MadeRow] = []
        size = 0
        try:
            while (rows := receive(sink, self._alive, deadline_s)) is not None:
                said_bytes, some = rows
                size += said_bytes
                if size > bytes_max:
                    raise NotTransformed(f"divert {divert!r}: the transformation produced more than {bytes_max} bytes from a batch")
                made += some
        except EOFError as error:
            raise NotTransformed(f"divert {divert!r}: the waiting task ended without an answer") from error
        except TimeoutError as error:
            raise NotTransformed(f"divert {divert!r}: the waiting task gave no answer within {ANSWER_S:.0f} s") from error
        return made, size


def _listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a task that was killed
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise NotTransformed(f"could not listen for waiting tasks at {path}: {error}") from error
    listener.setblocking(False)
    return listener


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the other side has closed: an end that waits says nothing."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(LOOK_S)


def _close(ends: Mapping[str, socket.socket]) -> None:
    for connection in ends.values():
        connection.close()


def asked_messages(path: str, divert: str, job: str) -> list[AskedMessage]:
    """Return the next batch of messages, for the source of a waiting task. Raises EOFError when the resident task has ended."""
    connection = connected(path, SOURCE, divert, job)
    try:
        return [AskedMessage(*each) for each in receive(connection)]
    finally:
        connection.close()


def answer(path: str, divert: str, job: str, batches: Iterator[tuple[int, list[MadeRow]]]) -> None:
    """Send the records of a batch in parts, each with its size in bytes. An error of ``batches`` leaves the answer without its end."""
    connection = connected(path, SINK, divert, job)
    try:
        for part in batches:
            send(connection, part)
        send(connection, None)
    finally:
        connection.close()
