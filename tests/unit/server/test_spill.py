"""Bodies on disk: each body is read back unchanged, even before it is flushed."""

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.broker.message import Bodies, BrokerMessage
from bascule.server import spill
from bascule.server.spill import SpillFiles


class Kept:
    """The owner of a body."""

    def __init__(self, files: SpillFiles, body: bytes) -> None:
        self.files, self.body, self.size_bytes = files, body, len(body)
        self.handle = -1
        self.handle = files.put(body, self)

    def whole(self) -> bool:
        return self.files.get(self.handle, len(self.body)) == self.body

    def free(self) -> None:
        self.files.free(self.handle, len(self.body))


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9), st.integers(0, 3)), max_size=60))
@settings(max_examples=50)
def test_a_stored_body_can_be_read_until_it_is_freed(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int]]) -> None:
    directory = tmp_path_factory.mktemp("spill") / "bodies"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "SEGMENT_BYTES", 8_000)
        patch.setattr(spill, "WRITE_BYTES", 2_000)
        patch.setattr(spill, "SLACK_SEGMENTS", 0)
        files = SpillFiles(directory)
        held: list[Kept] = []
        compaction = files.compaction()
        for number, (size, freed, pieces) in enumerate(steps):
            held.append(Kept(files, bytes([number % 256]) * size))
            if freed < len(held):
                held.pop(freed).free()
            for _ in range(pieces):
                if next(compaction, None) is None:
                    compaction = files.compaction()
            assert all(each.whole() for each in held)
        files.close()
    assert not directory.exists()


def test_a_segment_without_needed_bodies_is_deleted(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path / "bodies")
    body = b"x" * (1 << 20)
    kept = [Kept(files, body) for _ in range(2 * (spill.SEGMENT_BYTES >> 20) + 1)]
    assert len(list((tmp_path / "bodies").iterdir())) == 3
    for each in kept:
        each.free()
    assert len(list((tmp_path / "bodies").iterdir())) == 1, "only the file that is being written stays"
    files.close()


def test_files_stay_within_their_limit_and_report_a_shortage_before(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path / "bodies", limit_bytes=1 << 20)
    body = b"x" * 10_000
    kept: list[Kept] = []
    files.look()
    assert files.roomy
    while not files.look():
        kept.append(Kept(files, body))
    assert "broker.spill_bytes" in files.shortage
    assert not files.roomy
    with pytest.raises(OSError, match="spill_bytes"):
        kept.extend(Kept(files, body) for _ in range(100))
    assert files.used_bytes <= 1 << 20
    assert size_of(tmp_path / "bodies") <= 1 << 20
    freed = 0
    while files.look():
        kept[freed].free()
        freed += 1
    assert len(kept) // 10 < freed < len(kept) // 2
    assert Kept(files, body).whole()
    files.close()


def test_files_leave_the_configured_space_on_the_disk_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = 2_000_000
    files = SpillFiles(tmp_path / "bodies", free_min_bytes=1_000_000)
    monkeypatch.setattr(SpillFiles, "free_bytes", lambda _: free_bytes)
    body = b"x" * spill.WRITE_BYTES
    assert files.look() == ""
    Kept(files, body)
    free_bytes = 900_000
    assert "broker.spill_free_bytes" in files.look()
    with pytest.raises(OSError, match="spill_free_bytes"):
        Kept(files, body)
    free_bytes = 1_100_000
    assert files.look(), "hysteresis, so that producers do not block and continue all the time"
    free_bytes = 1_300_000
    assert files.look() == ""
    Kept(files, body)
    files.close()


