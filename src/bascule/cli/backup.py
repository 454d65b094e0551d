"""``bascule backup`` and ``bascule restore``."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bascule.cli.config import ConfigOption
from bascule.cli.kafka_access import with_own_access
from bascule.cli.log import LogFormatOption, LogLevelOption, settings_with_log
from bascule.cli.output import Format, FormatOption, as_json, line, note, show_document

if TYPE_CHECKING:
    from bascule.config import Configuration

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Directory of the backup", show_default=False)]
#: Seconds between two lines of progress: on a terminal, where a line replaces the one before, and elsewhere.
TERMINAL_S: Final = 0.5
ELSEWHERE_S: Final = 10.0
REMEDY: Final = "for the embedded Kafka, run `bascule kafka` or `bascule up`, and set BASCULE_KAFKA__BOOTSTRAP_SERVERS=HOST:PORT"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example:  bascule backup /backups/monday --config bascule.toml")(backup)
    app.command(epilog="Example:  bascule restore /backups/monday --config bascule.toml")(restore)


class _ProgressLine:
    """Shows on standard error which topic is copied, and how many of its records were."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next_s = time.monotonic() + (TERMINAL_S if self._terminal else ELSEWHERE_S)

    def show(self, topic: str, count: int) -> None:
        """Show the progress, if the last line is old enough."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (TERMINAL_S if self._terminal else ELSEWHERE_S)
        text = f"{topic}: {count:,} records"
        if self._terminal:
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
        else:
            note(text)

    def end(self) -> None:
        """Remove the line from a terminal."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


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
    shown = _ProgressLine()
    with new_backup(directory):
        _copy_files(configuration, directory, secrets)
        taking = Backup(
            kafka_client(settings), settings.journal_topics, settings.bridge.id, directory, others=topic or (), progress=shown.show
        )
        try:
            manifest = taking.take()
        finally:
            shown.end()
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

    An interrupted restore has no effect: repeat the command.
    """
    from bascule.backup.restoring import Restore
    from bascule.server.node import kafka_client

    settings = with_own_access(settings_with_log(config, log_format, log_level), REMEDY)
    shown = _ProgressLine()
    journal = settings.journal
    restoring = Restore(
        kafka_client(settings), settings.journal_topics, settings.bridge.id, directory, progress=shown.show,
        replication_factor=journal.replication_factor, min_insync_replicas=journal.min_insync_replicas,
    )  # fmt: skip
    try:
        result = restoring.run(adopt_sources=adopt_sources)
    finally:
        shown.end()
    cut, created = result.manifest.cut, result.manifest.created
    for name in result.recreated:
        note(f"warning: topic {name!r} is missing or was recreated: ingresses that read it will stop (see docs/guides/backup.md)")
    facts = {"journal_offset": cut.offset, "created": created, "records": result.records, "recreated": list(result.recreated)}
    _say(facts, f"restored {result.records:,} records, as of {created}, journal offset {cut.offset}", output)


def _copy_files(configuration: Configuration, directory: Path, secrets: bool) -> None:
    """Store the settings, and the files with secrets if wanted. Raises OSError."""
    from bascule.backup.copies import FILES
    from bascule.config.private_file import make_private, replace_private

    files = directory / FILES
    make_private(files)
    values = as_json([value._asdict() for value in configuration.explain()], indent=2)
    replace_private(files / "settings.json", values.encode())
    if secrets:
        for path in filter(None, (configuration.file, configuration.settings.broker.users_file)):
            replace_private(files / path.name, path.read_bytes())


def _say(facts: dict[str, Any], text: str, output: Format) -> None:
    show_document(facts, output, partial(line, text))
