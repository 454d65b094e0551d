"""Lists that the broker searches, sorts and cuts: the commands that print them, and their requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.config import ConfigOption
from bascule.cli.output import Format, FormatOption, show_rows
from bascule.core.errors import Unavailable

#: Entries of one request.
PART: Final = 500
#: Characters of a text by which the broker searches.
SEARCHED_CHARACTERS: Final = 200
#: The field that identifies an entry, for lists whose entries are not identified by name.
_KEYS: Final = {"connections": "id", "branches": "xid"}

SearchOption = Annotated[str, typer.Option("--search", help="Show only entries that contain this text", show_default=False)]
SortOption = Annotated[str, typer.Option("--sort", metavar="COLUMN", help="Sort by this column of `-o wide`", show_default=False)]
DescendingOption = Annotated[bool, typer.Option("--descending", help="Show the largest values of the column first")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Show at most N entries (default: all)", show_default=False)]


class ListChoice(NamedTuple):
    """What the options of a command choose of a list: all of it by default."""

    search: str = ""
    sort: str = ""
    descending: bool = False
    limit: int | None = None


def listed(client: AdminApiClient, name: str, chosen: ListChoice) -> list[dict[str, Any]]:
    """Return entries of a list of the broker. Raises InvalidInput, and Unavailable also if it is a standby, whose lists are empty.

    A list of more than 500 entries takes several requests. If it changes meanwhile, an entry may be missing; none is there twice.
    """
    options = {"search": chosen.search, "sort": chosen.sort, "order": "descending" if chosen.descending else ""}
    given = {option: value for option, value in options.items() if value}
    rows: dict[str, dict[str, Any]] = {}
    offset, wanted = 0, chosen.limit or PART
    while offset < wanted:
        part = client.look(f"list/{name}", offset=offset, limit=min(PART, wanted - offset), **given)
        if not part["serving"] and not part["total"]:
            raise Unavailable(f"the broker does not serve clients, so it has no {name}; ask the active broker")
        rows |= {each[_KEYS.get(name, "name")]: each for each in part["entries"]}
        offset += len(part["entries"])
        wanted = min(chosen.limit or part["found"], part["found"])
        if not part["entries"]:
            break
    return list(rows.values())


def add_list(
    commands: typer.Typer, name: str, columns: tuple[str, ...], *, text: str, example: str,
    row: Callable[[dict[str, Any]], dict[str, Any]] = lambda entry: entry,
) -> None:  # fmt: skip
    """Add the command ``list``, which prints a list of the broker. ``row`` makes a row of an entry; ``text`` is the help of the command."""

    def show(
        search: SearchOption = "",
        sort: SortOption = "",
        descending: DescendingOption = False,
        limit: LimitOption = None,
        config: ConfigOption = None,
        admin: AdminOption = None,
        output: FormatOption = Format.TABLE,
    ) -> None:
        chosen = ListChoice(search, sort, descending, limit)
        show_rows([row(entry) for entry in listed(AdminApiClient(admin, config), name, chosen)], columns, output, name)

    commands.command("list", help=text, epilog=f"Example:  {example}")(show)
