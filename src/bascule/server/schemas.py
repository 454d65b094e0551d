"""JSON schemas (draft 2020-12, as OpenAPI 3.1 uses it) of the types of answers."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any, Final, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

Schema = dict[str, Any]

_PLAIN: Final[Mapping[object, str]] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
#: Where a document has its schemas.
_COMPONENTS: Final = "#/components/schemas/"


class SchemaCollection:
    """The schemas of types. Each TypedDict gets a schema with a name, to which others refer."""

    def __init__(self) -> None:
        self.named: dict[str, Schema] = {}

    def of(self, type_: Any) -> Schema:
        """Return the schema of a type. Raises TypeError for a type that answers do not use."""
        if type_ in _PLAIN:
            return {"type": _PLAIN[type_]}
        if type_ is Any:
            return {}
        if is_typeddict(type_):
            return self._referred(type_)
        origin, arguments = get_origin(type_), get_args(type_)
        if origin is NotRequired:
            return self.of(arguments[0])
        if origin is list:
            return {"type": "array", "items": self.of(arguments[0])}
        if origin is dict and arguments[0] is str:
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if origin in (Union, types.UnionType):
            return self._one_of(arguments)
        raise TypeError(f"no schema for the type {type_!r}")

    def _one_of(self, types_: tuple[Any, ...]) -> Schema:
        schemas = [self.of(each) for each in types_]
        if all(set(each) == {"type"} for each in schemas):
            return {"type": [each["type"] for each in schemas]}
        return {"anyOf": schemas}

    def _referred(self, type_: Any) -> Schema:
        name = type_.__name__
        if name not in self.named:
            self.named[name] = {}  # a type may contain itself
            hints = get_type_hints(type_, include_extras=True)
            required = sorted(field for field, hint in hints.items() if get_origin(hint) is not NotRequired)
            self.named[name] = {
                "type": "object",
                "description": inspect.cleandoc(type_.__doc__ or ""),
                "properties": {field: self.of(hint) for field, hint in hints.items()},
                "required": required,
                "additionalProperties": False,
            }
        return {"$ref": f"{_COMPONENTS}{name}"}
