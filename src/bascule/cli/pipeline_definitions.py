"""The commands ``create``, ``change`` and ``delete`` of ``divert`` and ``ingress``: define a pipeline at run time."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from bascule.cli.admin import AdminApiClient, AdminOption
from bascule.cli.completed_names import pipeline_names
from bascule.cli.config import ConfigOption
from bascule.cli.confirmation import YesOption, ask_first
from bascule.cli.output import Format, FormatOption, note, show_result
from bascule.core.errors import InvalidInput

#: Interval, in seconds, at which a command looks whether the driver has followed.
LOOK_S: Final = 0.5
WAIT_S: Final = 30.0
#: Settings that are lists: their values are separated by commas.
LISTS: Final = ("topics",)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the pipeline", autocompletion=pipeline_names)]
NewName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new pipeline")]
SettingsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="SETTING=VALUE", help="Settings of the pipeline, as in the configuration file", show_default=False),
]
FileOption = Annotated[
    Path | None,
    typer.Option("--file", help="Read the settings from this TOML file (keys without a table)", show_default=False, dir_okay=False),
]
UnsetOption = Annotated[list[str] | None, typer.Option("--unset", help="Set a setting to its default; may be repeated", show_default=False)]
WaitOption = Annotated[
    float, typer.Option("--wait-s", min=0, help="Wait at most this time in seconds until the driver has done it; 0 = do not wait")
]

#: What a command says if the driver has not followed in time, by the state of the pipeline in which no driver has begun it.
_NOT_FOLLOWED: Final = {
    "unassigned": "stored, but no driver has begun it within {:g} s; it begins when a driver runs. Start the pipelines",
    "waiting for coverage": "stored, but no active broker has confirmed within {:g} s that its journal covers it; a driver begins it then",
}

#: What the deletion of a pipeline means, by kind.
_DELETED: Final = {
    "divert": "divert {!r} stops and loses its position; messages that only this divert has and that it has not carried will be lost",
    "ingress": "ingress {!r} stops and loses its positions; records that it has not carried stay in their topics",
}

#: Adds a command: name, function, help, and the example of its help.
Add = Callable[[str, Callable[..., None], str, str], None]


#: What the help of the commands says, by kind and command.
_TEXTS: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("ingress", "create"): (
        "Create an ingress at run time. It begins where its setting `start` says.",
        "ingress create stock topics=stock,prices to=queue://stock",
    ),
    ("ingress", "change"): (
        "Change settings of an ingress that was created at run time. It continues at its positions.", "ingress change stock body=bytes",
    ),
    ("ingress", "delete"): (
        "Delete an ingress that was created at run time, with its positions. Messages that it has carried stay.", "ingress delete stock",
    ),
    ("divert", "create"): (
        "Create a divert at run time. It carries the messages that are sent after this command has answered.",
        'divert create late from=flights selector="dep_delay > 30" to=kafka.late',
    ),
    ("divert", "change"): (
        "Change settings of a divert that was created at run time. It continues at its position.", "divert change late key=none",
    ),
    ("divert", "delete"): (
        "Delete a divert that was created at run time, with its position. Records that it has written stay.", "divert delete late",
    ),
}  # fmt: skip


def add_definition_commands(add: Add, kind: str, path: Callable[..., str]) -> None:
    """Add the commands of this module for a kind of pipelines. ``path`` returns the path of a page about a pipeline."""
    for verb, make in (("create", _create_command), ("change", _change_command), ("delete", _delete_command)):
        text, example = _TEXTS[kind, verb]
        add(verb, make(kind, path), text, example)


def _create_command(kind: str, path: Callable[..., str]) -> Callable[..., None]:
    def command(
        name: NewName, settings: SettingsArgument = None, file: FileOption = None, wait_s: WaitOption = WAIT_S,
        config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE,
    ) -> None:  # fmt: skip
        client = AdminApiClient(admin, config)
        answer = client.send("POST", path(kind), name=name, config=_given(settings, file))
        answer["state"] = _awaited(partial(client.look, path(kind, name, "status")), answer["revision"], wait_s)
        show_result(answer, output)

    return command


def _change_command(kind: str, path: Callable[..., str]) -> Callable[..., None]:
    def command(
        name: Name, settings: SettingsArgument = None, file: FileOption = None, unset: UnsetOption = None, wait_s: WaitOption = WAIT_S,
        config: ConfigOption = None, admin: AdminOption = None, output: FormatOption = Format.TABLE,
    ) -> None:  # fmt: skip
        client = AdminApiClient(admin, config)
        found = client.look(path(kind, name))
        wanted = {**(found["config"] or {}), **_given(settings, file)}
        for key in unset or ():
            wanted.pop(key, None)
        # The broker refuses the change if somebody has changed the pipeline since, and if it is defined in the file.
        answer = client.send("PUT", f"{path(kind, name, 'config')}?revision={found['revision'] or 0}", **wanted)
        answer["state"] = _awaited(partial(client.look, path(kind, name, "status")), answer["revision"], wait_s)
        show_result(answer, output)

    return command


def _delete_command(kind: str, path: Callable[..., str]) -> Callable[..., None]:
    def command(
        name: Name, yes: YesOption = False, wait_s: WaitOption = WAIT_S, config: ConfigOption = None, admin: AdminOption = None,
        output: FormatOption = Format.TABLE,
    ) -> None:  # fmt: skip
        client = AdminApiClient(admin, config)
        ask_first(_DELETED[kind].format(name), "Delete it?", yes=yes)
        answer = client.send("DELETE", path(kind, name))
        deadline_s = time.monotonic() + wait_s
        while wait_s and any(each["name"] == name for each in client.look(path(kind))):
            if time.monotonic() > deadline_s:
                note(f"no driver has deleted it within {wait_s:g} s; a driver deletes it when it runs. If one runs, see its log")
                raise typer.Exit(1)
            time.sleep(LOOK_S)
        show_result(answer, output)

    return command


def _given(settings: Sequence[str] | None, file: Path | None) -> dict[str, Any]:
    """Return the settings of a command line, which override those of a file. Raises InvalidInput."""
    given = _read(file) if file is not None else {}
    for each in settings or ():
        key, separator, value = each.partition("=")
        if not separator:
            raise InvalidInput(f"{each!r:.60} must be SETTING=VALUE")
        given[key] = [item for item in value.split(",") if item] if key in LISTS else _value(value)
    return given


def _value(text: str) -> Any:
    """Return a number or a truth value as TOML writes it; everything else is a text."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


