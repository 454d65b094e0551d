"""``bascule backup`` and ``bascule restore``: the files with settings, and what an interrupted restore says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bascule.backup.copies import FILES
from bascule.cli.backup import _copy_files, restore
from bascule.config import load
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.topics import BRIDGE_ID
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.backup.installation import back_up, small_installation
from tests.unit.server import broker_process


def configured(directory: Path, users_file: str = "") -> Path:
    file = directory / "bascule.toml"
    directory.mkdir(parents=True, exist_ok=True)
    users = f'users_file = "{users_file}"\n' if users_file else ""
    file.write_text(
        f'bridge.id = "{BRIDGE_ID}"\nkafka.bootstrap_servers = "memory:1"\n[journal]\nprefix = "{broker_process.PREFIX}"\n[broker]\n{users}'
    )
    return file


def test_files_with_secrets_are_copied_on_request_only(tmp_path: Path) -> None:
    users = tmp_path / "users.jsonl"
    users.write_text("")
    configuration = load(configured(tmp_path / "etc", str(users)))
    for number, (secrets, names) in enumerate([(False, {"settings.json"}), (True, {"settings.json", "bascule.toml", "users.jsonl"})]):
        directory = tmp_path / str(number)
        _copy_files(configuration, directory, secrets)
        found = list((directory / FILES).iterdir())
        assert {path.name for path in found} == names
        assert {path.stat().st_mode & 0o777 for path in found} == {0o600}


@pytest.mark.parametrize("name", ["settings.json", "bascule.toml"])
def test_files_with_the_same_name_do_not_replace_each_other(tmp_path: Path, name: str) -> None:
    users = tmp_path / name
    users.write_text("")
    with pytest.raises(InvalidInput, match=f"two files of the backup would have the name '{name}'"):
        _copy_files(load(configured(tmp_path / "etc", str(users))), tmp_path / "backup", True)


def test_missing_file_with_secrets_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"missing\.jsonl cannot be copied \(--secrets\): No such file"):
        _copy_files(load(configured(tmp_path / "etc", str(tmp_path / "missing.jsonl"))), tmp_path / "backup", True)


def test_restore_that_fails_says_whether_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = KafkaInMemory(monkeypatch)
    small_installation(old)
    back_up(tmp_path / "backup")
    file = configured(tmp_path / "etc")
    with pytest.raises(InvalidInput, match="deletes none"):
        restore(tmp_path / "backup", file)
    assert "Repeat the command" not in capsys.readouterr().err
    new = KafkaInMemory(monkeypatch)
    new.fail("delivery", 1)
    with pytest.raises(Unavailable):
        restore(tmp_path / "backup", file)
    assert "the restore is not complete" in capsys.readouterr().err
