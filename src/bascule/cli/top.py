"""``bascule top``: the rates, queues and pipelines of a broker, again and again."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Final, NamedTuple

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.config import ConfigOption
from bascule.cli.output import Format, FormatOption, as_json, cell, line, note, printable, show_document
from bascule.core.durations import Durations
from bascule.core.errors import InvalidInput, Unavailable

#: Counters of the status whose growth is shown, by the text.
RATES: Final = {
    "in": "messages_in",
    "out": "messages_out",
    "acknowledged": "messages_acknowledged",
    "redelivered": "messages_redelivered",
    "expired": "messages_expired",
    "dead-lettered": "messages_dead_lettered",
}
#: Shares of the messages whose latency is shown, by name.
QUANTILES: Final = {"p50": 0.5, "p99": 0.99}
#: Fields of a pipeline in its row, after its kind and name.
PIPELINE_FIELDS: Final = ("state", "lag", "lag_bytes", "records_per_s", "latency_p50_s", "latency_p99_s")
#: Columns by which the queues are sorted, in the order of the key `s`.
SORTS: Final = ("messages", "delivering", "bytes", "consumers", "delayed", "name")
#: Lines of a screen without queues: head, rates, memory, titles, and room for the cursor.
OTHER_LINES: Final = 8
#: Queues of a screen that is not on a terminal.
BATCH_QUEUES: Final = 20
#: Pipelines of a screen.
PIPELINES_MAX: Final = 8
CLEAR: Final = "\x1b[H\x1b[2J"


class TopSample(NamedTuple):
    """What the broker has said at one time."""

    at_s: float
    overview: dict[str, Any]
    queues: list[dict[str, Any]]
    pipelines: list[dict[str, Any]]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(epilog="Example:  bascule top --interval-s 5")(top)


def top(
    interval_s: Annotated[float, typer.Option("--interval-s", "-d", min=0.2, help="Interval between two screens in seconds")] = 2.0,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Print N screens (default: until q or Ctrl-C)", show_default=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen after one interval, and exit")] = False,
    batch: Annotated[bool, typer.Option("--batch", "-b", help="Print the screens one after the other, and read no keys")] = False,
    sort: Annotated[str, typer.Option("--sort", help=f"Sort the queues by: {', '.join(SORTS)}")] = SORTS[0],
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show rates, memory, queues and pipelines of a broker, and repeat. Keys: `q` quits, `s` sorts by another column.

    Without a terminal, the command works as with `--batch`.
    """
    if sort not in SORTS:
        raise InvalidInput(f"--sort {sort!r:.60} must be one of {', '.join(SORTS)}")
    client = AdminApiClient(admin, config)
    interactive = not (batch or once) and sys.stdin.isatty() and sys.stdout.isatty() and output in (Format.TABLE, Format.WIDE)
    left = 1 if once else count
    with _keys(interactive) as keys, suppress(KeyboardInterrupt):
        before = _sample(client, sort)
        while left is None or left > 0:
            key = keys(interval_s)
            if key == "q":
                return
            if key == "s":
                sort = SORTS[(SORTS.index(sort) + 1) % len(SORTS)]
            try:
                now = _sample(client, sort)
            except Unavailable as error:
                if not interactive:
                    raise
                note(str(error))  # the broker may come back
                continue
            _print(before, now, sort, output, interactive=interactive)
            before = now
            left = None if left is None else left - 1


def _sample(client: AdminApiClient, sort: str) -> TopSample:
    """Ask the broker. Raises InvalidInput, Unavailable."""
    order = "ascending" if sort == "name" else "descending"
    found = TopSample(
        time.monotonic(), client.look("overview"), client.look("list/queues", sort=sort, order=order, limit=_room())["entries"], []
    )
    # A broker without access to the topics of control, or that cannot reach Kafka, still has figures.
    with suppress(InvalidInput, Unavailable):
        found.pipelines.extend((*client.look("diverts"), *client.look("ingresses")))
    return found


def _room() -> int:
    """Return the number of queues that a screen can show."""
    if not sys.stdout.isatty():
        return BATCH_QUEUES
    return min(max(1, shutil.get_terminal_size().lines - OTHER_LINES - PIPELINES_MAX), 100)


def rates_between(before: TopSample, now: TopSample) -> dict[str, float]:
    """Return the growth of the counters a second. After a restart of the broker, which begins to count at zero, the rates are zero."""
    elapsed_s = max(now.at_s - before.at_s, 1e-6)
    old, new = before.overview["counters"], now.overview["counters"]
    return {name: round(max(0.0, new.get(field, 0) - old.get(field, 0)) / elapsed_s, 1) for name, field in RATES.items()}


