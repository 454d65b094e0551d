"""The offset from which the journal is kept for pipelines, and the shown reason, by positions in Kafka in memory."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.broker.retention import OwnersRetention, RetentionHold
from bascule.broker.snapshot import Snapshot
from bascule.core.topics import JournalTopics
from bascule.journal.offsets import OffsetMap
from bascule.server.epoch import JournalPlace
from bascule.server.pipeline_holds import PipelineHolds
from bascule.writer.pipeline_holds import ALL_DISABLED, DISABLED, UNTOLD
from bascule.writer.position import BEGUN, COMMON, DIVERT, ENDED, INGRESS, Position, lag_group, position_key, position_partition
from tests.support.journal import SyntheticJournal, text_message
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory

TOPICS = JournalTopics("test")
BRIDGE = "bridge"


class Holds:
    """The inputs of an epoch: a journal with an exclusive divert ``export``, positions, and the reports of drivers."""

    def __init__(self, kafka: KafkaInMemory) -> None:
        self.kafka = kafka
        self.journal_id = kafka.create(TOPICS.journal).id
        self.journal = SyntheticJournal("memory", TOPICS.journal)
        self.journal.start_epoch(["export"])
        for number in range(9):
            self.journal.send(text_message(str(number)))
        self.journal.flush()
        self._looking = PipelineHolds(
            JournalPlace(
                SETTINGS, TOPICS, bridge=BRIDGE, append_timeout_s=5.0, snapshot_records=100, session_timeout_s=6.0,
                retention=OwnersRetention(0.0), pinned_bytes_max=0,
            )
        )  # fmt: skip

    def put(self, pipeline: str, offset: int, **fields: Any) -> None:
        """Store the position of a pipeline."""
        if TOPICS.positions not in self.kafka.topics:
            self.kafka.create(TOPICS.positions, 16, cleanup_policy="compact")
        given = {"topic": TOPICS.journal, "topic_id": self.journal_id, "partition": 0, "members": ("x",), "owner": "driver", **fields}
        position = Position(offset=offset, **given)
        key = position_key(pipeline, position.topic, position.partition)
        self.kafka.put(TOPICS.positions, position.encode(), key.encode(), partition=position_partition(key))

    def say(self, pipeline: str, offset: int, note: str) -> None:
        """Publish a driver's report with the lag of its pipeline."""
        self.kafka.offsets[lag_group(TOPICS.prefix, BRIDGE, pipeline)][TOPICS.journal, 0] = (offset, note)

    def look(self) -> dict[str, RetentionHold]:
        end = self.kafka.partition(TOPICS.journal).end
        return {hold.name: hold for hold in self._looking.found(Snapshot(0, 0, end, 1, OffsetMap(), [], {}))}

    def found(self) -> dict[str, tuple[int, str]]:
        return {name: (hold.offset, hold.reason) for name, hold in self.look().items()}


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> Holds:
    return Holds(KafkaInMemory(monkeypatch))


def test_moving_pipeline_has_no_reason_and_stalled_one_shows_since_when(holds: Holds) -> None:
    holds.put(COMMON, 3)
    assert holds.found() == {COMMON: (3, "")}
    holds.put(COMMON, 4)
    assert holds.found() == {COMMON: (4, "")}
    (_, reason), *_ = holds.found().values()
    assert reason.startswith("has not moved since 20")
    assert "+00:00: the pipelines are not running" in reason
    holds.put(COMMON, 10)
    assert holds.found() == {COMMON: (10, "")}
    assert holds.found() == {COMMON: (10, "")}  # the pipeline has read all records


@pytest.mark.parametrize(("said_at", "reason"), [(3, "topic orders is missing"), (4, "topic orders is missing"), (2, "")])
def test_last_report_of_the_driver_is_the_reason_unless_the_pipeline_has_moved(holds: Holds, said_at: int, reason: str) -> None:
    holds.put(COMMON, 3)
    holds.say(COMMON, said_at, "topic orders is missing")
    assert holds.found() == {COMMON: (3, reason)}


def test_disabled_divert_is_distinguished_from_a_stopped_one(holds: Holds) -> None:
    holds.put(COMMON, 3)
    for name, said in (("off", ""), ("ended", ENDED), ("stopped", "topic orders is missing")):
        holds.put(f"{DIVERT}{name}", 2, owner="", members=(name,))
        if said:
            holds.say(f"{DIVERT}{name}", 2, said)
    assert holds.found() == {
        COMMON: (3, ""),
        f"{DIVERT}off": (2, DISABLED),
        f"{DIVERT}ended": (2, DISABLED),
        f"{DIVERT}stopped": (2, "topic orders is missing"),
    }


def test_hold_of_common_position_without_members_reports_disabled_diverts(holds: Holds) -> None:
    holds.put(COMMON, 3, members=())
    assert holds.found() == {COMMON: (3, ALL_DISABLED)}


def test_journal_is_not_kept_for_other_sources_and_removed_pipelines(holds: Holds) -> None:
    holds.put(COMMON, 9)
    holds.put(f"{BEGUN}{DIVERT}x", 1)
    holds.put(f"{DIVERT}gone", 1, owner="", members=())
    holds.put(f"{INGRESS}stock", 1, topic="stock", topic_id="other")
    holds.put(f"{DIVERT}other-partition", 1, partition=1)
    assert holds.found() == {COMMON: (9, "")}


def test_journal_is_pinned_from_start_for_exclusive_divert_without_position(holds: Holds) -> None:
    holds.put(f"{DIVERT}known", 5, members=("known",))
    assert holds.found() == {f"{DIVERT}export": (0, UNTOLD), f"{DIVERT}known": (5, "")}


def test_journal_is_pinned_from_common_position_for_exclusive_divert_listed_there(holds: Holds) -> None:
    holds.put(COMMON, 6, owner="", members=(), epoch=0, exclusive=("export",))
    assert holds.found() == {f"{DIVERT}export": (6, UNTOLD)}


def test_position_of_recreated_journal_does_not_count_for_exclusive_divert(holds: Holds) -> None:
    holds.put(COMMON, 6, owner="", members=(), epoch=0, exclusive=("export",), topic_id="earlier")
    assert holds.found() == {f"{DIVERT}export": (0, UNTOLD)}
