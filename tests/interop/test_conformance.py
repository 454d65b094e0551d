"""What Jakarta Messaging promises, case by case, with the unmodified Java client; Apache Artemis runs the same cases as a twin.

The cases are those of java/conformance; docs/jms.md says which statement of the specification each of them keeps.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from bench.artemis import PASSWORD, USER, Artemis

from bascule.embedded.kafka import EmbeddedKafka
from bascule.testing.java import JARS, JAVAX_JARS, java_command, sources_of
from bascule.testing.system import System

PROGRAM = "Conformance"
#: The two lines of Qpid JMS: Jakarta Messaging 3.1 and JMS 2.0.
LINES = {"jakarta": JARS, "javax": JAVAX_JARS}
#: Cases at once. They wait more than they work; more than this makes them wait for the processor.
THREADS = 6
#: The largest message of a case is there several times, in the case and in the client.
JVM = ("-Xms64m", "-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
RUN_TIMEOUT_S = 280
CONFIG = f"""
[broker]
allow_anonymous = true
users = {{ {USER} = "{PASSWORD}" }}
"""
#: The line that adds a case has its id as first argument.
CASE = re.compile(r'^\s+\w+\("([a-z0-9-]+\.[a-z0-9-]+)",', re.MULTILINE)

#: Cases that Artemis 2.56, as it comes out of its box, does not pass, and why that does not make the case wrong.
ARTEMIS_DIFFERS: dict[str, str] = {}


class Result(NamedTuple):
    """How a case ended; ``message`` says what was wrong."""

    ok: bool
    message: str


Results = dict[str, Result]
Run = Callable[[str], Results]


def case_ids() -> list[str]:
    """Every case, as the sources have it."""
    return [case for source in sources_of(PROGRAM) for case in CASE.findall(source.read_text())]


CASES = case_ids()


def run_cases(line: str, url: str, log_file: Path, *options: str) -> Results:
    """All cases, or those that options choose, with one line of the client in one process."""
    arguments = ("--url", url, "--user", USER, "--password", PASSWORD, "--threads", str(THREADS), *options)
    with log_file.open("w") as log:
        command = java_command(PROGRAM, *arguments, jvm=JVM, jars=LINES[line])
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.stdout, log_file.read_text()
    lines = map(json.loads, done.stdout.splitlines())
    return {each["id"]: Result(each["ok"], each["message"]) for each in lines}


def once_per_line(url: str, directory: Path) -> Run:
    """Runs the cases when a line's results are first asked for."""
    known: dict[str, Results] = {}

    def results(line: str) -> Results:
        if line not in known:
            known[line] = run_cases(line, url, directory / f"{line}.log")
        return known[line]

    return results


@pytest.fixture(scope="module")
def bascule(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("conformance")
    with System(kafka.bootstrap, directory, prefix="conformance", config=CONFIG) as system:
        yield once_per_line(system.url, directory)


def failed(results: Results) -> set[str]:
    return {case for case, result in results.items() if not result.ok}


def said(results: Results, cases: Iterable[str]) -> str:
    return "\n".join(f"{case}: {results[case].message}" for case in sorted(cases))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("line", LINES)
def test_a_client_is_given_what_the_specification_promises(bascule: Run, line: str, case: str) -> None:
    result = bascule(line)[case]
    assert result.ok, result.message


@pytest.mark.parametrize("line", LINES)
def test_every_case_ran_and_there_are_enough_of_them(bascule: Run, line: str) -> None:
    assert len(CASES) == len(set(CASES)) >= 300
    assert bascule(line).keys() == set(CASES)


@pytest.mark.parametrize("line", LINES)
def test_artemis_differs_where_it_is_explained_and_nowhere_else(line: str, artemis: Artemis, tmp_path: Path) -> None:
    results = run_cases(line, artemis.url, tmp_path / "run.log")
    if unexplained := failed(results) - ARTEMIS_DIFFERS.keys():
        # A machine that was busy with something else is no difference between brokers.
        results |= run_cases(line, artemis.url, tmp_path / "again.log", "--only", ",".join(unexplained))
    unexplained = failed(results) - ARTEMIS_DIFFERS.keys()
    assert not unexplained, said(results, unexplained)
    gone = ARTEMIS_DIFFERS.keys() - failed(results)
    assert not gone, f"Artemis passes {sorted(gone)} now: take them out of the table"


@pytest.fixture(scope="module")
def artemis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artemis]:
    with Artemis(tmp_path_factory.mktemp("artemis") / "broker") as running:
        yield running
