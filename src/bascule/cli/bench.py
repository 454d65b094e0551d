"""``bascule bench``: put a load on a broker and report throughput, latency, and lost and doubled messages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bascule.cli.config import ConfigOption
from bascule.cli.load_plan import SIZE_MIN, LoadPlan
from bascule.cli.login import CaFileOption, PasswordFileOption, UserOption
from bascule.cli.messages import BrokerOption, connection_factory
from bascule.cli.output import Format, FormatOption, line, show_document, table
from bascule.core.build import build
from bascule.core.errors import InvalidInput

if TYPE_CHECKING:
    from bascule.cli.load_counts import LoadCounts

#: Columns of the table, and their keys in JSON.
COLUMNS = {
    "messages": "messages", "per s": "per_s", "p50 ms": "p50_ms", "p90 ms": "p90_ms", "p99 ms": "p99_ms", "p99.9 ms": "p999_ms",
    "max ms": "max_ms",
}  # fmt: skip
COUNTS = ("sent", "unsent", "lost", "doubled", "redelivered", "left")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(epilog="Example:  bascule bench --rate 500 --producers 2 --consumers 2 --size 4096 --seconds 60")(bench)


def bench(
    producers: Annotated[int, typer.Option("--producers", min=1, help="Number of producers, each with its own connection")] = 1,
    consumers: Annotated[int, typer.Option("--consumers", min=0, help="Number of consumers, each with its own connection")] = 1,
    rate: Annotated[
        float, typer.Option("--rate", min=0, help="Messages a second of all producers together; 0 = as fast as possible")
    ] = 100.0,
    size: Annotated[int, typer.Option("--size", min=SIZE_MIN, help="Size of a message body in bytes")] = 1024,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Duration of the measurement in seconds")] = 10.0,
    warm_up_s: Annotated[float, typer.Option("--warmup-s", min=0, help="Seconds of load before the measurement")] = 2.0,
    arrival_s: Annotated[
        float, typer.Option("--arrival-s", min=1, help="Wait at most N seconds for each further message at the end")
    ] = 10.0,
    topic: Annotated[bool, typer.Option("--topic", help="Use a topic, whose consumers each receive all messages, not a queue")] = False,
    non_persistent: Annotated[bool, typer.Option("--non-persistent", help="Send non-persistent messages, which a crash may lose")] = False,
    transaction: Annotated[
        int, typer.Option("--transaction", min=0, help="Send and receive in transactions of N messages; 0 = no transactions")
    ] = 0,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Let each producer wait for the confirmation of a message before the next message")
    ] = False,
    broker: BrokerOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
    ca_file: CaFileOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure throughput and latency of a broker with a queue or topic of its own, and count lost and doubled messages.

    Each latency begins when the message was due, so a stall counts for all messages that it delays. Exit with 1 if messages were lost or
    doubled, if there were errors, or if messages could not be sent in time.
    """
    if transaction and synchronous:
        raise InvalidInput("--synchronous and --transaction exclude each other: a send in a transaction is not confirmed by itself")
    plan = LoadPlan(
        topic=topic, producers=producers, consumers=consumers, size=size, rate=rate, seconds=seconds, warm_up_s=warm_up_s,
        persistent=not non_persistent, transaction=transaction, synchronous=synchronous, arrival_s=arrival_s,
    )  # fmt: skip
    from bascule.cli.load import Load

    counts = Load(connection_factory(broker, user, config, password_file, ca_file), plan).run()
    show(counts, output)
    if counts.negative:
        raise typer.Exit(1)


def show(counts: LoadCounts, output: Format) -> None:
    """Print the report."""
    results = counts.summary()
    show_document({"build": build(), "plan": counts.plan.described(), "results": results}, output, partial(_draw, results))


def _draw(results: dict[str, Any]) -> None:
    rows = [[name, *(_cell(results[name][key]) for key in COLUMNS.values())] for name in ("confirmed", "received")]
    table(("", *COLUMNS), rows)
    line(", ".join(f"{name} {results[name]:,}" for name in COUNTS))
    line(f"processor time of the clients, which run the {build()} build: {results['client_cpu_s']} s")
    for name, error in results["errors"].items():
        line(f"{error['count']:,} errors {name}, for example: {error['example']}")


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}"
