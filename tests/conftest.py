"""Fixtures for all tests: one Kafka and one Java peer for a run, unique names, and no process left behind."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

import bascule
from bascule.core.build import build
from bascule.core.log import PRODUCT
from bascule.embedded import process
from bascule.embedded.jars import classpath
from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.threads.stacks import STACKS_VARIABLE, show_stacks_on_signal
from tests.support import preloaded
from tests.support.lost_workers import WORDS_FILE, LastWords, LostWorkers
from tests.support.postgres import temporary_postgres
from tests.support.qpid import Connection, JmsError, QpidPeer
from tests.support.speed import SLOWNESS
from tests.support.stacks import Watchdog

TESTS = Path(__file__).parent
#: A compiled build has no functions and classes whose parts a test can replace.
NOT_COMPILED = pytest.mark.skip(reason="replaces parts of compiled modules")
#: Import paths of child processes: the product, and the packages of the tests.
IMPORT_PATHS = (Path(bascule.__file__).parents[1], TESTS.parent, TESTS / "support" / "startup")
#: Tests in these directories run real processes.
SERVICE_DIRECTORIES = ("scenarios", "interop", "chaos")
#: With the grace period after a test's time (``tests.support.stacks.GRACE_S``) a hanging test ends within five minutes; on a slow machine
#: later.
TIMEOUT_MAX_S = 280
#: Tests in these directories take longer than that, and limit each of their steps themselves.
LASTING_DIRECTORIES = ("chaos", "simulation", "property")
#: Lines of libraries that no test may print: librdkafka's log, except messages about the end of a client (level 0, which no setting turns
#: off), and asyncio's messages about errors that nobody has retrieved.
NOISE = re.compile(r"%[3-7]\|.*rdkafka#|(^|asyncio:\S+ )\w+ exception was never retrieved")
#: A descriptor for the standard error of the run, which tests do not capture.
_STDERR = pytest.StashKey[int]()
_WATCHDOG = pytest.StashKey[Watchdog]()
_LAST_WORDS = pytest.StashKey[LastWords]()
#: Approximate seconds of a file in each directory. Tests that compute and tests that wait for services alternate during the whole run, so
#: that waiting tests leave the processors to the others. Within each kind long files come first, so that no process is left with a long one
#: at the end.
COMPUTING_S = {"simulation": 130.0, "property": 35.0, "tidy": 5.0, "unit": 3.0}
WAITING_S = {"chaos": 350.0, "scenarios": 60.0, "examples": 50.0, "interop": 30.0}
#: In the environment of every process of a run, and thus of all its descendants.
RUN_VARIABLE = "BASCULE_TEST_RUN"
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
#: A JVM whose parent was killed cleans up before it ends, which takes some seconds on a busy machine.
LEAVE_TIMEOUT_S = 60.0
#: Number of test processes, each with its own services. On average one of them computes at a time, and three keep two processors busy. When
#: four computed at once, Kafka got no processor time for 30 s.
WORKERS = 3
#: For every JVM of a run. They live for seconds, so the second compiler would cost half of the processor and never pay off.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1"

# Without this, hundreds of short processes would each compile the sources again, which takes a third of their start, and each test process
# would compile the tests again, which takes half of their collection.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_numbers = itertools.count(1)
#: Whether objects of the collected tests are not frozen.
_THAWED = threading.Event()
_THAWED.set()
_unfreeze = gc.unfreeze

# Neither the speed of the machine nor chance decides about a test. Set the variable to search with other examples.
settings.register_profile(
    "bascule", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="BASCULE_OTHER_EXAMPLES" not in os.environ
)
settings.load_profile("bascule")


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of a run its own share of ports: the port of a dead broker would otherwise be free for other processes."""
    gc.unfreeze = _thaw
    # pytest redirects descriptor 2 while it imports this file and while a test runs, but not while it calls this hook.
    config.stash[_STDERR] = os.dup(2)
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        first, count = process.LASTING_PORT_MIN, int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        share = max(0, process._first_passing_port() - first) // count
        first += int(worker.removeprefix("gw")) % count * share
        process.LASTING_PORT_MIN, process._first_passing_port = first, lambda: first + share
    if file := getattr(config, "workerinput", {}).get(WORDS_FILE):
        config.stash[_LAST_WORDS] = LastWords(Path(file))
        config.pluginmanager.register(config.stash[_LAST_WORDS])
    elif config.getoption("tx", None):
        config.pluginmanager.register(LostWorkers())


