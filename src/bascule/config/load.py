"""Sources of the settings (file, environment, flags; a later source overrides an earlier one), and errors that name the source."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from bascule.config.fields import Section, is_secret
from bascule.config.lines import Path, key_lines, line_of
from bascule.config.settings import Settings
from bascule.core.environment import ENVIRONMENT_PREFIX, Needs, needed
from bascule.core.errors import InvalidInput, Scope
from bascule.core.masking import MASK, without_login

#: Environment variable with the path of the file, used without the flag.
FILE_VARIABLE = "BASCULE_CONFIG"
#: Read if it exists and no other file is named.
DEFAULT_FILE = FilePath("bascule.toml")
#: Maximum characters of a value in an error.
SHOWN_MAX = 200
#: Reasons in the words of TOML, by the kind of Pydantic's error, whose own texts have the words of Python.
_TOML_REASONS = types.MappingProxyType(
    {
        "tuple_type": "must be an array, in square brackets",
        "model_type": "must be a table",
        "dict_type": "must be a table",
        "path_type": "must be a path, in quotes",
        "byte_size": "must be a number of bytes, such as 1048576 or '512 MiB'",
        "byte_size_unit": "must be a number of bytes, such as 1048576 or '512 MiB'",
    }
)
_SECRET_WORDS = ("password", "secret", "token")
ABSENT = object()


class ConfigError(InvalidInput):
    """Settings that cannot be used; the text has one paragraph for each error."""

    scope = Scope.PROCESS


class Value(NamedTuple):
    """The effective value of a setting, and its source."""

    key: str
    value: Any
    source: str


class _Layer(NamedTuple):
    """The settings of one source. ``lines`` are the line numbers in a file; ``blank``: the file has no text."""

    name: str
    values: dict[str, Any]
    lines: dict[Path, int]
    blank: bool = False

    def has(self, path: Path) -> bool:
        return at(self.values, path) is not ABSENT

    def place(self, path: Path) -> str:
        """Return this source, with the line or the variable that sets the value."""
        if self.name == "environment":
            keys = [str(part) for part in path]
            names = ["__".join([ENVIRONMENT_PREFIX + keys[0], *keys[1:end]]).upper().replace(".", "_") for end in range(len(keys), 0, -1)]
            return f"environment {next((name for name in names if name in os.environ), names[0])}"
        line = line_of(path, self.lines)
        return f"{self.name}:{line}" if line else self.name


@dataclass(frozen=True)
class Configuration:
    """The settings, and the values that each source set."""

    settings: Settings
    file: FilePath | None
    layers: tuple[_Layer, ...]

    def explain(self) -> list[Value]:
        """Return every setting with its value and source; secrets are masked."""
        return [Value(display_key(path, self.settings), value, self._source(path)) for path, value in _leaves(self.settings)]

    def overriding(self, *path: str, sources: int = 2) -> Any:
        """Return what the environment and the flags (``sources`` = 1: the flags alone) set at a path; None if they set nothing."""
        found = at(_tree(self.layers[-sources:]), path)
        return None if found is ABSENT else found

    @property
    def blank_file(self) -> bool:
        """Return whether there is a file without any text, not even a comment."""
        return any(layer.blank for layer in self.layers)

    @property
    def tree(self) -> dict[str, Any]:
        """Return the values of all sources, as given there."""
        return _tree(self.layers)

    def _source(self, path: Path) -> str:
        return next((layer.place(path) for layer in reversed(self.layers) if layer.has(path)), "default")


def masked_values(settings: Settings) -> list[tuple[str, str]]:
    """Return every setting with its value as a text; secrets are masked."""
    return [
        (display_key(path, settings), str(value) if not isinstance(value, tuple) else ", ".join(map(str, value)))
        for path, value in _leaves(settings)
    ]


def load(file: FilePath | None = None, *, flags: Mapping[str, Any] | None = None, needs: Needs | None = None) -> Configuration:
    """Read the settings.

    ``file`` is the file to read. If it is None, the function reads the file that ``BASCULE_CONFIG`` names, or ``bascule.toml`` if it
    exists. ``flags`` is a tree of the same shape as the file and overrides all other sources. Settings that are not in ``needs`` are
    neither checked nor read from files of secrets, and the result does not have them. Raises ConfigError with all errors.
    """
    if file is None and (named := os.environ.get(FILE_VARIABLE)):
        file = FilePath(named)
    if file is None:
        file = _default_file()
    layers = [_read_file(file)] if file else []
    layers += [_read_environment(), _Layer("flag", dict(flags or {}), {})]
    if needs is not None:
        layers = [layer._replace(values=needed(layer.values, needs)) for layer in layers]
    settings = settings_of(_tree(layers), layers)
    return Configuration(settings if needs is None else _restricted(settings, needs), file, tuple(layers))


def _default_file() -> FilePath | None:
    try:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    except OSError as error:  # the working directory cannot be searched; "no file" would mean the defaults
        raise ConfigError(f"{DEFAULT_FILE}: {error.strerror}") from error


def settings_of(tree: dict[str, Any], layers: Sequence[_Layer]) -> Settings:
    """Return the settings of a tree of values that come from ``layers``. Raises ConfigError with all errors."""
    try:
        return Settings(**tree)
    except ValidationError as error:
        paragraphs = sorted(_paragraphs(error, tree, layers), key=lambda paragraph: paragraph.line)
        raise ConfigError("\n".join(paragraph.text for paragraph in paragraphs)) from None


def settings_of_text(text: str, name: str) -> Settings:
    """Return the settings of the text of a file alone, without the environment. ``name`` is its name. Raises ConfigError."""
    layer = _layer_of_text(text, name)
    return settings_of(layer.values, [layer])


def _layer_of_text(text: str, name: str) -> _Layer:
    try:
        return _Layer(name, tomllib.loads(text), key_lines(text), not text.strip())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{name}: arrays or tables are nested too deeply") from None


def settings_from(tree: dict[str, Any], source: str) -> Settings:
    """Return the settings of a tree of values from one source, which the errors name. Raises ConfigError with all errors."""
    return settings_of(tree, [_Layer(source, tree, {})])


def _tree(layers: Sequence[_Layer]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for layer in layers:
        tree = _merged(tree, layer.values)
    return tree


def _restricted(settings: Settings, needs: Needs) -> Settings:
    """Return the settings with nothing but ``needs``: a program that reads another one fails, and does not get its default."""
    result = settings.model_copy()
    for section in type(settings).model_fields:
        keys = needs.get(section, frozenset())
        if not keys and keys is not None:
            del result.__dict__[section]
        elif keys is not None:
            part = getattr(settings, section).model_copy()
            for key in type(part).model_fields.keys() - keys:
                del part.__dict__[key]
            result.__dict__[section] = part
    return result


def _read_file(file: FilePath) -> _Layer:
    try:
        return _layer_of_text(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 (byte {error.start})") from error


def _read_environment() -> _Layer:
    """Read ``BASCULE_SECTION__KEY``. Lists and tables are JSON. In ``kafka.client`` an underscore of a name stands for a dot."""
    for name in sorted(os.environ):
        section, nested, _ = name.upper().removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if name.upper().startswith(ENVIRONMENT_PREFIX) and nested and section not in Settings.model_fields:
            raise ConfigError(f"environment {name}: unknown section {section!r}{_nearest(section, list(Settings.model_fields))}")
    try:
        values = EnvSettingsSource(Settings)()
    except SettingsError as error:
        raise ConfigError(f"environment: {error}: a list or table must be given as JSON") from error
    client = values.get("kafka", {}).get("client")
    if isinstance(client, dict):
        values["kafka"]["client"] = {key.replace("_", "."): value for key, value in client.items()}
    return _Layer("environment", values, {})


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees: tables key by key; any other value replaces."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


class _Paragraph(NamedTuple):
    """One error; ``line`` is the line in the file, or 0."""

    line: int
    text: str


def _paragraphs(error: ValidationError, merged: Mapping[str, Any], layers: Sequence[_Layer]) -> Iterator[_Paragraph]:
    """Return one paragraph for each error: source, key, value, reason."""
    for found in error.errors(include_url=False):
        context = found.get("ctx", {})
        path: Path = context["path"] if found["type"] == "setting" else found["loc"]
        # Pydantic appends branch names of unions; the key ends where the given tree does.
        while path and found["type"] != "missing" and not any(layer.has(path) for layer in layers):
            path = path[:-1]
        layer = next((layer for layer in reversed(layers) if layer.has(path)), None)
        if found["type"] == "missing":
            layer = next((layer for layer in reversed(layers) if layer.has(path[:-1])), None)
        place = layer.place(path) if layer and path else "settings"
        what = _what(found["type"], found["msg"], path, context)
        value = "" if found["type"] == "extra_forbidden" else _shown(path, merged)  # a mistyped key may hold a secret
        first, *more = what.splitlines()
        text = "\n".join([f"{place}: {display_key(path, merged)}{value}: {first}", *("    " + line for line in more)])
        yield _Paragraph(line_of(path, layer.lines) or 0 if layer else 0, text)


def _what(kind: str, message: str, path: Path, context: Mapping[str, Any]) -> str:
    match kind:
        case "extra_forbidden":
            return "unknown setting" + _nearest(str(path[-1]), _known_keys(path[:-1]))
        case "missing":
            return "must be given"
        case "value_error":
            return str(context["error"])
        case "tuple_type" if _is_array_of_tables(path):
            return f"must be an array of tables: write [[{path[0]}]]"
        case _:
            return _TOML_REASONS.get(kind) or message.removeprefix("Input ")


def _is_array_of_tables(path: Path) -> bool:
    return len(path) == 1 and bool(models_in(Settings.model_fields[str(path[0])].annotation))


def _nearest(wrong: str, known: list[str]) -> str:
    close = difflib.get_close_matches(wrong.lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _known_keys(path: Path) -> list[str]:
    """Return the keys that the table at ``path`` may have."""
    model: type[BaseModel] = Settings
    for part in path:
        if isinstance(part, str):
            field = next(field for name, field in model.model_fields.items() if part in (name, field.alias))
            model = next(iter(models_in(field.annotation)))
    return [field.alias or name for name, field in model.model_fields.items()]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the table that the type of a setting names, alone or in an array; nothing for a value."""
    return [
        each for each in (annotation, *get_args(annotation))
        if isinstance(each, type) and not isinstance(each, types.GenericAlias) and issubclass(each, BaseModel)
    ]  # fmt: skip


