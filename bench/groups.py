"""A backlog that 1, 2 and 4 groups of diverts carry: records/s, processor time, and the share of it that grows with the groups.

    python -m bench.groups [--records 100000] [--rounds 3] [--groups 1 --groups 4]

README.md explains the figures. Results go to bench/results/groups-*.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.admin import Topics
from bench.bridge import settle
from bench.bridge_load import QUIET_S, WARM_UP_SHARE
from bench.latency import BODY_BYTES, POLL_S, numbered
from bench.run import machine, markdown, spread, write_results
from tests.support.journal import SyntheticJournal, text_message
from tests.support.system import Late, System, descendants
from tests.support.usage import cpu_s

#: Diverts. Each one carries another address. The benchmark spreads them over the groups, so each number of groups carries the same records.
DIVERTS = 4
GROUPS = (1, 2, 4)
#: Part of the rate of one group that the most groups must reach, on two cores.
GOAL = 0.9
READ_MAX = 2_000


def config(groups: int) -> str:
    """Return the configuration of the diverts."""
    return "".join(
        f'[[divert]]\nname = "d{number}"\nfrom = "a{number}"\nto = "{{prefix}}.out{number}"\ngroup = "g{number % groups}"\n'
        for number in range(DIVERTS)
    )


class Reader(threading.Thread):
    """Counts the records of all target topics."""

    def __init__(self, servers: str, topics: Sequence[str]) -> None:
        super().__init__(name="reader", daemon=True)
        self.seen: Counter[bytes] = Counter()
        self.last_s = 0.0
        self._over = threading.Event()
        self._settings = {
            "bootstrap.servers": servers,
            "group.id": "groups",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
        self._topics = topics

    def run(self) -> None:
        with closing(Consumer(self._settings)) as consumer:
            consumer.assign([TopicPartition(topic, 0, 0) for topic in self._topics])
            while not self._over.is_set():
                records = [record for record in consumer.consume(READ_MAX, POLL_S / 10) if record.error() is None]
                for record in records:
                    self.seen[bytes(record.value() or b"")] += 1
                if records:
                    self.last_s = time.monotonic()

    def await_count(self, count: int) -> None:
        """Return when this number of different records has come. Raises Late."""
        since_s = time.monotonic()
        while len(self.seen) < count:
            if time.monotonic() - max(since_s, self.last_s) > QUIET_S:
                raise Late(f"{len(self.seen)} of {count} records have been carried")
            time.sleep(POLL_S / 10)

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join()


def turn(kafka: EmbeddedKafka, directory: Path, run: str, groups: int, records: int) -> dict[str, Any]:
    """Let pipelines with this number of groups carry a backlog. Return its rate, and the processor time of each part for a record."""
    prefix = f"groups-{run}"
    topics = [f"{prefix}.out{number}" for number in range(DIVERTS)]
    admin = Topics({"bootstrap.servers": kafka.bootstrap})
    for topic in (*topics, JournalTopics(prefix).journal):
        admin.create(topic, 1, {})
    env = {"BASCULE_PIPELINES__SPARK": "{}"}  # as users have it, not as the tests do
    system = System(kafka.bootstrap, directory / run, prefix=prefix, config=config(groups).replace("{prefix}", prefix), env=env)
    journal = SyntheticJournal(kafka.bootstrap, JournalTopics(prefix).journal)
    journal.start_epoch()
    with ExitStack() as opened:
        opened.callback(system.pipelines.stop)
        system.pipelines.start()  # it gives each group a position at the end of the journal
        system.pipelines.stop()
        bodies = [numbered("group", number).ljust(BODY_BYTES, b"x") for number in range(records)]
        for number, body in enumerate(bodies):
            address = f"a{number % DIVERTS}"
            journal.send(text_message(body.decode(), destination=address, destination_kind="queue"), address=address)
        journal.flush()
        reader = Reader(kafka.bootstrap, topics)
        reader.start()
        opened.callback(reader.stop)
        system.pipelines.start()
        reader.await_count(int(records * WARM_UP_SHARE))
        first, first_s, used = len(reader.seen), time.monotonic(), used_s(system, kafka)
        reader.await_count(records)
        after = used_s(system, kafka)
        carried, span_s = records - first, reader.last_s - first_s
        doubled = reader.seen.total() - len(reader.seen)
    return {
        "records_per_s": carried / max(span_s, POLL_S / 10), "duplicated": doubled, "lost": len(set(bodies) - reader.seen.keys()),
        "cpu_us": {part: 1e6 * (after[part] - used[part]) / carried for part in after},
        "cpu_s_of_all": sum(after[part] - used[part] for part in after) * records / carried,
    }  # fmt: skip


def used_s(system: System, kafka: EmbeddedKafka) -> dict[str, float]:
    """Return the processor time of the pipelines with all of their processes, and of Kafka."""
    pid = system.pipelines.pid
    assert kafka.pid is not None
    return {"pipelines": sum(map(cpu_s, (pid, *descendants(pid)))), "Kafka": cpu_s(kafka.pid)}


def growing_share(results: Mapping[int, Sequence[Mapping[str, Any]]]) -> float | None:
    """Return the part of the pipelines' processor time with one group that each further group adds; None without two numbers of groups."""
    if len(results) < 2:
        return None
    least, most = min(results), max(results)
    used = {groups: statistics.median(run["cpu_us"]["pipelines"] for run in results[groups]) for groups in (least, most)}
    return (used[most] - used[least]) / (most - least) / used[least]


