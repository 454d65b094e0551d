"""Secrets of each kind in a real `bascule up`: which processes get them, and where they are shown."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from bascule.client import Queue, connect
from bascule.kafka import clients
from tests.scenarios.secret_hunter import MARK
from tests.scenarios.topics import WAIT_S, Reader, create, produce
from tests.support.client import SOON_S
from tests.support.up import Up

pytestmark = pytest.mark.timeout(600)

#: Each place from which a secret comes. They differ, so that a failure names the kind.
KINDS = ("file", "environment", "flag", "token", "edit-token", "view-token", "spark", "lineage")
SECRETS = {kind: f"{MARK}-{kind}" for kind in KINDS}
CONFIG = f"""
[broker.users]
ann = "file:{{directory}}/ann"
[admin]
edit_token = "credential:edit-token"
view_token = "{SECRETS["view-token"]}"
[pipelines]
master = "local[2]"
[pipelines.spark]
"spark.hadoop.fs.s3a.secret.key" = "{SECRETS["spark"]}"
[[divert]]
name = "plain"
from = "orders"
to = "users.orders"
[[divert]]
name = "hunter"
from = "orders"
to = "users.found"
python = "tests.scenarios.secret_hunter:hunt"
group = "hunters"
[[ingress]]
name = "in"
topics = ["users.in"]
to = "payments"
routing = "anycast"
unbound = "keep"
"""


class Site:
    """A running `bascule up` whose secrets come from all places."""

    def __init__(self, directory: Path, up: Up) -> None:
        self.directory, self.up = directory, up

    def processes(self) -> dict[int, str]:
        """Return the processes below each part, and the parts, with the name of the part."""
        found = {pid: part for part, pid in self.up.pids.items() if pid is not None}
        parents = _parents()
        for pid in sorted(parents):
            line = [pid]
            while line[-1] in parents and line[-1] not in found:
                line.append(parents[line[-1]])
            if line[-1] in found:
                found |= dict.fromkeys(line, found[line[-1]])
        return found


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
    return found


def _of(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().replace(b"\0", b"\n").decode(errors="replace")
    except OSError:
        return ""  # it has ended


@contextmanager
def core_dumps_allowed() -> Iterator[None]:
    """Allow core dumps, as the shell of a user may do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("secrets")
    for name, kind in (("ann", "file"), ("carl", "flag"), ("edit-token", "edit-token")):
        (directory / name).write_text(f"{SECRETS[kind]}\n")
    config = directory / "bascule.toml"
    config.write_text(CONFIG.format(directory=directory))
    with pytest.MonkeyPatch.context() as patch, core_dumps_allowed():
        patch.setenv("BASCULE_BROKER__USERS", f'{{"bob": "{SECRETS["environment"]}"}}')
        patch.setenv("BASCULE_ADMIN__TOKEN", SECRETS["token"])
        patch.setenv("OPENLINEAGE__TRANSPORT__AUTH__APIKEY", SECRETS["lineage"])
        patch.setenv("CREDENTIALS_DIRECTORY", str(directory))
        with Up(directory, "--config", config, "--user", f"carl:file:{directory}/carl") as up:
            create(up.kafka, "users.orders", "users.found", "users.in")
            yield Site(directory, up)


def found_by_the_hunter(site: Site, messages: int) -> list[str]:
    """Return the places in which the transformation has found secrets, a list for each message."""
    settings = {"bootstrap.servers": site.up.kafka, "group.id": "found", "isolation.level": "read_committed"}
    with closing(clients.consumer(settings)) as consumer:
        consumer.assign([TopicPartition("users.found", 0, 0)])
        return [(record.value() or b"").decode() for record in consumer.consume(messages, WAIT_S)]


def test_messages_pass_both_ways_and_a_transformation_finds_no_secret(site: Site) -> None:
    produce(site.up.kafka, "users.in", ["a payment"])
    for user, kind in (("ann", "file"), ("bob", "environment"), ("carl", "flag")):
        with connect(site.up.url, user=user, password=SECRETS[kind]) as client:
            client.producer(Queue("orders")).send(f"of {user}")
    with closing(Reader(site.up.kafka, "users.orders")) as orders:
        assert orders.read_until("of carl") == ["of ann", "of bob", "of carl"]
    assert found_by_the_hunter(site, 3) == ["[]"] * 3
    with connect(site.up.url, user="ann", password=SECRETS["file"]) as client:
        message = client.consumer(Queue("payments")).receive(SOON_S)
    assert message is not None
    assert message.body == "a payment"


def test_no_secret_is_on_a_command_line(site: Site) -> None:
    shown = {pid: text for pid in site.processes() if MARK in (text := _of(pid, "cmdline"))}
    assert shown == {}


def test_only_the_broker_gets_its_secrets_in_the_environment(site: Site) -> None:
    parts = site.processes()
    assert set(parts.values()) == {"kafka", "broker", "pipelines"}
    held = {pid: {kind for kind, secret in SECRETS.items() if secret in _of(pid, "environ")} for pid in parts}
    assert {parts[pid] for pid, kinds in held.items() if kinds - {"lineage"}} <= {"broker"}
    assert {pid for pid, kinds in held.items() if "lineage" in kinds} <= {site.up.pids["pipelines"]}


def test_kafka_and_spark_get_no_settings_at_all(site: Site) -> None:
    pids = site.up.pids
    without = [pid for pid, part in site.processes().items() if part == "kafka" or (part == "pipelines" and pid != pids["pipelines"])]
    assert len(without) > 1
    for pid in without:
        names = {line.partition("=")[0] for line in _of(pid, "environ").splitlines()}
        assert not {name for name in names if name.startswith("BASCULE_") and "__" in name}
        assert "CREDENTIALS_DIRECTORY" not in names


def test_password_of_the_embedded_kafka_is_in_no_environment_command_line_or_log(site: Site) -> None:
    password = (site.up.data_dir / "kafka" / "password").read_text().strip()
    for pid in site.processes():
        assert password not in _of(pid, "environ")
        assert password not in _of(pid, "cmdline")
    assert not [file for file in _logs(site) if password in file.read_text(errors="replace")]


def test_no_secret_is_in_a_log_or_in_the_output_of_commands(site: Site) -> None:
    assert len(_logs(site)) >= 4
    assert not [file for file in _logs(site) if MARK in file.read_text(errors="replace")]
    environment = os.environ | {
        "BASCULE_BROKER__USERS": f'{{"bob": "{SECRETS["environment"]}"}}',
        "BASCULE_ADMIN__TOKEN": SECRETS["token"],
        "CREDENTIALS_DIRECTORY": str(site.directory),
    }
    for command in (["config", "show"], ["config", "check"], ["user", "list"]):
        done = subprocess.run(
            [sys.executable, "-m", "bascule.cli", *command, "--config", site.directory / "bascule.toml"],
            env=environment, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert MARK not in done.stdout + done.stderr


def test_other_users_can_read_nothing_in_the_data_directory(site: Site) -> None:
    there = [site.up.data_dir, *site.up.data_dir.rglob("*")]
    open_to_others = [path for path in there if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_to_others == []


def test_crash_of_a_process_writes_no_core_dump(site: Site) -> None:
    limits = {pid: line.split()[4] for pid in site.processes() for line in _of(pid, "limits").splitlines() if "core file" in line}
    assert len(limits) > 3
    assert set(limits.values()) == {"0" if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else "1"}


def _logs(site: Site) -> list[Path]:
    return [site.directory / "up.log", *site.up.data_dir.rglob("*.log")]