def _shown(path: Path, tree: object) -> str:
    """Return `` = value`` as the user gave it, short and without secrets; "" for a table."""
    value = at(tree, path)
    if value is ABSENT or isinstance(value, dict):
        return ""
    if _secret(path):
        return f" = {MASK}"
    if isinstance(value, str):
        value = without_login(value)
    text = json.dumps(value, default=str, ensure_ascii=False)
    return f" = {text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + '...'}"


def _secret(path: Path) -> bool:
    """Return whether a value must not be shown: also one at the wrong place, and one with a misspelt key."""
    if path[:2] == ("broker", "users") or path in {("kafka", "client"), ("pipelines", "spark")}:
        return True
    words = [word for part in path if isinstance(part, str) for word in (part, *part.lower().split("_"))]
    return any(is_secret(word) or difflib.get_close_matches(word, _SECRET_WORDS, n=1, cutoff=0.75) for word in words)


def display_key(path: Path, tree: object) -> str:
    """Return a path as users write it: ``broker.port``, ``divert["delayed"].selector``. Tables without a name are counted from 1."""
    shown = ""
    for position, part in enumerate(path):
        tree = at(tree, (part,))
        if isinstance(part, int):
            name = next((at(tree, (key,)) for key in ("name", "match") if isinstance(at(tree, (key,)), str)), None)
            shown += f'["{name}"]' if name is not None and position == 1 else f"[{part + 1}]"
        else:
            key = part if part.replace("_", "").replace("-", "").isalnum() else f'"{part}"'
            shown += f".{key}" if shown else key
    return shown


