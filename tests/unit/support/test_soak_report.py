"""The figures and charts of a soak's report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.soak.charts import Mark, Scale, chart
from tests.soak.faults import Fault
from tests.soak.figures import Figures
from tests.soak.measures import Sample
from tests.soak.plan import DIVERTS, FAULT_EVERY_S, Plan
from tests.soak.records import Record
from tests.soak.report import write_report
from tests.soak.run import Evidence, Result
from tests.soak.site import NO_KAFKA, OwnEnd
from tests.support.history import Audit, Divert, Operation, Place
from tests.support.stalls import Stall

BEGUN_S = 1_000.0


def send(number: int, begun_s: float, ended_s: float) -> Operation:
    return Operation("a", (f"m{number}",), "ok", target="orders", op="send", begun_ms=begun_s * 1000, ended_ms=ended_s * 1000)


def take(number: int, at_s: float) -> Operation:
    return Operation("b", (f"m{number}",), "ok", source="orders", op="receive", begun_ms=at_s * 1000, ended_ms=at_s * 1000)


AUDIT = Audit({"orders": {"m0", "m1", "m2"}}, {Place("orders"): {"m0", "m1", "m2"}})
EXCUSED = OwnEnd(1003.0, "driver", "<why>", NO_KAFKA)


def result(
    *,
    lost: bool = False,
    journal: Audit | None = AUDIT,
    failures: Sequence[str] = (),
    own_ends: Sequence[OwnEnd] = (EXCUSED,),
    stalls: Sequence[Stall] = (),
) -> Result:
    """Return the result of a soak with three messages. A fault after the first message delays the second send for 5 s."""
    operations = [send(0, 1000, 1001), send(1, 1002, 1007), send(2, 1008, 1008.5), take(0, 1001), take(1, 1008)]
    if not lost:
        operations.append(take(2, 1009))
    records = {name: [] for name in (*DIVERTS, "payments", "quotes")} | {
        "orders": [Record(1_002_000, "m0"), Record(1_008_000, "m1"), Record(1_009_000, "m2")]
    }
    gap = "" if journal else "the journal was trimmed before offset 7 was read"
    evidence = Evidence(operations, {"t": Divert("orders", ["m0", "m1", "m2"])}, {}, {}, 1_008_000, journal, gap)
    samples = [Sample(1001, 3, {"broker-0": 50.0}, 1.0), Sample(1005, None, {}, 1.5), Sample(1009, 0, {"broker-0": 60.0}, 1.2)]
    faults = [Fault(1001.5, "kill-active", "broker-0", 1.0)]
    return Result(
        Plan(seed=7), BEGUN_S, 1008, 1010, faults, samples, own_ends, stalls, records,
        evidence, evidence.judge(), failures, {"machine": "m"},
    )  # fmt: skip


def test_plan_of_half_an_hour_has_at_least_100_faults() -> None:
    assert Plan(seed=1).seconds / FAULT_EVERY_S >= 100


def test_service_is_back_at_the_first_answer_to_an_operation_begun_after_the_fault() -> None:
    assert Figures(result()).back() == [(5.5, 6.5)]


def test_latency_counts_at_its_end_and_interval_without_operations_is_a_gap() -> None:
    figures = Figures(result())
    latency = dict(figures.latency(figures.sends, 0.5))
    assert (latency[1.5], latency[7.5], latency[4.5]) == (1000.0, 5000.0, None)


def test_soak_report_is_self_contained_and_states_the_anomalies(tmp_path: Path) -> None:
    page = write_report(result(lost=True), tmp_path).read_text()
    assert "FAILED: lost: 1 sent and never given out from orders (m2)<" in page
    assert "&lt;why&gt;" in page
    assert "<why>" not in page
    assert "http" not in page
    assert (tmp_path / "report.json").exists()


def test_soak_report_charts_rates_latency_and_backlog_with_marks_of_faults(tmp_path: Path) -> None:
    page = write_report(result(lost=True), tmp_path).read_text()
    figures = {figure.partition("<")[0]: figure for figure in page.split("<figure><figcaption>")[1:]}
    for caption in (
        "Messages, per second ",
        "From send to answer, ms ",
        "Messages in all queues, messages ",
        "Faults and anomalies so far, count ",
    ):
        assert figures[caption].count('<line class="mark kill"') == 1, caption
        assert figures[caption].count('<line class="mark healed"') == 1, caption
        assert "<polyline" in figures[caption], caption
    assert figures["Faults and anomalies so far, count "].count("<polyline") == 2


def test_faults_and_anomalies_are_counted_by_their_time() -> None:
    bad = result(lost=True)
    figures = Figures(bad)
    assert figures.so_far(fault.at_s for fault in bad.faults) == [(0, 0), (1.5, 0), (1.5, 1), (10, 1)]
    # The last trace of the lost message is its record in Kafka.
    assert figures.so_far(figures.anomalies_s()) == [(0, 0), (9, 0), (9, 1), (10, 1)]


def test_soak_with_failed_client_unexcused_end_or_stall_is_not_good(tmp_path: Path) -> None:
    alone = OwnEnd(1004.0, "broker-0", "error: <odd>")
    assert result().good
    stall = Stall(1004.0, "broker-0", 2, 0.2)
    for bad, text in (
        (result(failures=["storm-0: failed: why"]), "storm-0: failed: why"),
        (result(own_ends=[EXCUSED, alone]), str(alone)),
        (result(stalls=[stall]), str(stall)),
    ):
        assert not bad.good
        page = write_report(bad, tmp_path).read_text()
        assert f"FAILED: {text.replace('<', '&lt;').replace('>', '&gt;')}<" in page
        assert f"<td>{NO_KAFKA}</td>" in page


def test_unjudged_anomaly_is_not_reported_as_none(tmp_path: Path) -> None:
    page = write_report(result(), tmp_path).read_text()
    zombies = '<td>zombie-ack</td><td>answered by a broker whose records no longer counted</td><td class="number">0</td>'
    assert zombies in page
    assert "not judged" not in page
    page = write_report(result(journal=None), tmp_path).read_text()
    assert zombies.replace('<td class="number">0</td>', "<td>not judged</td>") in page
    assert "No anomaly; not judged: zombie-ack (the journal was trimmed before offset 7 was read)<" in page
    assert json.loads((tmp_path / "report.json").read_text())["anomalies"]["zombie-ack"] == "not judged"


def test_gap_splits_a_chart_line() -> None:
    picture = chart({"a": [(0, 1.0), (1, 2.0), (2, None), (3, 4.0), (4, 4.0)]}, 4, [Mark(1, "kill", "fault <1>")])
    assert picture.count("<polyline") == 2
    assert "<title>fault &lt;1&gt;</title>" in picture


def test_chart_scale_covers_its_values() -> None:
    linear, logarithmic = Scale([0, 37], logarithmic=False), Scale([0.3, 2_500], logarithmic=True)
    assert linear.ticks() == [0, 10, 20, 30, 40]
    assert logarithmic.ticks() == [0.1, 1, 10, 100, 1000, 10_000]
    assert linear.y(40) < linear.y(0)
    assert logarithmic.y(10_000) == linear.y(40)
