"""The commands ``redrive``: list the dead letters of diverts and ingresses, and let the driver carry or discard some."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.administer import moment
from bascule.cli.config import ConfigOption
from bascule.cli.confirmation import YesOption, require_yes
from bascule.cli.output import Format, FormatOption, cell, note, show_document, show_result, show_rows, table
from bascule.cli.times import time_of_option
from bascule.core.errors import InvalidInput
from bascule.core.times import TIME_FORMS

commands = typer.Typer(
    help="Show, redrive and discard records that diverts and ingresses could not carry.",
    epilog="Example:  bascule redrive list --pipeline divert:orders",
    no_args_is_help=True,
)

COLUMNS: Final = ("place", "pipeline", "time", "redrives", "bytes", "reason")
JOB_COLUMNS: Final = ("job", "action", "state", "redriven", "failed", "discarded", "left", "by", "at", "error")
#: Interval, in seconds, at which a command looks whether the driver has finished.
LOOK_S: Final = 0.5
WAIT_S: Final = 30.0
COUNT_MAX: Final = 1_000

PipelineOption = Annotated[str, typer.Option("--pipeline", metavar="KIND:NAME", help="Only those of divert:NAME or ingress:NAME")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Only those with this text in the error, in any case")]
SinceOption = Annotated[str, typer.Option("--since", metavar="TIME", help=f"Only messages of this time or later: {TIME_FORMS}")]
UntilOption = Annotated[str, typer.Option("--until", metavar="TIME", help=f"Only messages from before this time: {TIME_FORMS}")]
HeaderOption = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME:VALUE", help="Only those with this header", show_default=False)
]
PlacesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="PARTITION:OFFSET...", help="Places in the dead-letter topic", show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="All that wait at the time of the request")]
WaitOption = Annotated[
    float, typer.Option("--wait-s", min=0, help="Wait at most this time in seconds until the driver has finished; 0 = do not wait")
]


LostMarksOption = Annotated[
    bool, typer.Option("--accept-lost-marks", help="Also if the topic of the marks was recreated: some may be done a second time")
]


class _Chosen(NamedTuple):
    """The dead letters that options name."""

    pipeline: str = ""
    reason: str = ""
    since_ms: int = 0
    until_ms: int = 0
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed

    def arguments(self) -> dict[str, Any]:
        """Return what is given, as a request has it."""
        return {name: value for name, value in self._asdict().items() if value}

    def parameters(self) -> dict[str, Any]:
        """Return the same as parameters of a path."""
        said = self.arguments()
        headers = said.pop("headers", {})
        return {**said, **({"header": [f"{name}:{value}" for name, value in headers.items()]} if headers else {})}


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="redrive")


@commands.command("list", epilog="Example:  bascule redrive list --reason TooLarge --count 20")
def list_letters(
    pipeline: PipelineOption = "", reason: ReasonOption = "", since: SinceOption = "", until: UntilOption = "",
    header: HeaderOption = None,
    count: Annotated[int, typer.Option("--count", min=1, max=COUNT_MAX, help="Show at most N dead letters")] = 100,
    start: Annotated[
        str, typer.Option("--from", metavar="PARTITION:OFFSET", help="Begin at this place in the dead-letter topic, to continue a list")
    ] = "",
    config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE,
) -> None:  # fmt: skip
    """Show the dead letters that wait, the oldest of each partition first."""
    chosen = _chosen(pipeline, reason, since, until, header)
    client, letters, more = AdminApiClient(admin, config), list[dict[str, Any]](), True
    while more and len(letters) < count:  # one answer reads for a limited time
        begin = {"from": start} if start else {}
        found = client.look("redrive/letters", count=count - len(letters), **chosen.parameters(), **begin)
        letters += found["letters"]
        start, more = found.get("next", ""), not found["complete"]
        if not start:  # of a server of an earlier version
            break
    for letter in letters:
        letter["time"] = moment(letter["time_ms"])
    show_rows(letters, COLUMNS, output, "letters")
    if more:
        note("there are more dead letters than shown" + (f"; continue with --from {start}" if start else ""))


@commands.command(epilog="Example:  bascule redrive show 0:17")
def show(
    place: Annotated[str, typer.Argument(metavar="PARTITION:OFFSET", help="Place in the dead-letter topic")],
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show one dead letter with its headers and the beginning of its content."""
    from urllib.parse import quote

    partition, colon, offset = place.partition(":")
    if not colon:
        raise InvalidInput(f"place {place!r:.60} must be PARTITION:OFFSET")
    found = AdminApiClient(admin, config).look(f"redrive/letters/{quote(partition, safe='')}/{quote(offset, safe='')}")
    show_document(found, output, partial(_draw, found))


def _draw(found: dict[str, Any]) -> None:
    headers, source = found.pop("headers"), found.pop("source")
    found["time"] = moment(found.pop("time_ms"))
    found["source"] = f"{source['topic']}-{source['partition']}, offset {source['offset']}"
    table(("dead letter", ""), [(key, cell(value)) for key, value in found.items()])
    table(("header", "value"), headers)