def pytest_report_header() -> str:
    return f"bascule: {build()} build"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    shares, compiled = _shares(items), build() == "compiled"
    items.sort(key=lambda item: (shares.get(item.path, 1.0), item.path))
    for item in items:
        if _directory(item.path) in SERVICE_DIRECTORIES:
            item.add_marker(pytest.mark.services)
            if item.get_closest_marker("on_mock_cluster"):
                item.add_marker(pytest.mark.slow)
        if compiled and item.get_closest_marker("interpreted"):
            item.add_marker(NOT_COMPILED)
        if item.config.getoption("timeout") is None:
            item.add_marker(pytest.mark.timeout(_timeout_s(item) * SLOWNESS), append=False)


def _shares(items: list[pytest.Item]) -> dict[Path, float]:
    """Return for each file the share of its kind's work that comes before the middle of the file."""
    directories = {item.path: _directory(item.path) for item in items}
    shares: dict[Path, float] = {}
    for usual_s in (COMPUTING_S, WAITING_S):
        # Within a directory large files come first: they take longer, and do not all need Spark at the same time.
        files = sorted((path for path, name in directories.items() if name in usual_s), key=lambda path: (
            -usual_s[directories[path]], -path.stat().st_size, path,
        ))  # fmt: skip
        ends_s = list(itertools.accumulate(usual_s[directories[path]] for path in files))
        shares |= {path: (end_s - usual_s[directories[path]] / 2) / ends_s[-1] for path, end_s in zip(files, ends_s, strict=True)}
    return shares


def _timeout_s(item: pytest.Item) -> float:
    """Return the timeout of a test on a machine of the usual speed, if the command line sets none."""
    directory = _directory(item.path)
    services = directory in SERVICE_DIRECTORIES
    lasting = directory in LASTING_DIRECTORIES or item.get_closest_marker("slow") is not None
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return TIMEOUT_MAX_S if services else float(item.config.getini("timeout"))
    timeout_s: float = marker.args[0]
    return timeout_s if lasting else min(timeout_s, TIMEOUT_MAX_S)


def pytest_xdist_auto_num_workers() -> int:
    """Return more workers than processors, since many tests wait for time to pass."""
    return WORKERS


@cache
def _directory(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector, which would take half of the time and find nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        _freeze_if_thawed()  # before the collector can examine the objects
        gc.enable()


def _thaw() -> None:
    """Thaw all objects, as ``gc.unfreeze`` does, and remember that."""
    _unfreeze()
    _THAWED.set()


def _freeze_if_thawed() -> None:
    """Freeze the objects of the collected tests, which are more than a million: a full collection would examine them for a second.

    A broker in this process thaws them at its end. To ask the collector for its number of frozen objects would take 20 ms for each test,
    because it counts them.
    """
    if _THAWED.is_set():
        _THAWED.clear()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Collect the stacks of all processes of the run shortly before a test's time is over."""
    _freeze_if_thawed()
    limit_s = pytest_timeout._get_item_settings(item).timeout
    if not limit_s:
        return (yield)
    say = partial(_say, item.config.stash)
    item.stash[_WATCHDOG] = watchdog = Watchdog(limit_s, lambda: _processes_of_run(os.environ.get(RUN_VARIABLE, "")), say)
    with watchdog:
        return (yield)


def _noise(report: pytest.TestReport) -> list[str]:
    """Return the lines that a Kafka client or asyncio has written to standard error or to a log during the test."""
    return [line for line in (report.capstderr + report.caplog).splitlines() if NOISE.search(line)]


def _say(stash: pytest.Stash, text: str) -> None:
    if _LAST_WORDS in stash:
        stash[_LAST_WORDS].say(text)
    os.write(stash[_STDERR], text.encode())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.passed and report.when == "teardown" and (lines := _noise(report)):
        report.outcome, report.longrepr = (
            "failed",
            "\n".join([f"{item.nodeid} prints lines of a library; no user of Bascule may see them:", *lines]),
        )
    if report.failed and _WATCHDOG in item.stash and item.stash[_WATCHDOG].stacks:
        report.sections.append(("stacks of all processes of the run", item.stash[_WATCHDOG].stacks))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once, since a run that is ended from outside has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        stacks = "\n".join(text for title, text in report.sections if title.startswith("stacks"))
        print(f"\n{report.nodeid} ({report.when}) failed\n{report.longreprtext}\n{stacks}", flush=True)  # noqa: T201


def _processes_of_run(run: str) -> dict[int, str]:
    """Return process id and command line of all other processes with this run's mark in their environment.

    Python's tracker of shared resources is left out, since it ends with the process that started it, and not before.
    """
    mark = f"{RUN_VARIABLE}={run}".encode()
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(directory.name) != os.getpid() and mark in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()[-200:]
    return {pid: command for pid, command in found.items() if RESOURCE_TRACKER not in command}


def _but(processes: dict[int, str], without: set[int]) -> dict[int, str]:
    return {pid: command for pid, command in processes.items() if pid not in without}


@pytest.fixture(scope="session", autouse=True)
def _no_process_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    run = uuid.uuid4().hex
    os.environ[STACKS_VARIABLE] = str(tmp_path_factory.mktemp("stacks"))
    show_stacks_on_signal()
    os.environ[RUN_VARIABLE] = run
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, IMPORT_PATHS))
    os.environ.setdefault("JDK_JAVA_OPTIONS", JVM_OPTIONS)
    os.environ["BASCULE_CONTEXT"] = ""  # commands of the tests do not talk to a broker of the user
    yield
    # Those that fork are stopped last, because what they have forked ends with them.
    deadline, forking = time.monotonic() + LEAVE_TIMEOUT_S, preloaded.pids()
    while (left := _but(_processes_of_run(run), forking)) and time.monotonic() < deadline:
        time.sleep(0.05)
    preloaded.stop()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"the tests left processes behind: {left}"


