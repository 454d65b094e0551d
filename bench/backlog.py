"""A deep queue: the broker's memory with N messages of 1 KiB waiting, how long a broker that was killed takes to serve them again,
and how fast they are drained, against a short queue.

    python -m bench.backlog [--messages 1000000]

Messages are sent by the blocking Python client, persistent, on one connection. Results go to bench/results/backlog-*.json and .md; the exit
code tells whether the broker served in time.
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

QUEUE = "backlog"
BODY_BYTES = 1024
BODY = "x" * BODY_BYTES
DEADLINE_S = 300
#: A queue that is short: drained for comparison.
SHORT_MESSAGES = 20_000
#: Messages a consumer asks for ahead.
AHEAD = 1_000
#: From kill -9 to serving, with up to a million waiting.
START_S_MAX = 30.0


def waiting(broker: BasculeUp) -> int:
    """Messages in the queue; -1 while nobody answers."""
    try:
        return sum(queue["messages"] for queue in broker.ask("queues") if queue["name"] == QUEUE)
    except OSError:
        return -1


def until(broker: BasculeUp, count: int) -> float:
    """Seconds until the queue shows ``count`` messages."""
    started_s = time.monotonic()
    while waiting(broker) != count:
        if time.monotonic() - started_s > DEADLINE_S:
            sys.exit(f"after {DEADLINE_S} s the queue shows {waiting(broker)} messages, not {count}")
        time.sleep(0.02)
    return time.monotonic() - started_s


def fill(client: Context, count: int, content: Callable[[int], Message | str] = lambda _number: BODY) -> float:
    """Send messages, whose ``content`` is made of their numbers. Returns messages sent per second."""
    started_s = time.monotonic()
    client.producer(Queue(QUEUE)).send_many(map(content, range(count)))
    return count / (time.monotonic() - started_s)


def drain(client: Context, count: int) -> float:
    """Messages received and acknowledged per second."""
    started_s = time.monotonic()
    with client.consumer(Queue(QUEUE), prefetch=AHEAD) as consumer:
        for _ in range(count):
            if consumer.receive(DEADLINE_S) is None:
                sys.exit("the queue gives nothing more")
    return count / (time.monotonic() - started_s)


def measure(count: int) -> dict[str, Any]:
    """Fill, measure, kill, measure."""
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as directory, BasculeUp(Path(directory)) as broker:
        with connect(broker.url, acknowledge=Acknowledge.DUPS_OK) as client:
            fill(client, SHORT_MESSAGES)
            short_per_s = drain(client, SHORT_MESSAGES)
            sent_per_s = fill(client, count)
        until(broker, count)
        filled_mb = rss_mb(broker.processes["broker"])
        killed_s = time.monotonic()
        os.kill(broker.processes["broker"], signal.SIGKILL)
        until(broker, count)
        restarted_s = time.monotonic() - killed_s
        after_start_mb = rss_mb(broker.processes["broker"])
        with connect(broker.url, acknowledge=Acknowledge.DUPS_OK) as client:
            deep_per_s = drain(client, count)
    return {
        "messages": count,
        "body_bytes": BODY_BYTES,
        "sent_per_s": round(sent_per_s),
        "rss_mb": filled_mb,
        "kill_to_serving_s": round(restarted_s, 2),
        "rss_after_start_mb": after_start_mb,
        "short_queue_drained_per_s": round(short_per_s),
        "drained_per_s": round(deep_per_s),
    }


def page(result: Mapping[str, Any]) -> str:
    """The result for people."""
    rows = markdown([["figure", ""], *([figure, str(value)] for figure, value in result.items())])
    return f"# A queue of {result['messages']:,} messages\n\n{rows}\n\n{machine()}"


def main() -> int:
    """Run it; the exit code tells whether the broker served in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    result = measure(parser.parse_args().messages)
    kept = result["kill_to_serving_s"] <= START_S_MAX
    result |= {"promised_s": START_S_MAX, "kept": "yes" if kept else "**no**"}
    write_results("backlog", result, page(result))
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