def _read(file: Path) -> dict[str, Any]:
    try:
        # A TOML file may have times, and JSON has none.
        found: dict[str, Any] = json.loads(
            json.dumps(tomllib.loads(file.read_text(encoding="utf-8")), default=lambda moment: moment.isoformat())
        )
        return found
    except RecursionError:
        raise InvalidInput(f"{file}: arrays or tables are nested too deeply") from None
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{file}: not valid TOML: {error}") from error


def _awaited(status: Callable[[], dict[str, Any]], revision: int, wait_s: float) -> str:
    """Return the state once the driver uses a revision. Exits with 1 if it does not in time, or if the pipeline has failed."""
    deadline_s = time.monotonic() + wait_s
    while (found := status())["reported_revision"] != revision or found["state"] == "restarting":
        if wait_s == 0:
            break
        if time.monotonic() > deadline_s:
            note(_NOT_FOLLOWED.get(found["state"], "stored, but the driver has not followed within {:g} s. See its log").format(wait_s))
            raise typer.Exit(1)
        time.sleep(LOOK_S)
    # A pipeline that an administrator has stopped has no error; one whose user may not consume is stopped with the reason.
    if found["reported_revision"] == revision and (found["state"] == "failed" or (found["state"] == "stopped" and found["error"])):
        note(f"{found['state']}: {found['error']}")
        raise typer.Exit(1)
    return str(found["state"])
