"""Formats of commands: a table, a table with all fields, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest

from bascule.cli import answer_fields, backup, why
from bascule.cli.output import CsvRows, Format, show_document, show_result, show_rows
from bascule.journal.fence import Fence
from bascule.timeline.facts import LifeEvent, What
from bascule.timeline.life import MessageLife
from bascule.timeline.story import MessageStory
from bascule.timeline.wanted import WantedId

ROWS = [{"name": "a", "size": 3, "roles": ["x", "y"], "extra": None}, {"name": "b", "size": -1, "roles": [], "more": {"k": [True]}}]


def parsed(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_table_has_the_main_columns_and_wide_table_all_fields(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(ROWS, ("name", "roles"), Format.TABLE)
    assert capsys.readouterr().out.split() == ["name", "roles", "─" * 12, "a", "x,", "y", "b"]
    show_rows(ROWS, ("name", "roles"), Format.WIDE)
    wide = capsys.readouterr().out
    assert wide.split()[:5] == ["name", "roles", "size", "extra", "more"]
    assert '{"k": [true]}' in wide


def test_csv_has_all_fields_in_order_and_quotes_every_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(ROWS, ("name", "roles"), Format.CSV)
    assert capsys.readouterr().out == ('"name","roles","size","extra","more"\n"a","x, y",3,"",""\n"b","",-1,"","{""k"": [true]}"\n')


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"])
def test_text_that_a_spreadsheet_would_calculate_is_marked_as_text(start: str, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = f'{start}cmd|"/c calc"!A1'
    show_rows([{"name": hostile}], ("name",), Format.CSV)
    assert capsys.readouterr().out == '"name"\n"\'' + hostile.replace('"', '""') + '"\n'


def test_quotation_marks_commas_and_line_ends_survive_csv(capsys: pytest.CaptureFixture[str]) -> None:
    text = 'a,"b"\r\nc'
    show_rows([{"name": text}], ("name",), Format.CSV)
    assert parsed(capsys.readouterr().out)[1] == [text]


def test_list_without_rows_has_a_header_in_csv_and_is_empty_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([], ("name", "size"), Format.CSV)
    assert capsys.readouterr().out == '"name","size"\n'
    show_rows([], ("name",), Format.JSON)
    assert json.loads(capsys.readouterr().out) == []


def test_document_in_csv_has_a_row_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    show_document({"a": {"b": 1, "c": [2, 3]}, "d": [{"e": True}]}, Format.CSV, lambda: pytest.fail("drew a table"))
    assert parsed(capsys.readouterr().out) == [["field", "value"], ["a.b", "1"], ["a.c", "2, 3"], ["d.0.e", "true"]]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (Format.TABLE, "moved 3  to q\n"),
        (Format.WIDE, "moved 3  to q\n"),
        (Format.CSV, '"moved","to"\n3,"q"\n'),
        (Format.JSON, '{"moved": 3, "to": "q"}\n'),
    ],
)
def test_result_of_an_action_is_one_row(output: Format, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_result({"moved": 3, "to": "q"}, output)
    assert capsys.readouterr().out == text


def test_rows_that_arrive_later_have_no_second_header(capsys: pytest.CaptureFixture[str]) -> None:
    rows = CsvRows(("n",))
    rows.write([{"n": 1}])
    rows.write([{"n": 2}])
    assert capsys.readouterr().out == '"n"\n1\n2\n'


@pytest.mark.parametrize("output", list(Format))
def test_backup_and_restore_show_their_result_in_every_format(output: Format, capsys: pytest.CaptureFixture[str]) -> None:
    backup._say({"journal_offset": 7, "recreated": ["a", "b"]}, "restored", output)
    out = capsys.readouterr().out
    match output:
        case Format.CSV:
            assert parsed(out) == [["field", "value"], ["journal_offset", "7"], ["recreated", "a, b"]]
        case Format.JSON:
            assert json.loads(out) == {"journal_offset": 7, "recreated": ["a", "b"]}
        case _:
            assert out == "restored\n"


@pytest.mark.parametrize("followed", [False, True])
def test_life_of_a_message_has_one_kind_of_rows_in_csv(followed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    story = MessageStory(MessageLife(WantedId("ID:a"), Fence()), "bascule.journal", 0, 0, 9)
    event = LifeEvent(1769846400000, 7, What.ACCEPTED, "ID:a", 0, "=1+1")
    if followed:
        why._event_shower(Format.CSV)(story, event)
    why.show_story(story, Format.CSV, followed=followed)
    rows = parsed(capsys.readouterr().out)
    if followed:
        assert rows == [list(why.EVENT_FIELDS), ["1769846400000", "7", "accepted", "ID:a", "", "'=1+1"]]
    else:
        assert rows[0] == ["field", "value"]
        assert ["journal.to", "9"] in rows


@pytest.mark.parametrize("listed", answer_fields._TYPES)
def test_list_without_rows_has_all_fields_that_a_row_would_have(listed: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([], ("name",), Format.CSV, listed)
    header = parsed(capsys.readouterr().out)[0]
    assert (header[0], len(header) > 3, len(set(header))) == ("name", True, len(header))
    show_rows([], ("name",), Format.TABLE, listed)
    assert capsys.readouterr().out.split()[0] == "name"


def test_list_without_rows_has_its_main_columns_if_the_broker_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bascule.server.status", None)
    show_rows([], ("name",), Format.CSV, "queues")
    assert capsys.readouterr().out == '"name"\n'
