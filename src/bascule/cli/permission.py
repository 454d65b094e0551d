"""``bascule permission``: the permissions that hold at a running broker."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.config import ConfigOption
from bascule.cli.output import Format, FormatOption, as_json, line, note, show_document, show_rows
from bascule.cli.user import DENIED_STATUS
from bascule.core.permissions import Permission

commands = typer.Typer(
    help="Show the permissions that hold at a running broker. `bascule user can` asks the settings.",
    epilog="Example:  bascule permission check ann send orders.eu",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(commands, name="permission")


@commands.command("list", epilog="Example:  bascule permission list")
def list_rules(config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE) -> None:
    """Show the rules of a running broker: addresses, and the roles that have each permission."""
    rules = AdminApiClient(admin, config).look("permissions")["rules"]
    if output is Format.JSON:
        line(as_json(rules, indent=2))
        return
    if not rules:
        note("there are no rules, so every client may do everything")
    rows: list[dict[str, Any]] = [{"address": rule["match"], **rule["roles"]} for rule in rules]
    show_rows(rows, tuple(dict.fromkeys(("address", *(name for row in rows for name in row)))), output)


@commands.command("check", epilog="Example:  bascule permission check ann send orders.eu")
def check(
    user: Annotated[str, typer.Argument(help="Name of the user; `anonymous` is a client without a login")],
    permission: Annotated[Permission, typer.Argument(help="Permission, in the words of Artemis")],
    address: Annotated[str, typer.Argument(help="Address")],
    config: ConfigOption = None,
    admin: AdminOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Say whether a running broker gives a user a permission on an address, and which rule decides. Exit with 1 if it does not."""
    client = AdminApiClient(admin, config)
    decision = client.look("permissions", user=user, permission=permission.value, address=address)["decision"]
    show_document(decision, output, lambda: line(f"{'allowed' if decision['allowed'] else 'denied'}: {decision['reason']}"))
    if not decision["allowed"]:
        raise typer.Exit(DENIED_STATUS)
