"""Commands that look at a running broker as the console does: messages of a queue, topics, links of a connection, the flow."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.administer import SUBSCRIPTION_COLUMNS, QueueName, SelectorOption, connections, queues, subscriptions
from bascule.cli.config import ConfigOption
from bascule.cli.lists import SEARCHED_CHARACTERS, ListChoice, add_list, listed
from bascule.cli.output import Format, FormatOption, as_json, cell, line, note, show_document, show_rows, table
from bascule.core.errors import InvalidInput

topics = typer.Typer(help="Show topics.", epilog="Example:  bascule topic list", no_args_is_help=True)

MESSAGE_COLUMNS = ("id", "state", "message_id", "type", "body_kind", "body", "bytes")
TOPIC_COLUMNS = ("name", "subscriptions", "messages", "consumers")
LINK_COLUMNS = ("role", "address", "queue", "selector", "unsettled", "credit")
FLOW_COLUMNS = ("kind", "name", "origin", "from", "to", "state", "behind", "records_per_s")
#: Maximum characters of a body in a table; JSON shows more.
BODY_SHOWN = 60

MessageId = Annotated[str, typer.Argument(metavar="ID", help="Id of the message, as `queue messages` shows it")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(topics, name="topic")
    app.command(epilog="Example:  bascule flow")(flow)


@queues.command("messages", epilog="Example:  bascule queue messages orders --selector \"JMSType = 'order'\" --text Nantucket")
def list_messages(
    name: QueueName,
    selector: SelectorOption = "",
    text: Annotated[str, typer.Option("--text", help="Select only messages that contain this text, in any part")] = "",
    count: Annotated[int, typer.Option("--count", min=1, help="Show at most N messages")] = 50,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the waiting and delayed messages of a queue with their ids. Removes nothing."""
    client, rows, after, more = AdminApiClient(admin, config), list[dict[str, Any]](), "", True
    while more and len(rows) < count:
        page = client.look("messages", queue=name, selector=selector, text=text, count=min(200, count - len(rows)), after=after)
        rows += page["messages"]
        after = page["next"]
        more = after != ""
    if output in (Format.TABLE, Format.WIDE):
        for row in rows:
            row["body"] = _short(row["body"])
    show_rows(rows, MESSAGE_COLUMNS, output, "messages")


@queues.command("message", epilog="Example:  bascule queue message orders 17-waiting-4-812")
def show_message(
    name: QueueName,
    id: MessageId,
    body: Annotated[bool, typer.Option("--body", help="Write only the body, as bytes, to standard output")] = False,
    config: ConfigOption = None,
    admin: AdminOption = None,
) -> None:
    """Show one message of a queue as JSON: headers, properties, body, and the origin of a dead letter. Removes nothing."""
    client = AdminApiClient(admin, config)
    if body:
        sys.stdout.buffer.write(client.download("messages/body", queue=name, id=id))
    else:
        line(as_json(client.look("messages/show", queue=name, id=id), indent=2))


add_list(
    topics, "topics", TOPIC_COLUMNS, text="Show topics with their number of subscriptions.",
    example="bascule topic list",
)  # fmt: skip


@topics.command("show", epilog="Example:  bascule topic show news.prices")
def show_topic(
    name: Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic")],
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show a topic with its subscriptions."""
    client = AdminApiClient(admin, config)
    topic = next((each for each in _found(client, "topics", name) if each["name"] == name), None)
    if topic is None:
        raise InvalidInput(f"there is no topic {name!r:.80}: it has no subscription, and is not in the settings of the broker")
    rows = [each for each in _found(client, "subscriptions", name) if each["topic"] == name]

    def draw() -> None:
        table(("topic", ""), topic.items())
        if rows:
            show_rows(rows, SUBSCRIPTION_COLUMNS, output)

    show_document({**topic, "subscription_list": rows}, output, draw)


@subscriptions.command("show", epilog="Example:  bascule subscription show billing.prices")
def show_subscription(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription, as `subscription list` shows it")],
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show a subscription of a topic, its consumers, and the effective settings of its queue (times in ms)."""
    client = AdminApiClient(admin, config)
    found = next((each for each in _found(client, "subscriptions", name) if each["name"] == name), None)
    if found is None:
        raise InvalidInput(f"there is no subscription {name!r:.80}; `bascule subscription list` shows the names")
    # A queue may have the name of the subscription, too.
    queue = client.look("queues", name=f"subscription://{name}")
    subscription = {**found, **{field: queue[field] for field in ("bytes", "delayed", "full", "consumer_list", "settings")}}

    def draw() -> None:
        fields = (item for item in subscription.items() if item[0] not in ("consumer_list", "settings"))
        table(("subscription", ""), ((field, cell(value)) for field, value in fields))
        if consumers := subscription["consumer_list"]:
            show_rows(consumers, tuple(consumers[0]), output)
        table(("setting", "value"), subscription["settings"].items())

    show_document(subscription, output, draw)


def _found(client: AdminApiClient, kind: str, name: str) -> list[dict[str, Any]]:
    """Return the entries of a list whose names, or other texts, contain a name. Raises InvalidInput, Unavailable."""
    return listed(client, kind, ListChoice(search=name[:SEARCHED_CHARACTERS]))


@connections.command("show", epilog="Example:  bascule connection show 127.0.0.1:50312")
def show_connection(
    id: Annotated[str, typer.Argument(metavar="ID", help="Address of the connection, as `connection list` shows it")],
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the producers and consumers of a connection, with their selectors."""
    found = AdminApiClient(admin, config).look("connections/links", id=id)
    if output is Format.JSON:
        line(as_json(found, indent=2))
    else:
        show_rows(found["links"], LINK_COLUMNS, output, "links")


def flow(config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
    """Show all diverts and ingresses with their ends, state, lag in records, and records a second.

    The column `origin` says where one is defined: in the file, or at run time.
    """
    found = AdminApiClient(admin, config).look("flow")
    if output is Format.JSON:
        line(as_json(found, indent=2))
        return
    diverts = [{"kind": "divert", **each, "behind": _behind(each)} for each in found["diverts"]]
    ingresses = [
        {"kind": "ingress", "from": ", ".join(each["topics"]) or each["pattern"], **each, "behind": each["lag"]}
        for each in found["ingresses"]
    ]
    show_rows([*diverts, *ingresses], FLOW_COLUMNS, output, "flow")
    if found["trouble"]:
        note(f"states, and pipelines that are defined at run time, are missing: {found['trouble']}")


def _behind(divert: dict[str, Any]) -> int | None:
    """Return the lag as the driver reports it, otherwise what the journal is kept for."""
    lag: int | None = divert["lag"]
    pin: dict[str, Any] = divert["pin"] or {}
    return pin.get("records") if lag is None else lag


def _short(body: dict[str, Any]) -> str:
    text = str(body.get("text", body.get("base64", body.get("entries", ""))))
    return text if len(text) <= BODY_SHOWN else text[: BODY_SHOWN - 1] + "…"
