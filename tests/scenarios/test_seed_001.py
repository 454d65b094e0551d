"""Transfer between two queues: a message is received from one queue and sent to the other in one transaction, whatever dies meanwhile."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.scenarios.conftest import Connect
from tests.support.storm import Storm
from tests.support.system import System, paused, wait_for

MESSAGES = 40
ROUNDS = 8
#: The kill of a round comes at a random moment within this time; a transfer takes some milliseconds.
MOMENT_MAX_S = 0.5


def test_transfer_keeps_each_message_in_one_queue_whenever_the_broker_is_killed(
    connect_to: Connect, system: System, name: str, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    queues = f"{name}.1", f"{name}.2"
    producer = connect_to(system.url).session().producer(f"queue:{queues[0]}")
    for number in range(MESSAGES):
        producer.send(str(number), properties={"storm_id": str(number)})
    there, back = f"move:{queues[0]}>{queues[1]}", f"move:{queues[1]}>{queues[0]}"
    with Storm(system.failover_url, tmp_path, there, there, back, back, batch=3) as storm:
        for _ in range(ROUNDS):
            moved = len(storm.history())
            wait_for(lambda moved=moved: len(storm.history()) > moved, "transfers")  # type: ignore[misc]
            time.sleep(moments.random() * MOMENT_MAX_S)
            system.broker.kill()
            with paused(storm.pid):
                system.broker.start()
                assert sum(map(system.depth, queues)) == MESSAGES, f"seed {seed}"
        storm.kill()
    wait_for(lambda: system.status()["gauges"]["connections"] == 0, "the clients' end")
    session = connect_to(system.url).session()
    found = sorted(int(message.body) for queue in queues for message in session.browse(f"queue:{queue}"))
    assert found == list(range(MESSAGES)), f"seed {seed}"
