"""The processes of the pipelines of ``bascule up`` die by kill -9: all records arrive, once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.recovery import CONFIG, KINDS, Flow, kill
from tests.support.up import Up


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pipelines_continue_after_kill_of_driver_of_spark_of_a_worker_and_of_all(tmp_path: Path) -> None:
    config = tmp_path / "bascule.toml"
    config.write_text(CONFIG)
    with ExitStack() as opened:
        up = opened.enter_context(Up(tmp_path, "--config", config))
        flow = Flow(up, opened)
        for kind in KINDS:
            kill(up, flow, kind, 0, pause_s=1.0)
        counts = flow.close()
    assert counts["sent"] > 0
    assert counts["duplicated"] == 0
