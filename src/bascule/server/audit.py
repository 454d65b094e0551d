"""The audit: one line of JSON for each event, to a file and to a Kafka topic.

A line that cannot be written is kept and retried, in order, up to a limit. Nothing here reads the content of messages.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from bascule.config.audit import Audit as AuditSettings
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.log import get_log
from bascule.core.permissions import Unauthorized
from bascule.kafka.line_topic import LineTopic
from bascule.server.refusal_limits import RefusalLimits, Unwritten

log = get_log(__name__)

#: Characters of a value in a line, since peers choose names and ids. Longer values are cut.
VALUE_LENGTH_MAX: Final = 1_000
#: Lines that wait for a sink that fails. The oldest line is dropped for each further one.
WAITING_LINES_MAX: Final = 10_000
#: Lines that one turn of the event loop writes again to a sink.
RETRIED_LINES: Final = 100
#: Only the user of the broker reads and writes the file.
FILE_MODE: Final = 0o600
#: The value of audit.on_failure that refuses what cannot be audited.
REFUSE: Final = "refuse"

#: Kinds of refusals before a login, apart from the mechanisms TLS and WebSocket: of a login by SASL, of a request to the admin server, and
#: of a connection that breaks the protocol, which has a line in the log only.
LOGIN: Final = "login"
ADMINISTRATION: Final = "administration"
CONNECTION: Final = "connection"
#: Mechanism in the audit of a client that TLS refuses.
TLS: Final = "TLS"
#: Mechanism in the audit of a client whose web page may not connect.
WEBSOCKET: Final = "WebSocket"


class AuditUnavailable(Unavailable):
    """The operation has to be audited, and the audit cannot be written."""

    condition = "amqp:resource-limit-exceeded"


#: Called once for each line, with the reason why it is not written, or None.
Done = Callable[[str, str | None], None]
_ERRORS: Final = (OSError, BufferError, ValueError)


class Sink(Protocol):
    """A place for lines. It calls a ``Done`` for each line that ``write`` has taken."""

    name: str

    def write(self, line: str) -> None:
        """Take a line. Raises one of _ERRORS if it cannot."""

    def poll(self) -> None:
        """Report what has happened meanwhile."""

    def close(self) -> None:
        """Finish."""


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


class FileSink:
    """A file. The broker passes each line to the operating system at once, and does not wait for the disk.

    The file is opened again if it was moved or deleted, as log rotation does. Of a line that does not fit on a full disk, nothing stays.
    """

    def __init__(self, path: Path, done: Done) -> None:
        self.name = str(path)
        self._path = path
        self._done = done
        self._file: int | None = None
        self._torn = False  # the file ends with a part of a line

    def write(self, line: str) -> None:
        """Append a line."""
        self._append(self._current(), line.encode() + b"\n")
        self._done(line, None)

    def poll(self) -> None:
        """Do nothing: ``write`` has reported everything."""

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _current(self) -> int:
        """Return the descriptor of the file that has the name now. Raises OSError."""
        if self._file is not None and not self._is_current(self._file):
            self.close()
        if self._file is None:
            self._file, self._torn = _opened(self._path), False
        return self._file

    def _is_current(self, file: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(file))
        except FileNotFoundError:
            return False

    def _append(self, file: int, data: bytes) -> None:
        whole = rest = memoryview(b"\n" + data if self._torn else data)
        begin = os.fstat(file).st_size
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            if len(rest) < len(whole):
                self._cut(file, begin)
            raise
        self._torn = False

    def _cut(self, file: int, size: int) -> None:
        try:
            os.ftruncate(file, size)
        except OSError:  # a pipe, or a file that may only grow
            self._torn = True


class _Output:
    """A sink, and the lines that it could not write. ``failing`` is true from a failure until a line is written again."""

    def __init__(self, make: Callable[[Done], Sink]) -> None:
        self.failing = False
        self._waiting: deque[str] = deque()
        self._lost = 0
        self._sink = make(self._done)

    def write(self, line: str) -> None:
        """Write a line, or keep it behind those that wait."""
        if self._waiting:
            self._keep(line)
            return
        try:
            self._sink.write(line)
        except _ERRORS as error:
            self._done(line, str(error))

    def poll(self) -> bool:
        """Write some lines that wait again. Return whether more of them wait, and the sink takes lines."""
        self._sink.poll()
        return self._retry() and bool(self._waiting) and not self.failing

    def _retry(self) -> bool:
        """Pass lines that wait to the sink. Return whether it has taken all of them."""
        for _ in range(min(len(self._waiting), RETRIED_LINES)):
            line = self._waiting.popleft()
            try:
                self._sink.write(line)
            except _ERRORS:
                self._waiting.appendleft(line)
                return False
        return True

    def close(self) -> None:
        """Finish, and report the lines that are lost."""
        self._sink.poll()
        for _ in range(math.ceil(len(self._waiting) / RETRIED_LINES)):
            if not self._retry():
                break
        self._sink.close()
        if lost := self._lost + len(self._waiting):
            log.error("audit lines lost", to=self._sink.name, lost=lost)

    def _done(self, line: str, reason: str | None) -> None:
        if reason is not None:
            if not self.failing:
                log.error("audit cannot be written", to=self._sink.name, reason=reason)
            self.failing = True
            self._keep(line)
        elif self.failing:
            self.failing = False
            log.warning("audit is written again", to=self._sink.name, lost=self._lost)

    def _keep(self, line: str) -> None:
        if len(self._waiting) >= WAITING_LINES_MAX:
            self._waiting.popleft()
            self._lost += 1
        self._waiting.append(line)


class AuditTrail:
    """The audit of one broker. ``messages``: each message that a client sends or gets is an event."""

    def __init__(self, makers: Sequence[Callable[[Done], Sink]] = (), *, messages: bool = False, required: bool = False) -> None:
        """Begin with places for lines. If ``required``, ``blocked`` says why nothing may happen that has to be audited."""
        self.messages = messages
        self.required = required
        self._outputs = [_Output(make) for make in makers]
        self._file: _Output | None = None  # one of them
        self._refusals = RefusalLimits()
        self._actor = ("", "")  # user and address of who is changing queues; empty for the broker itself

    @property
    def enabled(self) -> bool:
        """Return whether there is a place for lines."""
        return bool(self._outputs)

    @property
    def blocked(self) -> str:
        """Return why operations that have to be audited are refused; "" if they are not."""
        if self.required and any(output.failing for output in self._outputs):
            return "the audit cannot be written, and audit.on_failure is 'refuse'"
        return ""

    def check(self) -> None:
        """Raise AuditUnavailable if the operation cannot be audited."""
        if why := self.blocked:
            raise AuditUnavailable(why)

    def record(
        self, action: str, on: str, *, who: str, peer: str, allowed: bool = True, result: str = "ok", **more: str | int | bool
    ) -> None:
        """Write one event: ``who`` did ``action`` on ``on`` from the address ``peer``, and with which result."""
        if not self._outputs:
            return
        event = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "who": who, "from": peer, "action": action, "on": on, "allowed": allowed, "result": result, **more,
        }  # fmt: skip
        line = json.dumps({name: value[:VALUE_LENGTH_MAX] if isinstance(value, str) else value for name, value in event.items()})
        for output in self._outputs:
            output.write(line)

    def login_refused(self, peer: str, user: str, mechanism: str, reason: str) -> bool:
        """Write that a client at ``peer`` is refused, which claims to be ``user``. Return whether a line in the log may say so, too."""
        kind = mechanism if mechanism in (TLS, WEBSOCKET) else LOGIN
        return self.refused(kind, "login", "", who=user, peer=peer, result=reason, mechanism=mechanism)

    def refused(self, kind: str, action: str, on: str, *, who: str, peer: str, result: str, **more: str) -> bool:
        """Write a refusal before a login, unless its address has had many. Return whether a line in the log may say so, too."""
        unwritten = self._refusals.refused(kind, _host(peer), time.monotonic())
        if unwritten is None:
            return False
        fields: dict[str, Any] = {**more, "unwritten": unwritten} if unwritten else more
        self.record(action, on, who=who, peer=peer, allowed=False, result=result, **fields)
        return True

    def may_log(self, peer: str) -> bool:
        """Return whether the log may have a line about a connection of ``peer`` before its login."""
        return self._refusals.refused(CONNECTION, _host(peer), time.monotonic()) is not None

    def _report(self, refusals: Iterator[Unwritten]) -> None:
        """Write how many refusals have no line."""
        for kind, address, number in refusals:
            log.info("refusals before login not logged", kind=kind, address=address, count=number)
            if kind != CONNECTION:
                action = kind if kind == ADMINISTRATION else "login"
                self.record(action, "", who="", peer=address, allowed=False, result="refused before login", kind=kind, unwritten=number)

    @contextmanager
    def changing(self, who: str, peer: str) -> Iterator[None]:
        """Attribute the queues that the body creates and deletes to ``who`` at ``peer``. The body must not wait for anything."""
        before, self._actor = self._actor, (who, peer)
        try:
            yield
        finally:
            self._actor = before

    def record_change(self, action: str, queue: str, *, address: str, owner: str) -> None:
        """Write that a queue was created or deleted, by whom the innermost ``changing`` says; without one, by the broker itself."""
        who, peer = self._actor
        self.record(action, queue, who=who, peer=peer, address=address, owner=owner)

    @contextmanager
    def acting(self, action: str, on: str, *, who: str, peer: str, **more: Any) -> Iterator[dict[str, Any]]:
        """Record what the body does, or with which error it is refused. The arguments are those of ``record``.

        The body puts more of them, which only its success has, into the mapping that it gets.

        Raises AuditUnavailable if the operation cannot be audited, and what the body raises.
        """
        self.check()
        record = partial[None](self.record, action, on, who=who, peer=peer, **more)
        done: dict[str, Any] = {}
        try:
            yield done
        except Exception as error:
            record(allowed=not isinstance(error, Unauthorized), result=f"{type(error).__name__}: {error}")
            raise
        record(**done)

    def poll(self) -> bool:
        """Write lines again that a sink could not write. Return True if the sink takes lines, and the next turn can write more of them."""
        self._report(self._refusals.quiet(time.monotonic()))
        return True in [output.poll() for output in self._outputs]  # all are polled

    def write_to(self, file: Path | None) -> None:
        """Write the lines to another file, or to none; lines that wait for the file before are lost if it cannot be written."""
        before, self._file = self._file, None if file is None else _Output(partial(FileSink, file))
        others = [output for output in self._outputs if output is not before]
        self._outputs = others if self._file is None else [self._file, *others]
        if before is not None:
            before.close()

    def close(self) -> None:
        """Finish. May wait for Kafka."""
        self._report(self._refusals.rest())
        for output in self._outputs:
            output.close()


def _host(peer: str) -> str:
    """Return the host of HOST:PORT."""
    return peer.rpartition(":")[0]


#: No audit.
NO_AUDIT: Final = AuditTrail()


def audit_of(settings: AuditSettings, kafka: Mapping[str, Any]) -> AuditTrail:
    """Return the audit that the settings describe. Raises InvalidInput if the file cannot be written."""
    check_audit_file(settings)
    topic = settings.topic
    makers = [] if topic is None else [lambda done: LineTopic(kafka, topic, WAITING_LINES_MAX, done)]
    trail = AuditTrail(makers, messages=settings.messages, required=settings.on_failure == REFUSE)
    trail.write_to(settings.file)
    return trail


def check_audit_file(settings: AuditSettings) -> None:
    """Check that the file can be written. Raises InvalidInput."""
    if settings.file is not None:
        try:
            os.close(_opened(settings.file))
        except OSError as error:
            raise InvalidInput(f"audit.file {str(settings.file)!r} cannot be written: {error.strerror}") from None
