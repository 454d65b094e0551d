"""Driver and workers of the pipelines are ended at every boundary of an effect: each record is written once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from confluent_kafka import Producer
from tests.scenarios.bridge import Bridge

from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE, POINTS
from bascule.embedded.kafka import EmbeddedKafka
from bascule.testing.journal import text_message

#: In a worker, which Spark replaces. The first passes of a writer are the driver's.
WORKER = {
    name: 9 if name.startswith("writer") else 1 for name in POINTS if name.startswith(("writer.", "task.", "divert.", "ingress.dead"))
}
DRIVER = ["driver.topics.after", "driver.take.before", "driver.take.after", "driver.source.after"]
LEAVING = ["driver.stop.before", "driver.stop.after"]
WALK_S = 400.0
PAUSE_S = 0.3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_pipelines_are_ended_at_one_point_after_the_other(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "crashed"
    once.mkdir()
    points = {**WORKER, **dict.fromkeys(DRIVER + LEAVING, 1)}
    monkeypatch.setenv(ARMED_VARIABLE, ",".join(f"{name}:{number}" for name, number in points.items()))
    monkeypatch.setenv(ONCE_VARIABLE, str(once))
    bridge = Bridge(kafka, topic_prefix, tmp_path)
    prefix = bridge.prefix
    bridge.topics.create(f"{prefix}-in", 1, {})
    bridge.configure(
        f'dead_letter_topic = "{prefix}.dead"\n'
        f'[[divert]]\nname = "all"\nfrom = "orders"\nto = "{prefix}.all"\nstart = "earliest"\n'
        f'[[divert]]\nname = "bad"\nfrom = "bad.#"\nto = "{prefix}.${{address}}"\nstart = "earliest"\n'
        f'[[ingress]]\nname = "in"\ntopics = ["{prefix}-in"]\nto = "in"\nbody = "map"\nstart = "earliest"\n'
    )
    bridge.journal.start_epoch()
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    sent = 0

    def left() -> set[str]:
        return points.keys() - {each.name for each in once.iterdir()}

    def live(wanted: set[str]) -> None:
        """Until it has come by all of these."""
        nonlocal sent
        deadline = time.monotonic() + WALK_S
        while left() & wanted:
            assert time.monotonic() < deadline, left()
            if not bridge.child.running:
                bridge.child.start()
            bridge.journal.send(text_message(str(sent)), address="orders")
            bridge.journal.send(text_message("bad"), address="bad.no topic")
            producer.produce(f"{prefix}-in", f'{{"n": {sent}}}')
            producer.produce(f"{prefix}-in", "no json")
            bridge.journal.flush()
            producer.flush()
            sent += 1
            time.sleep(PAUSE_S)  # a batch each, so that there are many

    try:
        live({*WORKER, *DRIVER})
        for _ in LEAVING:
            bridge.child.stop(60)
            bridge.start()
        assert left() == set()
        written, taken, dead = (bridge.reader(f"{prefix}.{name}") for name in ("all", "ingress", "dead"))
        assert [int(value) for value in written.wait_for(sent)] == list(range(sent))
        assert len(taken.wait_for(sent)) == sent
        assert len(dead.wait_for(2 * sent)) == 2 * sent
        for reader in (written, taken, dead):
            reader.close()
    finally:
        bridge.child.stop(60)
