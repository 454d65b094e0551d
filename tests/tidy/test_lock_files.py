"""Packages are installed by the hashes in the lock files, and pip refuses a wheel that somebody has changed."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(ROOT.glob("requirements*.lock"))
WHEEL = "sample-1.0-py3-none-any.whl"


def wheel(directory: Path, content: str) -> str:
    """Make a wheel with one module, and return its hash."""
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / WHEEL, "w") as file:
        file.writestr("sample.py", content)
        file.writestr("sample-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n")
        file.writestr("sample-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("sample-1.0.dist-info/RECORD", "sample.py,,\n")
    return hashlib.sha256((directory / WHEEL).read_bytes()).hexdigest()


def installed(directory: Path, lock: str) -> subprocess.CompletedProcess[str]:
    (directory / "lock").write_text(lock)
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-index", "--find-links", "wheels"]
    command = [sys.executable, *words, "--target", "target", "-r", "lock"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=100)


def test_changed_wheel_and_wheel_without_a_hash_are_refused(tmp_path: Path) -> None:
    pinned = wheel(tmp_path / "wheels", "x = 1\n")
    wheel(tmp_path / "wheels", "import os\n")
    for lock, error in ((f"sample==1.0 --hash=sha256:{pinned}\n", "DO NOT MATCH THE HASHES"), ("sample==1.0\n", "--hash")):
        answer = installed(tmp_path, lock)
        assert answer.returncode != 0
        assert error in answer.stderr
    assert not (tmp_path / "target" / "sample.py").exists()
    answer = installed(tmp_path, f"sample==1.0 --hash=sha256:{wheel(tmp_path / 'wheels', 'import os')}\n")
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_package_of_a_lock_file_has_a_version_and_hashes(lock: Path) -> None:
    text = re.sub(r"^ *#.*\n", "", lock.read_text(), flags=re.MULTILINE)
    packages = [each for each in re.split(r"\n(?=\S)", text.strip()) if each.strip()]
    assert packages
    assert [each for each in packages if not re.match(r"[\w.\[\],-]+==\S+ (?:;[^\\]+)?\\\n +--hash=sha256:[0-9a-f]{64}", each)] == []


def test_every_installation_from_an_index_requires_hashes() -> None:
    installs = re.findall(r"(?:\$\(PIP\)|pip install)(?: .*)", (ROOT / "Makefile").read_text())
    of_index = [each for each in installs if " -r " in each]
    assert len(of_index) > 4
    assert [each for each in of_index if "--require-hashes" not in each] == []
    others = [each for each in installs if each not in of_index and "-e ." not in each and not each.endswith("--disable-pip-version-check")]
    assert [each for each in others if "--no-deps" not in each and "--no-index" not in each] == []
