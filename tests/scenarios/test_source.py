"""The reader of a Spark job, called as Spark calls it, on a journal that is trimmed, recreated, or has invalid JMS messages."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from bascule.core.errors import BadRecord, InvalidInput
from bascule.embedded.kafka import EmbeddedKafka
from bascule.jms.message import JmsMessage, encode_message
from bascule.jms.sections import APPLICATION_PROPERTIES, DATA, PROPERTIES, VALUE, head_of, section_bytes
from bascule.pipelines.source import JournalStreamReader
from bascule.writer.position import PositionLost
from tests.scenarios.sparkless import Bridge
from tests.support.journal import text_message

Offset = dict[str, Any]
#: Messages that a journal may hold and that are not valid in JMS: a text with a wrong charset, a map with a broken text, and a property
#: that is a list. Earlier versions of the broker accepted them.
MALFORMED = {
    "can't decode byte 0xff": section_bytes(PROPERTIES, [*[None] * 6, "text/plain"]) + section_bytes(DATA, b"\xff"),
    "property legs: a value of type list": section_bytes(APPLICATION_PROPERTIES, {"legs": [1, 2]}) + section_bytes(VALUE, "text"),
    "section amqp-value at byte": encode_message(JmsMessage(body_kind="map", body={"n": "x"}))[:-1] + b"\xff",
}


ANOTHER = r"offset 3 of this stream is not valid in journal .*: the topic was recreated"


class Job:
    """A query of a job, which keeps its offset. Each batch has a new reader, as after a restart."""

    def __init__(self, bridge: Bridge, **options: str) -> None:
        self._options = {
            "kafka.bootstrap.servers": bridge.pipelines.kafka["bootstrap.servers"], "prefix": bridge.pipelines.topics.prefix,
            "startingOffsets": "earliest", **options,
        }  # fmt: skip
        self.offset: Offset = self._reader().initialOffset()

    def batch(self) -> list[str]:
        return [row["text"] for row in self.rows()]

    def rows(self) -> list[dict[str, Any]]:
        reader = self._reader()
        end = reader.latestOffset(self.offset, ReadAllAvailable())
        found = [row for part in reader.partitions(self.offset, end) for rows in reader.read(part) for row in rows.to_pylist()]
        self.offset = end
        return found

    def option(self, name: str, value: str) -> None:
        self._options[name] = value

    def _reader(self) -> JournalStreamReader:
        return JournalStreamReader(dict(self._options))


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str) -> Bridge:
    found = Bridge(kafka, topic_prefix)
    found.journal.start_epoch()
    found.send("1", "2")
    return found


def test_stream_stops_at_a_recreated_journal_whether_shorter_or_longer(bridge: Bridge) -> None:
    job = Job(bridge)
    assert job.batch() == ["1", "2"]
    bridge.renew()
    bridge.journal.start_epoch()
    with pytest.raises(PositionLost, match=ANOTHER):
        job.batch()
    bridge.send("3", "4", "5")
    with pytest.raises(PositionLost, match=ANOTHER):
        job.batch()
    assert Job(bridge).batch() == ["3", "4", "5"]


@pytest.mark.on_mock_cluster
def test_stream_resumes_from_offset_of_an_earlier_version_and_stores_the_journal_id(bridge: Bridge) -> None:
    job = Job(bridge)
    job.offset = {"offset": 2}
    assert job.batch() == ["2"]
    assert job.offset["offset"] == 3
    assert job.offset["journal_id"] == bridge.topics.ids([bridge.pipelines.topics.journal])[bridge.pipelines.topics.journal]


def test_stream_stops_when_its_unread_records_are_trimmed(bridge: Bridge) -> None:
    job = Job(bridge)
    bridge.trim(2)
    with pytest.raises(PositionLost, match="records from offset 0 were trimmed"):
        job.batch()


@pytest.fixture(params=MALFORMED.items(), ids=["charset", "property", "body"])
def malformed(bridge: Bridge, request: pytest.FixtureRequest) -> tuple[str, bytes]:
    """Send such a message between two others of its transaction. Return why it is not a JMS message."""
    reason, message = request.param
    assert head_of(message)  # the broker reads the message from its journal
    bridge.journal.send(text_message("3"), message, text_message("4"))
    bridge.journal.flush()
    return reason, message


def test_malformed_message_becomes_a_row_with_its_raw_body_and_the_reason(bridge: Bridge, malformed: tuple[str, bytes]) -> None:
    reason, message = malformed
    *before, row, after = Job(bridge).rows()
    assert [each["text"] for each in (*before, after)] == ["1", "2", "3", "4"]
    (said,) = dict(row["headers"]).values()
    assert reason in said
    assert (row["address"], row["offset"], row["epoch"], row["sequence"], row["index"]) == ("flights", 3, 0, 3, 1)
    assert (row["body"], row["body_kind"], row["text"], row["value"], row["properties"]) == (message, None, None, None, [])
    assert (row["priority"], row["timestamp"] is None, row["expiration"]) == (4, False, None)


@pytest.mark.on_mock_cluster
def test_malformed_message_is_dropped_and_logged_in_mode_dropmalformed(
    bridge: Bridge, malformed: tuple[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    reason, _ = malformed
    assert Job(bridge, mode="dropMalformed").batch() == ["1", "2", "3", "4"]
    assert "journal, offset 3: could not decode message 0-3-1 to 'flights': " in caplog.text
    assert reason in caplog.text


@pytest.mark.on_mock_cluster
def test_malformed_message_stops_a_failfast_job_which_continues_in_mode_permissive(bridge: Bridge, malformed: tuple[str, bytes]) -> None:
    job = Job(bridge, mode="FAILFAST")
    said = rf"journal, offset 3: could not decode message 0-3-1 to 'flights': .*{malformed[0]}.* Set option mode to PERMISSIVE"
    for _ in range(2):
        with pytest.raises(BadRecord, match=said):
            job.batch()
    job.option("mode", "PERMISSIVE")
    assert job.batch() == ["1", "2", "3", None, "4"]


@pytest.mark.on_mock_cluster
def test_unknown_reader_mode_is_refused_with_the_valid_modes(bridge: Bridge) -> None:
    with pytest.raises(InvalidInput, match="option mode is 'lenient'; must be one of PERMISSIVE, DROPMALFORMED, FAILFAST"):
        Job(bridge, mode="lenient")
