"""``bascule export`` and ``bascule import``: definitions over HTTP, messages over AMQP."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.completed_names import queue_names
from bascule.cli.config import ConfigOption
from bascule.cli.definition_file import (
    DEFINITIONS_VERSION,
    KINDS_OF_DEFINITIONS,
    ONE_OF,
    missing_pipelines,
    missing_subscriptions,
    read_definitions,
)
from bascule.cli.login import CaFileOption, PasswordFileOption, UserOption
from bascule.cli.messages import BrokerOption, SelectorOption, connection_factory
from bascule.cli.output import Format, FormatOption, as_json, line, note, show_result
from bascule.core.errors import BasculeError, InvalidInput, Unavailable

if TYPE_CHECKING:
    from bascule.cli.message_file import FileMessage
    from bascule.client import ConnectionFactory
    from bascule.client.encoded import EncodedSender
    from bascule.client.links import PendingSend

exports = typer.Typer(
    help="Write definitions, or the messages of a queue, to a file.",
    epilog="Example:  bascule export messages orders orders.jsonl",
    no_args_is_help=True,
)
imports = typer.Typer(
    help="Create what a file of definitions has, or send the messages of a file.",
    epilog="Example:  bascule import messages orders.jsonl --to orders.copy",
    no_args_is_help=True,
)

#: Bytes and messages that are sent before the command waits for all answers: it holds no more of a file in memory.
BATCH_BYTES: Final = 8 << 20
BATCH_MESSAGES: Final = 500
#: Beginning of the client id of an import. The broker recognises a repeated message by client id and message id.
CLIENT_ID: Final = "bascule-import."
#: Messages of one connection, and with it of one client id, if duplicates are allowed: the command remembers that many message ids.
PART_MESSAGES: Final = 10_000
#: Characters of the name of a queue in the client id, which has a digest of a longer name.
QUEUE_SHOWN_MAX: Final = 200

NewFile = Annotated[Path, typer.Argument(metavar="FILE", help="File to write; it must not exist", show_default=False)]
FromFile = Annotated[Path, typer.Argument(metavar="FILE", help="File that `bascule export` has written", show_default=False)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check the file, show what would be done, and change nothing")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(exports, name="export")
    app.add_typer(imports, name="import")


# -- definitions -------------------------------------------------------------------------------------------------------


@exports.command("definitions", epilog="Example:  bascule export definitions definitions.json")
def export_definitions(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="File to write or replace (default: standard output)", show_default=False)
    ] = None,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Write the queues, durable subscriptions, and pipelines defined at run time as JSON. Settings and users are in files already."""
    broker = AdminApiClient(admin, config)
    found = {**broker.look("definitions"), **broker.look("definitions/pipelines"), "version": DEFINITIONS_VERSION}
    if file is None:
        line(as_json(found, indent=2))
        return
    from bascule.config.private_file import replace_private

    try:
        replace_private(file, as_json(found, indent=2).encode() + b"\n")
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from error
    show_result({kind: len(found[kind]) for kind in KINDS_OF_DEFINITIONS}, output)


