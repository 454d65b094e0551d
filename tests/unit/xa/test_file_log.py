"""The decision log in a file keeps every confirmed decision, whatever is cut off after it."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bascule.core.errors import Unavailable
from bascule.xa import file_log
from bascule.xa.errors import Code
from bascule.xa.file_log import FileLog
from bascule.xa.log import Decision, Heuristic, LogDamaged, Outcome, encode
from bascule.xa.xid import LOG_ID, Xid, branch
from tests.support.system import wait_for

GOLDEN = Path(__file__).parents[2] / "golden" / "xa-v1"


def decision(number: int, outcome: Outcome = Outcome.COMMIT, by: str = "host/1") -> Decision:
    return Decision(f"shop/{number}".encode(), outcome, ("db", "kafka"), 1_790_000_000_000 + number, by)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "shop.xalog"


def test_decision_in_file_log_survives_process(path: Path) -> None:
    assert FileLog(path).decide(decision(1)) == decision(1)
    assert FileLog(path).read().decisions == {b"shop/1": decision(1)}


def test_first_decision_in_file_log_stands_for_all_processes(path: Path) -> None:
    first, second = FileLog(path), FileLog(path)
    rolled_back = decision(1, Outcome.ROLLBACK, "recoverer")
    assert first.decide(rolled_back) == rolled_back
    assert second.decide(decision(1)) == rolled_back
    assert first.decide(decision(1)) == rolled_back
    assert FileLog(path).read().decisions == {b"shop/1": rolled_back}


def test_forgotten_decisions_are_removed_with_next_decision_or_close(path: Path) -> None:
    log = FileLog(path)
    for number in (1, 2, 3):
        log.decide(decision(number))
    log.forget([b"shop/1", b"shop/unknown"])
    log.decide(decision(4))
    assert set(FileLog(path).read().decisions) == {b"shop/2", b"shop/3", b"shop/4"}
    log.forget([b"shop/3"])
    log.close()
    assert set(FileLog(path).read().decisions) == {b"shop/2", b"shop/4"}


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_file_mode_is_kept_when_log_is_rewritten(path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "DEAD_LINES_MAX", 1)
    log = FileLog(path)
    log.decide(decision(1))
    path.chmod(mode)
    with path.open() as before:  # an open file keeps its inode, so no new file gets it
        for number in range(2, 9):
            log.decide(decision(number))
            log.forget([f"shop/{number}".encode()])
        assert path.stat().st_ino != os.fstat(before.fileno()).st_ino
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(os.getuid() != 0, reason="only root changes the owner of a file")
def test_owner_is_kept_when_root_rewrites_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "DEAD_LINES_MAX", 1)
    log = FileLog(path)
    log.read()
    os.chown(path, 4711, 4712)
    with path.open() as before:
        for number in range(9):
            log.decide(decision(number))
            log.forget([f"shop/{number}".encode()])
        assert path.stat().st_ino != os.fstat(before.fileno()).st_ino
    assert (path.stat().st_uid, path.stat().st_gid) == (4711, 4712)


def test_processes_that_open_log_by_different_links_share_one_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "DEAD_LINES_MAX", 1)
    first = FileLog(path)
    first.read()
    link = path.parent.parent / "link.xalog"
    link.symlink_to(path)
    second = FileLog(link)
    for number in range(9):
        second.decide(decision(number))
        second.forget([f"shop/{number}".encode()])
    assert link.is_symlink()  # also after the log was rewritten
    assert first.decide(decision(10, Outcome.ROLLBACK)).outcome is Outcome.ROLLBACK
    assert second.decide(decision(10)).outcome is Outcome.ROLLBACK
    assert [each.name for each in link.parent.iterdir() if each.suffix == ".lock"] == []


def test_full_log_refuses_decisions_and_continues_when_there_is_space(path: Path) -> None:
    log = FileLog(path)
    log.decide(decision(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))  # a part of a line has space
    try:
        for _ in range(2):
            with pytest.raises(Unavailable, match="is full"):
                log.decide(decision(2))
        log.forget([b"shop/1"])
        assert set(log.read().decisions) == {b"shop/1"}
        assert set(FileLog(path).read().decisions) == {b"shop/1"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.decide(decision(3)) == decision(3)
    assert set(FileLog(path).read().decisions) == {b"shop/3"}


def test_heuristic_outcome_stays_in_file_log_until_forget(path: Path) -> None:
    log = FileLog(path)
    heuristic = Heuristic(branch(b"shop/1", "db"), Code.XA_HEURRB, Outcome.COMMIT, "by hand: ü", 1)
    log.record(heuristic)
    assert FileLog(path).read().heuristics == {heuristic.xid: heuristic}
    log.forget_heuristic(heuristic.xid)
    assert FileLog(path).read().heuristics == {}


def test_torn_tail_of_file_log_is_truncated(path: Path) -> None:
    log = FileLog(path)
    log.decide(decision(1))
    whole = path.stat().st_size
    log.decide(decision(2))
    log.close()
    data = path.read_bytes()
    for cut in range(whole, len(data)):
        for rest in (b"", b"\0" * 50):
            path.write_bytes(data[:cut] + rest)
            again = FileLog(path)
            assert set(again.read().decisions) == {b"shop/1"}
            again.decide(decision(3))
            again.close()
            assert set(FileLog(path).read().decisions) == {b"shop/1", b"shop/3"}


def test_damage_before_end_of_file_log_is_reported_with_its_position(path: Path) -> None:
    log = FileLog(path)
    for number in (1, 2, 3):
        log.decide(decision(number))
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"commit", b"Commit") + lines[2])
    with pytest.raises(LogDamaged, match=f"damaged at byte {len(lines[0])}"):
        FileLog(path).read()


def test_file_log_is_compacted_when_most_lines_are_dead_and_other_processes_follow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "DEAD_LINES_MAX", 20)
    log, other = FileLog(path), FileLog(path)
    other.decide(decision(0))
    sizes = []
    for number in range(1, 100):
        log.decide(decision(number))
        log.forget([f"shop/{number}".encode()])
        sizes.append(path.stat().st_size)
    assert max(sizes) < 40 * 200
    assert set(other.read().decisions) == {b"shop/0", b"shop/99"}
    other.decide(decision(200))
    assert set(log.read().decisions) >= {b"shop/0", b"shop/200"}


def test_threads_share_file_log_writes_and_each_gets_its_own_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FileLog(path)
    synced = []
    sync = os.fdatasync
    monkeypatch.setattr(file_log.os, "fdatasync", lambda file: (synced.append(1), sync(file)))
    answers: dict[int, Decision] = {}

    def decide(number: int) -> None:
        answers[number] = log.decide(decision(number % 50, by=str(number)))

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 100
    stands = FileLog(path).read().decisions
    assert all(answer == stands[f"shop/{number % 50}".encode()] for number, answer in answers.items())
    assert len(synced) <= 100


DECIDE_ALL = """
import sys
from pathlib import Path
from bascule.xa.file_log import FileLog
from bascule.xa.log import Decision, Outcome
log = FileLog(Path(sys.argv[1]))
for number in range(50):
    print(log.decide(Decision(b"shop/%d" % number, Outcome.COMMIT, (), 0, sys.argv[2])).by)
