"""Variables of the environment that set something, and which processes get them: they may hold secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ENVIRONMENT_PREFIX: Final = "BASCULE_"
#: The password of the user of a command.
PASSWORD_VARIABLE: Final = "BASCULE_PASSWORD"
#: The directory in which systemd gives a service its credentials.
CREDENTIALS_VARIABLE: Final = "CREDENTIALS_DIRECTORY"

#: Begin of the variables of the client of OpenLineage, one of which may have a key of the receiver.
_LINEAGE_PREFIX: Final = "OPENLINEAGE_"
#: Begin and end of the variables of OpenTelemetry in which a collector's password may be.
_TRACING_PREFIX: Final = "OTEL_"
_TRACING_SUFFIX: Final = "_HEADERS"

#: Sections, and the keys that a process needs of each; None = all keys.
Needs = Mapping[str, frozenset[str] | None]

#: The pipelines read nothing else. They get no users, tokens and keys of the broker, and need not be able to read their files.
PIPELINES_NEED: Final[Needs] = {
    "admin": frozenset({"masked_properties"}),
    "audit": frozenset({"topic"}),
    "bridge": None,
    "broker": frozenset({"max_message_bytes", "session_timeout_s", "validated_user"}),
    "journal": None,
    "kafka": None,
    "embedded": None,
    "pipelines": None,
    "log": None,
    "divert": None,
    "ingress": None,
}
#: Processes that are no part of Bascule need no setting.
NOTHING: Final[Needs] = {}


def inherited(environment: Mapping[str, str], needs: Needs) -> dict[str, str]:
    """Return the environment for a child process that needs these settings: without all others, and without passwords of commands.

    Only the pipelines get the variables of OpenLineage, and only processes of Bascule the headers of OpenTelemetry.
    """
    return {name: value for name, value in environment.items() if _passes(name, needs)}


def _passes(name: str, needs: Needs) -> bool:
    if is_of_lineage(name):
        return "pipelines" in needs
    upper = name.upper()
    if name == CREDENTIALS_VARIABLE or (upper.startswith(_TRACING_PREFIX) and upper.endswith(_TRACING_SUFFIX)):
        return bool(needs)
    return not is_setting(name) or _needed(name, needs)


def is_of_lineage(name: str) -> bool:
    """Return whether a variable is for the client of OpenLineage."""
    return name.upper().startswith(_LINEAGE_PREFIX)


def needed(values: Mapping[str, object], needs: Needs) -> dict[str, object]:
    """Return the part of a tree of settings that a process needs."""
    found: dict[str, object] = {}
    for section, value in values.items():
        keys = needs.get(section, frozenset())
        if keys is None or not isinstance(value, dict):
            found[section] = value
        elif keys:
            found[section] = {key: each for key, each in value.items() if key in keys}
    return {section: value for section, value in found.items() if section in needs}


def is_setting(name: str) -> bool:
    """Return whether a variable is a setting, ``BASCULE_SECTION__KEY``, or leads to secrets. Others say where programs and files are."""
    upper = name.upper()
    return (upper.startswith(ENVIRONMENT_PREFIX) and "__" in upper) or upper in (PASSWORD_VARIABLE, CREDENTIALS_VARIABLE)


def _needed(name: str, needs: Needs) -> bool:
    section, _, rest = name.upper().removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
    keys = needs.get(section, frozenset())
    return keys is None or rest.partition("__")[0] in keys
