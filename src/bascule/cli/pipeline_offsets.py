"""The commands ``divert offsets`` and ``ingress offsets``: show positions of a pipeline, and move them after a confirmation."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from bascule.cli.admin import AdminApiClient, AdminOption, with_query
from bascule.cli.administer import moment
from bascule.cli.completed_names import pipeline_names
from bascule.cli.config import ConfigOption
from bascule.cli.confirmation import YesOption, require_yes
from bascule.cli.output import Format, FormatOption, as_json, line, note, show_result, show_rows
from bascule.cli.times import time_of_option
from bascule.core.errors import InvalidInput
from bascule.core.times import TIME_FORMS

#: Interval, in seconds, at which the command looks whether the driver has moved the positions.
LOOK_S: Final = 0.5
WAIT_S: Final = 30.0
COLUMNS: Final = ("topic", "partition", "offset", "first", "end")
PLAN_COLUMNS: Final = ("topic", "partition", "offset", "to", "skipped", "repeated")
DIVERT_COLUMNS: Final = (*PLAN_COLUMNS, "messages", "taken")

ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="WHERE",
        help=f"Move to `earliest`, `latest`, an offset, {TIME_FORMS}",
        show_default=False,
    ),
]
ShiftOption = Annotated[
    int | None, typer.Option("--shift-by", metavar="N", help="Move N records forward, or back if N is negative", show_default=False)
]
TopicOption = Annotated[
    str | None, typer.Option("--topic", help="Move only the positions in this topic (default: all topics)", show_default=False)
]
PartitionOption = Annotated[
    int | None, typer.Option("--partition", min=0, help="Move only the position in this partition of --topic", show_default=False)
]
ResetOption = Annotated[bool, typer.Option("--reset", help="Move to where the setting `start` says, as a new pipeline begins")]
DiscardOption = Annotated[bool, typer.Option("--discard", help="Messages may be lost that only an exclusive divert has")]
WaitOption = Annotated[
    float, typer.Option("--wait-s", min=0, help="Wait at most this time in seconds until the driver has done it; 0 = do not wait")
]


def offsets_command(kind: str, path: Callable[..., str]) -> Callable[..., None]:
    """Return the command for a kind of pipeline. ``path`` returns the path of a page about one of them."""

    def command(
        name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pipeline", autocompletion=pipeline_names)],
        to: ToOption = None, shift_by: ShiftOption = None, reset: ResetOption = False, topic: TopicOption = None,
        partition: PartitionOption = None,
        yes: YesOption = False, discard: DiscardOption = False, wait_s: WaitOption = WAIT_S,
        config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE,
    ) -> None:  # fmt: skip
        chosen = sum((to is not None, shift_by is not None, reset))
        if chosen > 1:
            raise InvalidInput("--to, --shift-by and --reset exclude each other")
        if not chosen and (topic is not None or partition is not None):
            raise InvalidInput("--topic and --partition need --to, --shift-by or --reset")
        wanted = {"to": None if to is None else _target(to), "shift_by": shift_by, "topic": topic, "partition": partition}
        given = {name: value for name, value in wanted.items() if value is not None}
        client, place = AdminApiClient(admin, config), path(kind, name, "offsets")
        if not chosen:
            _show(client.look(place), output)
            return
        plan = client.send("DELETE", with_query(place, given)) if reset else client.send("PATCH", place, **given)
        if _confirmed(plan, output, yes=yes, discard=discard):
            answer = client.send("PATCH", place, token=plan["token"], discard=discard)
            _report(client, place, answer["request"], wait_s, output)

    return command


def _target(to: str) -> str:
    """Return a target as the server reads it: a time with its zone. Periods end at the time of this machine. Raises InvalidInput."""
    if to in ("earliest", "latest") or to.isdecimal():
        return to
    return datetime.fromtimestamp(time_of_option("--to", to) / 1000, UTC).isoformat(timespec="milliseconds")


def _show(found: dict[str, Any], output: Format) -> None:
    if output is Format.JSON:
        line(as_json(found, indent=2))
        return
    show_rows(found["offsets"], COLUMNS, output, "offsets")
    if (request := found["request"]) is not None:
        error = f": {request['error']}" if request["error"] else ""
        note(f"last request to move, by {request['by'] or 'an unknown user'} at {moment(request['at_ms'])}: {request['state']}{error}")


def _confirmed(plan: dict[str, Any], output: Format, *, yes: bool, discard: bool) -> bool:
    """Show a plan and return whether it is to be carried out. Exits with 1 if it is not confirmed."""
    moves = plan["moves"]
    if not moves:
        note("nothing to do: the positions are there already")
        return False
    if output in (Format.TABLE, Format.WIDE):
        show_rows(moves, DIVERT_COLUMNS if plan["kind"] == "divert" else PLAN_COLUMNS, output)
    else:  # standard output has the result alone
        for each in moves:
            note(f"{each['topic']}-{each['partition']}: offset {each['offset']} -> {each['to']}")
    if skipped := sum(each["skipped"] for each in moves):
        note(f"{skipped} records will be skipped: {plan['kind']} {plan['name']!r} will never carry them")
    if repeated := sum(each["repeated"] for each in moves):
        note(f"{repeated} records will be carried again: their readers get the same messages twice")
    if not all(each.get("counted", True) for each in moves):
        note(
            "not all messages were counted: there are too many records, or no driver has reported the divert; there may be more than shown"
        )
    if plan["discards"] and not discard:
        only = "only this divert has messages that would be skipped, so they would be lost"
        unsure = "this divert may skip messages that only it has, so they would be lost"
        note(f"{only if any(each['taken'] for each in moves) else unsure}. Add --discard if they may be lost")
        raise typer.Exit(1)
    require_yes("Move the positions?", yes=yes)
    return True


def _report(client: AdminApiClient, place: str, request: str, wait_s: float, output: Format) -> None:
    """Show what has become of a request. Exits with 1 if the driver refuses it, or is still busy after ``wait_s``."""
    until_s = time.monotonic() + wait_s
    while True:
        found = client.look(place)
        asked = found["request"] or {}
        state = asked.get("state", "pending") if asked.get("id") == request else "another request was stored since"
        if state != "pending" or time.monotonic() > until_s:
            break
        time.sleep(LOOK_S)
    if output is Format.JSON:
        line(as_json(found, indent=2))
    else:
        show_result({"name": found["name"], "kind": found["kind"], "request": request, "state": state}, output)
    if state == "pending":
        note("no driver has moved the positions yet; a driver will when it runs. See `offsets` without options")
        raise typer.Exit(1 if wait_s else 0)
    if state != "done":
        note(asked.get("error") or f"{state}; the log of the pipelines says whether this one was carried out")
        raise typer.Exit(1)
