"""A process that knows secrets and messages writes no core dump, and only files that no other user can read, whatever the shell allows."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.speed import SLOWNESS

SOON_S = 60.0 * SLOWNESS


def allow_everything() -> None:
    os.umask(0)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def core_limit(pid: int) -> str:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line.split()[4] for line in lines if line.startswith("Max core file size"))


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0, reason="nothing may write core dumps here")
@pytest.mark.parametrize("command", ["broker", "pipelines"])
def test_process_that_knows_secrets_keeps_them_private(command: str, tmp_path: Path) -> None:
    """The process waits for a Kafka that does not exist. With the limit 0, Linux would start a program that `core_pattern` names."""
    environment = {**os.environ, "BASCULE_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1", "BASCULE_EMBEDDED__DATA_DIR": str(tmp_path)}
    environment |= {"BASCULE_BROKER__PORT": "0", "BASCULE_ADMIN__PORT": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "bascule.cli", command], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=allow_everything,
    )  # fmt: skip
    try:
        end_s = time.monotonic() + SOON_S
        while process.poll() is None and core_limit(process.pid) != "1" and time.monotonic() < end_s:
            time.sleep(0.05)
        assert process.poll() is None
        assert core_limit(process.pid) == "1"
        assert "Umask:\t0077" in Path(f"/proc/{process.pid}/status").read_text()
    finally:
        process.kill()
        process.communicate()
