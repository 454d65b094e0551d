"""Commands that act on a running broker: ``queue``, ``dead-letters``, ``subscription``, ``connection``, ``branch``, ``ingress``."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.completed_names import queue_names
from bascule.cli.config import ConfigOption
from bascule.cli.confirmation import YesOption, ask_first
from bascule.cli.lists import add_list
from bascule.cli.output import Format, FormatOption, cell, note, show_document, show_result, show_rows, table

queues = typer.Typer(help="Show queues, and act on them.", epilog="Example:  bascule queue show orders", no_args_is_help=True)
dead_letters = typer.Typer(
    help="List and return messages that could not be delivered.", epilog="Example:  bascule dead-letters list", no_args_is_help=True
)
subscriptions = typer.Typer(
    help="List, create and delete subscriptions of topics.", epilog="Example:  bascule subscription list", no_args_is_help=True
)
connections = typer.Typer(help="List and close connections of clients.", epilog="Example:  bascule connection list", no_args_is_help=True)
branches = typer.Typer(
    help="List branches of distributed transactions, and end those whose manager is gone.",
    epilog="Example:  bascule branch list",
    no_args_is_help=True,
)
ingresses = typer.Typer(
    help="Show ingresses, and pause, resume, stop or restart one.", epilog="Example:  bascule ingress list", no_args_is_help=True
)

QUEUE_COLUMNS = ("name", "address", "routing", "messages", "bytes", "delivering", "delayed", "consumers")
SUBSCRIPTION_COLUMNS = ("name", "topic", "durable", "selector", "messages", "delivering", "consumers", "unused_since_ms")
BRANCH_COLUMNS = ("xid", "state", "since", "sent", "received", "bytes", "user")
CONNECTION_COLUMNS = ("id", "client_id", "user", "producers", "consumers", "transactions")
DEAD_LETTER_COLUMNS = ("message_id", "address", "queue", "reason", "deliveries", "moved_at", "bytes")

QueueName = Annotated[
    str, typer.Argument(metavar="QUEUE", help="Name of the queue, or of the queue of a subscription", autocompletion=queue_names)
]
BranchXid = Annotated[str, typer.Argument(metavar="XID", help="Xid of the branch, as `branch list` shows it")]
SelectorOption = Annotated[str, typer.Option("--selector", help="Select only messages that match this JMS selector")]
IdsOption = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="ID", help="Select this message, as `queue messages` shows it; repeat for more", show_default=False),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Delete the queue even if it has messages or consumers")]
DeadLettersOption = Annotated[
    str,
    typer.Option(
        "--queue",
        metavar="QUEUE",
        help="Queue that contains them (default: the dead-letter address)",
        show_default=False,
        autocompletion=queue_names,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(queues, name="queue")
    app.add_typer(dead_letters, name="dead-letters")
    app.add_typer(subscriptions, name="subscription")
    app.add_typer(connections, name="connection")
    app.add_typer(branches, name="branch")
    app.add_typer(ingresses, name="ingress")


def _done(answer: dict[str, Any], output: Format) -> None:
    """Print the result of an action. If messages could not be processed, report them and exit with 1."""
    left: dict[str, int] = answer.get("left", {})
    show_result(answer if output is Format.JSON else {name: value for name, value in answer.items() if name != "left"}, output)
    for reason, count in left.items():
        note(f"left {count}: {reason}")
    if left:
        raise typer.Exit(1)


def _chosen(ids: list[str] | None) -> dict[str, str]:
    return {"ids": " ".join(ids)} if ids else {}


# -- queues ------------------------------------------------------------------------------------------------------------


add_list(
    queues, "queues", QUEUE_COLUMNS, text="Show queues, and the queues of subscriptions.",
    example="bascule queue list --sort messages --descending --limit 10",
)  # fmt: skip


@queues.command("show", epilog="Example:  bascule queue show orders")
def show_queue(name: QueueName, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
    """Show the state, the consumers and the effective settings of a queue (times in ms)."""
    queue = AdminApiClient(admin, config).look("queues", name=name)

    def draw() -> None:
        consumers = queue["consumer_list"]
        table(("queue", ""), ((name, cell(value)) for name, value in queue.items() if name not in ("consumer_list", "settings")))
        if consumers:
            show_rows(consumers, tuple(consumers[0]), output)
        table(("setting", "value"), queue["settings"].items())

    show_document(queue, output, draw)


@queues.command("create", epilog="Example:  bascule queue create orders")
def create_queue(
    name: Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the new queue")],
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create a queue that the broker does not delete when it is unused."""
    _done(AdminApiClient(admin, config).act("queues/create", name=name), output)


