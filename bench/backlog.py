"""A deep queue of 1 KiB messages: memory of the broker, time until a killed broker serves again, and the rate of draining.

    python -m bench.backlog [--messages 1000000]

The blocking Python client sends persistent messages on one connection. The benchmark also drains a short queue for comparison. Rates depend
on the client and on Kafka as well, so the processor time of the broker is measured, too. Results go to bench/results/backlog-*.json and
.md. The exit code tells whether each figure reached its goal.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bascule.client import Acknowledge, Context, Message, Queue, connect
from bench.bascule_up import BasculeUp
from bench.run import machine, markdown, rss_mb, write_results
from tests.support.usage import cpu_s

QUEUE = "backlog"
BODY_BYTES = 1024
BODY = "x" * BODY_BYTES
DEADLINE_S = 300
#: Messages in the short queue that is drained for comparison.
SHORT_MESSAGES = 20_000
#: Prefetch of the consumer.
AHEAD = 1_000
#: Figure -> what it may be at most, with up to a million messages in the queue: kill -9 to serving in seconds, and memory in MiB.
GOALS = {"kill_to_serving_s": 5.0, "rss_mb": 350.0, "rss_after_start_mb": 350.0}


def waiting(broker: BasculeUp) -> int:
    """Return the number of messages in the queue; -1 while no broker answers."""
    try:
        return sum(queue["messages"] for queue in broker.ask("queues") if queue["name"] == QUEUE)
    except OSError:
        return -1


def until(broker: BasculeUp, count: int) -> float:
    """Return the seconds until the queue has ``count`` messages."""
    started_s = time.monotonic()
    while waiting(broker) != count:
        if time.monotonic() - started_s > DEADLINE_S:
            sys.exit(f"after {DEADLINE_S} s the queue shows {waiting(broker)} messages, not {count}")
        time.sleep(0.02)
    return time.monotonic() - started_s


def fill(client: Context, count: int, content: Callable[[int], Message | str] = lambda _number: BODY) -> float:
    """Send messages with ``content`` made from their numbers. Return the messages sent per second."""
    started_s = time.monotonic()
    client.producer(Queue(QUEUE)).send_many(map(content, range(count)))
    return count / (time.monotonic() - started_s)


def drain(client: Context, count: int) -> float:
    """Return the messages received and acknowledged per second."""
    started_s = time.monotonic()
    with client.consumer(Queue(QUEUE), prefetch=AHEAD) as consumer:
        for _ in range(count):
            if consumer.receive(DEADLINE_S) is None:
                sys.exit("the queue returned no more messages")
    return count / (time.monotonic() - started_s)


def measure(count: int) -> dict[str, Any]:
    """Fill the queue, measure, kill the broker, and measure again."""
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as directory, BasculeUp(Path(directory)) as broker:
        with connect(broker.url, acknowledge=Acknowledge.DUPS_OK) as client:
            fill(client, SHORT_MESSAGES)
            short_per_s = drain(client, SHORT_MESSAGES)
            idle_mb, before_s = rss_mb(broker.processes["broker"]), cpu_s(broker.processes["broker"])
            sent_per_s = fill(client, count)
        until(broker, count)
        sent_cpu_s = cpu_s(broker.processes["broker"]) - before_s
        filled_mb = rss_mb(broker.processes["broker"])
        killed_s = time.monotonic()
        os.kill(broker.processes["broker"], signal.SIGKILL)
        until(broker, count)
        restarted_s = time.monotonic() - killed_s
        after_start_mb, start_cpu_s = rss_mb(broker.processes["broker"]), cpu_s(broker.processes["broker"])
        with connect(broker.url, acknowledge=Acknowledge.DUPS_OK) as client:
            deep_per_s = drain(client, count)
        drained_cpu_s = cpu_s(broker.processes["broker"]) - start_cpu_s
    return {
        "messages": count,
        "body_bytes": BODY_BYTES,
        "sent_per_s": round(sent_per_s),
        "sent_broker_us": round(sent_cpu_s / count * 1e6, 1),
        "rss_before_mb": idle_mb,
        "rss_mb": filled_mb,
        "kill_to_serving_s": round(restarted_s, 2),
        "start_broker_cpu_s": round(start_cpu_s, 2),
        "rss_after_start_mb": after_start_mb,
        "short_queue_drained_per_s": round(short_per_s),
        "drained_per_s": round(deep_per_s),
        "drained_broker_us": round(drained_cpu_s / count * 1e6, 1),
    }


def judge(result: Mapping[str, Any]) -> dict[str, bool]:
    """Return for each figure with a goal whether it reached the goal."""
    return {figure: result[figure] <= goal for figure, goal in GOALS.items()}


def page(result: Mapping[str, Any]) -> str:
    """Return the result as text."""
    rows = [["figure", "", "goal: at most", "reached"]]
    reached = judge(result)
    for figure in result:
        goal = [f"{GOALS[figure]:g}", "yes" if reached[figure] else "**no**"] if figure in GOALS else ["", ""]
        rows.append([figure, str(result[figure]), *goal])
    return f"# A queue of {result['messages']:,} messages\n\n{markdown(rows)}\n\n{machine()}"


def main() -> int:
    """Run the benchmark. The exit code tells whether each figure reached its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    result = measure(parser.parse_args().messages)
    reached = judge(result)
    write_results("backlog", {**result, "goals": GOALS, "reached": reached}, page(result))
    return int(not all(reached.values()))


if __name__ == "__main__":
    sys.exit(main())