"""


class InterruptedMutex:
    """Raises KeyboardInterrupt at the second release of the mutex, just after the thread has taken the entries to write."""

    def __init__(self) -> None:
        self.released = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self.released += 1
        if self.released == 2:
            raise KeyboardInterrupt


def test_interrupt_of_writing_thread_loses_no_entries_of_other_threads(path: Path) -> None:
    """Otherwise the entry of the other thread would be lost, and the thread would be told that its decision is stored."""
    log = FileLog(path)
    other = file_log._Line(file_log._line("+", encode(decision(1))))
    log._waiting.append(other)  # the entry of a thread that waits
    log._mutex = InterruptedMutex()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        log.decide(decision(2))
    assert log._waiting == [other]
    assert log.decide(decision(3)) == decision(3)
    assert FileLog(path).read().decisions.keys() == {b"shop/1", b"shop/3"}


def test_concurrent_processes_agree_on_each_decision(path: Path) -> None:
    command = [sys.executable, "-c", DECIDE_ALL, str(path)]
    processes = [subprocess.Popen([*command, by], stdout=subprocess.PIPE, text=True) for by in ("one", "two")]
    first, second = (process.communicate(timeout=50)[0].splitlines() for process in processes)
    assert len(first) == 50
    assert first == second


def test_file_log_decides_nothing_after_failed_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FileLog(path)
    log.decide(decision(1))

    def fail(_file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(file_log.os, "fdatasync", fail)
        with pytest.raises(Unavailable, match="Input/output error"):
            log.decide(decision(2))
    with pytest.raises(Unavailable, match="is closed after a failed write"):
        log.decide(decision(3))
    with pytest.raises(Unavailable, match="is closed after a failed write"):
        log.read()
    # The log removed the entry that it could not sync: the disk may not have it, and a later fsync would not report that.
    assert FileLog(path).read().decisions == {b"shop/1": decision(1)}
    assert FileLog(path).decide(decision(3)) == decision(3)


def test_unsynced_decision_of_killed_process_is_synced_before_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_file: int) -> None:
        raise SystemExit

    FileLog(path).read()
    with monkeypatch.context() as broken:
        broken.setattr(file_log.os, "fdatasync", killed)
        with pytest.raises(SystemExit):
            FileLog(path).decide(decision(1))
    synced = []
    sync = os.fdatasync
    monkeypatch.setattr(file_log.os, "fdatasync", lambda file: (synced.append(os.fstat(file).st_ino), sync(file)))
    assert FileLog(path).read().decisions == {b"shop/1": decision(1)}
    assert synced == [path.stat().st_ino]


def test_directory_left_unsynced_by_killed_process_is_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_directory: Path) -> None:
        raise SystemExit

    with monkeypatch.context() as broken:
        broken.setattr(file_log, "_sync_directory", killed)
        with pytest.raises(SystemExit):
            FileLog(path).decide(decision(1))
    synced: list[Path] = []
    monkeypatch.setattr(file_log, "_sync_directory", synced.append)
    FileLog(path).decide(decision(1))
    assert synced == [path.parent]


def test_log_locked_by_suspended_process_is_reported_and_used_when_process_continues(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "LOCKED_MAX_S", 0.1)
    log = FileLog(path)
    log.decide(decision(1))
    with path.with_name(path.name + ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for _ in range(2):
            with pytest.raises(Unavailable, match="is locked by another process"):
                log.decide(decision(2))
    monkeypatch.undo()
    wait_for(lambda: log._locking is not None and log._locking.done(), "the thread that got the lock too late")
    assert log.decide(decision(3)) == decision(3)
    assert set(FileLog(path).read().decisions) == {b"shop/1", b"shop/3"}


def test_unusable_log_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="could not access"):
        FileLog(tmp_path / "file" / "log").read()


def test_log_id_is_the_same_for_all_processes_and_survives_compaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "DEAD_LINES_MAX", 3)
    log = FileLog(path)
    log_id = log.read().log_id
    assert LOG_ID.fullmatch(log_id)
    for number in range(20):
        log.decide(decision(number))
        log.forget([decision(number).gtrid])
    assert {log.read().log_id, FileLog(path).read().log_id} == {log_id}
    assert FileLog(path.with_name("other.xalog")).read().log_id != log_id


def put_another_log(path: Path) -> None:
    other = path.with_name("other.xalog")
    FileLog(other).read()
    other.replace(path)


def put_an_empty_file(path: Path) -> None:
    empty = path.with_name("empty")
    empty.write_bytes(b"")
    empty.replace(path)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "was removed while"),
        (lambda path: shutil.rmtree(path.parent), "could not access"),
        (lambda path: os.truncate(path, 0), r"was truncated from \d+ to 0 bytes"),
        (put_an_empty_file, "was replaced by an empty file"),
        (put_another_log, "was replaced by another log"),
    ],
    ids=["removed", "directory removed", "emptied", "replaced by an empty file", "replaced by another log"],
)
def test_lost_or_replaced_file_log_refuses_decisions(path: Path, harm: Callable[[Path], None], message: str) -> None:
    """An empty log has no decisions, so recovery would roll back prepared branches of committed transactions."""
    log = FileLog(path)
    log.decide(decision(1))
    data = path.read_bytes()
    harm(path)
    for _ in range(2):
        with pytest.raises((LogDamaged, Unavailable), match=message):
            log.decide(decision(2))
        with pytest.raises((LogDamaged, Unavailable), match=message):
            log.read()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    assert log.decide(decision(3)) == decision(3)
    assert set(FileLog(path).read().decisions) == {b"shop/1", b"shop/3"}


def test_decision_is_not_confirmed_when_log_is_removed_during_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FileLog(path)
    log.read()
    sync = os.fdatasync
    monkeypatch.setattr(file_log.os, "fdatasync", lambda file: (path.unlink(), sync(file)))
    with pytest.raises(Unavailable, match="was removed during a write"):
        log.decide(decision(1))


def test_file_log_of_earlier_formats_is_read_and_continued(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes((GOLDEN / "decisions.xalog").read_bytes())
    first, second, third = (b"shop/0199aa00bb00%020x" % number for number in (1, 2, 3))
    log = FileLog(path)
    state = log.read()
    by = "host/4711"
    assert state.decisions == {
        first: Decision(first, Outcome.COMMIT, ("orders-db", "kafka"), 1_790_000_000_000, by),
        second: Decision(second, Outcome.COMMIT, ("orders-db", "kafka"), 1_790_000_000_001, by, ("771", "")),
        third: Decision(third, Outcome.ROLLBACK, (), 1_790_000_000_002, "host/4712"),
    }
    xid = branch(second, "orders-db")
    assert state.heuristics == {xid: Heuristic(xid, Code.XA_HEURRB, Outcome.COMMIT, "by hand", 1_790_000_000_003)}
    log.decide(decision(5))
    again = FileLog(path).read()
    assert (again.log_id, set(again.decisions)) == (state.log_id, {first, second, third, b"shop/5"})


def test_xid_text_round_trips() -> None:
    for xid in (branch(b"shop/1", "db"), Xid(0, bytes(range(64)), b""), Xid(2**31 - 1, b":/%", b":")):
        assert Xid.parse(str(xid)) == xid


def test_file_log_that_cannot_be_compacted_keeps_working_and_is_compacted_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory may allow no new file. A stored decision must not be reported as in doubt because of that."""
    monkeypatch.setattr(file_log, "DEAD_LINES_MAX", 3)
    log = FileLog(path)
    log.decide(decision(0))
    obstacle = path.with_name(path.name + ".new")
    obstacle.mkdir()

    def decide(numbers: range) -> None:
        for number in numbers:
            assert log.decide(decision(number)) == decision(number)
            log.forget([decision(number).gtrid])

    decide(range(1, 12))
    assert set(log.read().decisions) == {b"shop/0"}
    obstacle.rmdir()
    size_bytes = path.stat().st_size
    decide(range(12, 18))
    assert path.stat().st_size < size_bytes
    assert set(log.read().decisions) == {b"shop/0"}


def test_path_of_the_log_may_be_a_string(path: Path) -> None:
    assert FileLog(str(path)).path == FileLog(path).path == path.absolute()
