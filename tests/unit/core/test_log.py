"""The content of log lines, as text and as JSON. Only a command of the product configures logging."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from bascule.core import log as module
from bascule.core.log import ClientLog, LogSettings, configure, configured, get_log
from bascule.core.xid import Xid

log = get_log("bascule.here")


@pytest.fixture(autouse=True)
def _not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the configuration of logging of this process."""
    monkeypatch.setattr(module, "_configured", None)


def lines(settings: LogSettings, *calls: object) -> list[str]:
    stream = io.StringIO()
    configure(settings, stream)
    for call in calls:
        call()  # type: ignore[operator]
    return stream.getvalue().splitlines()


def test_text_line_has_time_level_logger_event_and_fields() -> None:
    (line,) = lines(LogSettings(), lambda: log.warning("divert paused", divert="delayed", count=3, reason="no such divert"))
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING bascule\.here: divert paused divert=delayed count=3 reason="no such divert"', line
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "x"', r'"say \"x\""'),
        ("one\ntwo", r'"one\ntwo"'),
        ("ü", '"ü"'),
        ("\x9b2J", r'"\u009b2J"'),
        ("\u202ea", r'"\u202ea"'),
        (None, "None"),
        (1.5, "1.5"),
    ],
)
def test_ambiguous_value_in_log_line_is_quoted(value: object, shown: str) -> None:
    (line,) = lines(LogSettings(), lambda: log.info("seen", value=value))
    assert line.endswith(f"seen value={shown}")


def test_json_line_has_the_fields_beside_the_event() -> None:
    def fail() -> None:
        try:
            raise ValueError("x")
        except ValueError:
            log.exception("batch failed", batch=7, divert="delayed", level="high", place=("t", 0))

    first, second = (json.loads(line) for line in lines(LogSettings("json"), fail, lambda: logging.getLogger("other").warning("a %s", "b")))
    assert datetime.now().astimezone() - datetime.fromisoformat(first.pop("time")) < timedelta(minutes=1)
    assert first.pop("exception").endswith("ValueError: x")
    assert first == {
        "level": "error", "logger": "bascule.here",
        "event": "batch failed", "batch": 7, "divert": "delayed", "level_": "high", "place": ["t", 0],
    }  # fmt: skip
    assert (second["logger"], second["event"]) == ("other", "a b")


def test_xid_in_json_line_has_the_form_that_commands_accept() -> None:
    xid = Xid(7, b"shop/1", b"db")
    (line,) = (json.loads(line) for line in lines(LogSettings("json"), lambda: log.info("branch ended", xid=xid)))
    assert Xid.parse(line["xid"]) == xid


def test_log_level_applies_to_bascule_and_other_libraries_start_at_warning() -> None:
    calls = [lambda: log.debug("a"), lambda: log.info("b"), lambda: logging.getLogger("other").info("c"), lambda: log.error("d")]
    assert [line[-1] for line in lines(LogSettings(level="debug"), *calls)] == ["a", "b", "d"]
    assert [line[-1] for line in lines(LogSettings(level="info"), *calls)] == ["b", "d"]
    assert [line[-1] for line in lines(LogSettings(level="error"), *calls)] == ["d"]


def test_suppressed_event_is_not_formatted() -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    assert lines(LogSettings(level="warning"), lambda: log.info("seen", value=Costly())) == []


def test_log_lines_of_kafka_client_are_written_at_debug() -> None:
    client = ClientLog(log)
    assert lines(LogSettings(), lambda: client.log(3, "%s [%s] %s", "FAIL", "rdkafka#1", "no route")) == []
    (line,) = lines(LogSettings(level="debug"), lambda: client.log(3, "%s [%s] %s", "FAIL", "rdkafka#1", "no route"))
    assert line.endswith('DEBUG bascule.here: Kafka client text="FAIL [rdkafka#1] no route"')


def test_handlers_of_application_get_event_and_fields_as_text(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("divert paused", divert="delayed")
    (record,) = caplog.records
    assert (record.getMessage(), record.filename) == ("divert paused divert=delayed", "test_log.py")
    assert configured() is None


def test_log_goes_to_stderr_and_libraries_configure_no_handlers() -> None:
    code = """
import logging
import bascule.adapter, bascule.client, bascule.xa
assert not logging.getLogger().handlers and not logging.getLogger("bascule").handlers
from bascule.core.log import configure, get_log
configure()
get_log("bascule.x").info("here", a=1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.endswith("INFO bascule.x: here a=1\n")
