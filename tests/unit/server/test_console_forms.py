"""The forms of the console in which pipelines are defined: they have all settings, and make the definitions that the server takes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from bascule.config.defined import FIXED, check_definition, refused
from bascule.config.pipeline import Divert, Ingress
from bascule.config.settings import Settings
from bascule.server.console import ROOT, files

MODULE: Final = "pipeline-fields.js"
KINDS: Final[dict[str, tuple[str, type[Divert | Ingress]]]] = {"diverts": ("divert", Divert), "ingresses": ("ingress", Ingress)}
#: Definitions with each setting that a form has.
DEFINITIONS: Final[dict[str, dict[str, Any]]] = {
    "diverts": {"from": "a", "selector": "b = 1", "to": "c", "key": "none", "from_kafka": False, "user": "ann", "start": "earliest"},
    "ingresses": {
        "topics": ["a", "b"], "to": "queue://q", "routing": "anycast", "body": "map", "reply_to": "r", "key_as": "none", "unbound": "keep",
        "keep_user_id": True, "user": "ann", "tasks": 3, "start": "latest",
    },
}  # fmt: skip
SCRIPT: Final = """
import { definitionOf, FIELDS, filled, FIRST } from "./fields.mjs";
const { collection, before } = JSON.parse(process.argv[2]);
const fields = FIELDS[collection];
const shown = filled(fields, before);
const same = Object.fromEntries(shown.map(({ name, value }) => [name, value]));
const empty = Object.fromEntries([...FIRST, ...fields].map(({ name }) => [name, " "]));
console.log(JSON.stringify({
  names: fields.map(({ name }) => name), first: FIRST.map(({ name }) => name),
  same: definitionOf(fields, same, before), changed: definitionOf(fields, { ...same, to: " other " }, before),
  empty: definitionOf(fields, empty, before), created: definitionOf([...FIRST, ...fields], { ...empty, ...same, name: "p" }),
}));
"""


def made(tmp_path: Path, collection: str, before: dict[str, Any]) -> dict[str, Any]:
    node = shutil.which("node")
    assert node is not None, "Node.js runs the scripts of the console"
    (tmp_path / "fields.mjs").write_bytes(files()[f"{ROOT}{MODULE}"][0])
    (tmp_path / "script.mjs").write_text(SCRIPT)
    given = json.dumps({"collection": collection, "before": before})
    run = subprocess.run([node, tmp_path / "script.mjs", given], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("collection", KINDS)
def test_form_of_a_definition_has_each_setting_and_changes_nothing_else(collection: str, tmp_path: Path) -> None:
    kind, model = KINDS[collection]
    before = {**DEFINITIONS[collection], "later": [1]}
    found = made(tmp_path, collection, before)
    settings = {field.alias or name for name, field in model.model_fields.items()} - refused(kind).keys() - FIXED.keys()
    assert set(found["names"]) == settings
    assert set(found["first"]) == {"name", *FIXED}
    assert found["same"] == before
    assert found["changed"] == {**before, "to": "other"}
    assert found["empty"] == {"later": [1], "start": before["start"]}
    assert found["created"] == {**{name: value for name, value in before.items() if name not in ("later", "start")}, "name": "p"}


@pytest.mark.parametrize("collection", KINDS)
def test_definition_of_a_form_is_accepted_by_the_server(collection: str, tmp_path: Path) -> None:
    found = made(tmp_path, collection, DEFINITIONS[collection])["same"]
    check_definition(KINDS[collection][0], "p", found, Settings.model_validate({"broker": {"users": {"ann": "x"}}}))
