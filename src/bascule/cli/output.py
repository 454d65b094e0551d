"""What commands print: data on standard output, everything else on standard error."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer


class Format(enum.StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Print a table or JSON.")]


def printable(text: str, keep: str = "") -> str:
    """A text that moves no cursor: names and bodies come from clients, and a terminal carries out what controls in them say.

    What is not printable and not in ``keep`` is written as JSON writes it.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else json.dumps(each)[1:-1] for each in text)


def line(text: str) -> None:
    """One line of data, out at once; into a pipe as it is."""
    sys.stdout.write((printable(text, "\n\t") if sys.stdout.isatty() else text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """One line for whoever watches."""
    sys.stderr.write(printable(text, "\n\t") + "\n")
    sys.stderr.flush()


def fail(text: str) -> None:
    """What went wrong, red on a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("error: " + printable(text, "\n\t"), style="red", markup=False)


def as_json(data: Any, *, indent: int | None = None) -> str:
    """JSON text; what JSON does not know as its text, bytes as hexadecimal digits."""
    return json.dumps(
        data, ensure_ascii=False, default=lambda value: value.hex() if isinstance(value, bytes) else str(value), indent=indent
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table without wrapping when it goes into a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        drawn.add_row(*("" if cell is None else printable(str(cell)) for cell in row))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(drawn)
