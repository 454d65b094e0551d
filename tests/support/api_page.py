"""The pages of the admin server's paths, made from its OpenAPI document: docs/reference/admin-api.md and docs/reference/openapi.json.

    python -m tests.support.api_page        # writes the pages

``tests/unit/server/test_openapi.py`` compares the pages with the document, and the document with the answers of a broker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from bascule.config import Settings
from bascule.core.masking import PropertyMask
from bascule.server.admin import AdministeredBroker, admin_pages
from bascule.server.admin_access import OPEN
from bascule.server.admin_app import AdminPage
from bascule.server.audit import NO_AUDIT
from bascule.server.brokers import BrokerPages
from bascule.server.console_sessions import ConsoleSessions
from bascule.server.openapi import document
from bascule.server.pipelines import PipelinePages, PipelineTopics
from bascule.server.reload import SettingsReload
from bascule.server.reload_pages import ReloadPages
from tests.support.flow_ends import NO_FLOW_ENDS

REFERENCE: Final = Path(__file__).parents[2] / "docs" / "reference"
PAGE: Final = REFERENCE / "admin-api.md"
FILE: Final = REFERENCE / "openapi.json"
HEAD: Final = """# The admin server over HTTP

This page lists the requests that the admin server of a broker answers. A running broker describes them at `GET /openapi.json` in the form
of [OpenAPI 3.1](https://spec.openapis.org/oas/v3.1.0): parameters, bodies, the schema of each answer, errors, and the role that each
request needs. The same document is [openapi.json](openapi.json). A generator can make a client from it.

    $ curl -s http://127.0.0.1:8672/openapi.json | jq '.paths | keys'

The broker makes the document from the table by which it routes requests. `python -m tests.support.api_page` writes this page and the
file, and `tests/unit/server/test_openapi.py` calls every request at a broker and compares each answer with its schema.

- **Who may send a request.** [Roles and credentials](../guides/operations.md#decide-who-may-use-the-admin-server). A role may do what a
  lower role may do.
- **Arguments.** A request that changes something takes a JSON object of at most 64 KiB, with `Content-Length`. Unknown arguments are
  errors.
- **Commands.** The last column names the [command](cli.md) that does the same. The document has it as `x-bascule-command`.
- **Errors.** Each error has the body `{"error": "TEXT"}`. Besides the statuses in the tables, a request may get 400 (invalid input),
  401 (no valid credentials), 403 (no sufficient role, or a page of another site), 404 (unknown path), 405 (another method; `Allow` names
  the right ones), 411 (no `Content-Length`), 421 (unknown host name), 500 (see the log of the broker) and 503 (the broker does not serve).
- **HEAD.** Each path that answers GET answers HEAD.
"""
#: Tags of the document in the order of the page, and their titles; all others follow under their own names.
TITLES: Final = {
    "livez": "Health", "readyz": "Health", "active": "Health", "metrics": "Health", "openapi.json": "Health", "status": "The whole broker",
    "overview": "The whole broker", "flow": "The whole broker",
    "brokers": "The whole broker", "settings": "The whole broker", "permissions": "The whole broker",
    "config": "The whole broker", "definitions": "The whole broker", "list": "Parts of lists", "queues": "Queues", "messages": "Messages",
    "dead-letters": "Dead letters", "subscriptions": "Subscriptions", "connections": "Connections",
    "branches": "Branches of distributed transactions", "ingress": "Ingress topic", "diverts": "Diverts", "ingresses": "Ingresses",
    "redrive": "Dead letters of pipelines",
    "console": "Console",
}  # fmt: skip


#: Pages that are in the table and cannot answer.
PIPELINES: Final = PipelinePages(
    cast(PipelineTopics, None),
    Settings(),
    NO_AUDIT,
    lambda: 0,
    lambda: cast(Any, None),
    lambda: cast(Any, None),
    PropertyMask,
    NO_FLOW_ENDS,
)
RELOAD: Final = ReloadPages(cast(SettingsReload, None), NO_AUDIT)
BROKERS: Final = BrokerPages(list, "")


def all_pages() -> list[AdminPage]:
    """Return the table of a complete admin server. Its pages cannot answer."""
    return admin_pages(cast(AdministeredBroker, None), OPEN, ConsoleSessions(OPEN), (), PIPELINES, RELOAD, BROKERS)


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    found = document(all_pages())
    return {PAGE: "".join(_lines(found)), FILE: _spread(found, 3) + "\n"}


def _spread(value: Any, levels: int) -> str:
    """Return JSON with a line for each operation and each schema, so that a change shows where it is."""
    if not levels or not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_spread(each, levels - 1)}" for name, each in value.items()) + "\n}"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield HEAD
    sections: dict[str, list[str]] = {title: [] for title in TITLES.values()}
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            sections[TITLES[operation["tags"][0]]].append(_row(method, path, operation))
    for title, rows in sections.items():
        yield f"\n## {title}\n\n| request | role | action | parameters or arguments | errors | command |\n"
        yield "| --- | --- | --- | --- | --- | --- |\n"
        yield from rows


def _row(method: str, path: str, operation: dict[str, Any]) -> str:
    role = f"`{operation['security'][0]['basic'][0]}`" if operation["security"] else "none"
    names = [f"`{each['name']}`" for each in operation.get("parameters", ()) if each["in"] == "query"]
    if "requestBody" in operation:
        names += [f"`{name}`" for name in operation["requestBody"]["content"]["application/json"]["schema"]["properties"]]
    command = f"`{operation['x-bascule-command']}`" if "x-bascule-command" in operation else ""
    errors = [status for status in operation["responses"] if status in ("404", "409", "413")]
    return f"| `{method.upper()} {path}` | {role} | {operation['summary']} | {', '.join(names)} | {', '.join(errors)} | {command} |\n"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
