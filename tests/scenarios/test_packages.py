"""Wheel and sdist, installed with each extra into an empty environment without the checkout, run the first steps of their audience."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.embedded.process import Child
from bascule.kafka.admin import Topics
from tests.examples.pages import ROOT
from tests.support.compiler import obstacle
from tests.support.speed import SLOWNESS
from tests.support.system import System
from tests.support.up import READY, START_TIMEOUT_S, STOP_TIMEOUT_S

BUILD = "import setuptools.build_meta as build; build.build_{kind}({directory!r})"
#: PySpark is built from source.
INSTALL_TIMEOUT_S = 900 * SLOWNESS
STEP_TIMEOUT_S = 120 * SLOWNESS
#: A compiled wheel takes minutes.
BUILD_TIMEOUT_S = 600 * SLOWNESS
#: Environment of an installed program: neither the checkout nor the packages of the tests are visible.
HIDDEN = ("PYTHONPATH", "VIRTUAL_ENV")

SEND_AND_RECEIVE = """
import sys
from bascule import Queue, connect
with connect(sys.argv[1]) as context:
    context.send(Queue(sys.argv[2]), "order 1")
    with context.consumer(Queue(sys.argv[2])) as consumer:
        print(next(consumer.messages(timeout_s=60)).body)
"""
COMMIT_IN_SQLITE = """
import sqlite3
from pathlib import Path
from bascule import FileLog, LocalDatabaseResource, TransactionManager
database = LocalDatabaseResource("shop", lambda: sqlite3.connect("shop.db", isolation_level=None, check_same_thread=False))
sqlite3.connect("shop.db").execute("CREATE TABLE payments (id INTEGER)").connection.close()
with TransactionManager("shop", FileLog(Path("shop.xalog")), [database]) as manager, manager.begin() as transaction:
    transaction.enlist(database).execute("INSERT INTO payments VALUES (4711)")
print(sqlite3.connect("shop.db").execute("SELECT id FROM payments").fetchall())
"""
SEND_IN_KAFKA = """
import sys
from bascule import TransactionManager
from bascule.adapter.inbound import ResourceAdapter
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_log import KafkaLog
settings, name = {"bootstrap.servers": sys.argv[1]}, sys.argv[2]
ResourceAdapter(settings)
kafka = KafkaResource("kafka", settings, prefix=name)
with TransactionManager("shop", KafkaLog(settings, topic=f"{name}.decisions"), [kafka]) as manager, manager.begin() as transaction:
    transaction.enlist(kafka).send(f"{name}.receipts", b"paid")
print(transaction.status.value)
"""
COMMIT_IN_POSTGRES = """
import sys
from pathlib import Path
from bascule import FileLog, TransactionManager
from bascule.xa.postgres import PostgresResource
database = PostgresResource("shop", sys.argv[1])
with TransactionManager("shop", FileLog(Path("shop.xalog")), [database]) as manager, manager.begin() as transaction:
    print(transaction.enlist(database).execute("SELECT 4711").fetchone())
"""

Install = Callable[..., "Environment"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from the files of the repository, and unpack it."""
    directory = tmp_path_factory.mktemp("build")
    with tarfile.open(directory / "files.tar", "w") as files:
        for name in repository():
            files.add(ROOT / name, name)
    with tarfile.open(directory / "files.tar") as files:
        files.extractall(directory / "files", filter="data")
    built(directory / "files", "sdist", directory)
    (sdist,) = directory.glob("*.tar.gz")
    with tarfile.open(sdist) as files:
        files.extractall(directory, filter="data")
    return directory / sdist.name.removesuffix(".tar.gz")


def repository() -> list[str]:
    """Return the files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return list(filter(None, listed.stdout.split("\0")))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """Build the pure wheel from the sdist."""
    built(source, "wheel", source.parent)
    return next(source.parent.glob("*.whl"))


@pytest.fixture(scope="module")
def compiled_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the compiled wheel from the sdist, as docs/package.md describes."""
    if why := obstacle():
        pytest.skip(why)
    directory = tmp_path_factory.mktemp("compiled")
    shutil.copytree(source, directory / "source")
    built(directory / "source", "wheel", directory, BASCULE_COMPILE="1", BASCULE_COMPILE_LEVEL="1")
    return next(directory.glob("*.whl"))


def built(source: Path, kind: str, target: Path, **variables: str) -> None:
    run([sys.executable, "-c", BUILD.format(kind=kind, directory=str(target))], source, BUILD_TIMEOUT_S, **variables)


def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in HIDDEN}


