"""The class through which demo and benchmarks run ``bascule up``. A script with the same output replaces the command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bascule.embedded.process import NotStarted
from tests.support.up import Up

READY_SCRIPT = """\
#!/bin/sh
echo "$@"
mkdir -p "$3"
echo '{"broker": 7, "pipelines": null}' > "$3/pids.json"
echo 'ready amqp://127.0.0.1:1 kafka=127.0.0.1:2 admin=http://127.0.0.1:3'
exec sleep 60
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the program that the class starts as ``bascule``."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = tmp_path / "bascule"
    program.touch(mode=0o755)
    return program


def test_up_reports_addresses_and_processes_of_its_parts(tmp_path: Path, program: Path) -> None:
    program.write_text(READY_SCRIPT)
    with Up(tmp_path / "place", "--no-pipelines") as up:
        assert (up.url, up.kafka, up.admin) == ("amqp://127.0.0.1:1", "127.0.0.1:2", "http://127.0.0.1:3")
        assert up.pids == {"broker": 7, "pipelines": None}
        assert up.data_dir == tmp_path / "place" / "data"
        output = (tmp_path / "place" / "up.log").read_text()
    assert output.startswith(f"up --data-dir {up.data_dir} --amqp-port 0 --kafka-port 0 --admin-port 0 --no-pipelines\n")


def test_up_reports_why_start_failed(tmp_path: Path, program: Path) -> None:
    program.write_text("#!/bin/sh\necho 'error: no JDK'\nexit 3\n")
    with pytest.raises(NotStarted, match="error: no JDK"):
        Up(tmp_path).__enter__()