def at(tree: object, path: Path) -> object:
    """Return the value at a path of a tree of tables, lists and models, or ``ABSENT``."""
    for part in path:
        if isinstance(tree, dict):
            tree = tree.get(part, ABSENT)
        elif isinstance(tree, list | tuple):
            tree = tree[part] if isinstance(part, int) and part < len(tree) else ABSENT
        else:
            tree = getattr(tree, str(part), ABSENT)
    return tree


def _leaves(settings: Settings) -> Iterator[tuple[Path, Any]]:
    """Yield every value of the settings, with secrets masked."""
    return ((path, shown_value(path, value)) for path, value in leaves(settings))


def shown_value(path: Path, value: object) -> Any:
    """Return the value of a setting, or a mask if it is a secret. A URL is shown without its user and password."""
    if isinstance(value, SecretStr) or _secret(path):
        return MASK
    return without_login(value) if isinstance(value, str) else value


def leaves(node: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value of the tree, table by table for arrays; an empty table or list counts as a value."""
    if isinstance(node, BaseModel):
        only_given = isinstance(node, Section) and node.shows_only_given
        for name, field in type(node).model_fields.items():
            if name not in node.__dict__ or (only_given and name not in node.model_fields_set):
                continue  # a process has only the settings that it needs
            yield from leaves(getattr(node, name), (*path, field.alias or name))
    elif isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    elif isinstance(node, tuple) and node and isinstance(node[0], BaseModel):
        for position, each in enumerate(node):
            yield from leaves(each, (*path, position))
    else:
        yield path, node
