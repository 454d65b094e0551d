# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""Commands that define ingresses, with an admin server that gives the answers of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bascule.cli import pipeline_definitions
from tests.unit.cli.test_administer import Broker, _elsewhere, broker, run  # noqa: F401 - fixtures

ANSWER = {"name": "in", "kind": "ingress", "revision": 2}
STATUS = {"name": "in", "state": "running", "reported_revision": 2, "error": "an error"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_definitions, "LOOK_S", 0.0)


def test_create_sends_settings_of_the_file_and_of_the_command(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers |= {"/ingresses": (202, ANSWER), "/ingresses/in/status": (200, STATUS)}
    table = tmp_path / "in.toml"
    table.write_text('topics = ["x"]\nto = "queue://a=b"\nbody = "bytes"\n')
    given = ("topics=a,b", "body=text", "tasks=3", "keep_user_id=true", "--file", str(table))
    assert run(monkeypatch, "ingress", "create", "in", *given, "--admin", broker.url) == 0
    config = {"topics": ["a", "b"], "to": "queue://a=b", "body": "text", "tasks": 3, "keep_user_id": True}
    assert broker.asked[0] == ("/ingresses", {"name": "in", "config": config})
    assert capsys.readouterr().out == "name in  kind ingress  revision 2  state running\n"


def test_settings_may_be_times_and_have_any_name(tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.answers |= {"/ingresses": (202, ANSWER), "/ingresses/in/config": (400, {"error": "unknown setting"})}
    broker.answers |= {"/ingresses/in": (200, {"name": "in", "config": {}, "revision": 1}), "/ingresses/in/status": (200, STATUS)}
    table = tmp_path / "in.toml"
    table.write_text('topics = ["x"]\nstart = 2026-01-31T08:00:00Z\n')
    assert run(monkeypatch, "ingress", "create", "in", "--file", str(table), "--admin", broker.url) == 0
    assert broker.asked[0][1]["config"] == {"topics": ["x"], "start": "2026-01-31T08:00:00+00:00"}
    assert run(monkeypatch, "ingress", "change", "in", "path=a", "method=b", "self=c", "--admin", broker.url) != 0
    assert broker.asked[-1] == ("/ingresses/in/config?revision=1", {"path": "a", "method": "b", "self": "c"})


def test_change_replaces_the_settings_that_it_has_read(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {"name": "in", "config": {"topics": ["a"], "body": "text", "tasks": 3}, "revision": 1}
    place = "/ingresses/in/config"
    broker.answers |= {"/ingresses/in": (200, shown), place: (202, ANSWER), "/ingresses/in/status": (200, STATUS)}
    assert run(monkeypatch, "ingress", "change", "in", "body=map", "--unset", "tasks", "--admin", broker.url) == 0
    assert broker.asked[1] == (f"{place}?revision=1", {"topics": ["a"], "body": "map"})


def test_delete_waits_until_the_ingress_is_gone(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"name": "in", "kind": "ingress"}
    broker.answers |= {"/ingresses/in": (202, answer), "/ingresses": (200, [{"name": "in"}])}
    assert run(monkeypatch, "ingress", "delete", "in", "--wait-s", "0.001", "--admin", broker.url) == 1
    assert "no driver has deleted it within 0.001 s; a driver deletes it when it runs. If one runs, see its log" in capsys.readouterr().err
    assert run(monkeypatch, "ingress", "delete", "in", "--wait-s", "0", "--admin", broker.url) == 0
    broker.answers["/ingresses"] = (200, [{"name": "other"}])
    assert run(monkeypatch, "ingress", "delete", "in", "--admin", broker.url) == 0


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        ({"reported_revision": 1}, 1, "the driver has not followed within 0.001 s"),
        ({"state": "restarting"}, 1, "the driver has not followed within 0.001 s"),
        ({"state": "failed"}, 1, "failed: an error"),
        ({"state": "waiting"}, 0, ""),
    ],
)
def test_create_waits_until_the_driver_uses_the_revision(
    status: dict[str, Any], code: int, said: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers |= {"/ingresses": (202, ANSWER), "/ingresses/in/status": (200, STATUS | status)}
    assert run(monkeypatch, "ingress", "create", "in", "topics=a", "--wait-s", "0.001", "--admin", broker.url) == code
    assert said in capsys.readouterr().err
    assert run(monkeypatch, "ingress", "create", "in", "topics=a", "--wait-s", "0", "--admin", broker.url) == (
        status == {"state": "failed"}
    )


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("unassigned", "stored, but no driver has begun it within 0.001 s; it begins when a driver runs. Start the pipelines\n"),
        ("waiting for coverage", "stored, but no active broker has confirmed within 0.001 s that its journal covers it; "),
    ],
)
@pytest.mark.parametrize("verb", ["create", "change"])
def test_no_log_is_named_if_no_driver_runs(
    verb: str, state: str, said: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = STATUS | {"name": "late", "state": state, "reported_revision": None, "error": ""}
    answer = {"name": "late", "kind": "divert", "revision": 1}
    broker.answers |= {"/diverts": (202, answer), "/diverts/late/status": (200, status), "/diverts/late/config": (202, answer)}
    broker.answers |= {"/diverts/late": (200, {"name": "late", "config": {"from": "a", "to": "b"}, "revision": 1})}
    assert run(monkeypatch, "divert", verb, "late", "from=a", "to=b", "--wait-s", "0.001", "--admin", broker.url) == 1
    noted = capsys.readouterr().err
    assert noted.startswith(said)
    assert "log" not in noted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("topics",), "'topics' must be SETTING=VALUE"),
        (("--file", "missing.toml"), "No such file"),
        (("--file", "x.toml"), "not valid TOML"),
        (("--file", "deep.toml"), "nested too deeply"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(
    arguments: tuple[str, ...], said: str, tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "x.toml").write_text("= 1")
    (tmp_path / "deep.toml").write_text(f"a = {'[' * 10_000}{']' * 10_000}")
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "ingress", "create", "in", *arguments, "--admin", broker.url) != 0
    assert said in capsys.readouterr().err
    assert broker.asked == []


def test_divert_is_created_changed_and_deleted(broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer, status = {"name": "late", "kind": "divert", "revision": 2}, {**STATUS, "name": "late"}
    broker.answers |= {"/diverts": (202, answer), "/diverts/late/status": (200, status), "/diverts/late/config": (202, answer)}
    broker.answers |= {"/diverts/late": (200, {"name": "late", "config": {"from": "a", "to": "b"}, "revision": 1})}
    given = ("from=news", "selector=dep_delay > 30", "to=late")
    assert run(monkeypatch, "divert", "create", "late", *given, "--admin", broker.url) == 0
    config = {"from": "news", "selector": "dep_delay > 30", "to": "late"}
    assert broker.asked[0] == ("/diverts", {"name": "late", "config": config})
    assert capsys.readouterr().out == "name late  kind divert  revision 2  state running\n"
    assert run(monkeypatch, "divert", "change", "late", "--admin", broker.url) == 0, "waits again for the confirmation of the broker"
    assert ("/diverts/late/config?revision=1", {"from": "a", "to": "b"}) in broker.asked
    broker.answers |= {"/diverts/late": (202, {"name": "late", "kind": "divert"}), "/diverts": (200, [])}
    assert run(monkeypatch, "divert", "delete", "late", "--admin", broker.url) == 0
