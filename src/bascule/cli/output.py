"""Output of commands: data on standard output, everything else on standard error."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer


class Format(enum.StrEnum):
    """The format of data."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Print a table or JSON.")]


def printable(text: str, keep: str = "") -> str:
    """Return a text that cannot control the terminal: names and bodies come from clients and may contain control characters.

    Characters that are not printable and not in ``keep`` are written as in JSON.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else json.dumps(each)[1:-1] for each in text)


def line(text: str) -> None:
    """Print one line of data and flush. On a terminal, control characters are escaped."""
    sys.stdout.write((printable(text, "\n\t") if sys.stdout.isatty() else text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print one line of information on standard error."""
    sys.stderr.write(printable(text, "\n\t") + "\n")
    sys.stderr.flush()


def fail(text: str) -> None:
    """Print an error, red on a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
    console.print("error: " + printable(text, "\n\t"), style="red", markup=False)


def as_json(data: Any, *, indent: int | None = None) -> str:
    """Return JSON text. Bytes become hexadecimal digits, and values that JSON does not know become their text."""
    return json.dumps(
        data, ensure_ascii=False, default=lambda value: value.hex() if isinstance(value, bytes) else str(value), indent=indent
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table, without wrapping if the output is a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        drawn.add_row(*("" if cell is None else printable(str(cell)) for cell in row))
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(drawn)
