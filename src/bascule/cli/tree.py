"""The tree of commands. A process builds only the commands that it needs, since all of them take longer than most commands run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_command_name, get_group
from typer.models import CommandInfo, TyperInfo


class CommandGroup(TyperGroup):
    """A group that knows the names of its commands before they are built."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names in the order of the registration."""
        return list(self.commands)


class CommandsOnDemand(MutableMapping[str, Any]):
    """Commands of a group by name, each of which is built when it is first asked for."""

    def __init__(self, builders: dict[str, Callable[[], Any]]) -> None:
        self._builders = builders
        self._built: dict[str, Any] = {}

    def built(self) -> set[str]:
        """Return the names of the commands that are built."""
        return set(self._built)

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = self._builders[name]()
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._builders[name] = lambda: command
        self._built.pop(name, None)

    def __delitem__(self, name: str) -> None:
        del self._builders[name]
        self._built.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)

    def __contains__(self, name: object) -> bool:
        return name in self._builders


def command_tree(app: typer.Typer) -> CommandGroup:
    """Return the same command as ``typer.main.get_command``, whose commands and groups are built when they are first asked for."""
    root = _without_commands(app)
    root.info = copy.copy(app.info)
    root.info.cls = CommandGroup
    group: Any = get_command(root)
    group.commands = _commands(app, app)
    return cast(CommandGroup, group)


def _without_commands(app: typer.Typer) -> typer.Typer:
    copied = copy.copy(app)
    copied.registered_commands, copied.registered_groups = [], []
    return copied


def _commands(app: typer.Typer, root: typer.Typer) -> CommandsOnDemand:
    builders: dict[str, Callable[[], Any]] = {}
    for command in app.registered_commands:
        callback: Any = command.callback
        builders[command.name or get_command_name(callback.__name__)] = partial(_command, command, root)
    for group in app.registered_groups:
        builders[str(group.name)] = partial(_group, group, root)
    return CommandsOnDemand(builders)


def _command(info: CommandInfo, root: typer.Typer) -> Any:
    parent = _without_commands(root)
    parent.registered_callback = None
    parent.registered_commands = [info]
    return _only_command(parent)


def _group(info: TyperInfo, root: typer.Typer) -> Any:
    app: Any = info.typer_instance
    named = copy.copy(info)
    named.typer_instance = _without_commands(app)
    named.cls = CommandGroup
    parent = _without_commands(root)
    parent.registered_callback = None
    parent.registered_groups = [named]
    group = _only_command(parent)
    group.commands = _commands(app, root)
    return group


def _only_command(parent: typer.Typer) -> Any:
    (command,) = get_group(parent).commands.values()
    return command
