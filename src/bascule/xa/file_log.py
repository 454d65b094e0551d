"""The decision log in a local file: one line per entry, appended and synced before any process acts on the entry.

    5f2a91c0 + {"gtrid":"shop/0199...","outcome":"commit","resources":["orders-db","kafka"],"by":"host/4711","at_ms":1790000000000}
    77d0e3b2 - {"gtrid":"shop/0199..."}

A line begins with its CRC-32; the first line has the id of the log. Processes share the file with a lock file beside it (PATH.lock).
A process holds the lock while it reads the entries of others and appends its own. Threads that decide at the same time share one write
and one sync.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import json
import os
import stat
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bascule.core import crash
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.threads.background import in_background
from bascule.xa.blocking import now_ms
from bascule.xa.forks import abandon
from bascule.xa.log import Decision, Entry, Heuristic, LogDamaged, LogIdentity, LogState, decode, encode
from bascule.xa.xid import Xid, new_log_id

#: The file is rewritten when it has this many obsolete lines: by then they are most of the file, a few hundred KiB.
DEAD_LINES_MAX = 2000
_CRC_DIGITS = 8
#: After this time, in seconds, a process that has locked the log counts as suspended: a write and its sync take milliseconds.
LOCKED_MAX_S = 10.0
#: Errors of a write that has no effect on the lines before it.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = get_log("bascule.xa")


class FileLogViolation(enum.StrEnum):
    """Rules of the file that a test breaks."""

    #: A log that is removed while managers use it goes on empty.
    REMOVED_GOES_ON_EMPTY = "file-log-removed-goes-on-empty"


@dataclass(slots=True, eq=False)
class _Line:
    data: bytes
    written: bool = False


class FileLog:
    """A decision log for managers on one machine. The first call opens it."""

    def __init__(self, path: str | Path, *, violations: Collection[enum.StrEnum] = frozenset()) -> None:
        self.path = Path(path).resolve()  # the lock file is beside the file itself, whatever symbolic link a process has opened
        self._goes_on_empty = FileLogViolation.REMOVED_GOES_ON_EMPTY in violations
        self._file = -1
        self._read_to = 0  # bytes
        self._lines = 0
        self._compact_from = 0  # lines
        self._state = LogState()
        self._mutex = threading.Lock()  # guards the next two attributes
        self._waiting: list[_Line] = []
        self._forgotten: set[bytes] = set()
        self._turn = threading.Lock()  # its holder works on the file
        self._broken: OSError | None = None
        self._log_id = ""  # of the file that this process works with
        self._locking: Future[None] | None = None  # a thread that waits for the lock of another process

    def decide(self, decision: Decision) -> Decision:
        """See DecisionLog. Returns after the sync."""
        state = self._append(_line("+", encode(decision)))
        # If the decision is gone, another process has seen it and carried it out.
        return state.decisions.get(decision.gtrid, decision)

    def read(self) -> LogState:
        """See DecisionLog. Also writes pending deletions."""
        with self._turn, self._locked():
            if self._forgotten:
                try:
                    self._write([])
                except Unavailable as error:  # no space: the next reader forgets them
                    if self._broken is not None or not self._has_the_name():
                        raise
                    _log.warning("could not delete decisions, will retry", path=self.path, error=error)
            with self._unbroken():
                os.fdatasync(self._file)  # the writer of the last lines may have died before its sync
            return self._state.copy()

    def record(self, heuristic: Heuristic) -> None:
        """See DecisionLog. Returns after the sync."""
        self._append(_line("+", encode(heuristic)))

    def forget(self, gtrids: Iterable[bytes]) -> None:
        """See DecisionLog. Written with the next decision, or before the next read."""
        with self._mutex:
            self._forgotten.update(gtrids)

    def forget_heuristic(self, xid: Xid) -> None:
        """See DecisionLog. Returns after the sync."""
        self._append(_line("-", json.dumps({"xid": str(xid)}).encode()))

    def close(self) -> None:
        """Write pending deletions, and close the file."""
        with self._turn:
            if self._forgotten:
                with suppress(Unavailable, LogDamaged), self._locked():
                    self._write([])
            self._close()

    def after_fork(self) -> None:
        """See Forks. Parent and child would share one file position: the child opens its own file."""
        abandon(self._mutex, self._turn)
        self._mutex, self._turn = threading.Lock(), threading.Lock()
        self._waiting, self._forgotten, self._locking = [], set(), None
        self._close()

    def _append(self, line: bytes) -> LogState:
        """Append a line, and return the state of the log afterwards."""
        mine = _Line(line)
        with self._mutex:
            self._waiting.append(mine)
        with self._turn:
            if not mine.written:
                lines: list[_Line] = []
                try:
                    with self._mutex:
                        lines, self._waiting = self._waiting, []
                    with self._locked():
                        self._write([each.data for each in lines])
                except BaseException:
                    with self._mutex:
                        others = [each for each in lines + self._waiting if each is not mine]
                        self._waiting = others  # each meets the failure in its own turn, or succeeds
                    raise
                for each in lines:
                    each.written = True
            return self._state

    def _write(self, lines: list[bytes]) -> None:
        with self._mutex:
            forgotten, self._forgotten = self._forgotten, set()
        gone = [
            _line("-", json.dumps({"gtrid": gtrid.decode("latin-1")}).encode()) for gtrid in forgotten if gtrid in self._state.decisions
        ]
        try:
            with self._unbroken():
                self._put(b"".join([*gone, *lines]))
                crash.point("xa.log.write.after")
                os.fdatasync(self._file)
                crash.point("xa.log.sync.after")
        except Unavailable:
            with self._mutex:
                self._forgotten |= forgotten
            raise
        if not self._has_the_name():
            raise Unavailable(f"decision log {self.path} was removed during a write")
        self._catch_up()
        live = len(self._state.decisions) + len(self._state.heuristics)
        if self._lines - live > max(DEAD_LINES_MAX, live) and self._lines >= self._compact_from:
            self._compact()

    def _put(self, data: bytes) -> None:
        """Write lines at the end of the file. If there is no space, the log continues as it was. Raises Unavailable, OSError."""
        os.lseek(self._file, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            os.ftruncate(self._file, self._read_to)
            raise Unavailable(f"decision log {self.path} is full: {error}. Free disk space; no restart is needed") from error

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Run a write and its sync. Raises Unavailable; after the first failure always."""
        if self._broken is not None:
            raise Unavailable(
                f"decision log {self.path} is closed after a failed write: {self._broken}. Repair the cause and restart the process"
            )
        try:
            yield
        except OSError as error:
            # The system may show data that the disk does not have, and the next sync would not report it: nobody may read what was written
            # here, and this process decides nothing more.
            self._broken = error
            with suppress(OSError):
                os.ftruncate(self._file, self._read_to)
            raise Unavailable(f"could not write decision log {self.path}: {error}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file with the log's name for this process, open it and read it. Raises LogDamaged, Unavailable."""
        try:
            if not self._log_id:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_name(self.path.name + ".lock").open("a") as lock:
                self._take(lock.fileno())
                try:
                    self._open()
                    self._catch_up()
                    self._identify()
                    yield
                finally:  # the child of a fork may have the file open, too
                    fcntl.flock(lock, fcntl.LOCK_UN)
        except OSError as error:
            raise Unavailable(f"could not access decision log {self.path}: {error}") from error

    def _take(self, lock: int) -> None:
        """Lock a file. Raises Unavailable if another process holds the lock for a long time, as a suspended process does."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait_for_lock(lock)

    def _wait_for_lock(self, lock: int) -> None:
        if self._locking is None or self._locking.done():
            too_late = threading.Event()
            self._locking = in_background(partial(_lock_in_thread, os.dup(lock), too_late), "bascule-xa-lock")
            try:
                if wait([self._locking], LOCKED_MAX_S).done:
                    self._locking.result()
                    return
            finally:
                too_late.set()
            fcntl.flock(lock, fcntl.LOCK_UN)  # the thread may just have got it
        raise Unavailable(
            f"decision log {self.path} is locked by another process for more than {LOCKED_MAX_S:g} s; resume or end the process (it may be "
            f"suspended; `fuser {self.path}.lock` shows it)"
        )

    def _open(self) -> None:
        if self._file >= 0:
            if self._has_the_name():
                return
            self._close()  # another process has rewritten it
        created = 0 if self._log_id else os.O_CREAT
        try:
            self._file = os.open(self.path, os.O_RDWR | created | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise LogDamaged(
                f"decision log {self.path} was removed while a manager uses it. Restore the file; it has the decisions"
            ) from error
        try:
            _sync_directory(self.path.parent)  # also for an existing file: its creator may have died before this
        except BaseException:
            self._close()
            raise

    def _has_the_name(self) -> bool:
        """Return True if the open file is the one at the path."""
        with suppress(FileNotFoundError):
            return os.stat(self.path).st_ino == os.fstat(self._file).st_ino
        return False

    def _identify(self) -> None:
        """Make sure that the log has an id, and that it is the log that this process has used so far. Raises LogDamaged."""
        if not self._state.log_id:
            if self._log_id:
                self._close()
                raise LogDamaged(
                    f"decision log {self.path} was replaced by an empty file while a manager uses it. Restore log {self._log_id}"
                )
            self._write([_line("+", encode(LogIdentity(new_log_id(), now_ms())))])
        found = self._state.log_id
        if found != (self._log_id or found):
            self._close()
            raise LogDamaged(
                f"decision log {self.path} was replaced by another log: its id is {found}, expected {self._log_id}. "
                f"Restore log {self._log_id}"
            )
        self._log_id = "" if self._goes_on_empty else found

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._read_to, self._lines, self._state = -1, 0, 0, LogState()

    def _catch_up(self) -> None:
        """Read the lines appended since the last time, and truncate a line that a crash left incomplete: nobody has acted on it."""
        size_bytes = os.fstat(self._file).st_size
        if size_bytes < self._read_to:
            raise LogDamaged(f"decision log {self.path} was truncated from {self._read_to} to {size_bytes} bytes while a manager uses it")
        data = os.pread(self._file, size_bytes - self._read_to, self._read_to)
        good = 0
        for line in data.splitlines(keepends=True):
            if (read := _read_line(line)) is None:
                break
            self._apply(*read)
            good += len(line)
        if good < len(data):
            if any(_read_line(line) is not None for line in data[good:].splitlines(keepends=True)):
                raise LogDamaged(
                    f"decision log {self.path} is damaged at byte {self._read_to + good}: valid entries follow the damaged one"
                )
            os.ftruncate(self._file, self._read_to + good)
        self._read_to += good

    def _apply(self, sign: str, data: bytes) -> None:
        self._lines += 1
        if sign == "+":
            self._state.add(decode(data))
        elif "gtrid" in (fields := json.loads(data)):
            self._state.decisions.pop(fields["gtrid"].encode("latin-1"), None)
        else:
            self._state.heuristics.pop(Xid.parse(fields["xid"]), None)

    def _compact(self) -> None:
        """Rewrite the file. A failure is only logged: the decisions are stored already, so they are not in doubt."""
        try:
            self._rewrite()
        except OSError as error:
            self._compact_from = self._lines + DEAD_LINES_MAX
            _log.warning("could not compact decision log, will retry", path=self.path, error=error)
            return
        self._close()
        self._open()  # this also syncs the new name
        self._catch_up()

    def _rewrite(self) -> None:
        identity = LogIdentity(self._state.log_id, now_ms())
        entries: list[Entry] = [identity, *self._state.decisions.values(), *self._state.heuristics.values()]
        new = self.path.with_name(self.path.name + ".new")
        with new.open("wb") as file:
            self._keep_access(file.fileno())
            file.write(b"".join(_line("+", encode(entry)) for entry in entries))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)

    def _keep_access(self, new: int) -> None:
        """Give a new file the owner and the permissions of the log: a recovery may run as root, the program as another user."""
        old = os.fstat(self._file)
        if (old.st_uid, old.st_gid) != ((made := os.fstat(new)).st_uid, made.st_gid):
            os.fchown(new, old.st_uid, old.st_gid)
        os.fchmod(new, stat.S_IMODE(old.st_mode))


def _lock_in_thread(own: int, too_late: threading.Event) -> None:
    """Lock a file through a descriptor of this thread, and close the descriptor. The lock stays, unless it is too late."""
    try:
        fcntl.flock(own, fcntl.LOCK_EX)
        if too_late.is_set():
            fcntl.flock(own, fcntl.LOCK_UN)  # a child of a fork may have the file open, too
    finally:
        os.close(own)


def _line(sign: str, data: bytes) -> bytes:
    rest = f" {sign} ".encode() + data + b"\n"
    return f"{zlib.crc32(rest):08x}".encode() + rest


def _read_line(line: bytes) -> tuple[str, bytes] | None:
    """Return sign and data of a line, or None if it is incomplete."""
    rest = line[_CRC_DIGITS:]
    if not line.endswith(b"\n") or line[:_CRC_DIGITS] != f"{zlib.crc32(rest):08x}".encode():
        return None
    return rest[1:2].decode(), rest[3:-1]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
