"""`bascule why --follow` with an admin server: the answers of the broker, asked for until the message has ended."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from bascule.cli import why
from tests.unit.cli.conftest import Bascule
from tests.unit.cli.test_administer import Broker, _elsewhere, broker

__all__ = ["_elsewhere", "broker"]  # fixtures

STAY = {"queue": "q", "state": "acknowledged", "failed_deliveries": 0, "redelivered": False, "may_have_been_delivered": True, "copy": ""}
MESSAGE = {"message": "1-2-3", "id": "ID:1", "queues": [STAY], "diverts": []}
SENT = {"time_ms": 1769846400000, "offset": None, "what": "sent by a client", "message": "", "queue": "", "detail": "q, by ann"}
ACCEPTED = {"time_ms": 1769846400000, "offset": 7, "what": "accepted", "message": "1-2-3", "queue": "", "detail": "address 'q'"}
LEFT = {"time_ms": 1769846402000, "offset": 9, "what": "left the queue", "message": "1-2-3", "queue": "q", "detail": "acknowledged"}


def life(*events: dict[str, Any], ended: bool = False) -> dict[str, Any]:
    """Return an answer of the broker."""
    messages = [MESSAGE] if events else []
    return {
        "id": "ID:1", "journal": {"topic": "j", "first": 0, "from": 0, "to": 9}, "ended": ended, "messages": messages, "branches": [],
        "events": list(events), "unrecorded": [],
    }  # fmt: skip


class Answers(dict[str, tuple[int, Any]]):
    """Answers of a broker to the same request, one after the other. The last one is repeated."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        super().__init__()
        self.left = list(answers)

    def __missing__(self, path: str) -> tuple[int, Any]:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "LOOK_S", 0.0)
    monkeypatch.setattr(why, "LOOK_PAUSES", 0.0)


def followed(broker: Broker, bascule: Bascule, *options: str) -> Any:
    return bascule("why", "ID:1", "--follow", "--admin", broker.url, *options)


ONE_BY_ONE = ((200, life()), (200, life(SENT)), (200, life(SENT, SENT, ACCEPTED)), (200, life(SENT, SENT, ACCEPTED, LEFT, ended=True)))


def test_each_event_is_printed_once_until_the_message_has_ended(broker: Broker, bascule: Bascule) -> None:
    broker.answers = Answers(*ONE_BY_ONE)
    done = followed(broker, bascule)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split("  ")[1] for line in lines[:4]] == ["sent by a client", "sent by a client", "accepted", "left the queue"]
    assert "ID:1: 1 messages in journal j" in lines[4]
    assert "sent by a client" not in "".join(lines[4:])
    assert len(broker.asked) == len(ONE_BY_ONE) + 1, "the last events may be younger than the first answer that has the end"


def test_lines_of_json_are_events_and_the_answer(broker: Broker, bascule: Bascule) -> None:
    broker.answers = Answers(*ONE_BY_ONE)
    found = [json.loads(line) for line in followed(broker, bascule, "-o", "json").stdout.splitlines()]
    assert found == [SENT, SENT, ACCEPTED, LEFT, ONE_BY_ONE[-1][1]]


def test_rows_of_csv_are_events(broker: Broker, bascule: Bascule) -> None:
    broker.answers = Answers(*ONE_BY_ONE)
    rows = list(csv.DictReader(io.StringIO(followed(broker, bascule, "-o", "csv").stdout)))
    assert [row["what"] for row in rows] == ["sent by a client", "sent by a client", "accepted", "left the queue"]


def test_message_that_turns_out_not_to_have_ended_is_followed_on(broker: Broker, bascule: Bascule) -> None:
    broker.answers = Answers((200, life(SENT, ended=True)), (200, life(SENT)), (200, life(SENT, LEFT, ended=True)))
    assert followed(broker, bascule).returncode == 0
    assert len(broker.asked) == 4


def test_broker_that_is_unavailable_for_some_time_is_asked_again(broker: Broker, bascule: Bascule) -> None:
    busy = 503, {"error": "two searches run"}
    broker.answers = Answers((200, life(SENT)), busy, busy, (200, life(SENT, LEFT, ended=True)))
    done = followed(broker, bascule)
    assert (done.returncode, done.stderr) == (0, "two searches run; asking again until the broker answers\n")
    assert len(broker.asked) == 5


def test_error_of_the_first_answer_and_refusals_end_the_command(broker: Broker, bascule: Bascule) -> None:
    broker.answers = Answers((503, {"error": "two searches run"}))
    assert followed(broker, bascule).returncode == 3
    broker.answers = Answers((200, life(SENT)), (403, {"error": "needs the role edit"}))
    done = followed(broker, bascule)
    assert (done.returncode, done.stderr) == (2, "error: needs the role edit\n")


def test_interrupt_shows_the_last_answer(broker: Broker, bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.answers = Answers((200, life(SENT)))

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bascule.cli.why.time.sleep", interrupt)
    done = followed(broker, bascule)
    assert (done.returncode, len(broker.asked), "1 messages in journal j" in done.stdout) == (0, 1, True)
    broker.answers = Answers((200, life()))
    assert followed(broker, bascule).returncode == 1


def test_pause_is_two_seconds_and_four_times_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert (why.pause_s(0.0), why.pause_s(0.5), why.pause_s(20.0)) == (2.0, 2.0, 80.0)
