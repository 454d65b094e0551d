"""A broker is suspended in the middle of its work, another takes over, and the first one resumes: its later work has no effect."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bascule.client import core
from bascule.core.crash import ARMED_VARIABLE
from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.crash_load import Load
from tests.support.system import SHORT_SESSION, System, stands_still, wait_for

CONFIG = f"""
[journal]
snapshot_records = 100
retention_s = 0
{SHORT_SESSION}"""
#: Which of the two brokers is suspended at which point, in order. An append precedes the first snapshot, which precedes a trim.
STOPS = [
    (0, "journal.append.before", 30),
    (1, "snapshot.write.before", 1),
    (0, "journal.trim.before", 1),
    (1, "snapshot.write.after", 2),
]
#: Time after which a client leaves a silent broker.
LEAVE_S = 6.0
#: Time for a takeover, for clients to leave a silent broker, and to reach the next point under load.
NEXT_S = 200.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def stands(system: System) -> bool:
    return stands_still(Path(f"/proc/{system.broker.pid}"))


def stand_still_and_go_on(broker: System, other: System, load: Load, name: str) -> None:
    # The other broker may have reached its own point before it is asked; its log always answers.
    served, ended = (said(each, text) for each, text in ((other, "ready amqp://"), (broker, "the epoch ends: ")))
    wait_for(lambda: stands(broker), f"the broker to come to {name}", NEXT_S)
    wait_for(lambda: said(other, "ready amqp://") > served, "the takeover by the other broker", NEXT_S)
    sent = len(load.sent)
    wait_for(lambda: len(load.sent) > sent + 20 or stands(other), "work under the other broker", NEXT_S)
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
        # The state that they have left in Kafka is a valid starting point.
        for system in systems:
            system.broker.kill()
        last.broker.start()
        load.check()
    finally:
        for system in (*systems, last):
            system.__exit__()
