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


def test_a_body_without_room_on_the_disk_is_refused_and_later_ones_are_kept_when_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = Bodies(SpillFiles(tmp_path / "bodies"), budget_bytes=0)
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
