"""The tables of docs/reference/configuration.md agree with the models. REWRITE=1 rewrites the tables."""

from __future__ import annotations

import json
import os
import re
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo

from bascule.config.address import Address, AddressSettings, QueueDefinition, TopicDefinition
from bascule.config.fields import Section
from bascule.config.limit import Limit
from bascule.config.oidc import Oidc
from bascule.config.openlineage import OpenLineage
from bascule.config.permission import PermissionRule
from bascule.config.pipeline import Divert, Ingress
from bascule.config.reload_effect import ReloadEffect
from bascule.config.settings import MIB, Broker, Settings
from bascule.config.tls import BrokerTls, Tls
from bascule.config.websocket import WebSocketListener

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"
SECTIONS: dict[str, type[BaseModel]] = {
    **{name: field.annotation for name, field in Settings.model_fields.items() if isinstance(field.annotation, type)},
    "broker.tls": BrokerTls,
    "broker.oidc": Oidc,
    "broker.websocket": WebSocketListener,
    "admin.tls": Tls,
    "pipelines.openlineage": OpenLineage,
    "[address]": Address,
    "[permission]": PermissionRule,
    "[limit]": Limit,
    "[queue]": QueueDefinition,
    "[topic]": TopicDefinition,
    "[divert]": Divert,
    "[ingress]": Ingress,
}
NAMES = {str: "text", Path: "path", int: "number", float: "number", bool: "true or false", ByteSize: "size", SecretStr: "text"}


def type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in arguments)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (UnionType, Union):
        return type_name(next(each for each in reversed(arguments) if each is not NoneType))
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "table"
    return NAMES[annotation]


def default_of(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "*must be given*"
    if value is None:
        return "unset"
    if isinstance(value, ByteSize):
        return f'`"{value // MIB} MiB"`' if value else "`0`"
    return f"`{json.dumps(value, default=str)}`"


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that the table of ``model`` lists, in the order of the page.

    The settings of an address follow its pattern; the table of the broker omits them. A nested section has its own table.
    """
    fields = {name: field for name, field in model.model_fields.items() if not is_section(field.annotation)}
    if model is Broker:
        return {name: field for name, field in fields.items() if name not in AddressSettings.model_fields}
    return {"match": fields.pop("match"), **fields} if model is Address else fields


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def table_of(model: type[BaseModel]) -> str:
    rows = ["| key | type | default | reload | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, field in fields_of(model).items():
        (effect,) = (each for each in field.metadata if isinstance(each, ReloadEffect))
        cells = (f"`{field.alias or name}`", type_name(field.annotation), default_of(field), effect.value, str(field.description))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def test_reference_page_lists_each_setting_with_type_default_and_meaning() -> None:
    page = PAGE.read_text()
    for name, model in SECTIONS.items():
        heading = re.escape(f"## `[{name}]`\n\n") + r"(?:[^|#\n].*\n)*\n?"  # a description of the section may follow
        page, found = re.subn(rf"({heading})(?:\|.*\n)*\n?", lambda match, model=model: f"{match[1]}{table_of(model)}\n", page)  # type: ignore[misc]
        assert found, f"{PAGE} has no section for [{name}]"
    if os.environ.get("REWRITE"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run this test with REWRITE=1, and check the difference"


def test_every_setting_has_a_description() -> None:
    fields = {f"{name}.{key}": field for name, model in SECTIONS.items() for key, field in model.model_fields.items()}
    assert len(fields) > len(SECTIONS)
    assert [name for name, field in fields.items() if not field.description] == []


def test_settings_named_by_the_guarantees_page_exist() -> None:
    section = PAGE.parents[1].joinpath("guarantees.md").read_text().partition("## For which settings\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)\.(\w+)`", "".join(re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)))
    assert named
    models = {name.strip("[]"): model for name, model in SECTIONS.items()}
    assert [f"{name}.{key}" for name, key in named if key not in models[name].model_fields] == []