def page(results: Mapping[int, Sequence[Mapping[str, Any]]], records: int) -> str:
    """Return the table, and what a reader must know beside it."""
    rows = [
        [
            "groups",
            "records/s",
            "pipelines us/record",
            "Kafka us/record",
            f"CPU s for {records:,} records",
            "beside one group",
            "lost",
            "duplicated",
        ]
    ]
    base = statistics.median(run["records_per_s"] for run in results[min(results)])
    for groups, runs in results.items():
        rate = statistics.median(run["records_per_s"] for run in runs)
        parts = [spread([run["cpu_us"][part] for run in runs], 0) for part in ("pipelines", "Kafka")]
        flaws = [str(sum(run[key] for run in runs)) for key in ("lost", "duplicated")]
        cpu = spread([run["cpu_s_of_all"] for run in runs], 1)
        rows.append([str(groups), spread([run["records_per_s"] for run in runs], 0), *parts, cpu, f"{rate / base:.2f}", *flaws])
    share = growing_share(results)
    text = (
        ""
        if share is None
        else f"\n\nEach further group adds {100 * share:.0f} % of the processor time of one group: it reads the whole journal."
    )
    return markdown(rows) + text


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="A backlog carried by several groups of diverts.")
    parser.add_argument("--records", type=int, default=100_000, help="records of the backlog (default: 100000)")
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of each number of groups (default: 3)")
    parser.add_argument(
        "--groups", type=int, action="append", choices=GROUPS, help="number of groups; may be repeated (default: 1, 2 and 4)"
    )
    return parser.parse_args()


def main() -> int:
    """Run the benchmark. The exit code tells whether a record was lost or duplicated, or the goal was missed."""
    options = arguments()
    results: dict[int, list[dict[str, Any]]] = {groups: [] for groups in sorted(set(options.groups or GROUPS))}
    with tempfile.TemporaryDirectory(prefix="bascule-groups-") as name, EmbeddedKafka(Path(name) / "kafka") as kafka:
        settle(kafka.bootstrap)
        for number in range(options.rounds):
            # The order changes from round to round.
            for groups in results if number % 2 == 0 else reversed(results):
                found = turn(kafka, Path(name), f"{groups}-{number + 1}", groups, options.records)
                results[groups].append(found)
                print(f"{groups} groups: {found}", file=sys.stderr, flush=True)
    write_results("groups", {"machine": machine(), "options": vars(options), "results": results}, page(results, options.records))
    rates = {groups: statistics.median(run["records_per_s"] for run in runs) for groups, runs in results.items()}
    flawed = any(run["lost"] or run["duplicated"] for runs in results.values() for run in runs)
    return int(flawed or rates[max(rates)] < GOAL * rates[min(rates)])


if __name__ == "__main__":
    sys.exit(main())
