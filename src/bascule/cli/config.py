"""``bascule config``: check the settings, and show the source of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bascule.cli.output import Format, FormatOption, as_json, line, note, table

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Configuration file (default: $BASCULE_CONFIG, or ./bascule.toml if it exists)", show_default=False),
]

commands = typer.Typer(
    help="Check and show the settings.", epilog="Example:  bascule config check --config bascule.toml", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="config")


@commands.command(epilog="Example:  bascule config check --config bascule.toml")
def check(config: ConfigOption = None, output: FormatOption = Format.TABLE) -> None:
    """Check the settings. Report all errors, and exit with 2 if there are any."""
    from bascule.config import load
    from bascule.server.tls import amqp_tls, server_context
    from bascule.server.user_directory import weaknesses

    loaded = load(config)
    amqp_tls(loaded.settings.broker.tls)
    server_context(loaded.settings.admin.tls, "admin.tls")
    for weakness in weaknesses(loaded.settings):
        note(f"warning: {weakness}")
    diverts, ingresses, rules = loaded.settings.divert, loaded.settings.ingress, loaded.settings.permission
    if output is Format.JSON:
        found = {"diverts": diverts, "ingresses": ingresses}
        names = {key: [each.name for each in pipelines] for key, pipelines in found.items()}
        line(as_json({"file": loaded.file, **names, "permissions": [rule.match for rule in rules]}))
    else:
        allowed = f"{len(rules)} permission rules" if rules else "no permission rules: every client may do everything"
        line(f"{loaded.file or 'no file'}: valid ({len(diverts)} diverts, {len(ingresses)} ingresses, {allowed})")


@commands.command(epilog="Example:  bascule config show --format json")
def show(config: ConfigOption = None, output: FormatOption = Format.TABLE) -> None:
    """Show every setting with its value and source; secrets are masked."""
    from bascule.config import load

    values = load(config).explain()
    if output is Format.JSON:
        line(as_json([value._asdict() for value in values], indent=2))
    else:
        table(("setting", "value", "source"), ((key, as_json(value), source) for key, value, source in values))
