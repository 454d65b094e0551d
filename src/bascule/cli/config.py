"""``bascule config``: check the settings, show the source of each, and let a broker reload them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.context import context_of_command
from bascule.cli.output import Format, FormatOption, as_json, line, note, show_document, show_rows
from bascule.core.errors import InvalidInput

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Configuration file (default: $BASCULE_CONFIG, or ./bascule.toml if it exists)", show_default=False),
]

commands = typer.Typer(
    help="Check, show and reload the settings.", epilog="Example:  bascule config check --config bascule.toml", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="config")


@commands.command(epilog="Example:  bascule config check --config bascule.toml")
def check(config: ConfigOption = None, output: FormatOption = Format.TABLE) -> None:
    """Check the settings. Report all errors, and exit with 2 if there are any."""
    from bascule.config import load
    from bascule.server.certificates import certificate_weaknesses
    from bascule.server.divert_users import refused_pipelines
    from bascule.server.key_source import key_source
    from bascule.server.listener_tls import amqp_tls, server_context
    from bascule.server.policies import permissions_of
    from bascule.server.user_directory import read_users, roles_of, weaknesses

    loaded = load(config)
    _check_kafka(loaded.settings.kafka.client)
    amqp_tls(loaded.settings.broker.tls)
    server_context(loaded.settings.admin.tls, "admin.tls")
    permissions = permissions_of(loaded.settings, roles_of(loaded.settings, read_users(loaded.settings)))
    for weakness in (
        *weaknesses(loaded.settings), *certificate_weaknesses(loaded.settings, time.time()),
        *refused_pipelines(loaded.settings, permissions),
    ):  # fmt: skip
        note(f"warning: {weakness}")
    if loaded.settings.broker.oidc.enabled:
        key_source(loaded.settings.broker.oidc)
    diverts, ingresses, rules = loaded.settings.divert, loaded.settings.ingress, loaded.settings.permission
    names = {"diverts": [each.name for each in diverts], "ingresses": [each.name for each in ingresses]}
    allowed = f"{len(rules)} permission rules" if rules else "no permission rules: every client may do everything"
    text = f"{loaded.file or 'no file'}: valid ({len(diverts)} diverts, {len(ingresses)} ingresses, {allowed})"
    show_document({"file": loaded.file, **names, "permissions": [rule.match for rule in rules]}, output, partial(line, text))


def _check_kafka(client: Mapping[str, Any]) -> None:
    """Check the settings of Kafka's client if it is installed: the commands for administration do not need it."""
    if client and find_spec("confluent_kafka"):
        from bascule.kafka.clients import check_settings

        check_settings(client)


@commands.command(epilog="Example:  bascule config reload && echo all changes are in effect")
def reload(config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
    """Let a running broker read its settings again. Exit with 1 if a changed setting needs a restart."""
    found = AdminApiClient(admin, config).send("POST", "config/reload")
    show_document(found, output, partial(_draw_reload, found))
    if found["needs_restart"]:
        raise typer.Exit(1)


def _draw_reload(found: dict[str, Any]) -> None:
    for each in found["applied"]:
        line(f"applied: {_change(each)}{'' if each['effect'] == 'at once' else '; for what begins from now on'}")
    for each in found["needs_restart"]:
        line(f"needs a restart: {_change(each)}")
    line(f"unchanged: {len(found['unchanged'])} settings")


def _change(change: dict[str, Any]) -> str:
    before, after = ("unset" if value is None else as_json(value) for value in (change["before"], change["after"]))
    return f"{change['setting']} ({before} -> {after})"


@commands.command(epilog="Example:  bascule config show --running --format json")
def show(
    running: Annotated[bool, typer.Option("--running", help="Show the settings that hold at the running broker")] = False,
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show every setting with its value and source; secrets are masked. With `--running`, ask a broker, which knows no sources."""
    if running:
        show_rows(AdminApiClient(admin, config).look("settings"), ("setting", "value"), output)
        return
    if admin is not None or context_of_command(None, config_given=True) is not None:
        raise InvalidInput("--admin and --context name a running broker; add --running to show its settings")
    from bascule.config import load

    values = load(config).explain()
    if output is Format.JSON:
        show_rows([value._asdict() for value in values], (), output)
    else:
        rows = [{"setting": key, "value": as_json(value), "source": source} for key, value, source in values]
        show_rows(rows, ("setting", "value", "source"), output)
