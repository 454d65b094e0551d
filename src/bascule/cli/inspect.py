"""Commands that show state: ``status`` and ``verify``."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.administer import QUEUE_COLUMNS
from bascule.cli.config import ConfigOption
from bascule.cli.kafka_access import with_own_access
from bascule.cli.log import LogFormatOption, LogLevelOption, settings_with_log
from bascule.cli.output import Format, FormatOption, as_json, line, show_document, show_rows, table
from bascule.core.errors import InvalidInput

if TYPE_CHECKING:
    from bascule.pipelines.audit import AuditResult


#: Columns of the table of pins, which keep the journal from being trimmed.
PIN_COLUMNS = ("journal kept for", "name", "from offset", "records", "size", "reason")
BROKER_COLUMNS = ("name", "host", "elected", "this")
RELEASED = "exceeds journal.pinned_bytes, unread records are deleted"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example:  bascule status --admin http://127.0.0.1:8672 --watch 1")(status)
    app.command(epilog="Example:  bascule verify --divert delayed --format json")(verify)


def status(
    config: ConfigOption = None,
    admin: AdminOption = None,
    watch: Annotated[
        float | None, typer.Option("--watch", metavar="SECONDS", min=0.1, help="Repeat every N seconds until Ctrl-C", show_default=False)
    ] = None,
    brokers: Annotated[bool, typer.Option("--brokers", help="Show the brokers of the journal, and which one is elected")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the state of a broker, its queues, the reasons why it keeps parts of the journal, and its counters."""
    broker = AdminApiClient(admin, config)
    while True:
        answer = broker.look("brokers" if brokers else "status")
        if brokers:
            show_rows(answer, BROKER_COLUMNS, output, "brokers")
        elif output is Format.JSON and watch:
            line(as_json(answer))
        else:
            show_document(answer, output, partial(_show, answer))
        if watch is None:
            return
        time.sleep(watch)


def verify(
    config: ConfigOption = None,
    divert: Annotated[
        list[str] | None, typer.Option("--divert", help="Name of a divert; may be repeated (default: all)", show_default=False)
    ] = None,
    since: Annotated[
        int | None, typer.Option("--from-offset", min=0, help="First journal offset (default: the oldest offset)", show_default=False)
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(
            "--to-offset", min=0, help="Stop before this journal offset (default: the position of the pipelines)", show_default=False
        ),
    ] = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compare the journal with the target topics of diverts: counts, digests, first difference. Exit with 1 if they differ."""
    settings = with_own_access(settings_with_log(config, log_format, log_level))
    known = {each.name for each in settings.divert}
    if unknown := sorted(set(divert or ()) - known):
        raise InvalidInput(f"no divert named {', '.join(unknown)}; known are {', '.join(sorted(known)) or 'none'}")
    from bascule.pipelines.audit import audit

    results = audit(settings, names=divert or None, from_offset=since, to_offset=until)
    _show_audit(results, output)
    if not all(result.exact for result in results):
        raise typer.Exit(1)


def _show(status: dict[str, Any]) -> None:
    line(
        f"{status['bridge']}: {status['state']}"
        + (f" ({status['reason']})" if status["reason"] else "")
        + f", Bascule {status['version']} ({status['build']})"
    )
    show_rows(status["queues"], QUEUE_COLUMNS, Format.TABLE)
    table(PIN_COLUMNS, map(_pin, status["pins"]))
    _show_memory(status["memory"])
    for title, figures in (("since it started", status["counters"]), ("now", status["gauges"])):
        table((title, ""), ((name.replace("_", " "), _figure(name, value)) for name, value in figures.items()))


def _show_memory(memory: dict[str, Any] | None) -> None:
    if memory is None:
        return
    used, limit = (_figure("_bytes", memory[field]) for field in ("used_bytes", "limit_bytes"))
    line(f"memory: {used} of {limit}; producers " + (f"are blocked: {memory['blocked']}" if memory["blocked"] else "are not blocked"))
    table(("memory used for", ""), ((name.replace("_", " "), _figure("_bytes", size)) for name, size in memory["parts"].items() if size))


def _pin(pin: dict[str, Any]) -> tuple[object, ...]:
    why = "; ".join(filter(None, (pin["reason"], pin["released"] and RELEASED)))
    return (*(pin[field] for field in ("keeper", "name", "offset", "records")), _figure("_bytes", pin["bytes"]), why)


def _figure(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value / (1 << 20):,.1f} MiB" if value >= 1 << 20 else f"{value:,.0f} bytes"
    return f"{value:,.0f}"


def _show_audit(results: list[AuditResult], output: Format) -> None:
    rows = [dataclasses.asdict(result) | {"exact": result.exact} for result in results]
    if rows or output in (Format.JSON, Format.CSV):
        show_rows(rows, tuple(rows[0]) if rows else ("divert",), output)
    else:
        line("no diverts to verify")
