"""What a new reading of the settings changes in a running process: what takes effect, and what needs a restart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bascule.config.lines import Path
from bascule.config.load import ABSENT, ConfigError, Configuration, at, display_key, leaves, models_in, settings_of, shown_value
from bascule.config.reload_effect import ReloadEffect
from bascule.config.settings import Settings
from bascule.core.log import get_log

log = get_log(__name__)

#: Shown in place of a value that is not set.
UNSET = "unset"


class ChangedSetting(NamedTuple):
    """A setting whose value has changed. Secrets are masked; None: not set."""

    key: str
    path: Path
    before: Any
    after: Any
    effect: ReloadEffect

    def __str__(self) -> str:
        """Return ``NAME (old -> new)``."""
        return f"{self.key} ({self.shown_before} -> {self.shown_after})"

    @property
    def shown_before(self) -> str:
        """Return the value before, for people."""
        return _text(self.before)

    @property
    def shown_after(self) -> str:
        """Return the new value, for people."""
        return _text(self.after)

    def as_object(self) -> dict[str, Any]:
        """Return the change for JSON."""
        return {"setting": self.key, "before": _plain(self.before), "after": _plain(self.after)}


class SettingsComparison(NamedTuple):
    """The settings that have changed, and the names of those that have not."""

    changes: tuple[ChangedSetting, ...]
    unchanged: tuple[str, ...]

    @property
    def applied(self) -> tuple[ChangedSetting, ...]:
        """Return the changes that a running process follows."""
        return tuple(each for each in self.changes if each.effect is not ReloadEffect.RESTART)

    @property
    def needs_restart(self) -> tuple[ChangedSetting, ...]:
        """Return the changes that a running process cannot follow."""
        return tuple(each for each in self.changes if each.effect is ReloadEffect.RESTART)

    def only(self, section: str) -> SettingsComparison:
        """Return the changes in one section."""
        return SettingsComparison(tuple(each for each in self.changes if each.path[0] == section), ())

    def as_object(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {
            "applied": [{**each.as_object(), "effect": each.effect.value} for each in self.applied],
            "needs_restart": [each.as_object() for each in self.needs_restart],
            "unchanged": list(self.unchanged),
        }


class ReloadPlan(NamedTuple):
    """What a reload does. ``configuration`` has the new values, except for settings that need a restart."""

    configuration: Configuration
    compared: SettingsComparison


def effect_of(path: Path) -> ReloadEffect:
    """Return when a change of the value at a path takes effect. A setting that does not state it needs a restart."""
    stated = [each for field in _fields_at(path) for each in field.metadata if isinstance(each, ReloadEffect)]
    return stated[-1] if stated else ReloadEffect.RESTART


def plan_reload(running: Configuration, given: Configuration) -> ReloadPlan:
    """Compare the settings of a process with new ones.

    Raises ConfigError if the file of the process is gone, or if the new settings contradict the settings that stay until a restart.
    """
    check_file(running, given)
    compared = compare(running.settings, given.settings)
    kept = {_unit(each.path) for each in compared.changes if each.effect is ReloadEffect.RESTART}
    configuration = _mixed(running, given, kept, compared.needs_restart) if kept else given
    return ReloadPlan(configuration, compared)


def check_file(running: Configuration, given: Configuration) -> None:
    """Check that the file of a process still exists and has a text, because otherwise the defaults would replace all its settings.

    An editor, or a tool that deploys files, may have removed or emptied the file for a moment. Raises ConfigError.
    """
    if running.file is not None and given.file is None:
        raise ConfigError(f"{running.file}: the file does not exist any more; restore it, or restart the process to use the defaults")
    if given.blank_file and not running.blank_file:
        raise ConfigError(f"{given.file}: the file is empty; restore it, or write a comment into it to use the defaults")


def compare(before: Settings, after: Settings, effect: Callable[[Path], ReloadEffect] = effect_of) -> SettingsComparison:
    """Return what has changed. ``effect`` returns when a change takes effect in this process."""
    old_values, new_values = _by_key(before), _by_key(after)
    changes: list[ChangedSetting] = []
    unchanged: list[str] = []
    for key in dict.fromkeys((*old_values, *new_values)):
        path = (new_values.get(key) or old_values[key])[0]
        old, new = (found[key][1] if key in found else _default(path) for found in (old_values, new_values))
        if old != new:
            changes.append(ChangedSetting(key, path, _shown(path, old), _shown(path, new), effect(path)))
        elif key in old_values and key in new_values:
            unchanged.append(key)
    return SettingsComparison(tuple(changes), tuple(unchanged))


def report(compared: SettingsComparison, by: str) -> None:
    """Log the result of a reload. ``by`` says who has asked for it."""
    for each in compared.needs_restart:
        log.warning("setting needs a restart", setting=each.key, before=each.shown_before, after=each.shown_after)
    for each in compared.applied:
        log.info("setting changed", setting=each.key, effect=each.effect.value, before=each.shown_before, after=each.shown_after)
    log.info("settings reloaded", by=by, applied=len(compared.applied), needs_restart=len(compared.needs_restart))


def _by_key(settings: Settings) -> dict[str, tuple[Path, Any]]:
    """Return path and value of each setting, by its name. Empty tables and arrays of tables have no settings."""
    return {
        display_key(path, settings): (path, value)
        for path, value in leaves(settings)
        if value != {} and not (value == () and len(path) == 1)
    }


def _mixed(running: Configuration, given: Configuration, kept: set[Path], needs_restart: tuple[ChangedSetting, ...]) -> Configuration:
    """Return the given settings with the running values of those that need a restart, checked as a whole."""
    tree = copy.deepcopy(given.tree)
    for path in kept:
        value, read = at(running.tree, path), at(running.settings, path)
        # A table may name files of secrets, which were read at the start and may not exist any more.
        _put(tree, path, read if isinstance(read, dict) and value is not ABSENT else value)
    try:
        settings = settings_of(tree, given.layers)
    except ConfigError as error:
        names = ", ".join(each.key for each in needs_restart)
        raise ConfigError(
            f"the settings are valid only after a restart, because of changed settings that need one ({names}):\n{error}"
        ) from None
    for path in _kept_fields(type(settings)):
        settings = _with(settings, path, at(running.settings, path))
    return replace(given, settings=settings, layers=(type(given.layers[0])("running", tree, {}), *given.layers[1:]))


def _kept_fields(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the settings that need a restart; an array of tables as a whole."""
    for name, field in model.model_fields.items():
        at_path = (*path, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _kept_fields(field.annotation, at_path)
        else:
            tables = models_in(field.annotation)
            keys: list[Path] = [(*at_path, 0, key) for key in tables[0].model_fields] if tables else [at_path]
            if all(effect_of(each) is ReloadEffect.RESTART for each in keys):
                yield at_path


def _with(model: Any, path: tuple[str, ...], value: object) -> Any:
    name, *rest = path
    if value is ABSENT:
        return model
    return model.model_copy(update={name: _with(getattr(model, name), tuple(rest), value) if rest else value})


def _put(tree: dict[str, Any], path: Path, value: object) -> None:
    """Set a value in a tree of tables, or remove it."""
    *tables, last = path
    for part in tables:
        tree = tree.setdefault(str(part), {})
    if value is ABSENT:
        tree.pop(str(last), None)
    else:
        tree[str(last)] = value


def _unit(path: Path) -> Path:
    """Return what is kept for a setting: a whole array of tables, or the setting without the key within its table of values."""
    model: type[BaseModel] = Settings
    for end, part in enumerate(path, 1):
        annotation = _field(model, part).annotation
        found = models_in(annotation)
        if not found or annotation is not found[0]:
            return path[:end]
        model = found[0]
    return path


def _fields_at(path: Path) -> Iterator[FieldInfo]:
    """Yield the fields on the way to a value, which may lie in a table with any keys."""
    model: type[BaseModel] = Settings
    for part in path:
        if isinstance(part, int):
            continue
        if part not in {each for name, field in model.model_fields.items() for each in (name, field.alias)}:
            return
        field = _field(model, part)
        yield field
        found = models_in(field.annotation)
        if not found:
            return
        model = found[0]


def _field(model: type[BaseModel], key: str | int) -> FieldInfo:
    return next(field for name, field in model.model_fields.items() if key in (name, field.alias))


def _default(path: Path) -> Any:
    """Return the value of a setting that is not there: its default in a table of an array, unless others decide there."""
    *_, field = _fields_at(path)
    if not any(isinstance(part, int) for part in path) or path[0] == "address" or field.default is PydanticUndefined:
        return None
    return field.default


def _shown(path: Path, value: Any) -> Any:
    return None if value is None else shown_value(path, value)


def _plain(value: Any) -> Any:
    """Return a value that JSON knows."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _text(value: Any) -> str:
    if value is None:
        return UNSET
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
