from pathlib import Path

import pytest

from bascule.embedded.java import NoJdk, find_java, find_jdk


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a JAVA_HOME whose ``java`` is a script."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    install(tmp_path, "exit 1")
    return tmp_path


def install(home: Path, script: str) -> None:
    (home / "bin" / "java").write_text(f"#!/bin/sh\n{script}\n")
    (home / "bin" / "java").chmod(0o755)


def release(home: Path, version: str, modules: str) -> None:
    (home / "release").write_text(f'IMPLEMENTOR="Nobody"\nJAVA_VERSION="{version}"\nMODULES="{modules}"\n')


def test_full_jdk_is_recognised_by_its_release_file(home: Path) -> None:
    release(home, "21.0.4", "java.base jdk.compiler jdk.incubator.vector")
    assert find_jdk().version == 21
    assert find_jdk().executable == home / "bin" / "java"


def test_java_8_is_refused_with_its_version(home: Path) -> None:
    release(home, "1.8.0_402", "java.base")
    with pytest.raises(NoJdk, match=r"is Java 8, but 17 or newer is needed: .*JAVA_HOME"):
        find_java()


@pytest.mark.parametrize(
    ("modules", "missing"), [("java.base jdk.compiler", "jdk.incubator.vector"), ("java.base jdk.incubator.vector", "jdk.compiler")]
)
def test_java_without_required_modules_is_accepted_for_kafka_but_not_as_jdk(home: Path, modules: str, missing: str) -> None:
    release(home, "17.0.15", modules)
    assert find_java().version == 17
    with pytest.raises(NoJdk, match=f"without the module {missing}"):
        find_jdk()


def test_java_without_release_file_is_queried_for_version_and_modules(home: Path) -> None:
    install(
        home,
        "case $1 in -version) echo 'openjdk version \"17.0.9\" 2023-10-17' >&2;; "
        "--list-modules) printf 'java.base@17\\njdk.compiler@17\\njdk.incubator.vector@17\\n';; esac",
    )
    assert find_jdk().version == 17


def test_java_home_is_found_behind_a_version_manager_shim(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release(home, "17.0.15", "java.base jdk.compiler jdk.incubator.vector")
    launchers = tmp_path / "shims"
    (launchers / "bin").mkdir(parents=True)
    install(launchers, f"echo '    java.home = {home}'")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(launchers / "bin"))
    assert find_jdk().home == home


def test_java_that_does_not_report_its_version_is_refused(home: Path) -> None:
    install(home, "echo broken")
    with pytest.raises(NoJdk, match="does not report its version"):
        find_java()


def test_invalid_java_home_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/no/jdk/here")
    with pytest.raises(NoJdk, match=r"JAVA_HOME is /no/jdk/here, which has no bin/java: install a full JDK"):
        find_java()


def test_missing_java_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoJdk, match=r"no Java found: .*install a full JDK 17 or 21"):
        find_jdk()
