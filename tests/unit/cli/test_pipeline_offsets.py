# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""The commands ``offsets``, with an admin server that gives the answers of a test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bascule.cli import pipeline_offsets
from bascule.cli.admin import AdminApiClient
from tests.unit.cli.test_administer import Broker, _elsewhere, broker, run  # noqa: F401 - fixtures

PATH = "/diverts/orders/offsets"
MOVE: dict[str, Any] = {
    "topic": "bascule.journal", "partition": 0, "offset": 9, "to": 2, "first": 1, "end": 20, "skipped": 0, "repeated": 7, "messages": 6,
    "taken": 0, "counted": True,
}  # fmt: skip
PLAN: dict[str, Any] = {"name": "orders", "kind": "divert", "moves": [MOVE], "discards": False, "token": "t"}
SHOWN: dict[str, Any] = {
    "name": "orders", "kind": "divert", "offsets": [{"topic": "bascule.journal", "partition": 0, "offset": 9, "first": 1, "end": 20}],
    "request": {"id": "t", "by": "ann", "at_ms": 1769846400000, "state": "done", "error": ""},
}  # fmt: skip


def answer(broker: Broker, plan: dict[str, Any] = PLAN, **request: Any) -> None:
    """Let the broker answer each request: the plan, the confirmation, and the last request."""
    asked = SHOWN["request"] | request
    broker.answers[PATH] = (200, {**SHOWN, **plan, "request": asked})


def test_positions_are_shown_with_the_last_request(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers[PATH] = (200, SHOWN)
    assert run(monkeypatch, "divert", "offsets", "orders", "--admin", broker.url) == 0
    shown = capsys.readouterr()
    assert all(text in shown.out for text in ("bascule.journal", "9", "20"))
    assert "last request to move, by ann at 2026-01-31T08:00:00Z: done" in shown.err
    assert run(monkeypatch, "divert", "offsets", "orders", "--admin", broker.url, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == SHOWN


@pytest.mark.parametrize(
    ("options", "plan", "code", "said", "sent"),
    [
        (("--to", "2", "--yes"), {}, 0, "7 records will be carried again", [{"to": "2"}, {"token": "t", "discard": False}]),
        (("--to", "2"), {}, 1, "nothing was changed; add --yes to confirm", [{"to": "2"}]),
        (("--shift-by", "-7", "--topic", "s", "--partition", "1"), {"moves": []}, 0, "nothing to do", [
            {"shift_by": -7, "topic": "s", "partition": 1},
        ]),
        (("--to", "latest", "--yes"), {"discards": True, "moves": [MOVE | {"skipped": 3, "repeated": 0, "counted": False}]}, 1,
         "Add --discard if they may be lost", [{"to": "latest"}]),
        (("--to", "latest", "--yes", "--discard"), {"discards": True, "moves": [MOVE | {"skipped": 3, "repeated": 0}]}, 0,
         "3 records will be skipped: divert 'orders' will never carry them", [{"to": "latest"}, {"token": "t", "discard": True}]),
        (("--to", "1", "--shift-by", "1"), {}, 2, "--to, --shift-by and --reset exclude each other", []),
        (("--to", "1", "--reset"), {}, 2, "--to, --shift-by and --reset exclude each other", []),
        (("--reset", "--yes"), {}, 0, "7 records will be carried again", [{}, {"token": "t", "discard": False}]),
        (("--reset",), {}, 1, "nothing was changed; add --yes to confirm", [{}]),
        (("--topic", "s"), {}, 2, "--topic and --partition need --to, --shift-by or --reset", []),
    ],
    ids=lambda each: repr(each)[:40],
)  # fmt: skip
def test_positions_move_only_after_the_confirmation_of_a_plan(
    options: tuple[str, ...], plan: dict[str, Any], code: int, said: str, sent: list[Any], broker: Broker,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    answer(broker, PLAN | plan)
    broker.answers[PATH][1]["request"] = dict(SHOWN["request"]) if len(sent) < 2 else "t"
    if len(sent) == 2:
        monkeypatch.setattr(pipeline_offsets, "_report", lambda *_: None)
    assert run(monkeypatch, "divert", "offsets", "orders", *options, "--admin", broker.url) == code
    assert said in capsys.readouterr().err
    assert [body for _, body in broker.asked] == sent


def test_reset_names_topic_and_partition_in_the_query(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.answers["/ingresses/stock/offsets"] = (200, {**PLAN, "kind": "ingress", "moves": []})
    options = ("--reset", "--topic", "a&b", "--partition", "1")
    assert run(monkeypatch, "ingress", "offsets", "stock", *options, "--admin", broker.url) == 0
    assert broker.asked == [("/ingresses/stock/offsets?topic=a%26b&partition=1", {})]


@pytest.mark.parametrize(
    ("request_", "wait_s", "code", "said"),
    [
        ({}, 1.0, 0, ""),
        ({"state": "refused", "error": "the position has moved"}, 1.0, 1, "the position has moved"),
        ({"state": "pending"}, 0.001, 1, "no driver has moved the positions yet"),
        ({"state": "pending"}, 0.0, 0, "no driver has moved the positions yet"),
        ({"id": "another"}, 1.0, 1, "another request was stored since"),
    ],
)
def test_command_waits_for_the_driver_and_says_what_became_of_the_request(
    request_: dict[str, Any], wait_s: float, code: int, said: str, broker: Broker, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(pipeline_offsets, "LOOK_S", 0.0)
    answer(broker, **request_)
    report = pipeline_offsets._report
    monkeypatch.setattr(pipeline_offsets, "_report", lambda client, place, _request, *more: report(client, place, "t", *more))
    options = ("--to", "2", "--yes", "--wait-s", str(wait_s))
    assert run(monkeypatch, "divert", "offsets", "orders", *options, "--admin", broker.url) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("output", ["table", "wide", "csv", "json"])
def test_plan_is_shown_before_the_confirmation_in_every_format(
    output: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    broker.answers[PATH] = (200, PLAN)
    assert run(monkeypatch, "divert", "offsets", "orders", "--to", "2", "-o", output, "--admin", broker.url) == 1
    shown = capsys.readouterr()
    assert "bascule.journal" in (shown.out if output in ("table", "wide") else shown.err)
    assert shown.out == "" or output in ("table", "wide")


def test_positions_and_result_are_rows_in_csv(broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broker.answers[PATH] = (200, SHOWN)
    assert run(monkeypatch, "divert", "offsets", "orders", "--admin", broker.url, "-o", "csv") == 0
    assert capsys.readouterr().out == '"topic","partition","offset","first","end"\n"bascule.journal",0,9,1,20\n'
    broker.answers[PATH] = (200, {**SHOWN, **PLAN, "request": "t"})
    monkeypatch.setattr(AdminApiClient, "look", lambda *_: SHOWN)
    assert run(monkeypatch, "divert", "offsets", "orders", "--to", "2", "--yes", "--admin", broker.url, "-o", "csv") == 0
    assert capsys.readouterr().out == '"name","kind","request","state"\n"orders","divert","t","done"\n'
