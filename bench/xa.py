"""Transactions over JMS, PostgreSQL and Kafka: Bascule from Python and from Java, and Narayana with Apache Artemis, in turns.

    python -m bench.xa [--mode jms-postgres-send ...] [--contender "Artemis, Java" ...] [--clients 1x1 --clients 1x4 --clients 4x1]
                       [--seconds 5] [--warm-up 2] [--rounds 3]

One Bascule (broker and Kafka), one Artemis and one PostgreSQL, which syncs its commits. See README.md for what the figures mean. Results go
to bench/results/ as JSON and as a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from bascule.embedded.jars import jar_sets
from bascule.embedded.java import find_jdk
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.kafka.admin import Topics
from bench import xa_java
from bench.artemis import PASSWORD, USER, Artemis
from bench.bascule_up import BasculeUp
from bench.run import flush_ms, machine, write_results
from bench.xa_cpu import processor_ms
from bench.xa_load import TOPIC, Load, seed
from bench.xa_modes import APART, CONTENDERS, JAVA, MODES, PEER, PYTHON, Clients, Mode, runs
from bench.xa_report import Run, figures, table

BODY_BYTES = 200
#: Messages in a queue that each transaction receives one from and sends one to, for each concurrent transaction.
SEEDS = 50
DEFAULT_CLIENTS = ("1x1", "1x4", "4x1")
#: A process that has not begun or ended by then has failed.
BEYOND_S = 90.0
PINNED = {"Kafka": ("kafka", "kafka_2.13"), "Narayana": ("narayana", "narayana-jta"), "Qpid JMS": ("qpid-jms", "qpid-jms-client")}


@dataclass
class Services:
    """The systems under measurement."""

    bascule: BasculeUp
    artemis: Artemis | None
    postgres: EmbeddedPostgres
    directory: Path

    @property
    def jdbc(self) -> str:
        """Return the URL for PostgreSQL's JDBC driver."""
        return f"jdbc:postgresql://127.0.0.1:{self.postgres.port}/postgres?user=postgres"

    def brokers(self, contender: str) -> Collection[int]:
        """The processes of the broker that a contender uses; Bascule's messages are in Kafka."""
        if contender == PEER and self.artemis is not None:
            return [self.artemis.pid]
        return self.bascule.processes.values()

    @property
    def postmaster(self) -> int:
        """PostgreSQL's first process, which may be the child of a program that changes the user."""
        return int((self.postgres.data_dir / "postmaster.pid").read_text().split()[0])


def measure(services: Services, contender: str, mode: Mode, clients: Clients, options: argparse.Namespace) -> Run:
    """One run, and what the servers have done for each of its transactions."""
    servers = {"cpu_broker_ms": services.brokers(contender), "cpu_postgres_ms": [services.postmaster]}
    before = {part: processor_ms(pids) for part, pids in servers.items()}
    found = transactions(services, contender, mode, clients, options)
    if found["failures"]:
        return found
    shares = {part: (processor_ms(pids) - before[part]) / found["transactions"] for part, pids in servers.items()}
    return {**found, "cpu_client_ms": found["cpu_ms"] / found["transactions"], **shares}


def transactions(services: Services, contender: str, mode: Mode, clients: Clients, options: argparse.Namespace) -> Run:
    """Run the transactions, with a separate queue and decision log."""
    name = f"bench.{mode.name}.{time.monotonic_ns()}"
    seeds = SEEDS * clients.processes * clients.threads if mode.receives else 0
    if contender in (PYTHON, APART):
        seed(services.bascule.url, name, seeds, BODY_BYTES)
        return by_python(services, contender, mode, clients, name, options)
    broker, url = "bascule", services.bascule.url
    if contender == PEER and services.artemis is not None:
        broker, url = "artemis", f"tcp://127.0.0.1:{services.artemis.port}?user={USER}&password={PASSWORD}"
    return xa_java.transaction_load(
        broker, seconds=options.seconds, warm_up_s=options.warm_up, url=url, jdbc=services.jdbc, log=str(services.directory / name),
        resources=",".join(mode.resources), receive=mode.receives, queue=name, seeds=seeds, size=BODY_BYTES, threads=clients.threads,
    )  # fmt: skip


def by_python(services: Services, contender: str, mode: Mode, clients: Clients, name: str, options: argparse.Namespace) -> Run:
    """Run processes of `bench.xa_load`, which start to count at the same moment."""
    load = Load(
        mode.name, contender == PYTHON, clients.threads, options.seconds, BODY_BYTES, services.postgres.conninfo, services.bascule.kafka,
        services.bascule.url, name, str(services.directory / f"{name}.xalog"),
    )  # fmt: skip
    command = [sys.executable, "-m", "bench.xa_load", json.dumps(dataclasses.asdict(load))]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(clients.processes)
        ]
        try:
            ready = [each.stdout is not None and each.stdout.readline() for each in processes]
            from_s = time.monotonic() + options.warm_up
            for each in processes:  # all of them start before the first one is waited for
                if each.stdin is not None:
                    each.stdin.write(f"{from_s}\n")
                    each.stdin.flush()
            answers = [each.communicate(timeout=options.warm_up + options.seconds + BEYOND_S)[0] for each in processes]
        except subprocess.TimeoutExpired:
            return {"failures": 1}
        finally:
            for each in processes:
                each.kill()
        failures = sum(said != "ready\n" or each.returncode != 0 for said, each in zip(ready, processes, strict=True))
        if failures:
            return {"failures": failures}
    done = [json.loads(each) for each in answers]
    found = figures([taken_ms for each in done for taken_ms in each["taken_ms"]], options.seconds)
    return {**found, **{part: sum(each[part] for each in done) for part in ("transactions", "cpu_ms")}}