@pytest.fixture(autouse=True)
def _log_restored() -> Iterator[None]:
    """Restore levels and handlers, since a command that a test runs in its own process configures logging for that process."""
    loggers = [logging.getLogger(), logging.getLogger(PRODUCT)]
    before = [(each, each.level, [*each.handlers]) for each in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    """Return a Kafka for the whole run. Use your own names (``topic_prefix``), and never stop it."""
    with EmbeddedKafka(tmp_path_factory.mktemp("kafka"), jvm_options=SHORT_LIVED) as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """Return a PostgreSQL for the whole run. Create your own tables (``name``), and never stop it."""
    with temporary_postgres() as running:
        yield running


@pytest.fixture(scope="session")
def qpid_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QpidPeer]:
    """Return the unmodified Java client, for the whole run. Open your own connections."""
    with QpidPeer(tmp_path_factory.mktemp("qpid") / "peer.log") as peer:
        yield peer


@pytest.fixture
def connect_to(qpid_peer: QpidPeer) -> Iterator[Callable[..., Connection]]:
    """Return a function that opens connections of the Java client as ``QpidPeer.connect`` does. They are closed after the test."""
    with ExitStack() as opened:

        def connect(url: str, **options: Any) -> Connection:
            connection = qpid_peer.connect(url, **options)

            def close() -> None:
                with suppress(JmsError):  # the test has closed it
                    connection.close()

            opened.callback(close)
            return connection

        yield connect


@pytest.fixture(scope="session")
def qpid_jms_classpath() -> str:
    """Return the class path for ``java -cp``."""
    return os.pathsep.join(map(str, classpath("qpid-jms")))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Return a directory that does not exist yet."""
    return tmp_path / "data"


@pytest.fixture
def free_port() -> int:
    return process.free_port()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return a name for a destination, a subscription or a client that no other test of the run uses."""
    return f"{re.sub(r'[^a-z0-9]+', '.', request.node.name.lower().removeprefix('test_'))[:40].strip('.')}.{next(_numbers)}"


@pytest.fixture
def queue(name: str) -> str:
    """Return a queue that no other test of the run uses, in the syntax of the Java client."""
    return f"queue:{name}"


@pytest.fixture
def topic(name: str) -> str:
    """Return a JMS topic that no other test of the run uses, in the syntax of the Java client."""
    return f"topic:{name}"


@pytest.fixture
def topic_prefix(request: pytest.FixtureRequest) -> str:
    """Return a prefix for Kafka topics, groups and transactional ids that no other test of the run uses."""
    name = re.sub(r"\W+", "-", request.node.name.removeprefix("test_"))
    return f"{name[:60]}-{next(_numbers)}"
