"""``bascule why``: what happened to a message, from the journal, the target topics of diverts and the audit topic."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bascule.cli.admin import AdminApiClient, AdminOption, server_of_command
from bascule.cli.administer import moment
from bascule.cli.config import ConfigOption
from bascule.cli.kafka_access import with_own_access
from bascule.cli.log import LogFormatOption, LogLevelOption, settings_with_log
from bascule.cli.output import CsvRows, Format, FormatOption, as_json, line, note, printable, show_document, table
from bascule.cli.progress import progress
from bascule.cli.times import time_of_option
from bascule.core.errors import Unavailable
from bascule.core.times import TIME_FORMS

if TYPE_CHECKING:
    from bascule.timeline.facts import LifeEvent
    from bascule.timeline.question import MessageQuestion
    from bascule.timeline.story import MessageStory

#: Records of the journal that are read by default: about a minute.
LIMIT: Final = 10_000_000
#: Interval, in seconds, at which ``--follow`` looks at the target topics and the audit topic again, or asks the broker again.
LOOK_S: Final = 2.0
#: The interval is longer if a look takes long: the pause is at least this many times as long as the look.
LOOK_PAUSES: Final = 4.0
#: Timeout, in seconds, of a search of the broker, which ends after 20 seconds and may wait for Kafka as long again.
LIFE_TIMEOUT_S: Final = 60.0
#: Columns of events in CSV.
EVENT_FIELDS: Final = ("time_ms", "offset", "what", "message", "queue", "detail")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(epilog="Example:  bascule why ID:4f1c2a:1:1:1-7 --since 2h")(why)


def why(
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="JMSMessageID of the message, with or without `ID:`")],
    config: ConfigOption = None,
    admin: AdminOption = None,
    since: Annotated[
        str,
        typer.Option(
            "--since",
            metavar="TIME",
            help=f"Read the journal from this time on: {TIME_FORMS} (default: all)",
        ),
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=0, help="Read at most N journal records; 0 = no limit")] = LIMIT,
    follow: Annotated[bool, typer.Option("--follow", help="Continue until the message has ended everywhere, or until Ctrl-C")] = False,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show what happened to a message, and what is not recorded. Exit with 1 if no message is found.

    With `--admin`, or a context, the broker searches, and needs the role `edit`. Otherwise the command reads Kafka itself.
    """
    since_ms = time_of_option("--since", since) if since else None
    client = server_of_command(admin, config)
    if client is not None:
        _ask(client, message_id, since_ms, output, follow=follow)
        return
    settings = with_own_access(settings_with_log(config, log_format, log_level))
    from bascule.core.masking import PropertyMask
    from bascule.pipelines.defined_specs import with_defined
    from bascule.pipelines.spec import from_settings
    from bascule.timeline.question import MessageQuestion
    from bascule.timeline.scan import ScanLimits

    pipelines = with_defined(from_settings(settings, str(settings.kafka.bootstrap_servers)))
    limits = ScanLimits(since_ms, limit or None)
    mask = PropertyMask(settings.admin.masked_properties)
    with closing(MessageQuestion(pipelines, message_id, limits, mask=mask)) as question:
        _read(question)
        if follow:
            with suppress(KeyboardInterrupt):
                _follow(question, output)
        story = question.story()
    show_story(story, output, followed=follow)
    if not story.life.messages and not story.life.branches:
        raise typer.Exit(1)


def _ask(client: AdminApiClient, message_id: str, since_ms: int | None, output: Format, *, follow: bool) -> None:
    """Print what the broker finds. Raises InvalidInput, Unavailable."""

    def look() -> dict[str, Any]:
        last_s = max(1, math.ceil(time.time() - since_ms / 1000)) if since_ms is not None else 0
        found: dict[str, Any] = client.look_within(LIFE_TIMEOUT_S, "messages/life", id=message_id, last_s=last_s)
        return found

    said = _last(_followed(look, _row_shower(output))) if follow else look()
    if said is not None:
        _show_answer(said, output, followed=follow)
    if said is None or not (said["messages"] or said["branches"]):
        raise typer.Exit(1)


