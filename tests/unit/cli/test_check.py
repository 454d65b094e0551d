# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""Checks for monitoring systems: exit codes, the line of a plugin, and its figures."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any, Final

import pytest

from bascule.cli.check import commands
from bascule.cli.check_result import CheckFigure
from tests.unit.cli.conftest import Bascule
from tests.unit.cli.test_administer import DETAIL, PIN, STATUS, Broker, broker  # noqa: F401 - a fixture

OVERVIEW = {**STATUS, "dead_letters": 3, "dead_letter_address": "DLQ", "pins": [PIN]}
RUNNING = {"kind": "divert", "name": "orders", "state": "running", "wanted": "running", "lag": 5, "error": ""}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_broker_that_does_not_answer_is_critical_for_alive_and_unknown_for_figures(bascule: Bascule) -> None:
    for command, code, state in (("alive", 2, "ALIVE CRITICAL"), ("active", 2, "ACTIVE CRITICAL"), ("memory", 3, "MEMORY UNKNOWN")):
        done = bascule("check", command, "--admin", "http://127.0.0.1:1")
        assert done.returncode == code
        assert done.stdout.startswith(f"{state} - no broker answers at http://127.0.0.1:1/")


@pytest.mark.parametrize(("arguments", "path"), [((), "/active"), (("--standby-ok",), "/readyz")])
def test_active_says_the_role_or_the_reason(arguments: tuple[str, ...], path: str, broker: Broker, bascule: Bascule) -> None:
    broker.answers[path] = (200, "active")
    assert bascule("check", "active", *arguments, "--admin", broker.url) == (0, "ACTIVE OK - the broker is active\n", "")
    broker.answers[path] = (503, "Kafka is away")
    done = bascule("check", "active", *arguments, "--admin", broker.url)
    assert (done.returncode, "CRITICAL" in done.stdout, "Kafka is away" in done.stdout) == (2, True, True)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("depth", "q"), 0, "DEPTH OK - q has 4 messages | 'q messages'=4;;"),
        (("depth", "q", "-w", "4", "-c", "9"), 0, "DEPTH OK - q has 4 messages | 'q messages'=4;4;9"),
        (("depth", "q", "-w", "3", "-c", "9"), 1, "DEPTH WARNING - q has 4 messages | 'q messages'=4;3;9"),
        (("depth", "q", "-w", "1", "-c", "3"), 2, "DEPTH CRITICAL - q has 4 messages | 'q messages'=4;1;3"),
        (("consumers", "q", "-w", "2", "-c", "1"), 1, "CONSUMERS WARNING - q has 1 consumers | 'q consumers'=1;2;1"),
        (("consumers", "q", "-c", "2"), 2, "CONSUMERS CRITICAL - q has 1 consumers | 'q consumers'=1;;2"),
        (("dead-letters",), 1, "DEAD-LETTERS WARNING - DLQ has 3 messages | 'DLQ messages'=3;0;"),
        (("dead-letters", "-w", "3"), 0, "DEAD-LETTERS OK - DLQ has 3 messages | 'DLQ messages'=3;3;"),
        (("memory",), 2, "MEMORY CRITICAL - producers are blocked: too much | 'memory'=1.78%;75;90 'used'=148914B;;"),
        (("journal", "-w", "30"), 1, "JOURNAL WARNING - pipeline divert:idle keeps 34 bytes | 'pipeline divert:idle bytes'=34B;30;"),
    ],
)
def test_limits_decide_the_state_and_the_exit_code(
    arguments: tuple[str, ...],
    code: int,
    line: str,
    broker: Broker,
    bascule: Bascule,
) -> None:
    broker.answers |= {"/queues": (200, DETAIL), "/overview": (200, OVERVIEW)}
    assert bascule("check", *arguments, "--admin", broker.url) == (code, line + "\n", "")


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({}, 0, "divert orders is running, lag 5"),
        ({"lag": 11}, 1, "divert orders is running, lag 11"),
        ({"lag": 101}, 2, "divert orders is running, lag 101"),
        ({"state": "failed", "error": "no topic"}, 2, "divert orders is failed: no topic"),
        ({"state": "unassigned", "lag": None}, 2, "divert orders is unassigned"),
        ({"state": "restarting"}, 1, "divert orders is restarting, wanted running"),
        ({"state": "paused", "wanted": "paused", "lag": 10**6}, 0, "divert orders is paused, lag 1,000,000"),
        ({"state": "running", "wanted": "paused"}, 1, "divert orders is running, wanted paused"),
        ({"state": "disabled", "lag": None}, 0, "divert orders is disabled"),
    ],
)
def test_state_of_a_pipeline_counts_before_its_lag(
    change: dict[str, Any],
    code: int,
    text: str,
    broker: Broker,
    bascule: Bascule,
) -> None:
    broker.answers |= {"/diverts": (200, [RUNNING | change]), "/ingresses": (200, [])}
    done = bascule("check", "pipelines", "-w", "10", "-c", "100", "--admin", broker.url)
    assert (done.returncode, done.stdout.partition(" - ")[2].partition(" | ")[0].strip()) == (code, text)


