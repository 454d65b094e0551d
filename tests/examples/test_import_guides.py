"""The guides for migration: `bascule config import` prints and writes what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.pages import ROOT, blocks, missing, typed
from tests.support.speed import SLOWNESS

RUN_TIMEOUT_S = 60.0 * SLOWNESS


@pytest.mark.parametrize("page", ["migrate-qpid-jms.md", "migrate-jms-bridge.md"])
def test_import_of_the_guide_prints_and_writes_what_is_shown(page: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (run,) = blocks(ROOT / "docs" / "guides" / page, "run")
    (shows,) = blocks(ROOT / "docs" / "guides" / page, "shows")
    output = typed(run.text, tmp_path, RUN_TIMEOUT_S)
    assert missing(shows.text, output) is None, output
