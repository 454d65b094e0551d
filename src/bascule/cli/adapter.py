"""``bascule adapter``: the groups of the Kafka resource adapter, as Kafka's topics show them, and their dead letters."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bascule.cli.config import ConfigOption
from bascule.cli.log import LogFormatOption, LogLevelOption, settings_with_log
from bascule.cli.output import Format, FormatOption, line, note, show_document, show_rows
from bascule.core.errors import InvalidInput

if TYPE_CHECKING:
    from bascule.adapter.inbound.dead_letters import DeadLetter
    from bascule.config import Settings

commands = typer.Typer(
    help="Show groups of the Kafka resource adapter, and return their dead letters.",
    epilog="Example:  bascule adapter status --group shop.payments",
    no_args_is_help=True,
)
dead_letters = typer.Typer(
    help="List and return records that failed too often.",
    epilog="Example:  bascule adapter dead-letters list --group shop.payments",
    no_args_is_help=True,
)
commands.add_typer(dead_letters, name="dead-letters")

GroupOption = Annotated[str, typer.Option("--group", help="Consumer group of the endpoint")]
KafkaOption = Annotated[
    str | None, typer.Option("--kafka", metavar="HOST:PORT", help="Address of Kafka (default: kafka.bootstrap_servers)", show_default=False)
]
TopicOption = Annotated[str, typer.Option("--topic", help="Dead-letter topic (default: GROUP.dead-letter)", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="adapter")


@commands.command(epilog="Example:  bascule adapter status --group shop.payments")
def status(
    group: GroupOption,
    kafka: KafkaOption = None,
    log: Annotated[str, typer.Option("--log", help="Topic of the inbound log (default: GROUP.inbound)", show_default=False)] = "",
    topic: TopicOption = "",
    config: ConfigOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show records in flight by source partition, transactions with claimed records, and the number of dead letters."""
    from bascule.adapter.inbound.dead_letters import DeadLetters
    from bascule.adapter.inbound.log import InboundLog
    from bascule.kafka.admin import Topics

    settings = _kafka(kafka, settings_with_log(config, log_format, log_level))
    inbound = InboundLog("look", settings, group=group, topic=log or None)
    if inbound.topic not in Topics(settings).partitions():
        raise InvalidInput(f"there is no topic {inbound.topic}: no endpoint has ever been active in group {group!r}")
    rows: list[dict[str, Any]] = [
        {
            "partition": str(place), "in_flight": len(flights.keys), "oldest": min(flights.keys, default=None),
            "failed": sum(1 for failures in flights.failures.values() if failures), "claimed": [str(xid) for xid in flights.claims],
        }
        for place, flights in sorted(inbound.all_flights().items())
    ]  # fmt: skip
    inbound.close()
    dead = DeadLetters(settings, group, topic).count()

    def draw() -> None:
        if rows:
            show_rows(rows, tuple(rows[0]), output)
        line(f"{group}: {sum(row['in_flight'] for row in rows)} in flight, {dead} dead letters")

    show_document({"group": group, "partitions": rows, "dead_letters": dead}, output, draw)


@dead_letters.command("list", epilog="Example:  bascule adapter dead-letters list --group shop.payments")
def list_letters(
    group: GroupOption,
    kafka: KafkaOption = None,
    topic: TopicOption = "",
    config: ConfigOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show waiting dead letters with their origin, number of failures and reason."""
    from bascule.adapter.inbound.dead_letters import DeadLetters

    letters = DeadLetters(_kafka(kafka, settings_with_log(config, log_format, log_level)), group, topic).waiting()
    if output is Format.JSON:
        show_rows(map(asdict, letters), (), output)
    elif letters or output is Format.CSV:
        show_rows(map(_row, letters), ("offset", "origin", "failures", "error", "key", "bytes", "sent_at"), output)
    else:
        line(f"{group}: no dead letters")


@dead_letters.command("return", epilog="Example:  bascule adapter dead-letters return --group shop.payments --count 10")
def send_back(
    group: GroupOption,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Return at most N of the oldest dead letters (default: all)", show_default=False)
    ] = None,
    kafka: KafkaOption = None,
    topic: TopicOption = "",
    config: ConfigOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Return dead letters to their group, each once, with their failures reset."""
    from bascule.adapter.inbound.dead_letters import DeadLetters

    note(f"returned: {DeadLetters(_kafka(kafka, settings_with_log(config, log_format, log_level)), group, topic).send_back(count)}")


def _kafka(servers: str | None, settings: Settings) -> dict[str, Any]:
    if (servers := servers or settings.kafka.bootstrap_servers) is None:
        raise InvalidInput("give --kafka HOST:PORT, or set kafka.bootstrap_servers")
    return {"bootstrap.servers": servers, **settings.kafka.client}


def _row(letter: DeadLetter) -> dict[str, object]:
    key = (letter.key or b"").decode(errors="replace")
    sent = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.at_ms / 1000))
    return {
        "offset": letter.offset, "origin": letter.origin, "failures": letter.failures, "error": letter.error, "key": key,
        "bytes": letter.size_bytes, "sent_at": sent, "partition": letter.partition,
    }  # fmt: skip
