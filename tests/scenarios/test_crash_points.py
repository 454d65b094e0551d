"""The broker is killed at every crash point, under load: no message is lost or duplicated."""

from __future__ import annotations

from pathlib import Path

import pytest

from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE, POINTS
from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.crash_load import Load
from tests.support.system import System, wait_for

PARTS = ("election", "epoch", "handover", "journal", "queue", "transaction", "ingress.take", "snapshot", "store")
BROKER = [name for name in POINTS if name.startswith(PARTS)]
#: Points that a broker passes once.
ONCE_A_LIFE = ("election", "epoch", "handover")
#: Points that a broker passes at its end, without load.
LEAVING = [name for name in BROKER if name.startswith("handover")]
#: Points of a short run.
SHORT = [
    "epoch.start.before", "epoch.start.after", "epoch.loaded", "journal.append.before", "journal.append.after", "journal.confirm.before",
    "journal.confirm.after", "queue.create.after", "transaction.commit.before", "transaction.commit.after", "ingress.take.before",
    "ingress.take.after", "snapshot.taken", "store.write.after", "snapshot.write.before", "snapshot.write.after", "snapshot.announce.after",
    "journal.trim.before", "journal.trim.after", "handover.snapshot",
]  # fmt: skip
#: Time to pass the points of one run, one after the other under one load.
WALK_S = 240.0
CONFIG = """
[journal]
snapshot_records = 100
retention_s = 0
"""


class Mortal:
    """A broker that is killed once at each of some points, and restarted each time."""

    def __init__(self, kafka: EmbeddedKafka, directory: Path, prefix: str, points: dict[str, int]) -> None:
        self.once = directory / "crashed"
        self.once.mkdir()
        self.points = points
        armed = {ARMED_VARIABLE: ",".join(f"{name}:{number}" for name, number in points.items()), ONCE_VARIABLE: str(self.once)}
        self.system = System(kafka.bootstrap, directory, prefix=prefix, config=CONFIG, env=armed)

    def left(self) -> set[str]:
        """Return the points at which it has not been killed yet."""
        return self.points.keys() - {each.name for each in self.once.iterdir()}

    def live(self, load: Load) -> None:
        """Restart the broker as often as it is killed."""
        broker = self.system.broker
        broker.launch()
        ends = 0  # counted here, because a point writes its mark a moment before it ends the process

        def done() -> bool:
            nonlocal ends
            left = self.left()
            assert load.failures == []
            if not broker.running:
                assert "crash point" in broker.said(), f"it has not come by {left}: {broker.said()}"
                ends += 1
                broker.launch()
            elif left and left <= set(LEAVING) and "ready amqp://" in broker.said():
                broker.stop()
            return ends == len(self.points)

        wait_for(done, "the last of its ends", WALK_S)
        broker.wait_ready()


def walk(kafka: EmbeddedKafka, directory: Path, prefix: str, points: dict[str, int]) -> None:
    mortal = Mortal(kafka, directory, prefix, points)
    try:
        with Load(mortal.system, prefix) as load:
            mortal.live(load)
        load.check()
    finally:
        mortal.system.__exit__()


def test_broker_crash_at_selected_points_in_turn_loses_and_doubles_no_message(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path
) -> None:
    walk(kafka, tmp_path, topic_prefix, dict.fromkeys(SHORT, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKER)
def test_broker_crash_at_first_pass_of_a_point_loses_and_doubles_no_message(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path, name: str
) -> None:
    walk(kafka, tmp_path, topic_prefix, {name: 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BROKER if not name.startswith(ONCE_A_LIFE)])
def test_broker_crash_at_third_pass_of_a_point_loses_and_doubles_no_message(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path, name: str
) -> None:
    walk(kafka, tmp_path, topic_prefix, {name: 3})
