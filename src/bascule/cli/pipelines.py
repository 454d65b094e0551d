"""Commands that control pipelines: ``divert`` and ``ingress``. They ask a broker, which talks to the driver through Kafka."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.administer import ingresses, moment
from bascule.cli.completed_names import pipeline_names
from bascule.cli.config import ConfigOption
from bascule.cli.output import Format, FormatOption, cell, note, show_document, show_result, show_rows, table
from bascule.cli.pipeline_definitions import add_definition_commands
from bascule.cli.pipeline_offsets import offsets_command

diverts = typer.Typer(
    help="Show diverts, pause, resume, stop or restart one, or move its position.",
    epilog="Example:  bascule divert list",
    no_args_is_help=True,
)

COLUMNS: Final = ("name", "origin", "state", "wanted", "group", "lag", "records_per_s", "restarts", "error")
INGRESS_COLUMNS: Final = tuple(column for column in COLUMNS if column != "group")
#: Interval, in seconds, at which a command looks whether the driver has followed.
LOOK_S: Final = 0.5
WAIT_S: Final = 30.0
#: States in which a pipeline does what is wanted.
REACHED: Final = {
    "running": ("running", "catching up", "waiting"),
    "paused": ("paused",),
    "stopped": ("stopped",),
}

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the pipeline", autocompletion=pipeline_names)]
WaitOption = Annotated[
    float, typer.Option("--wait-s", min=0, help="Wait at most this time in seconds until the driver has done it; 0 = do not wait")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module. Those of ``ingress`` join its other commands."""
    app.add_typer(diverts, name="divert")
    for commands, kind, columns in ((diverts, "divert", COLUMNS), (ingresses, "ingress", INGRESS_COLUMNS)):
        _add(commands, "list", _list_command(kind, columns), f"Show the {_plural(kind)} with state, lag and last error.", f"{kind} list")
        _add(commands, "show", _show_command(kind), f"Show the settings of one {kind}.", f"{kind} show orders")
        _add(commands, "status", _status_command(kind), f"Show state, positions and last error of one {kind}.", f"{kind} status orders")
        text = f"Show the positions of one {kind}, or move them while it is stopped, after a confirmation."
        _add(commands, "offsets", offsets_command(kind, _path), text, f"{kind} offsets orders --to earliest")
        for verb, text in VERBS.items():
            _add(commands, verb, _verb_command(kind, verb), text, f"{kind} {verb} orders")
        add_definition_commands(partial(_add, commands), kind, _path)


VERBS: Final = {
    "pause": "Pause a pipeline. It keeps its position, and the messages that it has not carried.",
    "resume": "Let a paused or stopped pipeline continue from its position.",
    "stop": "Stop a pipeline, as `pause` does. Use it for a pipeline that shall not be resumed by mistake.",
    "restart": "Restart the task of a pipeline, also after an error that the driver does not retry. The diverts of a group share a task.",
}
_WANTED: Final = {"pause": "paused", "resume": "running", "stop": "stopped"}


def _plural(kind: str) -> str:
    return {"divert": "diverts", "ingress": "ingresses"}[kind]


def _add(commands: typer.Typer, name: str, command: Callable[..., None], text: str, example: str) -> None:
    commands.command(name, help=text, epilog=f"Example:  bascule {example}")(command)


def _list_command(kind: str, columns: tuple[str, ...]) -> Callable[..., None]:
    def command(config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
        show_rows(AdminApiClient(admin, config).look(_plural(kind)), columns, output, "pipelines")

    return command


def _show_command(kind: str) -> Callable[..., None]:
    def command(name: Name, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
        found = AdminApiClient(admin, config).look(_path(kind, name))
        if found["definition"] is None and output is not Format.JSON:
            note(f"no driver has reported the {kind} yet")
        settings = [(name, cell(value)) for name, value in (found["definition"] or found["config"] or {}).items()]
        origin = "file" if found["revision"] is None else f"{found['origin']}, revision {found['revision']}"
        rows = [("name", found["name"]), ("defined in", origin), *settings]
        show_document(found, output, partial(table, (kind, ""), rows))

    return command


def _status_command(kind: str) -> Callable[..., None]:
    def command(name: Name, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
        found = AdminApiClient(admin, config).look(_path(kind, name, "status"))
        show_document(found, output, partial(_draw_status, kind, found))

    return command


def _draw_status(kind: str, found: dict[str, Any]) -> None:
    sources = found.pop("sources")
    for time_ms in ("wanted_at_ms", "error_at_ms", "reported_at_ms"):
        found[time_ms.removesuffix("_ms")] = moment(found.pop(time_ms))
    table((kind, ""), [(key.replace("_", " "), cell(value)) for key, value in found.items()])
    if sources:
        show_rows(sources, ("topic", "partition", "offset", "end"), Format.TABLE)


def _verb_command(kind: str, verb: str) -> Callable[..., None]:
    def command(
        name: Name,
        wait_s: WaitOption = WAIT_S,
        config: ConfigOption = None,
        admin: AdminOption = None,
        output: FormatOption = Format.TABLE,
    ) -> None:
        client = AdminApiClient(admin, config)
        method = "POST" if verb == "restart" else "PUT"
        answer = client.send(method, _path(kind, name, verb))
        wanted = _WANTED.get(verb)
        if wanted is not None and wait_s:
            answer["state"] = _awaited(partial(client.look, _path(kind, name, "status")), wanted, wait_s)
        show_result(answer, output)

    # `restart` does not wait: a restart that is quick cannot be seen in the status.
    return command if verb != "restart" else _without_waiting(command)


def _without_waiting(command: Callable[..., None]) -> Callable[..., None]:
    def restart(name: Name, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
        command(name, 0.0, config, admin, output)

    return restart


def _awaited(status: Callable[[], dict[str, Any]], wanted: str, wait_s: float) -> str:
    """Return the state once it is as wanted. Exits with 1 if the driver does not get there in time, or the pipeline has failed."""
    deadline_s = time.monotonic() + wait_s
    while (found := status())["state"] not in REACHED[wanted] and found["wanted"] == wanted:
        if found["state"] == "unassigned":
            note(f"no driver runs the pipelines; it will be {wanted} once a driver runs")
            break
        if found["state"] == "waiting for coverage":
            note(f"no active broker has confirmed that its journal covers it, so no driver runs it yet; it will be {wanted} then")
            break
        if found["state"] == "failed" and wanted == "running":  # a pipeline that has failed can be paused
            note(f"failed: {found['error']}")
            raise typer.Exit(1)
        if time.monotonic() > deadline_s:
            note(f"still {found['state']} after {wait_s:g} s; the driver continues to try. See its log")
            raise typer.Exit(1)
        time.sleep(LOOK_S)
    return str(found["state"])


def _path(kind: str, *parts: str) -> str:
    from urllib.parse import quote

    return "/".join((_plural(kind), *(quote(part, safe="") for part in parts)))