def send_latency_between(before: TopSample, now: TopSample) -> dict[str, float | None]:
    """Return the quantiles of the time in ms in which persistent messages were accepted between two samples; None without messages."""
    old, new = (Durations(tuple(each["bounds_s"]), tuple(each["counts"])) for each in (before.overview["sends"], now.overview["sends"]))
    between = new.since(old) or new  # a broker that was restarted begins to count at zero
    return {name: None if (value := between.quantile(share)) is None else round(value * 1000, 2) for name, share in QUANTILES.items()}


def _print(before: TopSample, now: TopSample, sort: str, output: Format, *, interactive: bool) -> None:
    overview = now.overview
    document = {
        "bridge": overview["bridge"], "state": overview["state"], "reason": overview["reason"], "time_ms": overview["time_ms"],
        "per_s": rates_between(before, now), "send_ms": send_latency_between(before, now), "sums": overview["sums"],
        "connections": overview["gauges"].get("connections", 0),
        "dead_letters": overview["dead_letters"], "memory": overview["memory"], "queues": now.queues, "pipelines": now.pipelines,
    }  # fmt: skip
    if output is Format.JSON:
        line(as_json(document))
        return
    show_document(document, output, lambda: _draw(document, sort, interactive=interactive))


def _draw(document: Mapping[str, Any], sort: str, *, interactive: bool) -> None:
    sums, memory = document["sums"], document["memory"]
    moment = time.strftime("%H:%M:%S", time.localtime(document["time_ms"] / 1000))
    why = f" ({document['reason']})" if document["reason"] else ""
    lines = [
        f"{document['bridge']}: {document['state']}{why}, {moment}, {document['connections']:,} connections, "
        f"{sums['consumers']:,} consumers, {document['dead_letters']:,} dead letters",
        "per second: " + ", ".join(f"{name} {value:,.1f}" for name, value in document["per_s"].items()) + _latency(document["send_ms"]),
        f"messages: {sums['messages']:,} waiting, {sums['delivering']:,} in delivery, {sums['delayed']:,} delayed" + _memory(memory),
        "",
        *_columns(("queue", "messages", "delivering", "delayed", "bytes", "consumers"), [_queue(each) for each in document["queues"]]),
    ]
    if document["pipelines"]:
        shown = sorted(document["pipelines"], key=lambda each: each["lag"] or 0, reverse=True)[:PIPELINES_MAX]
        rows = [(f"{each['kind']} {each['name']}", *(each[field] for field in PIPELINE_FIELDS)) for each in shown]
        lines += ["", *_columns(("pipeline", "state", "lag", "lag bytes", "records/s", "p50 s", "p99 s"), rows)]
    if interactive:
        size = shutil.get_terminal_size()
        sys.stdout.write(CLEAR)
        lines = [each[: size.columns - 1] for each in lines[: size.lines - 2]]
        lines.append(f"sorted by {sort}; q quits, s sorts by another column")
    else:
        lines.append("")
    for each in lines:
        line(printable(each))


def _latency(send_ms: Mapping[str, float | None]) -> str:
    if None in send_ms.values():
        return ""
    return "; accepted in ms: " + ", ".join(f"{name} {value:,.1f}" for name, value in send_ms.items())


def _memory(memory: Mapping[str, Any] | None) -> str:
    if memory is None:
        return ""
    percent = 100 * memory["used_bytes"] / max(1, memory["limit_bytes"])
    return f"; memory {percent:.1f} %" + (f", producers are blocked: {memory['blocked']}" if memory["blocked"] else "")


def _queue(queue: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(queue[field] for field in ("name", "messages", "delivering", "delayed", "bytes", "consumers"))


def _columns(titles: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> Iterator[str]:
    """Yield lines with columns: the first one to the left, numbers to the right."""
    texts = [titles, *(tuple(_shown(value) for value in row) for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(titles))]
    for row in texts:
        yield "  ".join(
            text.ljust(width) if not column else text.rjust(width) for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )


def _shown(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,}"
    return "-" if value is None else printable(str(cell(value)))


def _pause(interval_s: float) -> str:
    time.sleep(interval_s)
    return ""


def _pressed(interval_s: float) -> str:
    """Return the key that is pressed within an interval, or "". A terminal that was closed presses ``q``."""
    ready, _, _ = select.select([sys.stdin], [], [], interval_s)
    if not ready:
        return ""
    try:  # the terminal itself: the text layer of Python may read ahead
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace").lower() or "q"
    except OSError:
        return "q"


@contextmanager
def _keys(interactive: bool) -> Iterator[Callable[[float], str]]:
    """Return a function that waits for a time in seconds, or for a key. The terminal gets its old mode back at the end."""
    if not interactive:
        yield _pause
        return
    import termios
    import tty

    mode = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _pressed
    finally:
        with suppress(termios.error):  # the terminal may be closed
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
