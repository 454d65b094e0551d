"""Pipelines that are defined at run time, checked by the classes and with the errors of those in the configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bascule.config.load import ConfigError, settings_from
from bascule.config.pipeline import Divert, Ingress
from bascule.config.settings import Settings
from bascule.core.errors import InvalidInput

#: Settings that a definition made at run time cannot have, and why.
REFUSED: Final = {
    "name": "the name is part of the request, and cannot be changed",
    "enabled": "create the pipeline, and stop it with the command stop",
}
#: Settings that cannot change, and why.
FIXED: Final = {"start": "a pipeline begins once. To move it, stop it, and move its position with the command offsets"}


#: Settings that a divert cannot have at run time, and why.
REFUSED_OF_DIVERTS: Final = {
    "exclusive": "the journal names the exclusive diverts where an epoch begins, which is at a start of the broker",
    "group": "a divert that is defined at run time is carried alone, because the task of a group would stop for it",
    "select": "a transformation is code that runs in the driver",
    "python": "a transformation is code that runs in the driver",
}
_CLASSES: Final[Mapping[str, type[Divert | Ingress]]] = {"divert": Divert, "ingress": Ingress}


def refused(kind: str) -> Mapping[str, str]:
    """Return the settings that a pipeline of a kind cannot have at run time, with the reasons."""
    return {**REFUSED, **(REFUSED_OF_DIVERTS if kind == "divert" else {})}


def default_of(kind: str, setting: str) -> Any:
    """Return the value of a setting that a definition of a pipeline leaves out; None if there is no such setting."""
    field = _CLASSES[kind].model_fields.get(setting)
    return None if field is None else field.default


def check_definition(kind: str, name: str, given: Mapping[str, Any], settings: Settings) -> None:
    """Check the settings ``given`` of a divert or an ingress, beside those of the configuration file. Raises InvalidInput."""
    for key, reason in REFUSED.items():
        if key in given:
            raise InvalidInput(f"{key!r} cannot be given at run time: {reason}")
    if kind == "divert":
        for key, reason in REFUSED_OF_DIVERTS.items():
            if given.get(key):
                raise InvalidInput(f"{key!r} cannot be given at run time: {reason}. Define the divert in the configuration file")
    tree = {
        "journal": {"prefix": settings.journal.prefix},
        "audit": {"topic": settings.audit.topic},
        "pipelines": {"dead_letter_topic": settings.pipelines.dead_letter_topic},
        kind: [{"name": name, **given}],
    }
    try:
        settings_from(tree, "request")
    except ConfigError as error:
        raise InvalidInput(str(error)) from None


def check_change(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Check that a definition may become another one. Raises InvalidInput."""
    for key, reason in FIXED.items():
        default = default_of(kind, key)
        if before.get(key, default) != after.get(key, default):
            raise InvalidInput(f"{key!r} cannot be changed: {reason}")
