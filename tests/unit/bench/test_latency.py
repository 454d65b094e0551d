"""The calculations of the benchmark of latency across the bridge."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bascule.config import load
from bench.latency import KEYED, MARK_BYTES, PATHS, PIPELINES, Arrivals, at_rate, judged, table
from tests.support.system import Late


def test_configuration_of_the_benchmark_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "bascule.toml"
    assert list(PIPELINES) == list(PATHS)
    file.write_text("".join(PIPELINES.values()))
    settings = load(file).settings
    assert [each.name for each in settings.divert] == ["plain", "selected", "keyed", "transformed", "requests"]
    assert next(each for each in settings.divert if each.name == KEYED).key == "property:number"
    assert [each.name for each in settings.ingress] == ["in", "replies"]


def test_messages_are_due_at_a_fixed_rate_even_if_each_send_is_slow() -> None:
    sent: list[bytes] = []

    def send(mark: bytes) -> None:
        sent.append(mark)
        sum(range(200_000))  # longer than the interval

    due_s = at_rate(send, "0 plain 500", 500, range(500))
    assert sent == [*due_s]
    assert len({*sent}) == 500
    assert {len(mark) for mark in sent} == {MARK_BYTES}
    times = [*due_s.values()]
    assert [after - before for before, after in pairwise(times)] == pytest.approx([1 / 500] * 499)


def test_latency_begins_when_the_message_was_due_and_lost_and_duplicated_messages_are_counted() -> None:
    seen = Arrivals()
    for mark in (b"a", b"b", b"b"):
        seen.note(mark)
    seen.at_s |= {b"a": 10.5, b"b": 10.2}
    assert judged({b"a": 10.0, b"b": 10.1, b"c": 10.2}, seen) == {
        "p50_ms": pytest.approx(500), "p99_ms": pytest.approx(500), "longest_ms": pytest.approx(500),
        "sent": 3, "lost": 1, "duplicated": 1,
    }  # fmt: skip


def test_run_without_any_arrival_is_an_error() -> None:
    with pytest.raises(Late, match="no message has arrived"):
        judged({b"a": 1.0}, Arrivals())


def test_table_has_the_median_of_the_rounds_and_the_sum_of_the_counts() -> None:
    runs = [
        {"p50_ms": p50, "p99_ms": 9.0, "longest_ms": 10.0, "cpu_percent": 50.0, "sent": 100, "lost": 0, "duplicated": doubled}
        for p50, doubled in ((1.0, 0), (3.0, 1), (2.0, 0))
    ]
    assert table({"JMS to Kafka, 100/s": runs}).splitlines()[-1] == "| JMS to Kafka, 100/s | 2.0 | 9.0 | 10.0 | 50.0 | 300 | 0 | 1 |"
