"""The reads of a broker that loads its journal."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import closing

import pytest

from bascule.broker.retention import OwnersRetention
from bascule.core.topics import JournalTopics
from bascule.server import following
from bascule.server.epoch import JournalPlace
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]

PLACE = JournalPlace(
    SETTINGS, JournalTopics("t"), "following", append_timeout_s=15, snapshot_records=1000,
    session_timeout_s=60, retention=OwnersRetention(0), pinned_bytes_max=0,
)  # fmt: skip


def test_load_continues_with_a_new_client_if_the_old_one_gets_no_records(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the old one reads from a node that is cut off, and the end is known from another node."""
    monkeypatch.setattr(following, "RENEW_S", -1)
    kafka.create(PLACE.topics.journal)
    for number in range(3):
        kafka.put(PLACE.topics.journal, bytes([number]))

    async def load() -> None:
        assert await effects.read(1) == [(1, b"\1"), (2, b"\2")]
        assert effects._reader is not None
        monkeypatch.setattr(effects._reader._consumer, "consume", lambda *_: [])
        assert await effects.read(1) == []
        assert await effects.read(1) == []  # no record is expected yet
        effects.end = 3
        assert await effects.read(1) == []
        assert await effects.read(1) == [(1, b"\1"), (2, b"\2")]

    with closing(following._Effects(PLACE, lambda: pytest.fail("no engine is needed"))) as effects:
        asyncio.run(load())


class Engine:
    """An engine refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_collector_examines_no_loaded_object_until_the_load_was_in_vain(kafka: KafkaInMemory) -> None:
    with closing(following._Effects(PLACE, lambda: pytest.fail("no engine is needed"))) as effects:
        with effects.bulk():
            assert not gc.isenabled()
            engine = weakref.ref(Engine())
        assert gc.isenabled()
        gc.collect()
        assert engine() is not None, "frozen"
        with effects.bulk():
            assert engine() is None, "the engine of a load in vain"
        assert gc.get_freeze_count()
        effects.unfreeze()
        assert not gc.get_freeze_count()