@commands.command(epilog="Example:  bascule redrive run --pipeline divert:orders --since 2026-01-31T08:00:00Z")
def run(
    places: PlacesArgument = None, pipeline: PipelineOption = "", reason: ReasonOption = "", since: SinceOption = "",
    until: UntilOption = "", header: HeaderOption = None, every: AllOption = False, wait_s: WaitOption = WAIT_S,
    accept_lost_marks: LostMarksOption = False, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE,
) -> None:  # fmt: skip
    """Let the pipelines carry dead letters again, each once. Those that fail again become dead letters again."""
    arguments = _meant(places, _chosen(pipeline, reason, since, until, header), every=every) | _accepted(accept_lost_marks)
    client = AdminApiClient(admin, config)
    _report(client, client.send("POST", "redrive/run", **arguments), wait_s, output)


@commands.command(epilog="Example:  bascule redrive discard 0:17 0:18")
def discard(
    places: PlacesArgument = None, pipeline: PipelineOption = "", reason: ReasonOption = "", since: SinceOption = "",
    until: UntilOption = "", header: HeaderOption = None, every: AllOption = False,
    yes: YesOption = False, wait_s: WaitOption = WAIT_S,
    accept_lost_marks: LostMarksOption = False, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE,
) -> None:  # fmt: skip
    """Mark dead letters as done without carrying them, after a confirmation. The records stay in the topic until Kafka deletes them."""
    chosen = _chosen(pipeline, reason, since, until, header)
    arguments, client = _meant(places, chosen, every=every) | _accepted(accept_lost_marks), AdminApiClient(admin, config)
    if places:
        count = str(len(places))
    else:
        found = client.look("redrive/letters", count=COUNT_MAX, **chosen.parameters())
        count = f"{len(found['letters'])}{'' if found['complete'] else ' or more'}"
        arguments["upto"] = found["upto"]
    if not yes:
        note(f"{count} dead letters will be discarded: no pipeline will ever carry them")
    require_yes("Discard them?", yes=yes)
    _report(client, client.send("POST", "redrive/discard", confirm=True, **arguments), wait_s, output)


@commands.command(epilog="Example:  bascule redrive jobs")
def jobs(config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
    """Show what has become of the requests of the last week."""
    found = AdminApiClient(admin, config).look("redrive/jobs")
    for job in found:
        job["at"] = moment(job["at_ms"])
    show_rows(found, JOB_COLUMNS, output, "jobs")


def _report(client: AdminApiClient, asked: dict[str, Any], wait_s: float, output: Format) -> None:
    """Show what has become of a job. Exits with 1 if not all its dead letters are done, or the driver is still busy after ``wait_s``."""
    until_s = time.monotonic() + wait_s
    while True:
        job = next((each for each in client.look("redrive/jobs") if each["job"] == asked["job"]), {**asked, "state": "pending"})
        if job["state"] != "pending" or time.monotonic() > until_s:
            break
        time.sleep(LOOK_S)
    shown = ("job", "action", "state", "redriven", "failed", "discarded", "left")
    show_result({name: job[name] for name in shown if name in job}, output)
    if job["state"] == "pending":
        why = f"; the last attempt failed: {job['error']}" if job.get("error") else ""
        note(f"no driver has finished the job yet; a driver will when it runs{why}. See `bascule redrive jobs`")
        raise typer.Exit(1 if wait_s else 0)
    if job["state"] == "failed":
        note(f"{job['error']}. What is not done still waits: correct the cause, and repeat the request")
        raise typer.Exit(1)
    if not any(job[name] for name in ("redriven", "failed", "discarded", "left")):
        note("no dead letter that waits matches the request")
    if job["failed"]:
        note(f"{job['failed']} dead letters failed again and are dead letters again")
    if job["left"]:
        note(f"{job['left']} dead letters could not be redriven and still wait; the last reason: {job['error']}")
    if job["failed"] or job["left"]:
        raise typer.Exit(1)


def _chosen(pipeline: str, reason: str, since: str, until: str, header: list[str] | None) -> _Chosen:
    headers = {}
    for each in header or ():
        name, colon, value = each.partition(":")
        if not colon:
            raise InvalidInput(f"--header is {each!r:.60}; must be NAME:VALUE")
        headers[name] = value
    # 0 stands for no limit, so a time before 1970 must not become 0: everything would be meant.
    since_ms, until_ms = (max(1, time_of_option(*each)) if each[1] else 0 for each in (("--since", since), ("--until", until)))
    return _Chosen(pipeline, reason, since_ms, until_ms, headers)


def _accepted(accept_lost_marks: bool) -> dict[str, Any]:
    return {"accept_lost_marks": True} if accept_lost_marks else {}


def _meant(places: list[str] | None, chosen: _Chosen, *, every: bool) -> dict[str, Any]:
    """Return the arguments of a request. Raises InvalidInput."""
    said: dict[str, Any] = chosen.arguments()
    if places:
        said["places"] = places
    if every == bool(said):
        raise InvalidInput("say which dead letters are meant: places, options such as --pipeline, or --all")
    return said or {"all": True}
