"""Two brokers on one Kafka and a deep queue: how long a client waits after the serving broker is killed, or told to stop.

    python -m bench.takeover [--messages 100000] [--rounds 20]

In each round, the queue is full, the standby has read the journal, and an unmodified Qpid JMS client is connected with a `failover:` URL.
The time counts from the signal (SIGKILL, or SIGTERM for an orderly handover) until the client, which noticed the end by itself, has
received a message from the other broker. The exit code tells whether both goals were reached: the median of the rounds after a kill, and
every round after an orderly stop. Results go to bench/results/takeover-*.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bascule.client import connect
from bascule.embedded.kafka import EmbeddedKafka
from bench.backlog import BODY_BYTES, DEADLINE_S, QUEUE, fill
from bench.run import machine, markdown, write_results
from tests.support.qpid import QpidPeer
from tests.support.system import FAILOVER, System, wait_for

#: The way to end a broker -> its signal.
WAYS = {"kill": signal.SIGKILL, "hand-over": signal.SIGTERM}
#: The way to end a broker -> the seconds within which the next broker has to serve, and which of the rounds count.
GOALS: Mapping[str, tuple[float, str, Callable[[Sequence[float]], float]]] = {
    "kill": (2.0, "p50", statistics.median),
    "hand-over": (1.0, "longest", max),
}


class Pair:
    """An active broker and a standby broker."""

    def __init__(self, systems: Sequence[System], messages: int) -> None:
        self._systems = systems
        self._messages = messages
        self.url = FAILOVER.format(",".join(system.url for system in systems))

    def ready(self) -> tuple[System, System]:
        """Return the serving broker with its full queue, and the standby that has read the journal."""
        for system in self._systems:
            if not system.broker.running:
                system.broker.launch()
        active = wait_for(lambda: next((each for each in self._systems if each.serves()), None), "a broker that serves", DEADLINE_S)
        standby = next(each for each in self._systems if each is not active)
        wait_for(lambda: standby.stands_by() and "journal read from" in standby.broker.said(), "the standby's load", DEADLINE_S)
        with connect(active.url) as client:
            fill(client, self._messages - active.depth(QUEUE))
        active.wait_depth(QUEUE, self._messages)
        return active, standby

    def round(self, peer: QpidPeer, way: str) -> float:
        """Return the seconds until the other broker serves the client."""
        active, standby = self.ready()
        client = peer.connect(self.url)
        session = client.session()
        begun_s = time.monotonic()
        os.kill(active.broker.pid, WAYS[way])
        if not client.events(1, DEADLINE_S):  # from here on the old broker delivers nothing
            sys.exit("the client has not noticed the end of its broker")
        message = session.consumer(f"queue:{QUEUE}").receive(DEADLINE_S)
        took_s = time.monotonic() - begun_s
        if message is None or not standby.serves():
            sys.exit(f"no message from the other broker; see {standby.broker.log_file}")
        client.close()
        wait_for(lambda: not active.broker.running, "the end of the old broker")
        return round(took_s, 2)


def judge(rounds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return the rounds of each way, the figure that counts, the goal, and whether the figure reached it."""
    judged = {}
    for way, taken in rounds.items():
        goal_s, name, figure = GOALS[way]
        taken_s = round(figure(taken), 2)
        judged[way] = {"rounds_s": list(taken), "figure": name, "s": taken_s, "goal_s": goal_s, "reached": taken_s <= goal_s}
    return judged


def page(result: Mapping[str, Any]) -> str:
    """Return the result as text."""
    rows = [["way", "goal s", "s", "rounds s", "reached"]]
    for way, each in result["judged"].items():
        rounds, reached = ", ".join(map(str, each["rounds_s"])), "yes" if each["reached"] else "**no**"
        rows.append([way, f"{each['goal_s']:g} ({each['figure']})", f"{each['s']:g}", rounds, reached])
    lines = [
        f"# A standby takes over {result['messages']:,} messages of {result['body_bytes']:,} bytes",
        "",
        "From the signal until a Qpid JMS client with both brokers in its `failover:` URL has a message of the other broker.",
        "",
        markdown(rows),
        "",
        f"{result['machine']}",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark. The exit code tells whether both goals were reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bascule-takeover-")))
        kafka = stack.enter_context(EmbeddedKafka(directory / "kafka"))
        systems = [System(kafka.bootstrap, directory / name, prefix="bascule") for name in ("one", "two")]
        for system in systems:
            stack.callback(system.broker.stop)
        peer = stack.enter_context(QpidPeer())
        systems[0].broker.start()
        pair = Pair(systems, options.messages)
        rounds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, taken in rounds.items():
                taken.append(pair.round(peer, way))
                print(json.dumps({"way": way, "s": taken[-1], "load_average": os.getloadavg()[0]}), flush=True)
    result = {**vars(options), "body_bytes": BODY_BYTES, "machine": machine(), "judged": judge(rounds)}
    write_results("takeover", result, page(result))
    return int(not all(each["reached"] for each in result["judged"].values()))


if __name__ == "__main__":
    sys.exit(main())
