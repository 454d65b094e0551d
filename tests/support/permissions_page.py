"""The tables of permissions and roles in the guides, made from the data of the tests and from the paths of the admin server.

    python -m tests.support.permissions_page        # writes the tables

A table is found by its head. The rest of a page is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from bascule.core.permissions import Permission
from bascule.server.admin import admin_paths
from bascule.server.admin_access import OPEN
from tests.support.permission_matrix import BRANCH_REQUESTS, OPERATIONS, Operation

GUIDES: Final = Path(__file__).parents[2] / "docs" / "guides"
OPERATION_HEAD: Final = "| to do this | a client needs | and if the destination does not exist |"
BRANCH_HEAD: Final = "| request to `$management` | permissions there | and if the branch belongs to another user |"
PATH_HEAD: Final = "| request | role |"


def tables() -> dict[Path, dict[str, list[str]]]:
    """Return the tables of each page by their heads."""
    return {
        GUIDES / "permissions.md": {
            OPERATION_HEAD: [_row(operation.name, *_needs(operation)) for operation in OPERATIONS],
            BRANCH_HEAD: [_row(each.name, _words([Permission.MANAGE]), _words(each.others)) for each in BRANCH_REQUESTS],
        },
        GUIDES / "operations.md": {
            PATH_HEAD: [
                _row(f"`{each.method} {each.path}`", "none" if each.role is None else f"`{each.role.word}`") for each in admin_paths(OPEN)
            ]
        },
    }


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with its tables."""
    for path, found in tables().items():
        text = path.read_text()
        for head, rows in found.items():
            before, found_head, rest = text.partition(f"{head}\n")
            assert found_head, f"{path.name} has no table {head}"
            line, _, behind = rest.partition("\n")
            behind = behind[behind.index("\n\n") :] if not behind.startswith("\n") else behind
            text = "".join([before, found_head, f"{line}\n", "\n".join(rows), behind])
        yield path, text


def _needs(operation: Operation) -> tuple[str, str]:
    if operation.never:
        return "nobody may do this", ""
    return _words(operation.needs), _words((operation.new or frozenset()) - operation.needs)


def _words(permissions: Iterable[Permission]) -> str:
    wanted = frozenset(permissions)
    return ", ".join(f"`{each.value}`" for each in Permission if each in wanted)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells).replace("|  |", "| |") + " |" if cells[-1] else "| " + " | ".join(cells[:-1]) + " | |"


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text)
