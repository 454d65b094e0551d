"""What the results of every benchmark contain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bascule.core.build import build
from bench import run


def test_results_name_the_build_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    run.write_results("mode", {"machine": run.machine()}, "| a table |")
    (page,) = tmp_path.glob("mode-*.md")
    (content,) = tmp_path.glob("mode-*.json")
    assert page.read_text() == capsys.readouterr().out
    assert page.read_text().startswith("| a table |\n")
    assert f" {build()} build, " in page.read_text()
    assert json.loads(content.read_text())["machine"]["build"] == build()
