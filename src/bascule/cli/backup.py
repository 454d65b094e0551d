"""``bascule backup`` and ``bascule restore``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bascule.cli.config import ConfigOption
from bascule.cli.kafka_access import with_own_access
from bascule.cli.log import LogFormatOption, LogLevelOption, settings_with_log
from bascule.cli.output import Format, FormatOption, as_json, line, note, show_document
from bascule.cli.progress import Show, progress
from bascule.core.errors import InvalidInput

if TYPE_CHECKING:
    from bascule.config import Configuration

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Directory of the backup", show_default=False)]
REMEDY: Final = "for the embedded Kafka, run `bascule kafka` or `bascule up`, and set BASCULE_KAFKA__BOOTSTRAP_SERVERS=HOST:PORT"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example:  bascule backup /backups/monday --config bascule.toml")(backup)
    app.command(epilog="Example:  bascule restore /backups/monday --config bascule.toml")(restore)


def backup(
    directory: DirectoryArgument,
    config: ConfigOption = None,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", help="Copy another topic, too, such as that of the audit; may be repeated", show_default=False),
    ] = None,
    secrets: Annotated[
        bool, typer.Option("--secrets", help="Copy the configuration file and the users file, with their passwords and hashes")
    ] = False,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Copy the journal and the topics that belong to it into a new directory, as of one point.

    The broker may serve clients meanwhile. The pipelines must be stopped or paused, and so must programs with transactions over several
    resources: if they write, the command fails.
    """
    from bascule.backup.place import new_backup
    from bascule.backup.taking import Backup
    from bascule.config import load
    from bascule.server.node import kafka_client

    settings = with_own_access(settings_with_log(config, log_format, log_level), REMEDY)
    configuration = load(config)
    kafka, bridge = kafka_client(settings), settings.bridge.id
    with new_backup(directory):
        _copy_files(configuration, directory, secrets)
        with progress("copying topics") as show:
            manifest = Backup(kafka, settings.journal_topics, bridge, directory, others=topic or (), progress=_counts(show)).take()
        manifest.store(directory)
    records = sum(part.records for each in manifest.topics for part in each.parts)
    facts = {"directory": str(directory), "journal_offset": manifest.cut.offset, "topics": len(manifest.topics), "records": records}
    _say(facts, f"{directory}: {records:,} records of {len(manifest.topics)} topics, up to journal offset {manifest.cut.offset}", output)


def restore(
    directory: DirectoryArgument,
    config: ConfigOption = None,
    adopt_sources: Annotated[
        bool,
        typer.Option(
            "--adopt-sources",
            help="Let ingresses continue at their offsets in topics that were recreated: the topics must have their old offsets",
        ),
    ] = False,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Restore a backup into a Kafka that has none of its topics. Broker and pipelines start only after the restore is complete.

    After an interruption, repeat the command: until it succeeds, nothing starts on the new topics.
    """
    from bascule.backup.restoring import Restore
    from bascule.server.node import kafka_client

    settings = with_own_access(settings_with_log(config, log_format, log_level), REMEDY)
    journal = settings.journal
    with progress("checking the backup") as show:
        restoring = Restore(
            kafka_client(settings), settings.journal_topics, settings.bridge.id, directory, progress=_counts(show),
            replication_factor=journal.replication_factor, min_insync_replicas=journal.min_insync_replicas,
        )  # fmt: skip
        try:
            result = restoring.run(adopt_sources=adopt_sources)
        except BaseException:
            if restoring.begun:
                note("the restore is not complete; broker and pipelines refuse to start. Repeat the command to complete it")
            raise
    cut, created = result.manifest.cut, result.manifest.created
    for name in result.recreated:
        note(f"warning: topic {name!r} is missing or was recreated: ingresses that read it will stop (see docs/guides/backup.md)")
    facts = {"journal_offset": cut.offset, "created": created, "records": result.records, "recreated": list(result.recreated)}
    _say(facts, f"restored {result.records:,} records, as of {created}, journal offset {cut.offset}", output)


def _counts(show: Show) -> Callable[[str, int], None]:
    """Return a function that shows a topic, and how many of its records were copied."""

    def counted(topic: str, count: int) -> None:
        show(lambda: f"{topic}: {count:,} records")

    return counted


def _copy_files(configuration: Configuration, directory: Path, secrets: bool) -> None:
    """Store the settings, and the files with secrets if wanted. Raises InvalidInput if such a file cannot be read, OSError."""
    from bascule.backup.copies import FILES
    from bascule.config.private_file import make_private, replace_private

    values = as_json([value._asdict() for value in configuration.explain()], indent=2)
    contents = {"settings.json": values.encode()}
    for path in filter(None, (configuration.file, configuration.settings.broker.users_file) if secrets else ()):
        if path.name in contents:
            raise InvalidInput(f"two files of the backup would have the name {path.name!r}; rename {path}, or leave out --secrets")
        try:
            contents[path.name] = path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"{path} cannot be copied (--secrets): {error.strerror}") from error
    files = directory / FILES
    make_private(files)
    for name, content in contents.items():
        replace_private(files / name, content)


def _say(facts: dict[str, Any], text: str, output: Format) -> None:
    show_document(facts, output, partial(line, text))
