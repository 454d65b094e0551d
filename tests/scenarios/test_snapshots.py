"""A broker that has taken snapshots loads from the newest one, and has the same messages as from the whole journal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.scenarios.conftest import Connect

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.admin import Topics
from bascule.kafka.snapshots import CHUNK_BYTES, SnapshotStore
from bascule.testing.system import System, wait_for

SENT = 400
TAKEN = 150
LATE = 50


@pytest.fixture(scope="module")
def small_steps(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    config = "[journal]\nsnapshot_records = 100\n"
    with System(kafka.bootstrap, tmp_path_factory.mktemp("snapshots"), prefix="snapshots", config=config) as running:
        yield running


def test_a_broker_that_is_killed_starts_from_its_newest_snapshot(connect_to: Connect, small_steps: System) -> None:
    producer = connect_to(small_steps.url).session().producer("queue:steps")
    session = connect_to(small_steps.url).session("TRANSACTED")
    consumer = session.consumer("queue:steps")
    producer.send("{n}", count=SENT)  # one journal record each: the producer waits for each answer
    taken = consumer.receive_many(TAKEN)
    session.commit()
    assert len(taken) == TAKEN
    wait_for(lambda: small_steps.depth("steps") == SENT - TAKEN, "the commit")
    wait_for(lambda: SnapshotStore({"bootstrap.servers": small_steps.bootstrap}, "snapshots.snapshots").read(), "a snapshot")
    # It counts when the journal says so, which is some milliseconds later.
    producer.send("late", count=LATE)
    small_steps.broker.restart()
    loads = re.findall(r"loaded from (.*), journal read from offset (\d+)", small_steps.broker.said())
    assert loads[-1][0].startswith("snapshot ")
    assert int(loads[-1][1]) > 0
    left = connect_to(small_steps.url).session().consumer("queue:steps").receive_many(SENT - TAKEN + LATE)
    assert [message.body for message in left] == [str(number) for number in range(TAKEN, SENT)] + ["late"] * LATE


def test_old_snapshots_are_cleaned_away_long_before_they_would_slow_a_start_down(small_steps: System) -> None:
    topics = Topics({"bootstrap.servers": small_steps.bootstrap})
    for name in ("snapshots", "store"):
        settings = topics.config(f"{small_steps.prefix}.{name}")
        assert settings["cleanup.policy"] == "compact"
        assert CHUNK_BYTES < int(settings["segment.bytes"]) < 1 << 28  # what is in the newest segment is never cleaned
