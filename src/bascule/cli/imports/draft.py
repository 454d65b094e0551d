"""The settings that an import makes. Each value is checked by the product's own settings before it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from bascule.config.address import Address, QueueDefinition, TopicDefinition
from bascule.config.limit import Limit
from bascule.config.permission import PermissionRule
from bascule.config.pipeline import Divert, Ingress
from bascule.config.settings import Settings

#: Tables, in the order of the written file.
_SECTIONS: Final = ("bridge", "broker", "journal", "kafka", "admin")
_ARRAYS: Final = ("address", "queue", "topic", "permission", "limit", "divert", "ingress")
_MODELS: Final[Mapping[str, type[BaseModel]]] = {
    "address": Address,
    "queue": QueueDefinition,
    "topic": TopicDefinition,
    "permission": PermissionRule,
    "limit": Limit,
    "divert": Divert,
    "ingress": Ingress,
}
#: The key that names a table of an array; no two tables have the same.
_NAMES: Final = {"address": "match", "permission": "match", "queue": "name", "topic": "name", "divert": "name", "ingress": "name"}


class SettingsDraft:
    """Tables of settings. Every method that sets something raises ValueError with the reason if the settings refuse it."""

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
        self._arrays: dict[str, list[dict[str, Any]]] = {name: [] for name in _ARRAYS}
        self._named: dict[tuple[str, str], dict[str, Any]] = {}

    @property
    def tree(self) -> dict[str, Any]:
        """Return the settings as a tree in the shape of the file, without tables that set nothing."""
        sections = {name: table for name, table in self._sections.items() if table}
        arrays = {name: [row for row in rows if name != "address" or len(row) > 1] for name, rows in self._arrays.items()}
        return {**sections, **{name: rows for name, rows in arrays.items() if rows}}

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the values of a table."""
        return self._sections[name]

    def tables(self, name: str) -> Iterable[Mapping[str, Any]]:
        """Return the tables of an array."""
        return self._arrays[name]

    def set(self, section: str, key: str, value: Any) -> None:
        """Set a value of a table. Raises ValueError."""
        _checked(type(Settings.model_fields[section].get_default()), {key: value})
        self._sections[section][key] = value

    def set_unchecked(self, section: str, values: Mapping[str, Any]) -> None:
        """Set values of a table that are valid only together; the check of the complete settings includes them."""
        self._sections[section].update(values)

    def add(self, array: str, table: Mapping[str, Any]) -> None:
        """Add a table to an array. Raises ValueError, also if a table has the same name."""
        _checked(_MODELS[array], table)
        added = dict(table)
        if (identity := _NAMES.get(array)) is not None:
            if self.has(array, table[identity]):
                raise ValueError(f"{table[identity]!r} is given twice")
            self._named[array, table[identity]] = added
        self._arrays[array].append(added)

    def merge(self, array: str, name: str, key: str, value: Any) -> None:
        """Set a value in the table of an array with this name, which is added if there is none. Raises ValueError."""
        identity = _NAMES[array]
        table = {**self._named.get((array, name), {identity: name}), key: value}
        _checked(_MODELS[array], table)
        if not self.has(array, name):
            self.add(array, {identity: name})
        self._named[array, name][key] = value

    def table(self, array: str, name: str) -> Mapping[str, Any]:
        """Return the table of an array with this name. Raises KeyError."""
        return self._named[array, name]

    def has(self, array: str, name: str) -> bool:
        """Return whether an array has a table with this name."""
        return (array, name) in self._named


def _checked(model: type[BaseModel], table: Mapping[str, Any]) -> None:
    try:
        model(**table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        where = ".".join(str(part) for part in first["loc"])
        reason = str(cause).splitlines()[0] if cause is not None else first["msg"].removeprefix("Input ")
        raise ValueError(f"{where}: {reason}" if where else reason) from None
