"""Bodies on disk: what was put is what is got, whether it has been written yet or not."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.broker.message import Bodies, BrokerMessage
from bascule.server import spill
from bascule.server.spill import SpillFiles


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), max_size=60))
@settings(max_examples=50)
def test_what_is_put_is_got_until_it_is_freed(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool]]) -> None:
    directory = tmp_path_factory.mktemp("spill") / "bodies"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "SEGMENT_BYTES", 8_000)
        patch.setattr(spill, "WRITE_BYTES", 2_000)
        files = SpillFiles(directory)
        held: list[tuple[int, bytes]] = []
        for number, (size, free) in enumerate(steps):
            body = bytes([number % 256]) * size
            held.append((files.put(body), body))
            if free:
                handle, old = held.pop(0)
                files.free(handle, len(old))
            assert all(files.get(handle, len(body)) == body for handle, body in held)
        files.close()
    assert not directory.exists()


def test_a_segment_that_nobody_needs_is_deleted(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path / "bodies")
    body = b"x" * (1 << 20)
    handles = [files.put(body) for _ in range(2 * (spill.SEGMENT_BYTES >> 20) + 1)]
    assert len(list((tmp_path / "bodies").iterdir())) == 3
    for handle in handles:
        files.free(handle, len(body))
    assert len(list((tmp_path / "bodies").iterdir())) == 1, "only the one that is being written stays"
    files.close()


def test_files_take_no_more_than_their_limit_and_say_before_that_they_are_short(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path / "bodies", limit_bytes=1 << 20)
    body = b"x" * 10_000
    handles: list[int] = []
    while not files.look():
        handles.append(files.put(body))
    assert "broker.spill_bytes" in files.shortage
    with pytest.raises(OSError, match="spill_bytes"):
        handles.extend(files.put(body) for _ in range(100))
    assert files.used_bytes <= 1 << 20
    assert sum(file.stat().st_size for file in (tmp_path / "bodies").iterdir()) <= 1 << 20
    freed = 0
    while files.look():
        files.free(handles[freed], len(body))
        freed += 1
    assert len(handles) // 10 < freed < len(handles) // 2
    assert files.get(files.put(body), len(body)) == body
    files.close()


def test_files_leave_the_disk_the_space_that_is_to_stay_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = 2_000_000
    files = SpillFiles(tmp_path / "bodies", free_min_bytes=1_000_000)
    monkeypatch.setattr(SpillFiles, "free_bytes", lambda _: free_bytes)
    body = b"x" * spill.WRITE_BYTES
    assert files.look() == ""
    files.put(body)
    free_bytes = 900_000
    assert "broker.spill_free_bytes" in files.look()
    with pytest.raises(OSError, match="spill_free_bytes"):
        files.put(body)
    free_bytes = 1_100_000
    assert files.look(), "a gap, so that producers do not stop and go on all the time"
    free_bytes = 1_300_000
    assert files.look() == ""
    files.put(body)
    files.close()


def test_a_body_without_room_on_the_disk_is_refused_and_later_ones_are_kept_when_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
