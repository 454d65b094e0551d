"""The driver and the workers of the pipelines are killed at every crash point: each record is written exactly once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE, POINTS
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import Child
from bascule.jms.message import decode_message
from bascule.kafka import clients
from tests.scenarios.bridge import Bridge, Reader, eventually
from tests.scenarios.test_pipelines import EXAMPLE
from tests.scenarios.test_pipelines import sent as sent_in
from tests.support.journal import text_message

#: Points in a worker, which Spark replaces.
WORKER = [name for name in POINTS if name.startswith(("writer.", "task.", "divert.", "ingress.dead"))]
DRIVER = ["driver.topics.after", "driver.take.before", "driver.take.after", "driver.source.after"]
JOIN = ["join.before", "join.caught_up", "join.after"]
SINK = ["sink.commit.before", "sink.commit.after"]
LEAVING = ["driver.stop.before", "driver.stop.after"]
#: Points of a short run: those where a record could be duplicated or lost.
SHORT = ["writer.commit.before", "writer.commit.after", "task.transaction.after", "task.divert.end", "task.ingress.end", "join.caught_up"]
#: The points of each run, in order. A driver that was killed while joining may find nothing left to join after its restart.
WALKS = {"where it matters most": SHORT, "at work": [*WORKER, *DRIVER, *LEAVING], **{name: [name] for name in JOIN}}
WALK_S = 1200.0
PAUSE_S = 0.3

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.slow
@pytest.mark.parametrize("name", SINK)
def test_user_job_crash_around_batch_commit_writes_each_record_once(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path, name: str
) -> None:
    bridge = Bridge(kafka, topic_prefix, tmp_path)
    bridge.topics.create(f"{topic_prefix}.ingress", 1, {"retention.ms": "-1", "retention.bytes": "-1", "max.message.bytes": str(70 << 20)})
    armed = {ARMED_VARIABLE: f"{name}:2", ONCE_VARIABLE: str(tmp_path)}
    env = {"BASCULE_JOURNAL__PREFIX": topic_prefix, "BASCULE_BRIDGE__ID": topic_prefix, **armed}
    job = Child([sys.executable, EXAMPLE, bridge.servers, tmp_path / "checkpoint"], log_file=tmp_path / "job.log", env=env, name="job")
    bridge.journal.start_epoch()
    reader = bridge.reader(f"{topic_prefix}.ingress")
    sent = 0
    deadline = time.monotonic() + WALK_S
    try:
        while not (tmp_path / name).exists():
            assert time.monotonic() < deadline, f"it has not come by {name}"
            if not job.running:
                job.start()
            properties = {"carrier": "AA", "dep_delay": 90}
            bridge.journal.send(text_message("{}", message_id=f"ID:{sent}", properties=properties), address="flights")
            bridge.journal.flush()
            sent += 1
            time.sleep(PAUSE_S)
        assert job.wait(WALK_S)
        job.start()
        reader.wait_for(sent)
    finally:
        job.stop(60)
    reader.poll()
    ids = [decode_message(sent_in(message).body).message_id for message in reader.seen]
    assert ids == [f"ID:{number}" for number in range(sent)]
    reader.close()


def dead_letters(reader: Reader, pipeline: str) -> list[bytes]:
    name = ("__connect.errors.connector.name", pipeline.encode())
    return [message.value() or b"" for message in reader.seen if name in (message.headers() or ())]


@pytest.mark.parametrize(
    "walk", [pytest.param(walk, id=name, marks=[] if walk is SHORT else [pytest.mark.slow]) for name, walk in WALKS.items()]
)
def test_pipelines_crash_at_points_in_turn_writes_each_record_once(
    walk: list[str], kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "crashed"
    once.mkdir()
    in_workers, in_driver = (",".join(name for name in walk if (name in WORKER) is there) for there in (True, False))
    monkeypatch.setenv(ARMED_VARIABLE, in_driver)
    monkeypatch.setenv(ONCE_VARIABLE, str(once))
    bridge = Bridge(kafka, topic_prefix, tmp_path)
    prefix = bridge.prefix
    bridge.topics.create(f"{prefix}-in", 1, {})
    bridge.configure(
        f'dead_letter_topic = "{prefix}.dead"\nspark."spark.executorEnv.{ARMED_VARIABLE}" = "{in_workers}"\n'
        f'[[divert]]\nname = "all"\nfrom = "orders"\nto = "{prefix}.all"\nstart = "earliest"\n'
        f'[[divert]]\nname = "bad"\nfrom = "bad.#"\nto = "{prefix}.${{address}}"\nstart = "earliest"\n'
        f'[[divert]]\nname = "late"\nfrom = "orders"\nto = "{prefix}.late"\nstart = "latest"\n'
        f'[[ingress]]\nname = "in"\ntopics = ["{prefix}-in"]\nto = "in"\nbody = "map"\nstart = "earliest"\n'
    )
    bridge.journal.start_epoch()
    producer = clients.producer({"bootstrap.servers": kafka.bootstrap})
    sent = 0

    def left() -> set[str]:
        return {*walk} - {each.name for each in once.iterdir()}

    def send() -> None:
        nonlocal sent
        bridge.journal.send(text_message(str(sent)), address="orders")
        bridge.journal.send(text_message(f"bad {sent}"), address="bad.no topic")
        producer.produce(f"{prefix}-in", f'{{"n": {sent}}}')
        producer.produce(f"{prefix}-in", f"no json {sent}")
        bridge.journal.flush()
        producer.flush()
        sent += 1

    def live() -> None:
        if not bridge.child.running:
            bridge.child.start()

    def arrived() -> bool:
        live()
        written.poll()
        return len(written.seen) >= sent

    deadline = time.monotonic() + WALK_S
    send()  # the first two diverts start behind the third, and join it
    try:
        while left() - {*LEAVING}:
            assert time.monotonic() < deadline, left()
            live()
            send()
            time.sleep(PAUSE_S)  # one batch each, so that there are many batches
        send()  # a duplicate would come before this record
        written, late, taken, dead = (bridge.reader(f"{prefix}.{name}") for name in ("all", "late", "ingress", "dead"))
        # A point writes its mark a moment before it ends the driver.
        eventually(arrived, "what was sent")
        for _ in left():
            bridge.child.stop(60)
            bridge.start()
        assert left() == set()
        assert [int(value) for value in written.wait_for(sent)] == list(range(sent))
        first = int(late.wait_for(1)[0])
        assert [int(value) for value in late.wait_for(sent - first)] == list(range(first, sent))
        taken.wait_for(sent)
        assert [decode_message(sent_in(message).body).body["n"] for message in taken.seen] == list(range(sent))
        dead.wait_for(2 * sent)
        assert dead_letters(dead, "in") == [f"no json {n}".encode() for n in range(sent)]
        assert [decode_message(body).body for body in dead_letters(dead, "bad")] == [f"bad {n}" for n in range(sent)]
        assert len(dead.seen) == 2 * sent
        for reader in (written, late, taken, dead):
            reader.close()
    finally:
        bridge.child.stop(60)