def versions(postgres: EmbeddedPostgres) -> dict[str, str]:
    """The results of all runs."""
    found = {name: _pinned(*where) for name, where in PINNED.items()}
    found |= {"Artemis": _pinned("artemis-client", "artemis-jakarta-client"), "Java": str(find_jdk().version)}
    with psycopg.connect(postgres.conninfo) as database:
        row = database.execute("SHOW server_version").fetchone()
    return {**found, "PostgreSQL": str(row and row[0]), "psycopg": psycopg.__version__}


def _pinned(jars: str, artifact: str) -> str:
    return next(version for _, name, version, *_ in (jar.coordinates.split(":") for jar in jar_sets()[jars]) if name == artifact)


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mode", action="append", choices=[mode.name for mode in MODES], help="mode to measure; may be repeated (default: all)"
    )
    parser.add_argument(
        "--contender", action="append", choices=list(CONTENDERS), help="contender to measure; may be repeated (default: all)"
    )
    parser.add_argument(
        "--clients",
        action="append",
        help=f"PROCESSESxTHREADS, may be repeated (default: {', '.join(DEFAULT_CLIENTS)}); Java has threads only",
    )
    parser.add_argument("--seconds", type=float, default=5, help="seconds to measure (default: 5)")
    parser.add_argument("--warm-up", type=float, default=2, help="seconds of warm-up before (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Measure in turns. The exit code tells whether any client has failed."""
    options = arguments(given)
    modes = [mode for mode in MODES if not options.mode or mode.name in options.mode]
    clients = [Clients(*map(int, each.split("x"))) for each in options.clients or DEFAULT_CLIENTS]
    chosen = [each for each in CONTENDERS if not options.contender or each in options.contender]
    turns = [(mode, who, each) for mode in modes for each in clients for who in chosen if runs(who, mode, each)]
    results: dict[tuple[str, str, Clients], list[Run]] = {(mode.name, who, each): [] for mode, who, each in turns}
    with ExitStack() as stack:
        directory, data = (Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bascule-bench-"))) for _ in range(2))
        data.chmod(0o755)  # PostgreSQL does not run as root
        bascule = stack.enter_context(BasculeUp(directory / "bascule"))
        artemis = stack.enter_context(Artemis(directory / "artemis")) if PEER in chosen else None
        services = Services(bascule, artemis, stack.enter_context(EmbeddedPostgres(data / "postgres")), directory)
        with psycopg.connect(services.postgres.conninfo, autocommit=True) as database:
            database.execute("CREATE TABLE payments (id bigserial PRIMARY KEY, body text)")
        Topics({"bootstrap.servers": bascule.kafka}).create(TOPIC, 1, {})
        if {JAVA, PEER} & set(chosen):
            xa_java.compiled()
        about: dict[str, Any] = {"versions": versions(services.postgres), "flush_ms": flush_ms(directory)}
        for number in range(options.rounds):
            # The order changes from round to round.
            for mode, who, each in turns if number % 2 == 0 else reversed(turns):
                result = measure(services, who, mode, each, options)
                results[mode.name, who, each].append(result)
                said = f"{result.get('per_s', 0):.0f}/s, {result['failures']:g} failures"
                print(f"round {number + 1} {mode.name}, {each.title}, {who}: {said}", file=sys.stderr, flush=True)
        durability = [BasculeUp.durability, *([artemis.durability] if artemis else [])]
    write(options, about, durability, results, chosen)
    return int(any(run["failures"] for runs_of in results.values() for run in runs_of))


def write(
    options: argparse.Namespace,
    about: dict[str, Any],
    durability: list[str],
    results: dict[tuple[str, str, Clients], list[Run]],
    chosen: list[str],
) -> None:
    """Write the results as JSON and as a page."""
    about |= {"machine": machine(), "options": vars(options), "durability": durability}
    named = [{"mode": mode, "who": who, "clients": each.title, "runs": found} for (mode, who, each), found in results.items()]
    lines = [
        f"median (least to greatest) of {options.rounds} rounds of {options.seconds:g} s; ratio: how many times better than {PEER}",
        "processor ms: of one transaction, on all cores together; broker: with Kafka where the broker is Bascule",
        f"versions: {', '.join(f'{name} {version}' for name, version in about['versions'].items())}",
        f"machine: {about['machine']['cores']} cores, {about['machine']['cpu']}; load average at the end "
        f"{about['machine']['load_average'][0]:.1f}; fdatasync of a write of 512 bytes {about['flush_ms']:.2f} ms",
        *durability,
        "PostgreSQL: fsync on. Narayana: its default log, a synced file for each transaction. Bascule's manager: a file log, synced",
        *(f"{who}: {CONTENDERS[who]}" for who in chosen),
    ]
    write_results("xa", {**about, "results": named}, "\n".join([table(results), "", *(f"- {line}" for line in lines)]))


if __name__ == "__main__":
    sys.exit(main())
