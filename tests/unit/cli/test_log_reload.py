"""Reload of a process that can change only its log: the pipelines, and ``bascule up``."""

from __future__ import annotations

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
