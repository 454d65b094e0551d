# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""The commands ``redrive``, with an admin server that gives the answers of a test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bascule.cli import redrive
from tests.unit.cli.test_administer import Broker, _elsewhere, broker, run  # noqa: F401 - fixtures

LETTER = {
    "place": "0:17", "pipeline": "divert:orders", "source": {"topic": "bascule.journal", "partition": 0, "offset": 3},
    "stage": "VALUE_CONVERTER", "reason": "BadRecord: bad", "time_ms": 1769846400000, "redrives": 1, "bytes": 10, "address": "flights",
    "message": "0-1-0", "incomplete": "",
}  # fmt: skip
FOUND = {"letters": [LETTER], "complete": False, "upto": "id 0:18"}
JOB = {
    "job": "j", "action": "redrive", "state": "done", "redriven": 1, "failed": 0, "discarded": 0, "left": 0, "error": "", "by": "ann",
    "at_ms": 1769846400000, "pipeline": "", "reason": "",
}  # fmt: skip
ASKED = {"job": "j", "action": "redrive"}


def test_dead_letters_and_jobs_are_listed_and_shown(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filters = "count=2&pipeline=divert%3Aorders&since_ms=1769846400000&header=a%3A1&header=b%3A2"
    broker.answers |= {
        "/redrive/letters": (200, FOUND),
        "/redrive/letters/0/17": (200, {**LETTER, "state": "waiting", "headers": [["color", "red"]], "value": "hello"}),
        "/redrive/jobs": (200, [JOB]),
    }
    options = ("--count", "2", "--pipeline", "divert:orders", "--since", "2026-01-31T08:00:00Z", "--header", "a:1", "--header", "b:2")
    for arguments, texts in (
        (("list", *options), ("0:17", "divert:orders", "2026-01-31T08:00:00Z", "bad")),
        (("show", "0:17"), ("color", "red", "hello", "bascule.journal-0, offset 3", "waiting")),
        (("jobs",), ("ann", "done", "2026-01-31T08:00:00Z")),
    ):
        assert run(monkeypatch, "redrive", *arguments, "--admin", broker.url) == 0
        shown = capsys.readouterr()
        assert all(text in shown.out for text in texts), shown
        if arguments[0] == "list":
            assert broker.asked[-1][0] == f"/redrive/letters?{filters}"
        assert ("more dead letters than shown" in shown.err) == (arguments[0] == "list")
    assert run(monkeypatch, "redrive", "show", "0:17", "--admin", broker.url, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["value"] == "hello"


def test_list_asks_again_until_it_is_complete_and_says_where_to_continue(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers |= {
        "/redrive/letters?count=3": (200, {"letters": [], "complete": False, "next": "0:9", "upto": ""}),
        "/redrive/letters?count=3&from=0%3A9": (200, {"letters": [LETTER], "complete": False, "next": "0:18", "upto": ""}),
        "/redrive/letters?count=2&from=0%3A18": (200, {"letters": [LETTER, LETTER], "complete": False, "next": "1:5", "upto": ""}),
        "/redrive/letters?count=3&from=1%3A5": (200, {"letters": [LETTER], "complete": True, "next": "", "upto": ""}),
    }
    for options, count, said in (((), 3, "; continue with --from 1:5"), (("--from", "1:5"), 1, "")):
        assert run(monkeypatch, "redrive", "list", "--count", "3", *options, "--admin", broker.url, "-o", "json") == 0
        shown = capsys.readouterr()
        assert (shown.out.count("0:17"), said in shown.err) == (count, True)
        assert ("more dead letters" in shown.err) == bool(said)


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        (JOB, 0, ""),
        (JOB | {"redriven": 0}, 0, "no dead letter that waits matches the request"),
        (JOB | {"failed": 2}, 1, "2 dead letters failed again"),
        (JOB | {"left": 3, "error": "divert:x is disabled"}, 1, "could not be redriven and still wait; the last reason: divert:x"),
        (JOB | {"state": "failed", "error": "the topic was recreated"}, 1, "the topic was recreated"),
        (JOB | {"state": "failed", "error": "the topic was recreated"}, 1, "correct the cause, and repeat the request"),
        (JOB | {"state": "pending"}, 1, "no driver has finished the job yet; a driver will when it runs. See"),
        (JOB | {"state": "pending", "error": "Kafka is away"}, 1, "the last attempt failed: Kafka is away. See"),
    ],
)  # fmt: skip
def test_run_sends_what_is_meant_and_reports_what_became_of_it(
    job: dict[str, Any], code: int, said: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(redrive, "LOOK_S", 0.0)
    broker.answers |= {"/redrive/run": (202, ASKED), "/redrive/jobs": (200, [job])}
    assert run(monkeypatch, "redrive", "run", "0:17", "0:18", "--reason", "bad", "--wait-s", "0.001", "--admin", broker.url) == code
    assert said in capsys.readouterr().err
    assert broker.asked[0] == ("/redrive/run", {"places": ["0:17", "0:18"], "reason": "bad"})


def test_discard_asks_for_a_confirmation_of_what_was_listed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers |= {
        "/redrive/letters": (200, FOUND), "/redrive/discard": (202, ASKED), "/redrive/jobs": (200, [JOB | {"discarded": 1}]),
    }  # fmt: skip
    assert run(monkeypatch, "redrive", "discard", "--all", "--admin", broker.url) == 1
    assert "1 or more dead letters will be discarded" in capsys.readouterr().err
    assert all(path != "/redrive/discard" for path, _ in broker.asked)
    assert run(monkeypatch, "redrive", "discard", "--all", "--yes", "--admin", broker.url) == 0
    assert ("/redrive/discard", {"all": True, "upto": "id 0:18", "confirm": True}) in broker.asked


@pytest.mark.parametrize(
    "wrong", [("run",), ("run", "--all", "--reason", "x"), ("run", "--since", "x"), ("list", "--header", "x"), ("discard",), ("show", "17")]
)
def test_request_that_does_not_say_what_is_meant_is_refused(
    wrong: tuple[str, ...], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, "redrive", *wrong, "--admin", broker.url) == 2
    assert broker.asked == []


def test_time_before_1970_is_a_limit_that_nothing_meets(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.answers |= {"/redrive/letters": (200, {**FOUND, "letters": [], "complete": True})}
    for until in ("30000d", "1960-01-01T00:00:00Z"):
        assert run(monkeypatch, "redrive", "list", "--until", until, "--admin", broker.url) == 0
        assert broker.asked[-1][0] == "/redrive/letters?count=100&until_ms=1"
