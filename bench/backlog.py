"""A deep queue: the broker's memory with N messages of 1 KiB waiting, and how long a broker that was killed takes to serve them again.

    python bench/backlog.py [--messages 100000]

Messages are sent by the blocking Python client, persistent, on one connection. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from bascule_up import BasculeUp
from run import rss_mb

from bascule.client.blocking import Address, Client
from bascule.core.destination import Routing
from bascule.jms.message import JmsMessage, encode_message

QUEUE = "backlog"
BODY_BYTES = 1024
DEADLINE_S = 300


def waiting(broker: BasculeUp) -> int:
    """Messages in the queue; -1 while nobody answers."""
    try:
        with urllib.request.urlopen(f"{broker.admin}/queues", timeout=5) as answer:
            return sum(queue["messages"] for queue in json.load(answer) if queue["name"] == QUEUE)
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


def main() -> None:
    """Fill, measure, kill, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    count = parser.parse_args().messages
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as directory, BasculeUp(Path(directory)) as broker:
        place = urlsplit(broker.url)
        with Client(Address(place.hostname or "", place.port or 0)) as client:
            sender = client.sender(QUEUE, Routing.ANYCAST)
            started_s = time.monotonic()
            for number in range(count):
                sender.send(encode_message(JmsMessage(message_id=f"ID:backlog-{number}", body_kind="text", body="x" * BODY_BYTES)))
            sender.flush()
            sent_s = time.monotonic() - started_s
        until(broker, count)
        filled_mb = rss_mb(broker.processes["broker"])
        killed_s = time.monotonic()
        os.kill(broker.processes["broker"], signal.SIGKILL)
        until(broker, count)
        restarted_s = time.monotonic() - killed_s
        result = {
            "messages": count,
            "body_bytes": BODY_BYTES,
            "sent_per_s": round(count / sent_s),
            "rss_mb": filled_mb,
            "kill_to_serving_s": round(restarted_s, 2),
            "rss_after_start_mb": rss_mb(broker.processes["broker"]),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