def test_worst_result_is_first_and_names_select_pipelines(broker: Broker, bascule: Bascule) -> None:
    broker.answers |= {"/diverts": (200, [RUNNING, RUNNING | {"name": "bad|name", "state": "failed"}]), "/ingresses": (200, [])}
    done = bascule("check", "pipelines", "--admin", broker.url)
    assert (done.returncode, done.stdout.partition(" | ")[0]) == (
        2, "PIPELINES CRITICAL - divert bad/name is failed; divert orders is running, lag 5",
    )  # fmt: skip
    assert bascule("check", "pipelines", "orders", "--admin", broker.url).returncode == 0
    done = bascule("check", "pipelines", "other", "--admin", broker.url)
    assert (done.returncode, done.stdout) == (3, "PIPELINES UNKNOWN - there is no divert or ingress 'other'\n")


def test_age_is_that_of_the_next_waiting_message(broker: Broker, bascule: Bascule) -> None:
    message = {"state": "waiting", "timestamp_ms": int(time.time() * 1000) - 100_000}
    for messages, code in (([message], 1), ([{**message, "state": "delayed"}], 0), ([], 0), ([{"state": "waiting"}], 3)):
        broker.answers["/messages"] = (200, {"messages": messages})
        assert bascule("check", "age", "q", "-w", "99", "-c", "100000", "--admin", broker.url).returncode == code
    assert broker.asked[-1][0] == "/messages?queue=q&count=1"


@pytest.mark.parametrize(("days", "code"), [(31, 0), (29, 1), (6, 2), (-1, 2)])
def test_days_until_a_certificate_ends_are_compared(days: int, code: int, broker: Broker, bascule: Bascule) -> None:
    name = "bascule_certificate_expiry_timestamp_seconds"
    broker.answers["/metrics"] = (200, f'# HELP {name} x\n{name}{{setting="broker.tls.certificate"}} {time.time() + days * 86400}\n')
    done = bascule("check", "certificates", "--admin", broker.url)
    assert done.returncode == code
    assert "broker.tls.certificate" in done.stdout


def test_error_of_the_broker_is_unknown(broker: Broker, bascule: Bascule) -> None:
    broker.answers["/queues"] = (404, {"error": "there is no queue 'q'"})
    assert bascule("check", "depth", "q", "--admin", broker.url) == (3, "DEPTH UNKNOWN - there is no queue 'q'\n", "")


def test_answer_of_another_version_is_unknown(broker: Broker, bascule: Bascule) -> None:
    broker.answers["/overview"] = (200, {})
    done = bascule("check", "memory", "--admin", broker.url)
    assert (done.returncode, done.stdout.startswith("MEMORY UNKNOWN - the broker gave another answer"), done.stderr) == (3, True, "")


