"""The resources that processes and directories use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.usage import disk_mib, memory_mib


def test_current_memory_of_a_process_is_at_most_its_peak() -> None:
    assert 1 < memory_mib(os.getpid()) <= memory_mib(os.getpid(), "VmHWM")


def test_memory_of_an_ended_process_raises_an_error() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            memory_mib(process.pid)
        process.wait()
        with pytest.raises(OSError, match=str(process.pid)):
            memory_mib(process.pid)


def test_hole_in_a_sparse_file_takes_no_disk_space(tmp_path: Path) -> None:
    (tmp_path / "topic").mkdir()
    (tmp_path / "topic" / "log").write_bytes(b"x" * (2 << 20))
    before = disk_mib(tmp_path)
    with (tmp_path / "topic" / "index").open("wb") as index:
        index.truncate(10 << 20)
    assert before >= 2
    assert disk_mib(tmp_path) - before < 1
    assert disk_mib(tmp_path / "nowhere") == 0
