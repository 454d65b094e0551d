"""Everything that the console can do can be done over HTTP: its requests are those of the OpenAPI document, and it can send no others.

``tests/unit/cli/test_every_request.py`` says the same of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import pytest

from bascule.server.console import ROOT, files
from bascule.server.operations import OPERATIONS

#: The module with all requests, and the only one that sends any.
REQUESTS: Final = "requests.js"
SENDER: Final = "api.js"
_REQUEST: Final = re.compile(r'^ +\w+: "([A-Z]+) (/[^"]*)",$', re.MULTILINE)
#: Ways of JavaScript to reach a server, and addresses of the admin server itself in HTML.
_WAYS: Final = re.compile(
    r"\bfetch\b|XMLHttpRequest|EventSource|WebSocket|sendBeacon|\bimport\(|serviceWorker|Worker\(|\.submit\(|window\.open"
    r"""|\b(?:href|src|action|formaction|data|poster)\b["']?\s*[:=]\s*["'`](?!#|app\.js|icon\.svg|style\.css)[^"'`]"""
    r"""|location(?:\.href)?\s*=[^=]|location\.(?:assign|replace)|["'`]/\w"""
)


def scripts() -> dict[str, str]:
    """Return the texts of the console's modules and of its page, by name."""
    found = {path.removeprefix(ROOT): content.decode() for path, (content, kind) in files().items() if not kind.startswith("image/")}
    return {name: text for name, text in found.items() if not name.endswith(".css")}


def requests_of(text: str) -> list[tuple[str, str]]:
    return _REQUEST.findall(text)


def flaws(found: Mapping[str, str]) -> Iterator[str]:
    """Yield what these scripts could ask a server that HTTP does not offer, or that a test does not see."""
    text = found[REQUESTS]
    listed = requests_of(text)
    for method, path in listed:
        if (method, path) not in OPERATIONS:
            yield f"{method} {path} is not in the OpenAPI document"
    tables = text.partition("const made")[2]
    if tables.count('"') != 2 * len(listed) or re.search(r"['`]", tables):
        yield f"{REQUESTS} has a request in a form that this test does not read"
    if len(set(listed)) != len(listed):
        yield f"{REQUESTS} has a request twice"
    if "export class" in text or re.search(r"export[^\n]*\bmade\b(?!\()", text):
        yield f"another module could make a request of its own with what {REQUESTS} exports"
    for name, script in found.items():
        if name not in (REQUESTS, SENDER):
            yield from (f"{name}: {way!r} reaches a server without {SENDER}" for way in _WAYS.findall(script))
    if found[SENDER].count("fetch(") != 1 or "isRequest(request)" not in found[SENDER]:
        yield f"{SENDER} sends something that {REQUESTS} may not have"


def test_every_request_of_the_console_is_an_operation_of_the_document() -> None:
    found = scripts()
    assert list(flaws(found)) == []
    assert len(requests_of(found[REQUESTS])) > 50


def test_console_uses_each_of_its_requests() -> None:
    found = scripts()
    others = "".join(text for name, text in found.items() if name != REQUESTS)
    tables = re.findall(r"export const (\w+) = (?:made|Object\.freeze)\(", found[REQUESTS])
    assert len(tables) > 8
    assert [name for name in tables if f"{name}." not in others and f"{name}[" not in others] == []


@pytest.mark.parametrize(
    ("name", "added"),
    [
        (REQUESTS, '\n  rename: "POST /queues/rename",\n'),
        (REQUESTS, '\n  rename: `POST /queues/${"rename"}`,\n'),
        (REQUESTS, "\n  rename: ['POST', \"/queues/rename\"].join(' '),\n"),
        (REQUESTS, "\nexport { made };\n"),
        (SENDER, '\nexport const rename = () => fetch("queues/rename");\n'),
        ("page-queue.js", '\nawait fetch("../queues/rename", { method: "POST" });\n'),
        ("page-queue.js", '\nnew EventSource("events");\n'),
        ("page-queue.js", '\nlocation.assign("events");\n'),
        ("page-queue.js", '\nh("a", { href: "../queues" });\n'),
        ("page-queue.js", '\nh("img", { src: `../queues` });\n'),
        ("page-queue.js", "\nconst path = '/queues/rename';\n"),
        ("", '<form action="queues/rename">'),
    ],
)  # fmt: skip
def test_added_request_is_found(name: str, added: str) -> None:
    found = scripts()
    assert list(flaws({**found, name: found[name] + added})) != []


def hidden(text: str) -> set[str]:
    """Return the imported names that a declaration further inside of a module hides."""
    imported = {
        name.rpartition(" as ")[2].strip()
        for group, alone in re.findall(r"^import (?:\{([^}]*)\}|(\w+)) from", text, re.MULTILINE)
        for name in (group or alone).split(",")
    }
    return {name for name in re.findall(r"\b(?:const|let|function)\s+(\w+)", text) if name in imported}


def test_no_declaration_hides_what_its_module_imports() -> None:
    text = 'import { act, may as can } from "./api.js";\nconst run = (verb) => { const can = 1; const may = act(verb); };'
    assert hidden(text) == {"can"}
    assert {name: found for name, text in scripts().items() if (found := hidden(text))} == {}