def test_defect_of_a_check_is_unknown_and_not_blamed_on_the_broker(broker: Broker, bascule: Bascule) -> None:
    broker.answers["/messages"] = (200, {"queue": "q", "messages": [], "next": "", "looked_at": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bascule.cli.check.CheckFigure", lambda *_: 1 // 0)
        done = bascule("check", "age", "q", "-w", "99", "--admin", broker.url)
    assert (done.returncode, done.stdout) == (
        3, "AGE UNKNOWN - unexpected error, which is a defect of the check: ZeroDivisionError('integer division or modulo by zero')\n",
    )  # fmt: skip


@pytest.mark.parametrize("content", [[], "x", None, DETAIL | {"messages": "3", "delivering": "", "delayed": ""}])
def test_answer_with_other_types_is_unknown(content: Any, broker: Broker, bascule: Bascule) -> None:
    broker.answers["/queues"] = (200, json.dumps(content))
    done = bascule("check", "depth", "q", "--admin", broker.url)
    assert (done.returncode, done.stdout.startswith("DEPTH UNKNOWN - "), done.stderr) == (3, True, "")


@pytest.mark.parametrize(
    ("command", "path", "code"),
    [
        (("alive",), "/livez", 2),
        (("active",), "/active", 2),
        (("active", "--standby-ok"), "/readyz", 2),
        (("certificates",), "/metrics", 3),
    ],
)
def test_page_of_another_server_is_not_ok(command: tuple[str, ...], path: str, code: int, broker: Broker, bascule: Bascule) -> None:
    broker.answers[path] = (200, "<html>welcome</html>")
    done = bascule("check", *command, "--admin", broker.url)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (code, 1, "")


@pytest.mark.parametrize("end", ["nan", "inf", "soon"])
def test_end_of_a_certificate_that_is_no_time_is_unknown(end: str, broker: Broker, bascule: Bascule) -> None:
    broker.answers["/metrics"] = (200, f'bascule_certificate_expiry_timestamp_seconds{{setting="broker.tls.certificate"}} {end}\n')
    done = bascule("check", "certificates", "--admin", broker.url)
    assert (done.returncode, done.stdout.startswith("CERTIFICATES UNKNOWN"), done.stderr) == (3, True, "")


def test_label_of_a_figure_is_quoted() -> None:
    assert str(CheckFigure("it's=q", 1.5, 2, None, "s")) == "'it''s_q'=1.5s;2;"


ELECTED = {"name": "b-1", "host": "10.0.0.1", "elected": True, "this": False}
STANDBY = {"name": "b-2", "host": "10.0.0.2", "elected": False, "this": True}


@pytest.mark.parametrize(
    ("found", "arguments", "code", "line"),
    [
        ([ELECTED, STANDBY], (), 0, "BROKERS OK - 2 brokers: b-1 (elected), b-2 | 'brokers'=2;2;1"),
        ([ELECTED], (), 1, "BROKERS WARNING - 1 brokers: b-1 (elected) | 'brokers'=1;2;1"),
        ([ELECTED, STANDBY], ("-w", "4", "-c", "3"), 2, "BROKERS CRITICAL - 2 brokers: b-1 (elected), b-2 | 'brokers'=2;4;3"),
        (
            [STANDBY, STANDBY | {"name": "b-3"}], (), 2,
            "BROKERS CRITICAL - no broker is elected; 2 brokers stand for election: b-2, b-3 | 'brokers'=2;2;1",
        ),
    ],
)  # fmt: skip
def test_brokers_are_counted_and_one_must_be_elected(
    found: list[dict[str, Any]], arguments: tuple[str, ...], code: int, line: str, broker: Broker, bascule: Bascule
) -> None:
    broker.answers["/brokers"] = (200, found)
    assert bascule("check", "brokers", *arguments, "--admin", broker.url) == (code, line + "\n", "")


def test_brokers_are_unknown_without_kafka(broker: Broker, bascule: Bascule) -> None:
    broker.answers["/brokers"] = (503, {"error": "could not describe group g: Kafka does not answer"})
    done = bascule("check", "brokers", "--admin", broker.url)
    assert (done.returncode, done.stdout) == (3, "BROKERS UNKNOWN - could not describe group g: Kafka does not answer\n")


#: All checks, with what they need, and the exit code for the answers of ``every_answer``.
CHECKS: Final = {
    "alive": ((), 0), "active": ((), 2), "brokers": ((), 1), "depth": (("q", "-c", "3"), 2), "consumers": (("q",), 0), "age": (("q",), 0),
    "dead-letters": ((), 1), "pipelines": ((), 0), "certificates": ((), 3), "memory": ((), 2), "journal": (("-w", "30"), 1),
}  # fmt: skip


@pytest.fixture
def every_answer(broker: Broker) -> Broker:
    broker.answers |= {
        "/livez": (200, "ok"), "/active": (503, "Kafka is away"), "/brokers": (200, [ELECTED]), "/queues": (200, DETAIL),
        "/messages": (200, {"messages": []}), "/overview": (200, OVERVIEW), "/diverts": (200, [RUNNING]), "/ingresses": (200, []),
        "/metrics": (200, "no metrics"),
    }  # fmt: skip
    return broker


def test_tests_of_formats_have_every_check() -> None:
    assert CHECKS.keys() == {each.name or each.callback.__name__ for each in commands.registered_commands if each.callback is not None}


@pytest.mark.parametrize("name", CHECKS)
def test_check_has_the_same_exit_code_in_every_format(name: str, every_answer: Broker, bascule: Bascule) -> None:
    arguments, code = CHECKS[name]
    said = {
        output: bascule("check", name, *arguments, "--admin", every_answer.url, "-o", output) for output in ("table", "wide", "json", "csv")
    }
    assert [(each.returncode, each.stderr) for each in said.values()] == [(code, "")] * 4
    assert said["wide"] == said["table"] == bascule("check", name, *arguments, "--admin", every_answer.url)
    document = json.loads(said["json"].stdout)
    assert (document["check"], document["exit_code"]) == (name, code)
    assert said["table"].stdout.startswith(f"{name.upper()} {document['state']} - {document['results'][0]['text']}")
    values = dict(list(csv.reader(io.StringIO(said["csv"].stdout)))[1:])
    assert (values["check"], values["exit_code"], values["state"]) == (name, str(code), document["state"])
    assert values["results.0.text"] == document["results"][0]["text"]


def test_document_has_the_worst_result_first_and_all_figures(broker: Broker, bascule: Bascule) -> None:
    broker.answers |= {"/diverts": (200, [RUNNING, RUNNING | {"name": "bad|name", "state": "failed"}]), "/ingresses": (200, [])}
    said = json.loads(bascule("check", "pipelines", "-w", "9", "--admin", broker.url, "--format", "json").stdout)
    bad, good = said["results"]
    assert (bad["state"], bad["text"], good["state"]) == ("CRITICAL", "divert bad|name is failed", "OK")
    assert good["figures"] == [{"label": "divert orders lag", "value": 5, "warning": 9, "critical": None, "unit": ""}]
    broker.answers["/diverts"] = (200, [])
    assert json.loads(bascule("check", "pipelines", "--admin", broker.url, "-o", "json").stdout) == {
        "check": "pipelines", "state": "OK", "exit_code": 0, "results": [],
    }  # fmt: skip
