"""Reload of a process that can change only its log: the pipelines, and ``bascule up``."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bascule.cli.log_reload import LogReload
from bascule.config import Configuration, load
from bascule.core.environment import PIPELINES_NEED
from bascule.core.log import configure, configured
from bascule.embedded.service_manager import ServiceManager
from tests.support.service_manager import NotifySocket, notify_socket

TEXT = """
[log]
level = "{level}"
[broker]
port = {port}
[admin]
masked_properties = ["{masked}"]
"""

#: Runs `bascule kafka` with a node that has no JVM.
KAFKA = """
import sys
from pathlib import Path
from bascule.cli import run

class Node:
    bootstrap, running = "127.0.0.1:1", True
    def start(self):
        pass
    def stop(self):
        print("stopped", flush=True)

run._embedded_kafka = lambda *_: Node()
run.kafka(Path(sys.argv[1]), Path(sys.argv[2]), 0)
"""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[NotifySocket]:
    before = configured()
    with notify_socket(tmp_path / "notify") as found:
        yield found
    if before is not None:
        configure(before)


@pytest.mark.parametrize("level", ["info", "debug"])
def test_pipelines_follow_the_log_and_name_what_they_need_a_restart_for(
    level: str, manager: NotifySocket, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text(TEXT.format(level="info", port=1, masked="one"))
    read = partial(load, file, needs=PIPELINES_NEED)
    behind: list[bool] = []
    reload = LogReload(read(), read, ServiceManager(manager.environ), behind=lambda: behind.append(True))
    for _ in range(2):
        file.write_text(TEXT.format(level=level, port=2, masked="two"))
        reload.reload()
        said = capfd.readouterr().err
        assert "setting needs a restart setting=admin.masked_properties before=one after=two" in said
        assert "broker.port" not in said, "the pipelines do not read it"
    found = configured()
    assert found is not None
    assert found.level == level
    assert [each[0] for each in manager.messages()] == ["RELOADING=1", "READY=1"] * 2
    assert len(behind) == 2


def test_file_with_an_error_changes_nothing_and_the_parts_of_up_are_told(
    manager: NotifySocket, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text('[log]\nlevel = "info"\n')
    read = partial(load, file)
    behind: list[bool] = []
    configure(read().settings.log.values)
    reload = LogReload(read(), read, ServiceManager(manager.environ), whole_process=False, behind=lambda: behind.append(True))
    file.write_text('[log]\nlevel = "loud"\n')
    reload.reload()
    found = configured()
    assert found is not None
    assert found.level == "info"
    assert "settings not reloaded, the settings before stay" in capfd.readouterr().err
    assert [each[0] for each in manager.messages()] == ["RELOADING=1", "READY=1"]
    assert behind == [True]


@pytest.mark.parametrize("change", ["removed", "emptied", "defect"])
def test_log_keeps_its_settings_if_the_file_is_gone_or_cannot_be_read(
    change: str, manager: NotifySocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BASCULE_CONFIG", raising=False)
    file = Path("bascule.toml")
    file.write_text('[log]\nlevel = "debug"\n')
    configuration = load()
    configure(configuration.settings.log.values)

    def read() -> Configuration:
        if change == "defect":
            raise RuntimeError(change)
        return load()

    reload = LogReload(configuration, read, ServiceManager(manager.environ))
    if change == "emptied":
        file.write_text("")
    else:
        file.unlink()
    reload.reload()
    found = configured()
    assert found is not None
    assert found.level == "debug"
    assert "settings not reloaded, the settings before stay" in capfd.readouterr().err
    assert [each[0] for each in manager.messages()] == ["RELOADING=1", "READY=1"]


def test_kafka_alone_follows_the_log_at_sighup_and_does_not_end(tmp_path: Path) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text(TEXT.format(level="info", port=1, masked="one"))
    program = [sys.executable, "-c", KAFKA, str(file), str(tmp_path / "data")]
    with subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert "ready kafka=127.0.0.1:1" in running.stdout.readline()
        file.write_text(TEXT.format(level="debug", port=2, masked="two"))
        running.send_signal(signal.SIGHUP)
        lines = []
        for line in running.stderr:
            lines.append(line)
            if "settings reloaded" in line:
                break
        running.terminate()
        assert running.stdout.read() == "stopped\n"
    assert running.returncode == 0
    said = "".join(lines)
    assert "log.level" in said
    assert "broker.port" not in said, "Kafka does not read it"
