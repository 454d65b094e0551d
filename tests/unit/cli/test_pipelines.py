# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""Commands that control pipelines, with an admin server that gives the answers of a test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bascule.cli import pipelines
from bascule.cli.pipelines import COLUMNS
from tests.unit.cli.test_administer import Broker, _elsewhere, broker, run  # noqa: F401 - fixtures

STATUS = {
    "name": "orders", "kind": "divert", "origin": "file", "revision": None, "state": "paused", "wanted": "paused", "wanted_by": "ann",
    "wanted_at_ms": 1769846400000, "group": "g", "lag": 6, "records_per_s": 1.5, "restarts": 2, "error": "an error", "error_at_ms": None,
    "partitions": 1, "sources": [{"topic": "bascule.journal", "partition": 0, "offset": 3, "end": 9}], "driver": "host-1",
    "reported_at_ms": 1769846400000,
}  # fmt: skip
SHOWN = {
    "name": "orders",
    "kind": "divert",
    "origin": "file",
    "definition": {"from": "sales.#", "to": "t"},
    "config": None,
    "revision": None,
}


@pytest.mark.parametrize(("kind", "path"), [("divert", "/diverts"), ("ingress", "/ingresses")])
def test_pipelines_are_listed_shown_and_described(
    kind: str,
    path: str,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broker.answers |= {path: (200, [STATUS]), f"{path}/orders": (200, SHOWN), f"{path}/orders/status": (200, dict(STATUS))}
    for arguments, texts in (
        (("list",), ("orders", "paused", "an error")),
        (("show", "orders"), ("sales.#", "defined in", "file")),
        (("status", "orders"), ("2026-01-31T08:00:00Z", "host-1", "bascule.journal", "9")),
    ):
        assert run(monkeypatch, kind, *arguments, "--admin", broker.url) == 0
        out = capsys.readouterr().out
        assert all(text in out for text in texts), out
        assert run(monkeypatch, kind, *arguments, "--admin", broker.url, "--format", "json") == 0
        assert json.loads(capsys.readouterr().out) in (SHOWN, STATUS, [STATUS])
    broker.answers[f"{path}/orders"] = (200, SHOWN | {"definition": None})
    assert run(monkeypatch, kind, "show", "orders", "--admin", broker.url) == 0
    assert "no driver has reported" in capsys.readouterr().err


def test_wide_list_has_the_lag_in_bytes(broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broker.answers["/diverts"] = (200, [dict.fromkeys(COLUMNS, 1) | {"lag_bytes": 567_890}])
    for output, wide in (("wide", True), ("table", False)):
        assert run(monkeypatch, "divert", "list", "-o", output, "--admin", broker.url) == 0
        out = capsys.readouterr().out
        assert ("lag bytes" in out, "567890" in out) == (wide, wide), out


@pytest.mark.parametrize(
    ("verb", "state", "wanted", "code", "said"),
    [
        ("pause", "paused", "paused", 0, ""),
        ("stop", "stopped", "stopped", 0, ""),
        ("resume", "catching up", "running", 0, ""),
        ("pause", "unassigned", "paused", 0, "no driver runs the pipelines; it will be paused once a driver runs"),
        ("pause", "waiting for coverage", "paused", 0, "no active broker has confirmed that its journal covers it"),
        ("resume", "failed", "running", 1, "failed: an error"),
        ("pause", "failed", "paused", 1, "still failed after 0.001 s"),
        ("pause", "running", "paused", 1, "still running after 0.001 s"),
        ("pause", "running", "running", 0, ""),  # somebody else has resumed the pipeline meanwhile
    ],
)
def test_verb_is_sent_and_its_state_awaited(
    verb: str, state: str, wanted: str, code: int, said: str, broker: Broker, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    broker.answers |= {
        f"/diverts/a.b/{verb}": (202, {"name": "a.b", "kind": "divert", "wanted": wanted}),
        "/diverts/a.b/status": (200, STATUS | {"state": state, "wanted": wanted}),
    }
    monkeypatch.setattr(pipelines, "LOOK_S", 0.0)
    assert run(monkeypatch, "divert", verb, "a.b", "--wait-s", "0.001", "--admin", broker.url) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ("" if code else f"name a.b  kind divert  wanted {wanted}  state {state}\n")
    assert broker.asked[0] == (f"/diverts/a.b/{verb}", {})


def test_restart_and_verbs_that_need_not_wait_only_send(
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer: dict[str, Any] = {"name": "in", "kind": "ingress"}
    broker.answers |= {"/ingresses/in/restart": (202, answer | {"restart": "7"}), "/ingresses/in/pause": (202, answer)}
    assert run(monkeypatch, "ingress", "restart", "in", "--admin", broker.url) == 0
    assert run(monkeypatch, "ingress", "pause", "in", "--wait-s", "0", "--admin", broker.url, "--format", "json") == 0
    assert capsys.readouterr().out == 'name in  kind ingress  restart 7\n{"name": "in", "kind": "ingress"}\n'
    assert [path for path, _ in broker.asked] == ["/ingresses/in/restart", "/ingresses/in/pause"]
