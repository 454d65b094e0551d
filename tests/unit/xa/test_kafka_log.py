"""The decision log in Kafka while the offset of an append is unknown: the first decision counts for every process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.kafka.appender import OffsetUnknown
from bascule.kafka.compacted import Stored
from bascule.threads.joint import JointTry
from bascule.xa.kafka_log import KafkaLog, _Clients
from bascule.xa.log import Decision, Outcome
from tests.support.outage import THREADS, Door, Service, told_together


class Topic:
    """Entries in the order of their offsets. The next ``unknown`` appends are stored, but get no offset."""

    def __init__(self) -> None:
        self.unknown = 0
        self.between: list[Outgoing] = []  # entries that another process stores after the next append
        self.entries: list[tuple[bytes, bytes]] = []

    def append(self, record: Outgoing) -> Future[int]:
        future: Future[int] = Future()
        for each in (record, *self.between):
            self.entries.append((each.key or b"", each.value or b""))
        offset, self.between = len(self.entries) - 1 - len(self.between), []
        if self.unknown:
            self.unknown -= 1
            future.set_exception(OffsetUnknown("no offset"))
        else:
            future.set_result(offset)
        return future

    def reach(self, partition: int, offset: int, _timeout_s: float) -> dict[bytes, Stored]:
        return {key: Stored(value, partition, at) for at, (key, value) in enumerate(self.entries[: offset + 1])}


def log_of(topic: Topic) -> KafkaLog:
    log, client = KafkaLog({}), cast("Any", topic)
    log._open = _Clients(client, client, client)
    return log


def decision(outcome: Outcome, by: str) -> Decision:
    return Decision(b"transaction", outcome, ("db",), 0, by)


def test_earlier_decision_stored_at_unknown_offset_stands_before_later_decision_of_other_process() -> None:
    topic, other = Topic(), Topic()
    assert log_of(other).decide(decision(Outcome.ROLLBACK, "other")).by == "other"
    topic.between = [Outgoing("decisions", *other.entries[0])]
    topic.unknown = 1
    assert log_of(topic).decide(decision(Outcome.COMMIT, "mine")).by == "mine"
    assert log_of(topic).decide(decision(Outcome.ROLLBACK, "late")).by == "mine"
    assert len({key for key, _ in topic.entries}) == len(topic.entries)


def test_earlier_decision_of_other_process_stands_before_decision_stored_at_unknown_offset() -> None:
    topic = Topic()
    assert log_of(topic).decide(decision(Outcome.ROLLBACK, "other")).by == "other"
    topic.unknown = 1
    assert log_of(topic).decide(decision(Outcome.COMMIT, "mine")).by == "other"


def test_decisions_made_while_kafka_is_away_share_one_connection_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    door, kafka = Door(), Service(Unavailable("no answer"))
    monkeypatch.setattr("bascule.xa.kafka_log.own_topics.prepare", kafka)
    log = KafkaLog({})
    log._opening = JointTry(door)
    errors = told_together(door, kafka, lambda: log.decide(decision(Outcome.COMMIT, "mine")))
    assert [str(each) for each in errors] == ["no answer"] * THREADS
    assert kafka.tries == 1