def test_body_stays_in_memory_when_disk_is_full_and_later_bodies_are_spilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = Bodies(SpillFiles(tmp_path / "bodies"), memory_bytes=0)
    messages = [BrokerMessage(bytes([number]) * spill.WRITE_BYTES) for number in range(4)]

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    bodies.hold(messages[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        bodies.hold(messages[1])
    bodies.hold(messages[2])
    bodies.hold(messages[3])
    assert [message.body is None for message in messages] == [True, False, True, True]
    assert [bodies.read(message)[:1] for message in messages] == [b"\x00", b"\x01", b"\x02", b"\x03"]
    for message in messages:
        bodies.release(message)
    assert (bodies.memory_bytes, bodies.stored_bytes) == (0, 0)


def keep_one_in_each_segment(files: SpillFiles, segments: int) -> list[Kept]:
    """Store bodies, one of which is left in each segment."""
    left, segment_bytes = [], files.limit_bytes // spill.SEGMENTS_MIN
    for _ in range(segments):
        kept = [Kept(files, b"%d" % number * 5_000) for number in range(10)]
        while sum(len(each.body) for each in kept) < segment_bytes:
            kept.append(Kept(files, b"x" * 5_000))
        left.append(kept.pop(3))
        for each in kept:
            each.free()
    return left


def test_files_with_few_needed_bodies_are_compacted(tmp_path: Path) -> None:
    directory = tmp_path / "bodies"
    files = SpillFiles(directory, limit_bytes=4 << 20)
    left = keep_one_in_each_segment(files, 12)
    assert files.wasteful
    assert size_of(directory) > 2 << 20
    pieces = list(files.compaction())
    assert max(pieces) < 1_000
    assert not files.wasteful
    live_bytes = sum(len(each.body) for each in left)
    assert files.used_bytes <= spill.WASTE_MAX * live_bytes + (spill.SLACK_SEGMENTS + 1) * (4 << 20) // spill.SEGMENTS_MIN
    assert size_of(directory) <= files.used_bytes
    assert all(each.whole() for each in left)
    for each in left:
        each.free()
    assert len(list(directory.iterdir())) == 1
    files.close()


def test_bodies_freed_in_the_order_of_arrival_are_not_copied(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path / "bodies", limit_bytes=4 << 20)
    kept = [Kept(files, b"x" * 5_000) for _ in range(600)]
    wasteful = []
    for each in kept:
        wasteful.append(files.wasteful)
        each.free()
    assert wasteful == [False] * 600
    files.close()


def test_failed_compaction_without_room_keeps_all_bodies_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SpillFiles(tmp_path / "bodies", limit_bytes=4 << 20)
    left = keep_one_in_each_segment(files, 12)
    files.limit_bytes = files.used_bytes
    with pytest.raises(OSError, match="spill_bytes"):
        list(files.compaction())
    assert all(each.whole() for each in left)
    files.close()


def test_index_of_spill_segment_stays_small_for_small_bodies(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path / "bodies", limit_bytes=1 << 20)
    last = Kept(files, b"x")
    for _ in range(5_000):
        Kept(files, b"x").free()
    list(files.compaction())
    assert sum(len(segment.owners) for segment in files._segments.values()) < 3 * (1 << 20) // spill.SEGMENTS_MIN // spill.ENTRY_BYTES + 3
    assert last.whole()
    files.close()


def test_spill_files_have_bodies_as_clients_sent_them_and_are_for_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing encrypts messages on the disk: whoever reads files of this account reads messages."""
    monkeypatch.setattr(spill, "WRITE_BYTES", 1)
    umask = os.umask(0)
    try:
        files = SpillFiles(tmp_path / "bodies")
        kept = Kept(files, b"the body of a message" * 100)
        Kept(files, b"another")  # bodies are written before the next one
    finally:
        os.umask(umask)
    found = list((tmp_path / "bodies").iterdir())
    assert kept.body in b"".join(file.read_bytes() for file in found)
    assert {stat.S_IMODE(file.stat().st_mode) for file in found} == {0o600}
    files.close()


@given(st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 9), st.integers(0, 3)), max_size=40))
@settings(max_examples=50)
def test_large_bodies_can_be_read_whether_they_are_written_or_not(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("spill") / "bodies"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SEGMENT_BYTES": 8_000, "WRITE_BYTES": 1_000, "LARGE_BYTES": 2_000, "SLACK_SEGMENTS": 0}.items():
            patch.setattr(spill, name, value)
        files = SpillFiles(directory)
        waiting: list[None] = []
        files.on_waiting = lambda: waiting.append(None)
        writing, compaction, held = files.writing(), files.compaction(), []
        for number, (size, freed, pieces) in enumerate(steps):
            held.append(Kept(files, bytes([number % 256]) * size))
            for _ in range(pieces):
                if next(writing, None) is None:
                    writing = files.writing()
                if next(compaction, None) is None:
                    compaction = files.compaction()
            if freed < len(held):
                held.pop(freed).free()
            assert all(each.whole() for each in held)
            assert files.waiting_bytes == sum(map(len, files._large.values()))
            assert bool(files.waiting_bytes) <= bool(waiting)
        list(writing)
        list(files.writing())
        assert files.waiting_bytes == 0
        assert all(each.whole() for each in held)
        files.close()


def test_large_body_stays_readable_while_the_disk_is_full_and_many_of_them_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SpillFiles(tmp_path / "bodies")
    files.on_waiting = lambda: None
    body = b"x" * (spill.LARGE_BYTES + 1)
    kept = Kept(files, body)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert list(files.writing()) == []
        assert (kept.whole(), files.waiting_bytes) == (True, len(body))
    files.memory_bytes = int(2 * len(body) / spill.WAITING_SHARE)
    other = Kept(files, body)
    with pytest.raises(OSError, match="wait to be written"):
        Kept(files, body)
    assert max(files.writing()) < 1_000
    assert (files.waiting_bytes, kept.whole(), other.whole()) == (0, True, True)
    assert Kept(files, body).whole()
    files.close()


def test_bodies_that_wait_to_be_written_take_a_share_of_the_memory_but_one_may_always_wait(tmp_path: Path) -> None:
    body = b"x" * spill.LARGE_BYTES
    files = SpillFiles(tmp_path / "bodies", memory_bytes=len(body))
    files.on_waiting = lambda: None
    first = Kept(files, body)
    assert files.waiting_bytes == len(body)
    with pytest.raises(OSError, match="wait to be written"):
        Kept(files, body)
    for _ in files.writing():
        pass
    assert first.whole()
    assert Kept(files, body).whole()
    files.close()


def loaded(count: int, size: int, first: int = 0) -> list[BrokerMessage]:
    messages = []
    for number in range(first, first + count):
        message = BrokerMessage(bytes([number % 256]) * size)
        message.mid, message.references = number, 1
        messages.append(message)
    return messages


def record_of(messages: list[BrokerMessage], between: int) -> tuple[bytes, list[int]]:
    """Take the bodies out of messages. Return a record with the bodies and ``between`` bytes before each, and where the bodies begin."""
    content, starts = b"", []
    for message in messages:
        content += b"-" * between
        starts.append(len(content))
        content += message.body or b""
        message.body = None
    return content, starts


@pytest.mark.parametrize("between", [0, 50])
@pytest.mark.parametrize("size", [0, 7, 500, 4_000, 700_000])
def test_loaded_bodies_are_stored_together_and_counted_like_single_ones(
    size: int, between: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "SEGMENT_BYTES", 40_000)
    together, single = (Bodies(SpillFiles(tmp_path / name), 1 << 20) for name in ("together", "single"))
    records = [loaded(20, size, 20 * number) for number in range(10)]
    for record in records:
        together.hold_loaded(record, *record_of(record, between))
        for message in loaded(20, size):
            single.hold(message, for_long=True)
    messages = [message for record in records for message in record]
    assert [together.read(message) for message in messages] == [bytes([number]) * size for number in range(200)]
    counts = [(each.account.messages, each.account.entries, each.stored_bytes + each.memory_bytes) for each in (together, single)]
    assert counts == [(200, 200, 200 * size)] * 2
    assert together.memory_bytes <= together.account.first_bodies_max_bytes
    for message in messages:
        together.release(message)
    assert (together.stored_bytes, together.memory_bytes) == (0, 0)


def test_loaded_bodies_stay_in_memory_if_the_disk_has_no_room(tmp_path: Path) -> None:
    bodies = Bodies(SpillFiles(tmp_path / "bodies", limit_bytes=10_000), 1 << 20)
    record = loaded(30, 1_000)
    bodies.hold_loaded(record, *record_of(record, 50))
    assert [bodies.read(message) for message in record] == [bytes([number]) * 1_000 for number in range(30)]
    assert (bodies.stored_bytes, bodies.memory_bytes) == (0, 30_000)


def test_bodies_that_are_read_in_the_order_of_their_arrival_need_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SpillFiles(tmp_path / "bodies")
    kept = [Kept(files, bytes([number % 256]) * 1_000) for number in range(2_000)]
    sizes, pread = [], os.pread

    def read(file: int, size_bytes: int, offset: int) -> bytes:
        sizes.append(size_bytes)
        return pread(file, size_bytes, offset)

    monkeypatch.setattr(os, "pread", read)
    assert all(each.whole() for each in kept)
    assert len(sizes) < 2 * 2_000_000 / spill.READ_AHEAD_BYTES
    sizes.clear()
    assert all(each.whole() for each in kept[::-100])
    assert set(sizes) == {1_000}, "no more is read than one body if the bodies are read in another order"
    files.close()
