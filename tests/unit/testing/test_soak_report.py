"""The figures and pictures of a soak's report."""

from __future__ import annotations

from pathlib import Path

from bascule.testing.history import Divert, Operation
from bascule.testing.soak.charts import Mark, Scale, chart
from bascule.testing.soak.faults import Fault
from bascule.testing.soak.figures import Figures
from bascule.testing.soak.measures import Sample
from bascule.testing.soak.plan import DIVERTS, Plan
from bascule.testing.soak.records import Record
from bascule.testing.soak.report import write_report
from bascule.testing.soak.run import Evidence, Result

BEGUN_S = 1_000.0


def send(number: int, begun_s: float, ended_s: float) -> Operation:
    return Operation("a", (f"m{number}",), "ok", target="orders", op="send", begun_ms=begun_s * 1000, ended_ms=ended_s * 1000)


def take(number: int, at_s: float) -> Operation:
    return Operation("b", (f"m{number}",), "ok", source="orders", op="receive", begun_ms=at_s * 1000, ended_ms=at_s * 1000)


def result(*, lost: bool = False) -> Result:
    """Three messages; a fault between the first and the second, during which a send waits for 5 s."""
    operations = [send(0, 1000, 1001), send(1, 1002, 1007), send(2, 1008, 1008.5), take(0, 1001), take(1, 1008)]
    if not lost:
        operations.append(take(2, 1009))
    records = {name: [] for name in (*DIVERTS, "payments", "quotes")} | {
        "orders": [Record(1_002_000, "m0"), Record(1_008_000, "m1"), Record(1_009_000, "m2")]
    }
    evidence = Evidence(operations, {"t": Divert("orders", ["m0", "m1", "m2"])}, {}, {})
    samples = [Sample(1001, 3, {"broker-0": 50.0}, 1.0), Sample(1005, None, {}, 1.5), Sample(1009, 0, {"broker-0": 60.0}, 1.2)]
    faults = [Fault(1001.5, "kill-active", "broker-0", 1.0)]
    return Result(
        Plan(seed=7), BEGUN_S, 1008, 1010, faults, samples, [(1003.0, "driver ended by itself: <why>")], records,
        evidence, evidence.judge(), [], {"machine": "m"},
    )  # fmt: skip


def test_after_a_fault_service_is_back_with_the_first_answer_to_what_began_after_it() -> None:
    assert Figures(result()).back() == [(5.5, 6.5)]


def test_a_latency_counts_where_it_ended_and_nothing_is_a_gap() -> None:
    figures = Figures(result())
    latency = dict(figures.latency(figures.sends, 0.5))
    assert (latency[1.5], latency[7.5], latency[4.5]) == (1000.0, 5000.0, None)


def test_a_page_stands_alone_and_tells_what_was_found(tmp_path: Path) -> None:
    page = write_report(result(lost=True), tmp_path).read_text()
    assert "NOT GOOD: lost: 1 sent and never given out from orders (m2)" in page
    assert "&lt;why&gt;" in page
    assert "<why>" not in page
    assert "http" not in page
    assert (tmp_path / "report.json").exists()


def test_a_gap_parts_a_line() -> None:
    picture = chart({"a": [(0, 1.0), (1, 2.0), (2, None), (3, 4.0), (4, 4.0)]}, 4, [Mark(1, "kill", "fault <1>")])
    assert picture.count("<polyline") == 2
    assert "<title>fault &lt;1&gt;</title>" in picture


def test_a_scale_holds_its_values() -> None:
    linear, logarithmic = Scale([0, 37], logarithmic=False), Scale([0.3, 2_500], logarithmic=True)
    assert linear.ticks() == [0, 10, 20, 30, 40]
    assert logarithmic.ticks() == [0.1, 1, 10, 100, 1000, 10_000]
    assert linear.y(40) < linear.y(0)
    assert logarithmic.y(10_000) == linear.y(40)
