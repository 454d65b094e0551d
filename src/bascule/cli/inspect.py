"""Commands that look: ``status`` and ``verify``."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
import urllib.request
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bascule.cli.config import ConfigOption
from bascule.cli.output import Format, FormatOption, as_json, line, table
from bascule.core.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from bascule.pipelines.audit import AuditResult

#: The broker answers from memory; one that takes longer is in trouble.
ADMIN_TIMEOUT_S = 10.0


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example:  bascule status --admin http://127.0.0.1:8672 --watch 1")(status)
    app.command(epilog="Example:  bascule verify --divert delayed --format json")(verify)


def status(
    config: ConfigOption = None,
    admin: Annotated[
        str | None,
        typer.Option("--admin", metavar="URL", help="Address of the admin server [default: admin.host and .port]", show_default=False),
    ] = None,
    watch: Annotated[
        float | None, typer.Option("--watch", metavar="SECONDS", min=0.1, help="Ask again so often, until Ctrl-C", show_default=False)
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show how a broker stands: its state, its queues, its counters."""
    url = (admin or _configured(config)).rstrip("/") + "/status"
    while True:
        answer = _get(url)
        if output is Format.JSON:
            line(as_json(answer, indent=None if watch else 2))
        else:
            _show(answer)
        if watch is None:
            return
        time.sleep(watch)


def verify(
    config: ConfigOption = None,
    divert: Annotated[list[str] | None, typer.Option("--divert", help="Names of diverts; all when not given", show_default=False)] = None,
    since: Annotated[
        int | None, typer.Option("--from-offset", min=0, help="First journal offset [default: the oldest there]", show_default=False)
    ] = None,
    until: Annotated[
        int | None,
        typer.Option("--to-offset", min=0, help="Journal offset to stop before [default: the pipelines' position]", show_default=False),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compare the journal with the target topics: counts, digests, the first difference. Exit code 1 when they differ."""
    from bascule.config import load

    settings = load(config).settings
    if settings.kafka.bootstrap_servers is None:
        raise InvalidInput("kafka.bootstrap_servers is not set: BASCULE_KAFKA__BOOTSTRAP_SERVERS=HOST:PORT names the Kafka of `bascule up`")
    known = {each.name for each in settings.divert}
    if unknown := sorted(set(divert or ()) - known):
        raise InvalidInput(f"no divert named {', '.join(unknown)}; known are {', '.join(sorted(known)) or 'none'}")
    from bascule.pipelines.audit import audit

    results = audit(settings, names=divert or None, from_offset=since, to_offset=until)
    _show_audit(results, output)
    if not all(result.exact for result in results):
        raise typer.Exit(1)


def _configured(config: Any) -> str:
    from bascule.config import load

    chosen = load(config).settings.admin
    return f"http://{chosen.host}:{chosen.port}"


def _get(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=ADMIN_TIMEOUT_S) as answer:
            content: dict[str, Any] = json.load(answer)
            return content
    except ValueError as error:
        raise InvalidInput(f"{url}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no broker answers at {url}: {getattr(error, 'reason', None) or error}") from error


def _show(status: dict[str, Any]) -> None:
    figures = {**status["gauges"], **status["counters"]}
    line(f"{status['bridge']}: {status['state']}" + (f" ({status['reason']})" if status["reason"] else ""))
    table(("queue", "address", "routing", "messages", "bytes", "delivering", "consumers"), ([queue[key] for key in (
        "name", "address", "routing", "messages", "bytes", "delivering", "consumers")] for queue in status["queues"]))  # fmt: skip
    table(("figure", "value"), ((name, f"{value:g}" if value < 1e6 else f"{value:.0f}") for name, value in sorted(figures.items())))


def _show_audit(results: list[AuditResult], output: Format) -> None:
    rows = [dataclasses.asdict(result) | {"exact": result.exact} for result in results]
    if output is Format.JSON:
        line(as_json(rows, indent=2))
    elif rows:
        table(tuple(rows[0]), (list(row.values()) for row in rows))
    else:
        line("no diverts to verify")
