"""What a driver's JVM is told of the archive of Spark's classes."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bascule.pipelines import class_archive


@pytest.fixture(autouse=True)
def _an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv(class_archive.WRITING, raising=False)


def test_without_an_archive_the_driver_is_told_nothing() -> None:
    assert class_archive.java_options() == ""


def test_an_archive_that_is_there_is_used() -> None:
    path = class_archive.archive_path()
    path.parent.mkdir(parents=True)
    path.touch()
    assert f"-XX:SharedArchiveFile={path}" in class_archive.java_options()
    assert class_archive.write() == path


def test_another_jdk_or_another_spark_has_another_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    first = class_archive.archive_path()
    monkeypatch.setattr(class_archive, "classpath", lambda _: [Path("another.jar")])
    assert class_archive.archive_path() != first


def test_the_archive_is_written_by_the_jvm_that_is_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(class_archive.WRITING, str(tmp_path / "new.jsa"))
    assert f"-XX:ArchiveClassesAtExit={tmp_path / 'new.jsa'}" in class_archive.java_options()


def test_a_setup_goes_on_without_the_archive_whatever_keeps_it_from_being_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late() -> Path:
        raise subprocess.TimeoutExpired("java", 120)

    monkeypatch.setattr(class_archive, "write", late)
    assert class_archive.main() == 0
    assert "could not archive Spark's classes" in capsys.readouterr().out


def test_an_environment_may_lie_in_a_directory_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(class_archive.WRITING, "/my projects/spark.jsa")
    assert shlex.split(class_archive.java_options())[0] == "-XX:ArchiveClassesAtExit=/my projects/spark.jsa"
