"""A Spark job's reader on a journal that is trimmed, or made anew, asked as Spark asks it."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.scenarios.sparkless import Bridge

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.positions import PositionLost
from bascule.pipelines.source import JournalStreamReader

Offset = dict[str, Any]


class Job:
    """A query of a job, which keeps its offset; each batch has a reader of its own, as after a restart."""

    def __init__(self, bridge: Bridge) -> None:
        self._options = {
            "kafka.bootstrap.servers": bridge.pipelines.kafka["bootstrap.servers"], "prefix": bridge.pipelines.prefix,
            "startingOffsets": "earliest",
        }  # fmt: skip
        self.offset: Offset = self._reader().initialOffset()

    def batch(self) -> list[str]:
        reader = self._reader()
        end = reader.latestOffset(self.offset, ReadAllAvailable())
        texts = [text for part in reader.partitions(self.offset, end) for rows in reader.read(part) for text in rows["text"].to_pylist()]
        self.offset = end
        return texts

    def _reader(self) -> JournalStreamReader:
        return JournalStreamReader(dict(self._options))


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str) -> Bridge:
    found = Bridge(kafka, topic_prefix)
    found.journal.start_epoch()
    found.send("1", "2")
    return found


def test_a_stream_stops_at_a_journal_that_was_made_anew_be_it_shorter_or_longer(bridge: Bridge) -> None:
    job = Job(bridge)
    assert job.batch() == ["1", "2"]
    bridge.renew()
    bridge.journal.start_epoch()
    with pytest.raises(PositionLost, match=r"ends at 1, before offset 3 of this stream: it was deleted and created again"):
        job.batch()
    bridge.send("3", "4", "5")
    with pytest.raises(PositionLost, match=r"is not the journal of which this stream stands at offset 3: it was deleted and created again"):
        job.batch()
    assert Job(bridge).batch() == ["3", "4", "5"]


def test_a_stream_whose_offset_an_earlier_version_has_left_goes_on_and_knows_its_journal_from_then_on(bridge: Bridge) -> None:
    job = Job(bridge)
    job.offset = {"offset": 2}
    assert job.batch() == ["2"]
    assert job.offset == {"offset": 3, "journal_id": bridge.topics.ids([bridge.pipelines.journal_topic])[bridge.pipelines.journal_topic]}


def test_a_stream_stops_where_its_records_are_trimmed(bridge: Bridge) -> None:
    job = Job(bridge)
    bridge.trim(2)
    with pytest.raises(PositionLost, match="records from offset 0 on were trimmed"):
        job.batch()