def run(command: list[str | Path], directory: Path, timeout_s: float = STEP_TIMEOUT_S, **variables: str) -> str:
    env = environ() | variables
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Environment:
    """An environment with the package and an extra, and a directory to work in."""

    def __init__(self, directory: Path) -> None:
        self.home, self.work = directory / "env", directory / "work"
        self.work.mkdir()
        run([sys.executable, "-m", "venv", "--without-pip", self.home], directory)

    @property
    def bin(self) -> Path:
        return self.home / "bin"

    def install(self, requirement: str, *options: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet", "--no-compile"]
        run([*pip, *options, requirement], self.work, INSTALL_TIMEOUT_S)

    def python(self, program: str, *arguments: str) -> str:
        return run([self.bin / "python", "-I", "-c", program, *arguments], self.work)

    def bascule(self, *arguments: str) -> str:
        return run([self.bin / "bascule", *arguments], self.work)

    def packages(self) -> set[str]:
        listed = "from importlib.metadata import distributions; print(*(each.name.lower() for each in distributions()))"
        return set(self.python(listed).split())


@pytest.fixture
def install(request: pytest.FixtureRequest, tmp_path: Path) -> Install:
    """Create an environment with a wheel and an extra, with the versions of the lock file or the newest of each range."""

    def made(extra: str = "", *, locked: bool = True, wheel: Path | None = None) -> Environment:
        wheel = wheel or request.getfixturevalue("wheel")
        environment = Environment(tmp_path)
        if not extra:
            environment.install(str(wheel), "--no-index")
            return environment
        options: list[str | Path] = []
        if locked:
            # With hashes, pip would require a hash of the wheel, too.
            versions = re.findall(r"^[\w-]+==[^\\\n]+", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE)
            (tmp_path / "versions.txt").write_text("\n".join(versions) + "\n")
            options = ["--constraint", tmp_path / "versions.txt"]
        environment.install(f"bascule[{extra}] @ {wheel.as_uri()}", *options)
        return environment

    return made


def contents(wheel: Path) -> set[str]:
    """Return the files of a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as files:
        return {name for name in files.namelist() if ".dist-info/" not in name}


def sources() -> set[str]:
    """Return the files that every wheel has: those of the product."""
    return {name.removeprefix("src/") for name in repository() if name.startswith("src/")}


def test_pure_wheel_contains_the_product_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert contents(wheel) == sources()
    assert "bascule/py.typed" in sources()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_wheel_contains_the_product_and_its_compiled_modules(compiled_wheel: Path) -> None:
    suffix, tag = sysconfig.get_config_var("EXT_SUFFIX"), f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_")
    assert compiled_wheel.name.endswith(f"-{tag}-{tag}-{platform}.whl")
    modules = [Path(module).relative_to("src").with_suffix("") for module in runpy.run_path(str(ROOT / "setup.py"))["modules"]()]
    assert contents(compiled_wheel) == sources() | {f"{module}{suffix}" for module in (*modules, "bascule__mypyc")}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_wheel_serves_and_sends(compiled_wheel: Path, install: Install) -> None:
    environment = install("broker", wheel=compiled_wheel)
    assert environment.bascule("--version").endswith(" (compiled)\n")
    assert environment.python(COMMIT_IN_SQLITE) == "[(4711,)]\n"
    serve_and_send(environment, "--no-pipelines")


def test_base_install_sends_messages_and_commits_without_other_packages(install: Install, system: System, name: str) -> None:
    environment = install()
    assert environment.packages() == {"bascule"}
    assert environment.python(SEND_AND_RECEIVE, system.url, name) == "order 1\n"
    assert environment.python(COMMIT_IN_SQLITE) == "[(4711,)]\n"


def test_kafka_extra_commits_and_logs_decisions_in_kafka(install: Install, kafka: EmbeddedKafka, topic_prefix: str) -> None:
    environment = install("kafka")
    assert environment.packages() == {"bascule", "confluent-kafka"}
    Topics({"bootstrap.servers": kafka.bootstrap}).create(f"{topic_prefix}.receipts", 1, {})
    assert environment.python(SEND_IN_KAFKA, kafka.bootstrap, topic_prefix) == "committed\n"


def test_postgres_extra_works_in_a_database(install: Install, postgres: EmbeddedPostgres) -> None:
    environment = install("postgres")
    assert environment.packages() == {"bascule", "psycopg", "psycopg-binary", "typing_extensions"}
    assert environment.python(COMMIT_IN_POSTGRES, postgres.conninfo) == "(4711,)\n"


def serve_and_send(environment: Environment, *options: str) -> None:
    """Run `bascule up` with the embedded Kafka, and the commands of the first steps."""
    log = environment.work / "up.log"
    ports = ("--amqp-port", "0", "--kafka-port", "0", "--admin-port", "0")
    command = [environment.bin / "bascule", "up", "--data-dir", environment.work / "data", *ports, *options]
    up = Child(command, log_file=log, name="bascule up", env=dict.fromkeys(HIDDEN, ""))
    up.start()
    try:
        up.wait_ready(lambda: READY.search(log.read_text()) is not None, START_TIMEOUT_S)
        url = READY.findall(log.read_text())[-1][0]
        environment.bascule("send", "orders", "--text", "order 1", "--broker", url)
        assert "order 1" in environment.bascule("receive", "orders", "--timeout-s", "60", "--broker", url)
    finally:
        up.stop(STOP_TIMEOUT_S)


def test_broker_extra_starts_kafka_and_broker(install: Install) -> None:
    environment = install("broker")
    assert not {"pyspark", "pyarrow", "pandas", "psycopg"} & environment.packages()
    serve_and_send(environment, "--no-pipelines")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_extra_with_newest_dependencies_starts_kafka_broker_and_pipelines(
    install: Install, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str
) -> None:
    environment = install("all", locked=False)
    Topics({"bootstrap.servers": kafka.bootstrap}).create(f"{topic_prefix}.receipts", 1, {})
    assert environment.python(SEND_IN_KAFKA, kafka.bootstrap, topic_prefix) == "committed\n"
    assert environment.python(COMMIT_IN_POSTGRES, postgres.conninfo) == "(4711,)\n"
    serve_and_send(environment)
