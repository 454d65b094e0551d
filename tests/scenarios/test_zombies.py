"""A broker stands still in the middle of what it does, another takes over, and it goes on where it stood: it changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bascule.client import core
from bascule.core.crash import ARMED_VARIABLE
from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.crash_load import Load
from tests.support.system import System, stands_still, wait_for

CONFIG = """
[journal]
snapshot_records = 100
retention_s = 0
[broker]
session_timeout_s = 6
"""
#: Where which of the two brokers stands still, one after the other. An append comes before the first snapshot, that before a trim.
STOPS = [
    (0, "journal.append.before", 30),
    (1, "snapshot.write.before", 1),
    (0, "journal.trim.before", 1),
    (1, "snapshot.write.after", 2),
]
#: A client leaves a broker that has said nothing for so long.
LEAVE_S = 6.0
#: A takeover, the time after which clients leave a broker that says nothing, and the way to the next point under load.
NEXT_S = 200.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def stands(system: System) -> bool:
    return stands_still(Path(f"/proc/{system.broker.pid}"))


def stand_still_and_go_on(broker: System, other: System, load: Load, name: str) -> None:
    # The other one may have come to its own point before it is asked: its log answers always.
    served, ended = (said(each, text) for each, text in ((other, "ready amqp://"), (broker, "the epoch ends: ")))
    wait_for(lambda: stands(broker), f"the broker to come to {name}", NEXT_S)
    wait_for(lambda: said(other, "ready amqp://") > served, "the other one to take over", NEXT_S)
    sent = len(load.sent)
    wait_for(lambda: len(load.sent) > sent + 20 or stands(other), "work under the other one", NEXT_S)
    os.kill(broker.broker.pid, signal.SIGCONT)
    wait_for(lambda: said(broker, "the epoch ends: ") > ended, f"the end of what stood still at {name}", NEXT_S)


def said(system: System, text: str) -> int:
    return system.broker.said().count(text)


def test_suspended_broker_appends_snapshots_and_trims_nothing_that_counts(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "IDLE_TIMEOUT_S", LEAVE_S)
    armed = [",".join(f"{name}:{number}:stop" for of, name, number in STOPS if of == broker) for broker in (0, 1)]
    systems = [
        System(kafka.bootstrap, tmp_path / str(broker), prefix=topic_prefix, config=CONFIG, env={ARMED_VARIABLE: armed[broker]})
        for broker in (0, 1)
    ]
    last = System(kafka.bootstrap, tmp_path / "last", prefix=topic_prefix, config=CONFIG)
    try:
        systems[0].broker.start()
        systems[1].broker.launch()
        wait_for(systems[1].stands_by, "the second broker to stand by")
        with Load(systems[0], topic_prefix, ",".join(system.url for system in (*systems, last))) as load:
            for broker, name, _ in STOPS:
                stand_still_and_go_on(systems[broker], systems[1 - broker], load, name)
                assert load.failures == []
        # What they have left in Kafka is a state to start from.
        for system in systems:
            system.broker.kill()
        last.broker.start()
        load.check()
    finally:
        for system in (*systems, last):
            system.__exit__()
