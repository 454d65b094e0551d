"""Output of commands: data on standard output, everything else on standard error."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import typer


class Format(enum.StrEnum):
    """The format of data: ``wide`` is a table with all fields."""

    TABLE = "table"
    WIDE = "wide"
    CSV = "csv"
    JSON = "json"


FormatOption = Annotated[
    Format, typer.Option("--format", "-o", help="Print a table, a table with all fields (wide), CSV with all fields, or JSON.")
]
#: First characters of a cell that a spreadsheet program reads as a formula; the wide forms count in some languages.
FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")

#: Rows that rich draws on a terminal, in which it wraps long cells. For more rows it would need seconds.
DRAWN_ROWS_MAX: Final = 1_000


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

    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    console = Console(markup=False, highlight=False, emoji=False)
    if title is None and cells and (not console.is_terminal or len(cells) > DRAWN_ROWS_MAX):
        _write_plain(columns, cells)
        return
    drawn = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in cells:
        drawn.add_row(*row)
    if not console.is_terminal:
        console.width = 10_000
    console.print(drawn)


def _write_plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print what rich would print of a table without wrapping: rich needs seconds for thousands of rows."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]

    def drawn(row: Sequence[str]) -> str:
        return " " + "   ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)) + " "

    width = sum(widths) + 3 * len(widths) - 1
    lines = [" " * width, drawn(columns), f" {'─' * (width - 2)} ", *map(drawn, rows), " " * width]
    line("\n".join(lines))


def show_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], output: Format, listed: str = "") -> None:
    """Print objects: some fields as a table, or all fields. The fields in ``columns`` come first.

    ``listed`` says what the objects are (``answer_fields``): without rows, nothing else knows all fields.
    """
    found = list(rows)
    if output is Format.JSON:
        line(as_json(found, indent=2))
        return
    shown = tuple(columns)
    if output is not Format.TABLE:
        from bascule.cli.answer_fields import fields_of

        fields = [name for row in found for name in row] if found or not listed else fields_of(listed)
        shown = tuple(dict.fromkeys((*columns, *fields)))
    if output is Format.CSV:
        CsvRows(shown).write(found)
    else:
        table(tuple(column.replace("_", " ") for column in shown), ([cell(row.get(column)) for column in shown] for row in found))


def show_document(document: Mapping[str, Any], output: Format, draw: Callable[[], None]) -> None:
    """Print one object: as JSON, as CSV with a row for each value, or as ``draw`` does."""
    if output is Format.JSON:
        line(as_json(document, indent=2))
    elif output is Format.CSV:
        CsvRows(("field", "value")).write({"field": field, "value": value} for field, value in _values(document))
    else:
        draw()


def show_result(result: Mapping[str, Any], output: Format) -> None:
    """Print the result of an action on one line."""
    if output is Format.JSON:
        line(as_json(result))
    elif output is Format.CSV:
        CsvRows(tuple(result)).write([result])
    else:
        line("  ".join(f"{name} {value}" for name, value in result.items()))


class _Lines:
    """The file of a CSV writer, which writes each row at once."""

    def write(self, text: str) -> None:
        """Print a row."""
        line(text)


class CsvRows:
    """Rows of CSV (RFC 4180, with the line ends of Unix). Prints the header at once.

    Texts are in quotation marks. A text that a spreadsheet program would read as a formula gets an apostrophe in front: names and bodies
    come from clients.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        import csv

        self._columns = columns
        self._writer = csv.writer(_Lines(), quoting=csv.QUOTE_NONNUMERIC, lineterminator="")
        self._writer.writerow(columns)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Print rows."""
        for row in rows:
            self._writer.writerow([_csv_cell(row.get(column)) for column in self._columns])


def cell(value: object) -> object:
    """Return a value for a cell of a table or of CSV: the items of a list with commas, other nested values as JSON."""
    match value:
        case list() | tuple() if not any(isinstance(item, dict | list | tuple) for item in value):
            return ", ".join(str(item) for item in value)
        case dict() | list() | tuple():
            return as_json(value)
        case bytes():
            return value.hex()
    return value


def _csv_cell(value: object) -> str | int | float:
    shown = cell(value)
    if isinstance(shown, bool):
        return "true" if shown else "false"
    if isinstance(shown, int | float):
        return shown
    text = "" if shown is None else str(shown)
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def _values(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Return the values of a nested object with their paths. A path has dots between names and numbers."""
    for name, value in document.items():
        match value:
            case dict():
                yield from _values(value, f"{prefix}{name}.")
            case list() if any(isinstance(item, dict) for item in value):
                yield from _values({str(number): item for number, item in enumerate(value)}, f"{prefix}{name}.")
            case _:
                yield f"{prefix}{name}", value
