"""The options with which a driver's JVM uses the archive of Spark's classes."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bascule.pipelines import class_archive


@pytest.fixture(autouse=True)
def _restored_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv(class_archive.WRITING, raising=False)


def test_java_options_are_empty_without_class_archive() -> None:
    assert class_archive.java_options() == ""


def test_existing_class_archive_is_used() -> None:
    path = class_archive.archive_path()
    path.parent.mkdir(parents=True)
    path.touch()
    assert f"-XX:SharedArchiveFile={path}" in class_archive.java_options()
    assert class_archive.write() == path


def test_class_archive_path_depends_on_jdk_and_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    first = class_archive.archive_path()
    monkeypatch.setattr(class_archive, "classpath", lambda _: [Path("another.jar")])
    assert class_archive.archive_path() != first


def test_class_archive_is_written_by_requested_jvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(class_archive.WRITING, str(tmp_path / "new.jsa"))
    assert f"-XX:ArchiveClassesAtExit={tmp_path / 'new.jsa'}" in class_archive.java_options()


def test_setup_continues_when_class_archive_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def late() -> Path:
        raise subprocess.TimeoutExpired("java", 120)

    monkeypatch.setattr(class_archive, "write", late)
    assert class_archive.main() == 0
    assert "could not archive Spark's classes" in capsys.readouterr().out


def test_class_archive_path_may_contain_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(class_archive.WRITING, "/my projects/spark.jsa")
    assert shlex.split(class_archive.java_options())[0] == "-XX:ArchiveClassesAtExit=/my projects/spark.jsa"
