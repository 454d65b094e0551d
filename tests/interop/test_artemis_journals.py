"""The journals of Artemis that the benchmark compares with, made by Artemis itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.artemis import Artemis, JournalUnavailable, has_libaio

#: Lines of the log about the journal in use.
USED = {"NIO": "AMQ221013: Using NIO Journal", "ASYNCIO": "AMQ221012: Using AIO Journal"}


def test_journal_without_fsync_is_used(tmp_path: Path) -> None:
    with Artemis(tmp_path / "broker", "nio-no-fsync") as made:
        assert made.durability == "artemis-nio-no-fsync: journal NIO, no fdatasync"
        assert USED["NIO"] in (tmp_path / "broker/log/run.log").read_text()


@pytest.mark.skipif(has_libaio(), reason="this machine has libaio")
def test_aio_is_refused_on_a_machine_without_its_library(tmp_path: Path) -> None:
    with pytest.raises(JournalUnavailable, match="libaio"):
        Artemis(tmp_path / "broker", "aio")


@pytest.mark.skipif(not has_libaio(), reason="this machine has no libaio")
def test_aio_is_used_on_a_machine_with_its_library(tmp_path: Path) -> None:
    with Artemis(tmp_path / "broker", "aio") as made:
        assert made.journal == {"type": "ASYNCIO", "datasync": "true"}
        assert USED["ASYNCIO"] in (tmp_path / "broker/log/run.log").read_text()
