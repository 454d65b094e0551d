"""Commands with messages: ``send``, ``receive``, ``browse``."""

from __future__ import annotations

import base64
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bascule.cli.completed_names import queue_names
from bascule.cli.config import ConfigOption
from bascule.cli.context import broker_of, context_of_command
from bascule.cli.login import CaFileOption, PasswordFileOption, UserOption, credentials, password_of, warn_of_password
from bascule.cli.output import CsvRows, Format, FormatOption, as_json, line, note, show_result, show_rows, table
from bascule.core.errors import InvalidInput
from bascule.core.masking import PropertyMask

if TYPE_CHECKING:
    from ssl import SSLContext

    from bascule.client import ConnectionFactory, Message, Queue, Topic

#: Maximum characters of a body in a table; JSON shows all.
BODY_SHOWN = 80
#: Prefetch of a browser, and of a consumer of many messages.
AHEAD = 100
#: Fields of a message, in the order of a table with all fields and of CSV.
FIELDS = (
    "message_id", "correlation_id", "destination", "reply_to", "type", "delivery_mode", "priority", "timestamp_ms", "expiration_ms",
    "redelivered", "delivery_count", "group_id", "user_id", "properties", "body_kind", "body",
)  # fmt: skip
PROPERTY_TYPES = ("string", "boolean", "byte", "short", "int", "long", "float", "double")