@queues.command("purge", epilog="Example:  bascule queue purge orders --selector \"JMSType = 'test'\"")
def purge_queue(
    name: QueueName,
    selector: SelectorOption = "",
    ids: IdsOption = None,
    yes: YesOption = False,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Delete the messages of a queue, except those that a consumer holds. At a terminal, ask for a confirmation first."""
    which = "the chosen messages" if selector or ids else "all messages"
    ask_first(f"{which} of queue {name!r:.200} will be deleted, and cannot be restored", "Delete them?", yes=yes)
    _done(AdminApiClient(admin, config).act("queues/purge", name=name, selector=selector, **_chosen(ids)), output)


@queues.command("move", epilog='Example:  bascule queue move orders orders.later --selector "priority < 3"')
def move_queue(
    name: QueueName,
    to: Annotated[str, typer.Argument(metavar="TO", help="Name of the target queue", autocompletion=queue_names)],
    selector: SelectorOption = "",
    ids: IdsOption = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Move the messages of a queue to another queue, except those that a consumer holds. Exit with 1 if some could not be moved."""
    _done(AdminApiClient(admin, config).act("queues/move", name=name, to=to, selector=selector, **_chosen(ids)), output)


@queues.command("delete", epilog="Example:  bascule queue delete orders --force")
def delete_queue(
    name: QueueName,
    force: ForceOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Delete a queue and its messages. Without `--force`, refuse to delete a queue that has messages or consumers.

    With `--force`, ask for a confirmation first at a terminal.
    """
    if force:
        ask_first(f"queue {name!r:.200} will be deleted with all its messages, which cannot be restored", "Delete it?", yes=yes)
    _done(AdminApiClient(admin, config).act("queues/delete", name=name, force=force), output)


# -- dead letters ------------------------------------------------------------------------------------------------------


@dead_letters.command("list", epilog="Example:  bascule dead-letters list --queue ExpiryQueue --count 20")
def list_dead_letters(
    queue: DeadLettersOption = "",
    count: Annotated[int, typer.Option("--count", min=1, max=1000, help="Show at most N messages")] = 100,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show dead letters with their origin, reason and number of deliveries."""
    rows = AdminApiClient(admin, config).look("dead-letters", queue=queue, count=count)
    for row in rows:
        row["moved_at"] = moment(row["moved_at_ms"])
    show_rows(rows, DEAD_LETTER_COLUMNS, output, "dead letters")


@dead_letters.command("return", epilog="Example:  bascule dead-letters return --selector \"JMSType = 'order'\"")
def return_dead_letters(
    queue: DeadLettersOption = "",
    selector: SelectorOption = "",
    ids: IdsOption = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Return dead letters to their original queues and subscriptions. Exit with 1 if some could not be returned."""
    _done(AdminApiClient(admin, config).act("dead-letters/return", queue=queue, selector=selector, **_chosen(ids)), output)


def moment(time_ms: int | None) -> str | None:
    """Return a time in milliseconds since the epoch as text in UTC."""
    if time_ms is None:
        return None
    return datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# -- subscriptions and connections -------------------------------------------------------------------------------------


add_list(
    subscriptions, "subscriptions", SUBSCRIPTION_COLUMNS, text="Show the subscriptions of topics.",
    example="bascule subscription list",
)  # fmt: skip


@subscriptions.command("create", epilog="Example:  bascule subscription create prices --topic news.prices --client-id billing")
def create_subscription(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription, as its client gives it")],
    topic: Annotated[str, typer.Option("--topic", help="Name of the topic")],
    client_id: Annotated[
        str, typer.Option("--client-id", help="Client id of its client. Only a shared subscription can do without", show_default=False)
    ] = "",
    selector: SelectorOption = "",
    no_local: Annotated[bool, typer.Option("--no-local", help="Leave out messages that the same client id sends")] = False,
    shared: Annotated[bool, typer.Option("--shared", help="Several consumers share the subscription")] = False,
    user: Annotated[str, typer.Option("--user", help="User who may use it (default: every user)", show_default=False)] = "",
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create a durable subscription before its client connects. It keeps the messages that are sent from now on."""
    wanted: dict[str, str | bool] = {
        "topic": topic, "client_id": client_id, "selector": selector, "no_local": no_local, "shared": shared, "user": user,
    }  # fmt: skip
    _done(AdminApiClient(admin, config).act("subscriptions/create", name=name, **wanted), output)


@subscriptions.command("delete", epilog="Example:  bascule subscription delete billing.prices --force")
def delete_subscription(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription, as `subscription list` shows it")],
    force: Annotated[bool, typer.Option("--force", help="Delete the subscription even if it has consumers")] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Delete a subscription and its messages, as if its client had unsubscribed. At a terminal, ask for a confirmation first."""
    ask_first(f"subscription {name!r:.200} will be deleted with all its messages, which cannot be restored", "Delete it?", yes=yes)
    _done(AdminApiClient(admin, config).act("subscriptions/delete", name=name, force=force), output)


add_list(
    connections, "connections", CONNECTION_COLUMNS, text="Show the connections of clients.",
    example="bascule connection list",
)  # fmt: skip


@connections.command("close", epilog="Example:  bascule connection close 127.0.0.1:50312")
def close_connection(
    id: Annotated[str, typer.Argument(metavar="ID", help="Address of the connection, as `connection list` shows it, or a client id")],
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Close a connection. Its unsettled messages are redelivered. A client with `failover:` reconnects."""
    _done(AdminApiClient(admin, config).act("connections/close", id=id), output)


# -- branches ----------------------------------------------------------------------------------------------------------


add_list(
    branches, "branches", BRANCH_COLUMNS,
    text="Show branches that are prepared, and branches that an administrator has ended and that are not forgotten yet.",
    example="bascule branch list", row=lambda entry: {**entry, "since": moment(entry["since_ms"])},
)  # fmt: skip


@branches.command("commit", epilog="Example:  bascule branch commit 1111577411:shop/0199...:broker")
def commit_branch(
    xid: BranchXid, yes: YesOption = False, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Commit a prepared branch without its manager, which receives a heuristic outcome. Prefer `bascule xa commit`.

    At a terminal, ask for a confirmation first.
    """
    ask_first(_contrary(xid, "committed"), "Commit it?", yes=yes)
    _done(AdminApiClient(admin, config).act("branches/commit", xid=xid), output)


@branches.command("rollback", epilog="Example:  bascule branch rollback 1111577411:shop/0199...:broker")
def roll_back_branch(
    xid: BranchXid, yes: YesOption = False, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Roll a prepared branch back without its manager, which receives a heuristic outcome. Prefer `bascule xa rollback`.

    At a terminal, ask for a confirmation first.
    """
    ask_first(_contrary(xid, "rolled back"), "Roll it back?", yes=yes)
    _done(AdminApiClient(admin, config).act("branches/rollback", xid=xid), output)


@branches.command("forget", epilog="Example:  bascule branch forget 1111577411:shop/0199...:broker")
def forget_branch(
    xid: BranchXid, yes: YesOption = False, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Forget a branch that an administrator has ended. `bascule xa forget` does this as well.

    At a terminal, ask for a confirmation first.
    """
    ask_first(f"the outcome of branch {xid:.200} will be forgotten, and its manager is no longer told of it", "Forget it?", yes=yes)
    _done(AdminApiClient(admin, config).act("branches/forget", xid=xid), output)


def _contrary(xid: str, ended: str) -> str:
    return f"branch {xid:.200} will be {ended}, whatever its manager has decided: another decision of the manager splits the transaction"


# -- ingresses ---------------------------------------------------------------------------------------------------------


@ingresses.command("reset", epilog="Example:  bascule ingress reset")
def reset_ingress(
    yes: YesOption = False, config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Read `bascule.ingress` from its beginning, after it was recreated.

    Messages that the broker had not read from the old topic are lost. At a terminal, ask for a confirmation first.
    """
    ask_first("messages that the broker had not read from the old topic will be lost", "Read the new topic from its beginning?", yes=yes)
    _done(AdminApiClient(admin, config).act("ingress/reset"), output)
