"""Output escapes the control characters in texts of clients, so that a terminal does not execute them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from bascule.cli.output import fail, line, note, printable, table
from tests.support.speed import SLOWNESS

#: Clear the screen, with ESC and with the one-character control; right-to-left text; a bell and a deletion.
HOSTILE = "\x1b[2J\x9b2J\u202e\a\x7f"
CONTROLS = set(HOSTILE) - set("[2J")


@pytest.mark.parametrize("text", ["orders", "é 😀", "'quoted' \\ back"])
def test_printable_text_is_unchanged(text: str) -> None:
    assert printable(text) == text


def test_control_characters_are_escaped_as_in_json() -> None:
    assert printable(f"a{HOSTILE}\n") == r"a\u001b[2J\u009b2J\u202e\u0007\u007f\n"
    assert json.loads(f'"{printable(HOSTILE)}"') == HOSTILE


def test_tables_notes_and_errors_contain_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    table(("name", "reason"), [(HOSTILE, f"one\n{HOSTILE}")])
    note(HOSTILE)
    fail(HOSTILE)
    printed = capsys.readouterr()
    assert CONTROLS & set(printed.out + printed.err) == set()


def test_colons_around_a_word_are_not_replaced_by_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    xid = "1111577411:key:bank"
    table((xid,), [(xid,)], title=xid)
    fail(xid)
    printed = capsys.readouterr()
    assert (printed.out.count(xid), printed.err) == (3, f"error: {xid}\n")


def test_lines_are_printed_raw_to_a_pipe_and_without_control_characters_to_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line(HOSTILE)
    assert capsys.readouterr().out == f"{HOSTILE}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    line(f"one\n\t{HOSTILE}")
    printed = capsys.readouterr().out
    assert printed.startswith("one\n\t")
    assert CONTROLS & set(printed) == set()


@pytest.mark.parametrize("output", ["table", "json"])
def test_output_that_nobody_reads_or_that_has_no_room_ends_the_command_without_a_traceback(output: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "bascule.cli", "config", "show", "-o", output]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    read, write = os.pipe()
    os.close(read)
    for sink, said in ((write, ""), (os.open("/dev/full", os.O_WRONLY), "error: the output cannot be written: No space left on device\n")):
        done = subprocess.run(arguments, stdout=sink, stderr=subprocess.PIPE, cwd=tmp_path, env=environment, text=True, check=False)
        os.close(sink)
        assert (done.returncode, done.stderr) == (1, said)


def test_table_in_a_pipe_is_what_rich_draws_and_ten_thousand_rows_take_no_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ("name", "messages", "名前")
    rows = [("orders", 7, "日本"), ("", None, "é"), ("a" * 300, 10**9, "x"), ("e\u0301", 0, "🎏")]
    table(columns, rows)
    found = capsys.readouterr().out
    drawn = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        drawn.add_row(*("" if cell is None else str(cell) for cell in row))
    wanted = io.StringIO()
    Console(file=wanted, width=10_000, markup=False, highlight=False, emoji=False).print(drawn)
    assert found == wanted.getvalue()
    begun_s = time.process_time()
    table(("name", "messages"), [(f"orders.{number:05}", number) for number in range(10_000)])
    assert time.process_time() - begun_s < 2 * SLOWNESS, "rich needs some seconds"
    assert capsys.readouterr().out.count("\n") == 10_004
