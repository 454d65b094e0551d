"""The table of the benchmark beside Artemis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import run
from bench.artemis import JournalUnavailable


def of_round(rate: float, latency_ms: float, **used: dict[str, float]) -> dict[str, Any]:
    latencies = dict.fromkeys(("send_p50_ms", "send_p99_ms", "end_p50_ms", "end_p99_ms"), latency_ms)
    return {"sent_per_s": rate, "received_per_s": rate, **latencies, **used}


@pytest.fixture
def rows() -> dict[str, dict[str, str]]:
    """The rows of a mode by broker, each with its cells by column. The last round of Bascule is an outlier."""
    ours = [
        of_round(rate, 2.0, cpu_us={"kafka": kafka, "broker": 50}, rss_mb={"kafka": 200, "broker": rss})
        for rate, kafka, rss in ((100, 30, 90), (110, 40, 100), (40, 400, 110))
    ]
    theirs = [of_round(rate, 4.0, cpu_us={"broker": 100}, rss_mb={"broker": 600}) for rate in (200, 100, 80)]
    text = run.table({"sync-1x1": {"bascule": ours, "artemis": theirs}}, ["bascule", "artemis"])
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {cells[1]: dict(zip(head, cells, strict=True)) for cells in lines}


def test_figures_are_medians_of_the_rounds_with_least_and_greatest(rows: dict[str, dict[str, str]]) -> None:
    assert rows["bascule"]["sent/s"] == "100.00 (40.00 to 110.00)"
    assert rows["artemis"]["sent/s"] == "100.00 (80.00 to 200.00)"


def test_processor_time_and_memory_are_medians_by_process_and_together(rows: dict[str, dict[str, str]]) -> None:
    assert rows["bascule"]["CPU us/message"] == "kafka 40 (30 to 400), broker 50 (50 to 50), together 90 (80 to 450)"
    assert rows["bascule"]["RSS MB"] == "kafka 200 (200 to 200), broker 100 (90 to 110), together 300 (290 to 310)"
    assert rows["artemis"]["CPU us/message"] == "broker 100 (100 to 100)"


def test_ratio_compares_medians_and_all_processes_of_bascule_with_artemis(rows: dict[str, dict[str, str]]) -> None:
    ratio = rows["**ratio**"]
    assert ratio["sent/s"] == "**1.00** (0.50 to 1.10)"
    assert ratio["send p50 ms"] == "**2.00** (2.00 to 2.00)"
    assert ratio["CPU us/message"] == "**0.90** (0.80 to 4.50) of Artemis"
    assert ratio["RSS MB"] == "**0.50** (0.48 to 0.52) of Artemis"


def test_ratio_compares_the_rounds_in_which_both_were_measured() -> None:
    used = {"cpu_us": {"broker": 5}, "rss_mb": {"broker": 5}}
    ours = [of_round(rate, 2.0, **used) for rate in (10, 1000, 30)]
    theirs = [of_round(10, 2.0, **used), {"failures": 1, **used}, of_round(30, 2.0, **used)]
    text = run.table({"async": {"bascule": ours, "artemis": theirs}}, ["bascule", "artemis"])
    assert text.splitlines()[-1].startswith("| async | **ratio** | **1.00** (1.00 to 1.00) | **1.00** (1.00 to 1.00) |")
    text = run.table({"async": {"bascule": ours[:2], "artemis": [theirs[1], theirs[0]]}}, ["bascule", "artemis"])
    assert text.splitlines()[-1].startswith("| async | **ratio** | **100.00** |")
    text = run.table({"async": {"bascule": ours[:2], "artemis": [theirs[1], theirs[1]]}}, ["bascule", "artemis"])
    assert "**ratio**" not in text


def test_mode_without_a_whole_round_has_no_figures_and_no_ratio() -> None:
    failed = {"failures": 1, "cpu_us": {"broker": 5}, "rss_mb": {"broker": 5}}
    text = run.table({"async": {"bascule": [failed], "artemis": [failed]}}, ["bascule", "artemis"])
    assert [line.count("| - ") for line in text.splitlines()[2:]] == [8, 8]
    assert "1 failures" in text


def test_single_round_has_no_spread() -> None:
    single = of_round(1000, 2.0, cpu_us={"broker": 50}, rss_mb={"broker": 90})
    text = run.table({"async": {"bascule": [single]}}, ["bascule"])
    assert "1,000.00 | 1,000.00 | 2.00" in text
    assert "(" not in text


def test_each_journal_of_artemis_has_a_ratio() -> None:
    used = {"cpu_us": {"broker": 5}, "rss_mb": {"broker": 5}}
    rounds = {
        "bascule": [of_round(90, 2.0, **used)],
        "artemis": [of_round(100, 2.0, **used)],
        "artemis-nio-no-fsync": [of_round(300, 2.0, **used)],
    }
    text = run.table({"async": rounds}, list(rounds))
    assert [line.split(" | ")[1:3] for line in text.splitlines() if "ratio" in line] == [
        ["**ratio**", "**0.90**"], ["**ratio to artemis-nio-no-fsync**", "**0.30**"],
    ]  # fmt: skip


def test_each_journal_that_the_machine_allows_is_measured_once_and_the_page_names_the_others(tmp_path: Path) -> None:
    made: list[str] = []

    class Peer:
        def __init__(self, directory: Path, journal: str) -> None:
            made.append(journal)
            assert directory == tmp_path / journal
            if "aio" in journal:
                raise JournalUnavailable("no libaio")
            self.name, self.journal = journal, {"type": "NIO", "datasync": str("no-fsync" not in journal)}

    make: Any = Peer
    found, missing = run.peers(tmp_path, None, make)
    assert [peer.name for peer in found] == ["created", "nio-no-fsync"]
    assert missing == ["artemis-aio was not measured: no libaio", "artemis-aio-no-fsync was not measured: no libaio"]
    made.clear()
    found, missing = run.peers(tmp_path, ["nio"], make)
    assert ([peer.name for peer in found], missing, made) == (["nio"], [], ["nio"])
