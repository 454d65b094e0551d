"""Run commands of the command line in this process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from bascule.cli.main import main

#: A log line of librdkafka.
CLIENT_LOG = re.compile(r"%\d\|\d+\.\d+\|")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Bascule = Callable[..., Done]


@pytest.fixture
def bascule(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Bascule:
    """Run commands in this process, in an empty directory and without settings from the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("BASCULE_") and "__" in name]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("BASCULE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["bascule", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        out, err = capfd.readouterr()
        # Kafka clients of earlier tests of this process may still log.
        kept = [line for line in err.splitlines(keepends=True) if not CLIENT_LOG.match(line)]
        return Done(int(str(code or 0)), out, "".join(kept))

    return run