@imports.command("definitions", epilog="Example:  bascule import definitions definitions.json --dry-run")
def import_definitions(
    file: FromFile,
    auto_created: Annotated[
        bool,
        typer.Option(
            "--auto-created",
            help="Create the queues, too, that a broker has created for clients. Otherwise the broker creates them when they are used",
        ),
    ] = False,
    no_pipelines: Annotated[bool, typer.Option("--no-pipelines", help="Leave out the diverts and ingresses, which run at once")] = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create the queues, durable subscriptions and pipelines of a file that the broker does not have. Existing ones stay as they are.

    If one of them exists with another definition, nothing is created. A pipeline begins where its setting `start` says.
    """
    definitions = read_definitions(file)
    wanted = [each for each in definitions.queues if auto_created or not each["auto_created"]]
    pipelines = [] if no_pipelines else definitions.pipelines
    broker = AdminApiClient(admin, config)
    there = broker.look("definitions")
    known = {each["name"] for each in there["queues"]}
    new_queues = [each for each in wanted if each["name"] not in known]
    new_subscriptions = missing_subscriptions(definitions.subscriptions, there["subscriptions"])
    new_pipelines = missing_pipelines(pipelines, broker) if pipelines else []
    steps: list[tuple[str, str, dict[str, Any]]] = [("queues", "queues/create", {"name": each["name"]}) for each in new_queues]
    steps += [("subscriptions", "subscriptions/create", dict(each)) for each in new_subscriptions]
    # Last: an ingress drops messages for an address that has neither a queue nor a subscription.
    steps += [(each.collection, each.collection, {"name": each.name, "config": each.config}) for each in new_pipelines]
    created = dict.fromkeys(KINDS_OF_DEFINITIONS, 0)
    for kind, action, arguments in steps:
        try:
            if not dry_run:
                broker.send("POST", action, **arguments)
        except BasculeError as error:
            note(f"created before the error: {', '.join(f'{count} {name}' for name, count in created.items())}")
            raise type(error)(f"{ONE_OF[kind]} {arguments['name']!r}: {error}") from error
        created[kind] += 1
    existing = len(wanted) + len(definitions.subscriptions) + len(pipelines) - len(steps)
    show_result({**created, "existing": existing, "auto_created": len(definitions.queues) - len(wanted)}, output)


# -- messages ----------------------------------------------------------------------------------------------------------


@exports.command("messages", epilog="Example:  bascule export messages orders orders.jsonl --selector \"JMSType = 'new'\"")
def export_messages(
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue", autocompletion=queue_names)],
    file: NewFile,
    selector: SelectorOption = "",
    broker: BrokerOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
    ca_file: CaFileOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Write the messages that wait in a queue to a new file, without removing them.

    Messages that consumers hold, and delayed ones, are left out.
    """
    from bascule.cli.message_file import new_message_file
    from bascule.client import Queue
    from bascule.client.encoded import browse_encoded

    with connection_factory(broker, user, config, password_file, ca_file).connect() as context, new_message_file(file, queue) as writer:
        for data in browse_encoded(context, Queue(queue), selector):
            writer.add(data)
    show_result({"exported": writer.count}, output)


@imports.command("messages", epilog="Example:  bascule import messages orders.jsonl --to orders.copy")
def import_messages(
    file: FromFile,
    to: Annotated[str, typer.Option("--to", metavar="QUEUE", help="Queue for the messages (default: the queue in the file)")] = "",
    allow_duplicates: Annotated[
        bool, typer.Option("--allow-duplicates", help="Store messages whose message id an earlier import, or an earlier line, has")
    ] = False,
    from_line: Annotated[int, typer.Option("--from-line", min=1, help="Begin at this line of the file, as an error has named it")] = 1,
    dry_run: DryRunOption = False,
    broker: BrokerOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
    ca_file: CaFileOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Send the messages of a file to a queue, without any change. An incomplete file is refused before the first message is sent.

    The broker stores a message of a repeated import once, as long as it remembers its message id.
    """
    from bascule.cli.message_file import check_message_file, messages_in

    head = check_message_file(file, distinct=not allow_duplicates)
    queue = to or head.queue
    if not queue:
        raise InvalidInput(f"{file} names no queue; give --to")
    if head.duplicate_ids:
        note(f"up to {head.duplicate_ids} messages have the property _AMQ_DUPL_ID: the broker drops each whose value it remembers")
    if dry_run:
        show_result({"messages": head.messages, "to": queue}, output)
        return
    sending = _Sending(file, queue, connection_factory(broker, user, config, password_file, ca_file))
    messages = (each for each in messages_in(file) if each.line >= from_line)
    if allow_duplicates:
        for _, part in itertools.groupby(messages, _DistinctParts()):
            sending.send_all(part, f"{CLIENT_ID}{uuid.uuid4()}")
    else:
        sending.send_all(messages, _client_id(queue))
    show_result({"imported": sending.stored, "to": queue}, output)


def _client_id(queue: str) -> str:
    """Return the client id of imports into a queue. Names of queues may be as long as client ids."""
    return CLIENT_ID + (queue if len(queue) <= QUEUE_SHOWN_MAX else hashlib.sha256(queue.encode()).hexdigest())


class _DistinctParts:
    """Numbers the parts of a file in which each message id occurs once: the broker recognises a repetition within one client id."""

    def __init__(self) -> None:
        self._number = 0
        self._seen: set[bytes] = set()

    def __call__(self, message: FileMessage) -> int:
        """Return the part of the next message."""
        if message.message_id is not None:
            digest = hashlib.blake2b(message.message_id, digest_size=16).digest()
            if digest in self._seen or len(self._seen) >= PART_MESSAGES:
                self._number += 1
                self._seen.clear()
            self._seen.add(digest)
        return self._number


class _Sending:
    """Sends messages in order, some ahead of the answers. ``stored`` is the number of those that the broker has confirmed."""

    def __init__(self, file: Path, queue: str, factory: ConnectionFactory) -> None:
        self._file, self._queue, self._factory = file, queue, factory
        self._open: dict[int, PendingSend] = {}  # sent since the last flush, by line
        self._bytes = 0
        self._last = 0  # the line of the last message that was sent
        self.stored = 0

    def send_all(self, messages: Iterable[FileMessage], client_id: str) -> None:
        """Send messages on a connection of their own. Raises InvalidInput, Unavailable for the first line that is not stored."""
        from bascule.client import Queue
        from bascule.client.encoded import EncodedSender

        try:
            connected = replace(self._factory, client_id=client_id).connect()
        except BasculeError as error:
            if not self._last:
                raise
            raise self._failed(error) from error
        with connected as context:
            sender = EncodedSender(context, Queue(self._queue))
            for message in messages:
                self._send(sender, message)
            self._flush(sender)

    def _send(self, sender: EncodedSender, message: FileMessage) -> None:
        self._last = message.line - 1
        try:
            self._open[message.line] = sender.send(message.data)
        except BasculeError as error:
            raise self._failed(error) from error
        self._last = message.line
        self._bytes += len(message.data)
        if len(self._open) >= BATCH_MESSAGES or self._bytes >= BATCH_BYTES:
            self._flush(sender)

    def _flush(self, sender: EncodedSender) -> None:
        """Wait for all answers."""
        try:
            sender.flush()
        except BasculeError as error:
            raise self._failed(error) from error
        refused = next((each.error for each in self._open.values() if each.error is not None), None)
        if refused is not None:
            raise self._failed(refused) from refused
        self.stored += len(self._open)
        self._open.clear()
        self._bytes = 0

    def _failed(self, error: BasculeError) -> BasculeError:
        """Return the error for the first line that is not stored."""
        missing = {number: each.error for number, each in self._open.items() if not each.done or each.error is not None}
        number = min(missing, default=self._last + 1)
        said = missing.get(number) or error
        stored = self.stored + len(self._open) - len(missing)
        text = f"{self._file}, line {number}: {said}. {stored} messages are stored; to continue, add --from-line {number}"
        return (Unavailable if isinstance(said, Unavailable) else InvalidInput)(text)
