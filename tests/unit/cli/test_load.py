"""The load of ``bascule bench`` without a broker: when messages are due, and how they are counted."""

from __future__ import annotations

import json

import pytest

from bascule.cli.bench import show
from bascule.cli.load_counts import LoadCounts, LoadEvents, percentiles
from bascule.cli.load_plan import SIZE_MIN, LoadMark, LoadPlan
from bascule.cli.output import Format
from bascule.core.build import build


def events(*numbers: int, after_s: float = 0.25) -> LoadEvents:
    """Return events of one producer; message N was due at second N."""
    found = LoadEvents()
    for number in numbers:
        found.add(LoadMark(0, number, float(number)), number + after_s)
    return found


def counts(plan: LoadPlan, confirmed: LoadEvents, received: list[LoadEvents], redelivered: list[LoadEvents] | None = None) -> LoadCounts:
    again = redelivered or [LoadEvents() for _ in received]
    return LoadCounts(plan, sent=[len(confirmed)], confirmed=[confirmed], received=received, redelivered=again)


def test_producers_share_the_rate_and_send_in_turns() -> None:
    plan = LoadPlan(producers=2, rate=4, seconds=1, warm_up_s=0.5)
    assert [[*plan.due_times_s(producer, 10)] for producer in range(2)] == [[10.0, 10.5, 11.0], [10.25, 10.75, 11.25]]


def test_body_has_the_requested_size_and_the_mark_of_its_message() -> None:
    plan, mark = LoadPlan(size=100), LoadMark(3, 7, 12.5)
    assert len(plan.body(mark)) == 100
    assert plan.mark_of(plan.body(mark)) == mark
    assert len(LoadPlan(size=SIZE_MIN).body(mark)) == SIZE_MIN


@pytest.mark.parametrize("body", ["text", b"short", LoadPlan().body(LoadMark(0, 0, 0))], ids=["text", "short", "of another run"])
def test_body_of_another_program_has_no_mark(body: object) -> None:
    assert LoadPlan().mark_of(body) is None


def test_latency_and_throughput_are_those_of_the_measured_time() -> None:
    found = counts(LoadPlan(seconds=4), events(0, 1, 2, 3, 4, 5), [events(0, 1, 2, 3, 4, 5, after_s=0.5)])
    found.measured_from_s = 2.0
    summary = found.summary()
    # Messages 2 to 5 were due in the measurement, and were confirmed within it.
    assert summary["confirmed"]["per_s"] == 1.0
    assert (summary["confirmed"]["p50_ms"], summary["received"]["max_ms"]) == (250.0, 500.0)
    assert (summary["lost"], summary["doubled"], found.negative) == (0, 0, False)


@pytest.mark.parametrize(
    ("plan", "received", "redelivered", "flaws"),
    [
        (LoadPlan(consumers=2), [(0,), (2,)], [(), ()], (1, 0)),
        (LoadPlan(consumers=2), [(0, 1), (1, 2)], [(), ()], (0, 1)),
        (LoadPlan(consumers=2), [(0, 1), (2,)], [(), (1,)], (0, 0)),  # JMS allows it after a failure
        (LoadPlan(consumers=2), [(0, 1), ()], [(), (2,)], (0, 0)),
        (LoadPlan(topic=True, consumers=2), [(0, 1, 2), (0, 1, 2)], [(), ()], (0, 0)),
        (LoadPlan(topic=True, consumers=2), [(0, 1, 2), (0, 0)], [(), ()], (2, 1)),
    ],
    ids=["lost", "doubled", "redelivered", "redelivered only", "topic", "topic with flaws"],
)
def test_lost_and_doubled_messages_are_counted(
    plan: LoadPlan, received: list[tuple[int, ...]], redelivered: list[tuple[int, ...]], flaws: tuple[int, int]
) -> None:
    found = counts(plan, events(0, 1, 2), [events(*each) for each in received], [events(*each) for each in redelivered])
    assert found.flaws() == flaws
    assert found.negative == (flaws != (0, 0))


def test_message_whose_acknowledgement_is_in_doubt_is_not_lost() -> None:
    found = counts(LoadPlan(), events(0, 1), [events(0)])
    found.doubtful = events(1)
    assert found.flaws() == (0, 0)


def test_message_that_was_not_confirmed_is_not_lost() -> None:
    assert counts(LoadPlan(), events(0), [events(0, 1)]).flaws() == (0, 0)


def test_messages_of_different_producers_with_the_same_number_are_different() -> None:
    received = LoadEvents()
    for producer in range(2):
        received.add(LoadMark(producer, 5, 0.0), 1.0)
    assert counts(LoadPlan(producers=2), received, [received]).flaws() == (0, 0)


def test_percentile_is_a_value_that_was_measured() -> None:
    assert percentiles([float(value) for value in range(1, 1001)]) == {
        "p50_ms": 500.0, "p90_ms": 900.0, "p99_ms": 990.0, "p999_ms": 999.0, "max_ms": 1000.0,
    }  # fmt: skip
    assert set(percentiles([]).values()) == {None}


def test_report_shows_counts_and_an_example_of_each_error(capsys: pytest.CaptureFixture[str]) -> None:
    found = counts(LoadPlan(), events(0, 1), [events(0)])
    found.errors["MessageRefused"], found.examples["MessageRefused"] = 2, "queue bench is full"
    show(found, Format.TABLE)
    text = capsys.readouterr().out
    assert "sent 2, unsent 0, lost 1, doubled 0, redelivered 0, left 0" in text
    assert f"which run the {build()} build" in text
    assert "2 errors MessageRefused, for example: queue bench is full" in text
    show(found, Format.JSON)
    report = json.loads(capsys.readouterr().out)
    assert report["results"]["errors"] == {"MessageRefused": {"count": 2, "example": "queue bench is full"}}
    assert report["plan"]["destination"].startswith("bench.")
    assert report["build"] == build()
