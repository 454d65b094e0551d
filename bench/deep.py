"""A deep queue in use: consumers with selectors, browsers, snapshots, an administrator and restarts, on N messages of 1 KiB.

    python -m bench.deep [--messages 1000000]

A canary, which is a client in another process, sends a persistent message to another queue and receives it, about ten times a second. Each
phase reports its longest round trip, and the longest turn of the broker's event loop from the broker's own histogram. Results go to
bench/results/deep-*.json and .md. The exit code tells whether the canary waited no longer than a second and the broker started in time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bascule.client import Acknowledge, Message, Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bench.backlog import AHEAD, BODY, BODY_BYTES, GOALS, QUEUE, drain, fill
from bench.run import machine, markdown, rss_mb, write_results
from bench.steady import Traffic
from tests.support.canary import canary
from tests.support.speed import SLOWNESS
from tests.support.stalls import longest_turn_s
from tests.support.system import System, wait_for
from tests.support.usage import memory_mib

#: Time limit of a phase.
PHASE_S = 1800.0
#: Limit on a round trip of the canary.
GAP_S_MAX = 1.0
#: Records between snapshots, so few that each phase has some snapshots.
CONFIG = "[journal]\nsnapshot_records = 2000\n"
SNAPSHOTS = 3
TRAFFIC_PER_S = 200.0
#: A bucket has a thousandth of all messages: selectors ask for ``bucket = N``.
BUCKETS = 1_000
NONE = "bucket = -1"
THOUSANDTH = "bucket = 0"
TENTH = f"bucket BETWEEN 1 AND {BUCKETS // 10}"
#: Concurrent browsers: two of the whole queue, one of a thousandth, one that finds nothing.
BROWSED = ("", "", "bucket = 500", NONE)
#: Where an administrator moves messages.
ASIDE = "backlog.aside"
IDLE_S = 5.0

Row = dict[str, Any]


def numbered(number: int) -> Message:
    """Return a message with properties for selectors."""
    return Message(BODY, properties={"n": number, "bucket": number % BUCKETS})


class DeepQueue:
    """A broker with a deep queue. ``rows`` has the phases, each with its figures."""

    def __init__(self, system: System, messages: int) -> None:
        self.system = system
        self.messages = messages
        self.rows: list[Row] = []

    @contextmanager
    def _phase(self, name: str) -> Iterator[Row]:
        """Run a phase beside a canary. The body of the block sets ``result``."""
        with canary(self.system, "canary", sends=True) as bird:
            first, before = bird.look(), self.system.metrics()
            row: Row = {"phase": name}
            begun_s = time.monotonic()
            yield row
            row["s"] = round(time.monotonic() - begun_s, 2)
            done = bird.look()
            wait_for(lambda: bird.look() > done, "the round trip in progress", PHASE_S)
            times_s = bird.times_s[first:]
            row |= {
                "round_trips": len(times_s),
                "median_ms": round(statistics.median(times_s) * 1000, 1),
                "longest_wait_s": round(max(times_s), 3),
                "longest_turn_s": longest_turn_s(self.system.metrics(), before),
            }
        self._end(row)

    def _end(self, row: Row) -> None:
        pid = self.system.broker.pid
        row |= {"rss_mb": rss_mb(pid), "peak_rss_mb": round(memory_mib(pid, "VmHWM"), 1)}
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)

    # -- the phases --------------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Measure how long the canary waits when the broker has no other work."""
        with self._phase("nothing else") as row:
            time.sleep(IDLE_S)
            row["result"] = ""

    def fill(self) -> None:
        """Fill the queue."""
        with self._phase("fill") as row, connect(self.system.url) as client:
            row["result"] = f"{fill(client, self.messages, numbered):,.0f} messages/s"

    def select(self, name: str, selector: str, count: int) -> None:
        """Receive what a selector finds, and wait until the broker reports that there is no more."""
        with self._phase(name) as row, connect(self.system.url) as client, client.consumer(Queue(QUEUE), selector=selector) as consumer:
            begun_s, first_s = time.monotonic(), 0.0
            for number in range(count):
                if consumer.receive(PHASE_S) is None:
                    sys.exit(f"the selector {selector!r} found {number} messages of {count}")
                first_s = first_s or time.monotonic() - begun_s
            if consumer.receive_no_wait(timeout_s=PHASE_S) is not None:
                sys.exit(f"the selector {selector!r} found more than {count} messages")
            row["result"] = f"{count:,} messages" + (f", the first after {first_s:.2f} s" if count else "")

    def browse(self) -> None:
        """Browse with several browsers at once."""
        found: list[int] = []

        def one(selector: str) -> None:
            with connect(self.system.url) as client:
                found.append(sum(1 for _ in client.browse(Queue(QUEUE), selector=selector, timeout_s=PHASE_S)))

        with self._phase(f"{len(BROWSED)} concurrent browsers") as row:
            threads = [threading.Thread(target=one, args=(selector,)) for selector in BROWSED]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            row["result"] = f"{' + '.join(f'{count:,}' for count in sorted(found, reverse=True))} messages"
        if len(found) < len(BROWSED):
            sys.exit("a browser has failed")

    def snapshots(self) -> None:
        """Take snapshots while clients send and receive."""
        with self._phase(f"{SNAPSHOTS} snapshots during traffic") as row:
            traffic = Traffic(self.system.url, TRAFFIC_PER_S, BODY_BYTES)
            try:
                for _ in range(SNAPSHOTS):
                    last = self._snapshot_offset()
                    wait_for(lambda last=last: self._snapshot_offset() > last, "a snapshot", PHASE_S)  # type: ignore[misc]
            finally:
                traffic.stop()
            if traffic.errors or traffic.duplicated or len(traffic.seen) < traffic.sent:
                sys.exit(f"{traffic.sent} sent, {len(traffic.seen)} received, {traffic.duplicated} duplicated: {traffic.errors}")
            row["result"] = f"{traffic.sent:,} messages sent and received meanwhile"

    def _snapshot_offset(self) -> int:
        """Return the journal offset that the last snapshot covers."""
        return next(int(pin["offset"]) for pin in self.system.status()["pins"] if pin["keeper"] == "snapshot")

    def administer(self) -> None:
        """Move a tenth of the messages to another queue by a selector as an administrator, and purge them there."""
        with self._phase("move of a tenth by a selector") as row:
            moved = self.system.act("queues/move", timeout_s=PHASE_S, name=QUEUE, to=ASIDE, selector=TENTH)
            row["result"] = f"{moved['moved']:,} messages"
        with self._phase("purge of the moved messages") as row:
            row["result"] = f"{self.system.act('queues/purge', timeout_s=PHASE_S, name=ASIDE)['purged']:,} messages"

    def restart(self, name: str, *, kill: bool) -> None:
        """Restart the broker. Return when a client that connects then has a message."""
        depth, begun_s = self.system.depth(QUEUE), time.monotonic()
        if kill:
            self.system.broker.kill()
        else:
            self.system.broker.stop()
        ended_s = time.monotonic() - begun_s
        self.system.broker.start()
        with connect(self.system.url) as client, client.consumer(Queue(QUEUE), prefetch=0) as consumer:
            if consumer.receive(PHASE_S) is None:
                sys.exit("the queue returned no message")
            row = {"phase": name, "s": round(time.monotonic() - begun_s, 2), "longest_turn_s": longest_turn_s(self.system.metrics())}
        self.system.wait_depth(QUEUE, depth - 1)
        self._end(row | {"result": f"{ended_s:.2f} s of it until the old process had ended"})

    def drain(self) -> None:
        """Receive all messages that are left."""
        count = self.system.depth(QUEUE)
        with self._phase("drain") as row, connect(self.system.url, acknowledge=Acknowledge.DUPS_OK) as client:
            row["result"] = f"{drain(client, count):,.0f} messages/s, {count:,} in all, {AHEAD:,} ahead"

    def run(self) -> None:
        """Run all phases."""
        self.idle()
        self.fill()
        self.system.wait_depth(QUEUE, self.messages)
        self.select("selector that matches nothing", NONE, 0)
        self.select("selector that matches each thousandth", THOUSANDTH, -(-self.messages // BUCKETS))
        self.select("selector that matches the last", f"n = {self.messages - 1}", 1)
        self.browse()
        self.snapshots()
        self.administer()
        self.restart("restart in order", kill=False)
        self.restart("restart after kill -9", kill=True)
        self.drain()


def judge(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the longest wait of the canary and the longest restart, each with its phase, its limit and whether it was kept."""
    waits = {row["phase"]: row["longest_wait_s"] for row in rows if "longest_wait_s" in row}
    starts = {row["phase"]: row["s"] for row in rows if "longest_wait_s" not in row}
    judged = {}
    for name, found, limit_s in (("longest wait of the canary", waits, GAP_S_MAX), ("longest restart", starts, GOALS["kill_to_serving_s"])):
        worst = max(found, key=found.__getitem__)
        judged[name] = {"s": found[worst], "phase": worst, "promised_s": limit_s, "kept": found[worst] <= limit_s}
    return judged


def page(result: Mapping[str, Any]) -> str:
    """Return the result as text."""
    columns = {
        "phase": "phase", "s": "s", "result": "result", "median_ms": "canary: median ms", "longest_wait_s": "longest s",
        "longest_turn_s": "longest turn below s", "rss_mb": "RSS MB at its end", "peak_rss_mb": "peak RSS MB so far",
    }  # fmt: skip
    lines = [
        f"# {result['messages']:,} messages of {result['body_bytes']:,} bytes in a queue, in use",
        "",
        f"`python -m bench.deep --messages {result['messages']}`, {result['at']}.",
        "The canary sends a persistent message to another queue and receives it, about ten times a second. The time of a restart counts",
        "from the signal to the old process until a new client has a message. The longest turn of the event loop is a bucket of",
        "`bascule_event_loop_stall_seconds`, in processor time.",
        "",
        markdown([[*columns.values()], *([str(row.get(key, "")) for key in columns] for row in result["rows"])]),
        "",
        *(
            f"- {name}: {each['s']:g} s ({each['phase']}); at most {each['promised_s']:g} s: {'kept' if each['kept'] else '**not kept**'}"
            for name, each in result["judged"].items()
        ),
        f"- the machine: {result['slowness']:.2f} times as slow as the machine for which the limits of the tests were chosen",
        "",
        f"{result['machine']}",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark. The exit code tells whether all limits were kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bascule-deep-")))
        kafka = stack.enter_context(EmbeddedKafka(directory / "kafka"))
        deep = DeepQueue(
            stack.enter_context(System(kafka.bootstrap, directory / "broker", prefix="bascule", config=CONFIG)), options.messages
        )
        deep.run()
    judged = judge(deep.rows)
    result = {
        **vars(options), "body_bytes": BODY_BYTES, "at": time.strftime("%Y-%m-%d %H:%M"), "rows": deep.rows, "judged": judged,
        "slowness": SLOWNESS, "machine": machine(),
    }  # fmt: skip
    write_results("deep", result, page(result))
    return int(not all(each["kept"] for each in judged.values()))


if __name__ == "__main__":
    sys.exit(main())