Destination = Annotated[str, typer.Argument(metavar="DESTINATION", help="Name of the queue or topic", autocompletion=queue_names)]
BrokerOption = Annotated[
    str | None,
    typer.Option(
        "--broker",
        metavar="URL",
        help="amqp://HOST[:PORT], or amqps:// for TLS (default: the broker of the context, or of the settings)",
        show_default=False,
    ),
]
TopicOption = Annotated[bool, typer.Option("--topic", help="The destination is a topic, not a queue")]
GroupIdOption = Annotated[
    str | None, typer.Option("--group-id", help="Set JMSXGroupID: all messages of a group go to one consumer", show_default=False)
]
ReplyToOption = Annotated[str | None, typer.Option("--reply-to", metavar="QUEUE", help="Set JMSReplyTo to this queue", show_default=False)]
SelectorOption = Annotated[str, typer.Option("--selector", help="Select only messages that match this JMS selector")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example:  bascule send flights --text '{\"n\": 1}' --property carrier=UA --property dep_delay:int=45")(send)
    app.command(epilog="Example:  bascule receive flights --count 10 --timeout-s 5 --format json")(receive)
    app.command(epilog="Example:  bascule browse flights --selector \"carrier = 'UA'\"")(browse)


def send(
    destination: Destination,
    text: Annotated[str | None, typer.Option("--text", help="Send a text message with this text", show_default=False)] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Send the content of this file as a bytes message", show_default=False)
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Send a text message for each line of standard input")] = False,
    map_: Annotated[
        str | None,
        typer.Option("--map", metavar="JSON", help='Send a map message: {"name": {"type": "int", "value": 1}}', show_default=False),
    ] = None,
    no_body: Annotated[bool, typer.Option("--no-body", help="Send a message without a body")] = False,
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            metavar="NAME[:TYPE]=VALUE",
            help=f"Set a JMS property; may be repeated; TYPE is {', '.join(PROPERTY_TYPES)}",
            show_default=False,
        ),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Send each message N times")] = 1,
    topic: TopicOption = False,
    non_persistent: Annotated[bool, typer.Option("--non-persistent", help="Send non-persistent messages, which a crash may lose")] = False,
    priority: Annotated[int, typer.Option("--priority", min=0, max=9, help="Priority (JMSPriority); 9 is the highest")] = 4,
    ttl_ms: Annotated[int, typer.Option("--ttl-ms", min=0, help="Time to live in milliseconds; 0 = for ever")] = 0,
    correlation_id: Annotated[str | None, typer.Option("--correlation-id", help="Set JMSCorrelationID", show_default=False)] = None,
    group_id: GroupIdOption = None,
    jms_type: Annotated[str | None, typer.Option("--type", help="Set JMSType", show_default=False)] = None,
    reply_to: ReplyToOption = None,
    delay_ms: Annotated[int, typer.Option("--delay-ms", min=0, help="Deliver the message after this time in milliseconds")] = 0,
    broker: BrokerOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
    ca_file: CaFileOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Send messages to a queue or topic. Return when the broker has stored all of them."""
    if sum((text is not None, file is not None, lines, map_ is not None, no_body)) != 1:
        raise InvalidInput("give one of --text, --file, --lines, --map and --no-body")
    fields: dict[str, Any] = {
        "correlation_id": correlation_id,
        "group_id": group_id,
        "type": jms_type,
        "reply_to": _destination(reply_to, topic=False) if reply_to else None,
        "properties": dict(_property(each) for each in properties or ()),
    }
    from bascule.client import Message

    with connection_factory(broker, user, config, password_file, ca_file).connect() as context:
        producer = context.producer(
            _destination(destination, topic=topic), persistent=not non_persistent, priority=priority, time_to_live_s=ttl_ms / 1000,
            delivery_delay_s=delay_ms / 1000,
        )  # fmt: skip
        bodies = [None] if no_body else [_map(map_)] if map_ is not None else _bodies(text, file)
        sent = producer.send_many(Message(body, **fields) for body in bodies for _ in range(count))
    show_result({"sent": sent}, output)


def receive(
    destination: Destination,
    count: Annotated[int, typer.Option("--count", min=1, help="Receive N messages")] = 1,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0, help="Wait at most N seconds for each message")] = 5.0,
    follow: Annotated[bool, typer.Option("--follow", help="Receive until Ctrl-C, and print one line of JSON for each message")] = False,
    topic: TopicOption = False,
    selector: SelectorOption = "",
    broker: BrokerOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
    ca_file: CaFileOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Receive messages, and acknowledge each after printing it. Exit with 1 if fewer than `--count` messages arrived in time."""
    from bascule.client import Acknowledge

    if follow and output is not Format.CSV:
        output = Format.JSON
    streaming = output in (Format.JSON, Format.CSV)
    show = _shower(output)
    mask = _mask(config)
    page: list[Message] = []
    taken = 0
    with connection_factory(broker, user, config, password_file, ca_file).connect(Acknowledge.CLIENT) as context:
        consumer = context.consumer(
            _destination(destination, topic=topic), selector=selector, prefetch=AHEAD if follow else min(AHEAD, count)
        )
        while follow or taken < count:
            if not follow:
                consumer.prefetch = min(AHEAD, count - taken)  # not more than requested
            message = consumer.receive(math.inf if follow else timeout_s)
            if message is not None:
                page.append(message)
                taken += 1
            if streaming or message is None or len(page) == AHEAD or taken == count:
                show(_row(each, mask) for each in page)
                context.acknowledge()
                page.clear()
            if message is None:
                break
    if taken < count and not follow:
        note(f"received {taken} of {count}")
        raise typer.Exit(1)


def browse(
    destination: Destination,
    count: Annotated[int | None, typer.Option("--count", min=1, help="Show at most N messages (default: all)", show_default=False)] = None,
    selector: SelectorOption = "",
    broker: BrokerOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
    ca_file: CaFileOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the messages of a queue without removing them."""
    from bascule.client import Queue

    mask = _mask(config)
    with connection_factory(broker, user, config, password_file, ca_file).connect() as context:
        there = context.browse(Queue(destination), selector=selector)
        _shower(output)(_row(message, mask) for message in itertools.islice(there, count))


def connection_factory(
    broker: str | None, user: str | None, config: Path | None, password_file: Path | None, ca_file: Path | None
) -> ConnectionFactory:
    """Return the factory for connections to a broker: to ``broker``, to that of the context of the command, or to that in the settings.

    A context also has a user with a password, and authorities; arguments replace them. Raises InvalidInput.
    """
    from bascule.client import ConnectionFactory

    tls: SSLContext | None = None
    authorities, login = "--ca-file", None
    found = context_of_command(broker, config_given=config is not None, given_by="--broker")
    if found is not None:
        name, context = found
        if ca_file is None and context.ca_file:
            ca_file, authorities = Path(context.ca_file), f"context {name!r}: ca_file"
        context_user = context.user if user is None else ""
        broker = broker_of(name, context, context_user or (user or "").partition(":")[0])
        if context_user:
            file = Path(context.password_file) if context.password_file else None
            login = context_user, password_of(context_user, password_file or file)
    elif broker is None:
        from bascule.config import load

        settings = load(config).settings.broker
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        broker = f"{settings.url_scheme}://{host}:{settings.port}"
        if settings.tls.certificate is not None and ca_file is None:
            from bascule.server.tls import client_context

            tls = client_context(settings.tls.certificate, "broker.tls")
    else:
        warn_of_password(broker)
    if ca_file is not None:
        from bascule.server.tls import authorities_context

        tls = authorities_context(ca_file, authorities)
    login = login or credentials(user, password_file)
    if login is None:
        return ConnectionFactory(broker, tls=tls)
    return ConnectionFactory(broker, user=login[0], password=login[1], tls=tls)


def _destination(name: str, *, topic: bool) -> Queue | Topic:
    from bascule.client import Queue, Topic

    return Topic(name) if topic else Queue(name)


def _bodies(text: str | None, file: Path | None) -> Iterator[str | bytes]:
    if text is not None:
        yield text
    elif file is not None:
        try:
            yield file.read_bytes()
        except OSError as error:
            raise InvalidInput(f"{file}: {error.strerror}") from error
    else:
        for each in sys.stdin:
            yield each.rstrip("\n")


def _map(text: str) -> dict[str, Any]:
    """Return the body of a map message. Raises InvalidInput."""
    from bascule.jms.record import map_from_json

    return map_from_json(text.encode())


def _property(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE`` or ``NAME:TYPE=VALUE``. Raises InvalidInput."""
    from bascule.client import Byte, Float, Int, Long, Short

    makers: dict[str, Callable[[str], Any]] = {
        "string": str, "boolean": _boolean, "byte": Byte, "short": Short, "int": Int, "long": Long,
        "float": Float, "double": float,
    }  # fmt: skip
    left, equals, value = text.partition("=")
    name, _, kind = left.partition(":")
    if not equals or not name or (kind or "string") not in makers:
        raise InvalidInput(f"--property {text!r}: must be NAME=VALUE or NAME:TYPE=VALUE with a TYPE of {', '.join(PROPERTY_TYPES)}")
    try:
        return name, makers[kind or "string"](value)
    except ValueError as error:
        raise InvalidInput(f"--property {text!r}: {value!r} is not of type {kind}") from error


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _mask(config: Path | None) -> PropertyMask:
    """Return which properties the settings hide. Raises InvalidInput."""
    from bascule.config import load

    return PropertyMask(load(config).settings.admin.masked_properties)


def _row(message: Message, mask: PropertyMask) -> dict[str, Any]:
    """Return a message as JSON shows it, without the fields that it does not have."""
    to, reply_to = message.destination, message.reply_to
    fields: dict[str, Any] = {
        "message_id": message.message_id,
        "correlation_id": message.correlation_id,
        "destination": to and to.name,
        "reply_to": reply_to and reply_to.name,
        "type": message.type,
        "delivery_mode": "PERSISTENT" if message.persistent else "NON_PERSISTENT",
        "priority": message.priority,
        "timestamp_ms": message.timestamp_ms,
        "expiration_ms": message.expiration_ms,
        "redelivered": message.redelivered,
        "delivery_count": message.delivery_count,
        "group_id": message.group_id,
        "user_id": message.user_id,
        "properties": mask.shown(message.properties),
        "body_kind": message.kind,
        "body": message.body,
    }
    if isinstance(message.body, bytes):
        fields["body"] = {"base64": base64.b64encode(message.body).decode()}
    return {name: value for name, value in fields.items() if value not in (None, "", {}) and (name, value) != ("expiration_ms", 0)}


def _shower(output: Format) -> Callable[[Iterable[dict[str, Any]]], None]:
    """Return a function that prints messages, and may be called again for more. CSV and JSON print each message at once."""
    match output:
        case Format.JSON:
            return _print_objects
        case Format.CSV:
            return CsvRows(FIELDS).write
        case Format.WIDE:
            return partial(show_rows, columns=FIELDS, output=output)
    return _draw


def _print_objects(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        line(as_json(row))


def _draw(rows: Iterable[dict[str, Any]]) -> None:
    def short(row: dict[str, Any]) -> str:
        body = row.get("body", "")
        text = body if isinstance(body, str) else as_json(body)
        return text if len(text) <= BODY_SHOWN else text[: BODY_SHOWN - 1] + "…"

    table(
        ("message id", "properties", "kind", "body"),
        ((row.get("message_id"), as_json(row.get("properties", {})), row["body_kind"], short(row)) for row in rows),
    )
