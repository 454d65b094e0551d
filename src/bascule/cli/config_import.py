"""``bascule config import``: take over the configuration of another broker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bascule.cli.config import commands
from bascule.cli.output import Format, FormatOption, note, show_rows
from bascule.core.errors import InvalidInput


def register(_app: typer.Typer) -> None:
    """Add the command to ``bascule config``."""
    commands.command("import", epilog="Example:  bascule config import broker.xml --users artemis-users.properties --to bascule.toml")(
        import_config
    )


def import_config(
    source: Annotated[
        list[Path],
        typer.Argument(help="broker.xml of Apache Artemis, or the configuration of the JMS Bridge; give both if the JMS Bridge has both"),
    ],
    to: Annotated[Path, typer.Option("--to", help="File to write; the users go to a file beside it with the ending .users")] = Path(
        "bascule.toml"
    ),
    users: Annotated[Path | None, typer.Option("--users", help="artemis-users.properties", show_default=False)] = None,
    roles: Annotated[Path | None, typer.Option("--roles", help="artemis-roles.properties", show_default=False)] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--property", metavar="NAME=VALUE", help="Value of ${NAME} in the source; may be repeated", show_default=False),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="PEM file in place of the key store of the acceptor", show_default=False)
    ] = None,
    client_ca: Annotated[
        Path | None, typer.Option("--client-ca", help="PEM file in place of the trust store of the acceptor", show_default=False)
    ] = None,
    allow_insecure: Annotated[
        bool, typer.Option("--allow-insecure", help="Let other machines reach a broker without TLS or without permissions")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file; users of an existing file of users stay")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, only show the report")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Write a configuration from that of Apache Artemis or of the JMS Bridge, and report what became of each of its settings.

    A setting is taken, taken with a difference, or has no counterpart; then the report says what to do in place of it.
    """
    from bascule.cli.imports.artemis_acceptors import CertificateFiles
    from bascule.cli.imports.importer import ImportOptions, import_sources, write_result
    from bascule.cli.imports.report import COLUMNS

    options = ImportOptions(source, to, users, roles, _properties(given or []), CertificateFiles(certificate, client_ca), allow_insecure)
    result = import_sources(options)
    written = [] if dry_run else write_result(options, result, force=force)
    show_rows([row.shown() for row in result.report.rows], COLUMNS, output)
    note(f"{result.report.summary()}; {'written: ' + ', '.join(map(str, written)) if written else 'nothing is written'}")


def _properties(given: list[str]) -> dict[str, str]:
    for each in given:
        if not each.partition("=")[0].strip() or "=" not in each:
            raise InvalidInput(f"--property {each!r}: must be NAME=VALUE")
    return {name.strip(): value for name, _, value in (each.partition("=") for each in given)}
