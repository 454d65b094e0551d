"""What ``bascule up`` passes on to its parts, so that a reload of the broker still sees each change of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bascule.cli.run import _environment
from bascule.config.load import load
from bascule.config.reloading import plan_reload

TEXT = """
kafka.bootstrap_servers = "127.0.0.1:9"
embedded.data_dir = "{directory}"
broker.port = {port}
admin.port = {port}1
pipelines.instance = "{directory}"
"""
PORTS = {"amqp": 7, "admin": 8}


def passed_on(file: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any] | None = None) -> None:
    for name, value in _environment(load(file, flags=flags), file.parent, PORTS).items():
        monkeypatch.setenv(name, value)


def test_reload_of_the_broker_of_up_names_each_setting_that_needs_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text(TEXT.format(directory="one", port=1))
    passed_on(file, monkeypatch)
    running = load(file)
    assert (running.settings.broker.port, running.settings.admin.port) == (1, 11)
    file.write_text(TEXT.format(directory="two", port=2))
    changed = {each.key for each in plan_reload(running, load(file)).compared.needs_restart}
    assert changed == {"embedded.data_dir", "broker.port", "admin.port", "pipelines.instance"}


@pytest.mark.parametrize(
    ("port", "flags"), [(0, {}), (1, {"broker": {"port": 5}, "admin": {"port": 6}, "embedded": {"data_dir": "given"}})]
)
def test_chosen_ports_and_flags_of_up_count_for_its_parts(
    port: int, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text(TEXT.format(directory="one", port=port).replace("= 01", "= 0"))
    passed_on(file, monkeypatch, flags)
    settings = load(file).settings
    assert (settings.broker.port, settings.admin.port) == (7, 8)
    assert str(settings.embedded.data_dir) == ("given" if flags else "one")
