"""The statements of Jakarta Messaging, case by case, with the unmodified Java client. Apache Artemis runs the same cases for comparison.

The cases are in java/conformance; docs/jms.md states which statement of the specification each of them covers.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bench.artemis import PASSWORD, USER, Artemis
from tests.interop.conformance import PROGRAM, case_ids
from tests.support.java import JARS, JAVAX_JARS, java_command
from tests.support.speed import SLOWNESS
from tests.support.system import System

#: The two lines of Qpid JMS: Jakarta Messaging 3.1 and JMS 2.0.
LINES = {"jakarta": JARS, "javax": JAVAX_JARS}
#: The client of both has one source, and sends the same frames: the default suite runs the newer line.
EACH_LINE = pytest.mark.parametrize("line", ["jakarta", pytest.param("javax", marks=pytest.mark.slow)])
#: Concurrent cases. Cases mostly wait; more of them would wait for the processor.
THREADS = 6
#: The largest message of a case exists several times, in the case and in the client.
JVM = ("-Xms64m", "-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
RUN_TIMEOUT_S = 280 * SLOWNESS
#: The first test of a line runs all its cases.
pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)
CONFIG = f"""
[broker]
allow_anonymous = true
users = {{ {USER} = "{PASSWORD}" }}
"""
CASES = case_ids()

_TYPES = "compares values of different types by their text or as unequal; by the specification, the comparison is false (3.8.1.1)"
_NULL = "evaluates NULL = NULL as true; by the specification, it is unknown (3.8.1.2)"
_LENIENT = "accepts it as valid"
_GUEST = "its default settings allow anonymous access, so a client with a wrong password is admitted as a guest"
_ONE_NAME = "lets a shared and an unshared durable subscription replace each other; by the specification, this is refused (8.3.3, 8.3.4)"
_BY_NAME = "knows no prefixes in names unless its acceptor configures them"
_RECREATED = "creates the queue again, as an ordinary queue, when a client names it"

#: Cases that Artemis 2.56 does not pass with its default settings, and why that does not make the case wrong.
ARTEMIS_DIFFERS = {
    "async.refused-is-told-to-the-listener": _RECREATED,
    "context.wrong-password": _GUEST,
    "durable.name-of-a-shared-one-is-refused": _ONE_NAME,
    "failover.wrong-password-is-told-at-once": _GUEST,
    "group.does-not-hold-back-what-has-none": "a message whose group has a consumer without credit blocks the messages behind it",
    "queue.name-with-its-prefix": _BY_NAME,
    "queue.of-the-name-of-a-topic-is-apart": "an address of a queue accepts no message for a topic from a producer without destination",
    "security.unknown-user": _GUEST,
    "security.wrong-password": _GUEST,
    "selector.boolean-not-equal": _TYPES,
    "selector.divided": "divides integers as real numbers; the specification wants Java's numeric promotion",
    "selector.invalid-comment": _LENIENT,
    "selector.invalid-double-quotes": _LENIENT,
    "selector.not-equal": _TYPES,
    "selector.null-equals-nothing": _NULL,
    "selector.two-properties": f"{_NULL}, and an int unequal to a short",
    "selector.unlike-types-are-not-unequal-either": _TYPES,
    "shared-durable.name-of-an-unshared-one-is-refused": _ONE_NAME,
    "temporary.deleted-queue-cannot-be-used": _RECREATED,
    "temporary.only-its-connection-may-consume-also-by-name": "only the client protects a temporary queue",
    "topic.name-with-its-prefix": _BY_NAME,
    "transaction.with-a-refused-message-is-rolled-back": _RECREATED,
}
#: Cases whose result with Artemis depends on timing. Artemis does not run them; some would wait for half a minute.
NOT_FOR_ARTEMIS = {
    "browser.of-more-than-a-prefetch": "under load, it ends a browser too early",
    "expiry.browsers-do-not-show-expired-ones": "shows them until its next scan, or until they reach a consumer",
    "expiry.a-sweep-finds-those-that-nobody-receives": "it scans every 30 seconds",
    "session.many-of-a-connection": "takes most of a second to end each session that has sent something",
}


class Result(NamedTuple):
    """The result of a case; ``message`` says what was wrong."""

    ok: bool
    message: str


Results = dict[str, Result]
Run = Callable[[str], Results]


def run_cases(line: str, url: str, log_file: Path, *options: str) -> Results:
    """Run all cases, or the selected ones, with one line of the client in one process."""
    arguments = ("--url", url, "--user", USER, "--password", PASSWORD, "--threads", str(THREADS), *options)
    with log_file.open("w") as log:
        command = java_command(PROGRAM, *arguments, jvm=JVM, jars=LINES[line])
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.stdout, log_file.read_text()
    lines = map(json.loads, done.stdout.splitlines())
    return {each["id"]: Result(each["ok"], each["message"]) for each in lines}


def once_per_line(url: str, directory: Path) -> Run:
    """Runs the cases of a line when its results are first needed. A failed run is not repeated for each case."""

    @cache
    def outcome(line: str) -> Results | Exception:
        try:
            return run_cases(line, url, directory / f"{line}.log")
        except Exception as error:
            return error

    def results(line: str) -> Results:
        found = outcome(line)
        if isinstance(found, Exception):
            raise found
        return found

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
@EACH_LINE
def test_conformance_case_passes(bascule: Run, line: str, case: str) -> None:
    result = bascule(line)[case]
    assert result.ok, result.message


@EACH_LINE
def test_all_conformance_cases_ran(bascule: Run, line: str) -> None:
    assert len(CASES) == len(set(CASES)) >= 300
    assert bascule(line).keys() == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_artemis_fails_exactly_the_conformance_cases_listed_as_differences(line: str, artemis: Twin, tmp_path: Path) -> None:
    results = dict(artemis.results[line])
    if unexplained := failed(results) - ARTEMIS_DIFFERS.keys():
        # A machine that was busy with other work is not a difference between brokers.
        results |= run_cases(line, artemis.url, tmp_path / "again.log", "--only", ",".join(unexplained))
    unexplained = failed(results) - ARTEMIS_DIFFERS.keys()
    assert not unexplained, said(results, unexplained)
    assert results.keys() == set(CASES) - NOT_FOR_ARTEMIS.keys()
    gone = ARTEMIS_DIFFERS.keys() - failed(results)
    assert not gone, f"Artemis passes {sorted(gone)} now: take them out of the table"


class Twin(NamedTuple):
    """A running Artemis, and the results of the cases of each line with it."""

    url: str
    results: Mapping[str, Results]


@pytest.fixture(scope="module")
def artemis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    directory = tmp_path_factory.mktemp("artemis")
    asked = ",".join(case for case in CASES if case not in NOT_FOR_ARTEMIS)
    with Artemis(directory / "broker") as running:

        def run(line: str) -> Results:
            return run_cases(line, running.url, directory / f"{line}.log", "--only", asked)

        # Both lines concurrently: where Artemis differs, a case waits for a message that does not come.
        with ThreadPoolExecutor(len(LINES)) as pool:
            results = dict(zip(LINES, pool.map(run, LINES), strict=True))
        yield Twin(running.url, results)
