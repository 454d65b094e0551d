from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from bascule.core.errors import Unavailable
from bascule.server.housekeeping import StoredMessages
from bascule.server.stored_values import MEMORY_BYTES, StoredValues
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]  # fixtures


def test_stored_values_return_latest_value_of_message_id(tmp_path: Path) -> None:
    with closing(StoredValues(tmp_path / "scratch")) as values:
        for mid in (7, 1, 9):
            values.keep(mid, b"value %d" % mid)
        values.keep(1, b"another")
        values.forget(9)
        values.forget(5)
        assert dict(values) == {7: b"value 7", 1: b"another"}
        assert values.get(9) is None
        values.keep(2, b"behind what was read")
        assert values[2] == b"behind what was read"
    assert not (tmp_path / "scratch").exists()


def test_values_of_a_large_store_are_in_an_unnamed_file(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with closing(StoredValues(tmp_path / "scratch")) as values:
            for mid in range(16):
                values.keep(mid, bytes([mid]) * (MEMORY_BYTES // 2))
            assert tracemalloc.get_traced_memory()[0] < 2 * MEMORY_BYTES
            assert [values[mid][:2] for mid in (15, 0)] == [bytes([15]) * 2, bytes(2)]
            assert list((tmp_path / "scratch").iterdir()) == []
    finally:
        tracemalloc.stop()


def test_store_without_room_on_the_disk_is_unavailable(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create("store")
    kafka.put("store", bytes(MEMORY_BYTES + 1), key=b"1")
    (tmp_path / "file").write_bytes(b"")
    store = StoredMessages(SETTINGS, "store", tmp_path / "file" / "scratch")
    with pytest.raises(Unavailable, match=r"messages of topic store cannot be written to a temporary file: .*Not a directory"):
        store.read()
    store.release()