def _last(answers: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last answer before the end, or before Ctrl-C; None if there was none."""
    last: dict[str, Any] | None = None
    with suppress(KeyboardInterrupt):
        for answer in answers:
            last = answer
    return last


def _followed(look: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    """Yield the answers of the broker until the message has ended, and show each event of them once.

    The message has ended in the last two answers, since the last events may be younger than the first of these. If the broker is
    unavailable after the first answer, it is asked again.
    """
    shown: Counter[str] = Counter()
    said: dict[str, Any] | None = None
    ended = unavailable = False
    while True:
        began_s = time.monotonic()
        try:
            said = look()
        except Unavailable as error:
            if said is None:
                raise
            if not unavailable:
                note(f"{error}; asking again until the broker answers")
            unavailable = True
        else:
            unavailable = False
            _show_new(said["events"], shown, show)
            yield said
            if ended and said["ended"]:
                return
            ended = said["ended"]
        time.sleep(pause_s(time.monotonic() - began_s))


def _show_new(events: list[dict[str, Any]], shown: Counter[str], show: Callable[[dict[str, Any]], None]) -> None:
    """Show the events that are not ``shown`` yet. Two events may be equal."""
    there = Counter(map(as_json, events))
    for event in events:
        if shown[key := as_json(event)] < there[key]:
            shown[key] += 1
            show(event)


def pause_s(took_s: float) -> float:
    """Return the pause, in seconds, after a look that took this time."""
    return max(LOOK_S, LOOK_PAUSES * took_s)


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(question: MessageQuestion) -> None:
    scan = question.scan

    def text() -> str:
        percent = 100 * (scan.position - scan.start) // max(1, scan.end - scan.start)
        return f"journal: offset {scan.position} of {scan.end} ({percent} %), {len(scan.life.messages)} messages found"

    with progress("reading the journal") as show:
        for _ in question.steps():
            show(text)


def _follow(question: MessageQuestion, output: Format) -> None:
    """Print events as they happen, until the message has ended."""
    shown: Counter[LifeEvent] = Counter()
    show = _event_shower(output)
    look_due_s = time.monotonic() + LOOK_S
    looked_at_end = False
    while True:
        story = question.story()
        events = Counter(story.events())
        for event in story.events():
            if shown[event] < events[event]:
                shown[event] += 1
                show(story, event)
        if looked_at_end:
            return
        if looked_at_end := story.ended:
            question.look_elsewhere()  # the last events may be younger than the last look
            continue
        question.read_on()
        if (began_s := time.monotonic()) > look_due_s:
            question.look_elsewhere()
            took_s = time.monotonic() - began_s
            look_due_s = time.monotonic() + pause_s(took_s)


def _event_shower(output: Format) -> Callable[[MessageStory, LifeEvent], None]:
    """Return a function that prints an event. It may be called again for more."""
    show = _row_shower(output)
    return lambda story, event: show(story.event(event))


def _row_shower(output: Format) -> Callable[[dict[str, Any]], None]:
    """Return a function that prints an event of an answer. It may be called again for more."""
    if output is Format.JSON:
        return lambda event: line(as_json(event))
    if output is Format.CSV:
        rows = CsvRows(EVENT_FIELDS)
        return lambda event: rows.write([event])
    return lambda event: line("  ".join(filter(None, (_time(event["time_ms"]), event["what"], event["queue"], event["detail"]))))


def show_story(story: MessageStory, output: Format, *, followed: bool) -> None:
    """Print the answer. In CSV, a story whose events were ``followed`` has been printed: its rows are the events."""
    _show_answer(story.as_dict(), output, followed=followed)


def _show_answer(said: dict[str, Any], output: Format, *, followed: bool) -> None:
    """Print an answer as ``show_story`` does."""
    if output is Format.JSON and followed:
        line(as_json(said))
    elif output is not Format.CSV or not followed:
        show_document(said, output, partial(_show, said, events=not followed))


# -- text --------------------------------------------------------------------------------------------------------------


def _show(said: dict[str, Any], *, events: bool) -> None:
    journal = said["journal"]
    place = f"journal {journal['topic']}, offsets {journal['from']} to {journal['to']}"
    line(f"{printable(said['id'])}: {len(said['messages'])} messages in {place}")
    if events and said["events"]:
        rows = (
            (_time(each["time_ms"]), *(each[name] for name in ("offset", "what", "message", "queue", "detail"))) for each in said["events"]
        )
        table(("time", "offset", "event", "message", "queue", "detail"), rows)
    queues = [
        (each["message"], stay["queue"], stay["state"], _deliveries(stay), stay["copy"])
        for each in said["messages"]
        for stay in each["queues"]
    ]
    if queues:
        table(("message", "queue", "state", "deliveries", "copy"), queues)
    if len({each["id"] for each in said["messages"]}) > 1:
        table(("message", "JMSMessageID"), ((each["message"], each["id"]) for each in said["messages"]))
    diverts = [(each["message"], *_divert(found)) for each in said["messages"] for found in each["diverts"]]
    if diverts:
        table(("message", "divert", "state", "record", "detail"), diverts)
    if said["branches"]:
        table(("transaction", "client", "outcome"), ((each["xid"], each["client"], each["outcome"]) for each in said["branches"]))
    for sentence in said["unrecorded"]:
        note(f"note: {sentence}")


def _deliveries(stay: dict[str, Any]) -> str:
    if stay["failed_deliveries"]:
        return f"{stay['failed_deliveries']} failed"
    if stay["redelivered"]:
        return "perhaps, in an earlier epoch"
    if stay["may_have_been_delivered"] is None:
        return "unknown"
    return "perhaps" if stay["may_have_been_delivered"] else "none"


def _divert(found: dict[str, Any]) -> tuple[str, ...]:
    record = f"{found['topic']}-{found['partition']} offset {found['offset']}" if found["offset"] >= 0 else ""
    return found["divert"], found["state"], record, found["detail"]


def _time(time_ms: int) -> str:
    return moment(time_ms) or "" if time_ms > 0 else ""
