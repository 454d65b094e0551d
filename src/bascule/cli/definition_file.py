"""Files of definitions: what ``bascule export definitions`` writes, and what of it another broker does not have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bascule.core.errors import InvalidInput

if TYPE_CHECKING:
    from bascule.cli.admin import AdminApiClient

#: As bascule.server.definitions, which commands do not import.
DEFINITIONS_FORMAT: Final = "bascule-definitions"
#: The version that is written. Files of the first version have no pipelines.
DEFINITIONS_VERSION: Final = 2
VERSIONS_READ: Final = (1, 2)
KINDS_OF_DEFINITIONS: Final = ("queues", "subscriptions", "diverts", "ingresses")
#: What one definition of a kind is called.
ONE_OF: Final[Mapping[str, str]] = {"queues": "queue", "subscriptions": "subscription", "diverts": "divert", "ingresses": "ingress"}
#: The fields of a definition, with the values of those that may be missing.
QUEUE_FIELDS: Final[Mapping[str, Any]] = {"name": "", "auto_created": False, "user": ""}
SUBSCRIPTION_FIELDS: Final[Mapping[str, Any]] = {
    "name": "", "topic": "", "client_id": "", "selector": "", "no_local": False, "shared": False, "user": "",
}  # fmt: skip
PIPELINE_FIELDS: Final[Mapping[str, Any]] = {"name": "", "config": {}}
_TYPE_WORDS: Final[Mapping[type, str]] = {bool: "true or false", str: "a string", dict: "an object"}


class FilePipeline(NamedTuple):
    """A pipeline in a file: ``collection`` is the path of its kind, and ``where`` its place in the file."""

    collection: str
    name: str
    config: dict[str, Any]
    where: str

    @property
    def kind(self) -> str:
        """Return ``divert`` or ``ingress``."""
        return ONE_OF[self.collection]


@dataclass(frozen=True, slots=True)
class FileDefinitions:
    """All definitions of a file."""

    queues: list[dict[str, Any]]
    subscriptions: list[dict[str, Any]]
    pipelines: list[FilePipeline]


def read_definitions(file: Path) -> FileDefinitions:
    """Return the definitions in a file. Raises InvalidInput."""
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != DEFINITIONS_FORMAT:
        raise InvalidInput(f"{file} has no definitions; `bascule export definitions` writes such files (format {DEFINITIONS_FORMAT!r})")
    if found.get("version") not in VERSIONS_READ:
        read = " and ".join(map(str, VERSIONS_READ))
        raise InvalidInput(f"{file} has version {found.get('version')!r:.20}; this program reads versions {read}")
    pipelines = [
        FilePipeline(kind, each["name"], each["config"], f"{file}: {kind}[{place}]")
        for kind in ("diverts", "ingresses")
        for place, each in enumerate(_all(file, found, kind, PIPELINE_FIELDS))
    ]
    _check_once(pipelines)
    return FileDefinitions(
        _all(file, found, "queues", QUEUE_FIELDS), _all(file, found, "subscriptions", SUBSCRIPTION_FIELDS), pipelines
    )  # fmt: skip


def _all(file: Path, found: Mapping[str, Any], kind: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    value = found.get(kind, [])
    if not isinstance(value, list):
        raise InvalidInput(f"{file}: {kind} is not a list")
    return [_checked(f"{file}: {kind}[{place}]", each, fields) for place, each in enumerate(value)]


def _checked(where: str, given: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a definition with all fields. Raises InvalidInput."""
    if not isinstance(given, dict):
        raise InvalidInput(f"{where} is not an object")
    if unknown := [name for name in given if name not in fields]:
        raise InvalidInput(f"{where} has an unknown field {unknown[0]!r:.60}; known are {', '.join(fields)}")
    for name, default in fields.items():
        if type(given.get(name, default)) is not type(default):
            raise InvalidInput(f"{where}.{name} must be {_TYPE_WORDS[type(default)]}")
    if not given.get("name"):
        raise InvalidInput(f"{where} has no name")
    return {**fields, **given}


def _check_once(pipelines: Iterable[FilePipeline]) -> None:
    seen: dict[str, FilePipeline] = {}
    for each in pipelines:
        if (other := seen.setdefault(each.name, each)) is not each:
            raise InvalidInput(f"{each.where}: {other.kind} {each.name!r} is in the file already; names of pipelines are unique")


def missing_subscriptions(wanted: Iterable[dict[str, Any]], there: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the subscriptions that the broker does not have. Raises InvalidInput if it has one with another definition."""
    known = {(each["client_id"], each["name"]): each for each in there}
    missing = []
    for each in wanted:
        found = known.get((each["client_id"], each["name"]))
        if found is None:
            missing.append(each)
        elif differing := [name for name in SUBSCRIPTION_FIELDS if found[name] != each[name]]:
            what = f"subscription {each['name']!r} of client {each['client_id']!r}"
            raise _other(what, differing[0], found[differing[0]], each[differing[0]], "delete it first")
    return missing


def missing_pipelines(wanted: Iterable[FilePipeline], broker: AdminApiClient) -> list[FilePipeline]:
    """Return the pipelines that are not defined at a broker. Raises InvalidInput if one of the name is, in another way."""
    held = broker.look("definitions/pipelines")
    there = {each["name"]: (kind, each["config"]) for kind in ("diverts", "ingresses") for each in held[kind]}
    in_file = {each["name"]: each["kind"] for kind in ("diverts", "ingresses") for each in broker.look(kind) if each["origin"] == "file"}
    missing = []
    for each in wanted:
        settings = _settings_of(each)
        if each.name in in_file:
            raise InvalidInput(
                f"{each.where}: {in_file[each.name]} {each.name!r} is defined in the configuration file there. Nothing was created;"
                " remove the pipeline from this file or from the configuration, or leave all pipelines out with --no-pipelines"
            )
        if each.name not in there:
            missing.append(each)
            continue
        kind, config = there[each.name]
        if kind != each.collection:
            raise InvalidInput(f"{each.where}: {ONE_OF[kind]} {each.name!r} exists; names of pipelines are unique. Nothing was created")
        known = _settings_of(each._replace(config=config, where=f"{each.kind} {each.name!r} of the broker"))
        if differing := [name for name in settings if known.get(name) != settings[name]]:
            name = differing[0]
            raise _other(f"{each.kind} {each.name!r}", name, known.get(name), settings[name], f"change it (bascule {each.kind} change)")
    return missing


def _other(what: str, field: str, found: object, wanted: object, remedy: str) -> InvalidInput:
    return InvalidInput(
        f"{what} exists with another {field}: {found!r} instead of {wanted!r}. Nothing was created; {remedy}, or change the file"
    )


def _settings_of(pipeline: FilePipeline) -> dict[str, Any]:
    """Return all settings of a pipeline, so that a default counts as the same value that was given. Raises InvalidInput."""
    from pydantic import ValidationError

    from bascule.config.pipeline import Divert, Ingress

    model: type[Divert | Ingress] = Divert if pipeline.kind == "divert" else Ingress
    try:
        return model.model_validate({**pipeline.config, "name": pipeline.name}).model_dump(by_alias=True, mode="json")
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(map(str, first["loc"])) or "config"
        raise InvalidInput(f"{pipeline.where}: {setting}: {first['msg']}") from None
