"""The checker finds what is planted, and nothing where nothing is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bascule.testing.history import Operation, Outcome, check, read_history


def sent(*ids: str, outcome: Outcome = "ok") -> Operation:
    return Operation("sender", ids, outcome, target="a")


def moved(*ids: str, outcome: Outcome = "ok") -> Operation:
    return Operation("mover", ids, outcome, "a", "b")


def taken(*ids: str, outcome: Outcome = "ok") -> Operation:
    return Operation("taker", ids, outcome, source="b")


SOUND = [
    sent("1"), sent("2", "3"), sent("4", "5", outcome="indeterminate"), sent("6", outcome="fail"), sent("7", outcome="indeterminate"),
    moved("1", "2", outcome="fail"), moved("1", "2", outcome="indeterminate"), moved("1", "2", "3"),
    moved("4", "5", "4", outcome="fail"), moved("4", "5", outcome="indeterminate"),
    taken("1", "2", "3", outcome="indeterminate"), taken("1", "2"), taken("3", "4", "5"),
]  # fmt: skip
COPIES = ["1", "2", "3", "4", "5"]


def test_a_sound_history_has_no_anomaly() -> None:
    tally = check(SOUND, diverted={"t": ("a", COPIES)})
    assert tally.anomalies == []
    assert (tally.sent, tally.maybe_sent, tally.taken, tally.copies) == (3, 3, 5, {"t": 5})
    assert str(tally) == "3 sent, 3 in doubt, 5 taken, 5 in t: 0 lost, 0 doubled, 0 torn"


@pytest.mark.parametrize(
    ("planted", "text"),
    [
        (sent("8"), "1 lost in a (8)"),
        (taken("2"), "1 delivered again from b after they had been acknowledged (2)"),
        (taken("2"), "1 taken twice from b (2)"),
        (taken("1", outcome="fail"), "1 delivered again from b after they had been acknowledged (1)"),
        (taken("99", "99"), "1 twice in one transaction from b (99)"),
        (taken("99"), "1 in b without having been sent (99)"),
        (taken("6"), "1 in b without having been sent (6)"),
        (moved("7", outcome="fail"), "1 left in a (7)"),
        (moved("7"), "1 lost in b (7)"),
        (moved("7"), "1 taken from a and never seen in b (7)"),
        (moved("6"), "1 in a without having been sent (6)"),
    ],
)
def test_an_operation_that_must_not_be_is_found(planted: Operation, text: str) -> None:
    assert text in check([*SOUND, planted]).anomalies


def test_half_a_transaction_is_found() -> None:
    operations = [sent("1", "2", "3", outcome="indeterminate"), moved("1", "3"), taken("1", "3")]
    assert check(operations).anomalies == ["1 transactions torn in a, which begin (1)"]


@pytest.mark.parametrize(
    ("copies", "text"),
    [
        ([*COPIES, "3"], "1 doubled in topic t (3)"),
        (COPIES[1:], "1 taken from a and missing in topic t (1)"),
        ([*COPIES, "6"], "1 in topic t and never taken from a (6)"),
    ],
)
def test_a_topic_that_differs_is_found(copies: list[str], text: str) -> None:
    assert check(SOUND, diverted={"t": ("a", copies)}).anomalies == [text]


def test_a_long_list_is_cut() -> None:
    assert check([sent(*map(str, range(10, 20)))]).anomalies == ["10 lost in a (10, 11, 12, 13, 14, ...)"]


def test_a_history_is_read_without_its_events(tmp_path: Path) -> None:
    lines = [
        {"t": 1, "client": "c", "event": "restored"},
        {"t": 2, "client": "c", "op": "move", "from": "a", "to": "b", "ids": ["1"], "redelivered": [], "outcome": "ok"},
    ]
    file = tmp_path / "history"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_history(file) == [Operation("c", ("1",), "ok", "a", "b")]
