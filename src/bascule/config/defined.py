"""Pipelines that are defined at run time, checked by the classes and with the errors of those in the configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bascule.config.load import ConfigError, settings_from
from bascule.config.pipeline import Ingress
from bascule.config.settings import Settings
from bascule.core.errors import InvalidInput

#: Settings that a definition made at run time cannot have, and why.
REFUSED: Final = {
    "name": "the name is part of the request, and cannot be changed",
    "enabled": "create the pipeline, and stop it with the command stop",
}
#: Settings that cannot change, and why.
FIXED: Final = {"start": "a pipeline begins once. To move it, stop it, and move its position with the command offsets"}


def defined_ingress(name: str, given: Mapping[str, Any], settings: Settings) -> Ingress:
    """Return the ingress that ``given`` defines, beside those of the configuration file. Raises InvalidInput."""
    for key, reason in REFUSED.items():
        if key in given:
            raise InvalidInput(f"{key!r} cannot be given at run time: {reason}")
    tree = {
        "journal": {"prefix": settings.journal.prefix},
        "audit": {"topic": settings.audit.topic},
        "pipelines": {"dead_letter_topic": settings.pipelines.dead_letter_topic},
        "ingress": [{"name": name, **given}],
    }
    try:
        return settings_from(tree, "request").ingress[0]
    except ConfigError as error:
        raise InvalidInput(str(error)) from None


def check_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Check that a definition may become another one. Raises InvalidInput."""
    for key, reason in FIXED.items():
        default = Ingress.model_fields[key].default
        if before.get(key, default) != after.get(key, default):
            raise InvalidInput(f"{key!r} cannot be changed: {reason}")
