"""Contexts: named brokers with their logins, in a file of the user. ``bascule context`` changes the file."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from bascule.core.errors import InvalidInput

#: Variable that names the context of a command. An empty value means no context.
CONTEXT_VARIABLE: Final = "BASCULE_CONTEXT"
#: Version of the file.
FORMAT: Final = 1
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ServerContext:
    """An admin server, the address of its broker for clients, and the login.

    ``token`` is a token in the clear, which the user has asked to store. ``broker`` is "" if no address is known: files of older versions
    have no such field.
    """

    url: str
    user: str = ""
    password_file: str = ""
    token_file: str = ""
    token: str = field(default="", repr=False)
    ca_file: str = ""
    broker: str = ""


@dataclass(frozen=True)
class ContextFile:
    """The content of the file: the contexts by name, and the name of the current context, "" for none."""

    current: str = ""
    contexts: Mapping[str, ServerContext] = field(default_factory=dict)

    def named(self, name: str) -> ServerContext:
        """Return a context. Raises InvalidInput."""
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none"
            raise InvalidInput(f"there is no context {name!r:.80}; known are: {known}")
        return self.contexts[name]

    def with_context(self, name: str, context: ServerContext) -> ContextFile:
        """Return the content with a new or changed context. Raises InvalidInput."""
        if not NAME.fullmatch(name):
            raise InvalidInput(
                f"context {name!r:.80}: a name must have 1 to 64 letters, digits, '.', '_' and '-', the first a letter or digit"
            )
        return replace(self, contexts={**self.contexts, name: context})

    def without(self, name: str) -> ContextFile:
        """Return the content without a context. Raises InvalidInput."""
        self.named(name)
        left = {each: context for each, context in self.contexts.items() if each != name}
        return ContextFile("" if self.current == name else self.current, left)


def contexts_path() -> Path:
    """Return the file of the contexts: ``contexts.json`` in the configuration directory of the user (XDG). Raises InvalidInput."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        return (Path(base) if base.startswith("/") else Path.home() / ".config") / "bascule" / "contexts.json"
    except RuntimeError:  # a user without an entry in /etc/passwd, as in some containers
        raise InvalidInput("the user of this process has no home directory; set HOME or XDG_CONFIG_HOME") from None


def read_contexts() -> ContextFile:
    """Return the content of the file; no contexts if it does not exist.

    Raises InvalidInput, also if another user could have written the file, or can read the tokens in it.
    """
    path = contexts_path()
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = json.loads(file.read())
    except FileNotFoundError:
        return ContextFile()
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: not valid JSON: {error}; correct or delete the file") from error
    try:
        if content["format"] != FORMAT:
            raise InvalidInput(f"{path}: format {content['format']!r:.20} is not known; it must be {FORMAT}")
        contexts = {name: _context(each) for name, each in content["contexts"].items()}
        current = content["current"]
        if not isinstance(current, str) or (current and current not in contexts):
            raise ValueError(f"the current context {current!r:.80} does not exist")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidInput(f"{path}: not a file of contexts: {error}; correct or delete the file") from error
    _check_private(path, found, has_token=any(each.token for each in contexts.values()))
    return ContextFile(current, contexts)


def _check_private(path: Path, found: os.stat_result, *, has_token: bool) -> None:
    """Refuse a file by which another user could send the logins elsewhere, or learn a token. Raises InvalidInput."""
    user = os.geteuid()
    if found.st_uid not in (user, 0) and user != 0:
        raise InvalidInput(f"{path}: belongs to another user, who could send your logins to another server")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidInput(f"{path}: other users may write it, and could send your logins to another server; run chmod 600 {path}")
    if has_token and found.st_mode & (stat.S_IRGRP | stat.S_IROTH):
        raise InvalidInput(f"{path}: other users may read the token in it; store a new token, and run chmod 600 {path}")


def _context(content: dict[str, Any]) -> ServerContext:
    if not all(isinstance(value, str) for value in content.values()) or not content["url"]:
        raise ValueError("each field of a context must be a text, and url must be given")
    return ServerContext(**content)


def change_contexts(change: Callable[[ContextFile], ContextFile]) -> ContextFile:
    """Change the file, or create it, with the mode 0600. Two changes happen one after the other. Raises InvalidInput."""
    from bascule.config.private_file import PRIVATE_DIRECTORY, locked, replace_private

    path = contexts_path()
    try:
        path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        with locked(path):
            changed = change(read_contexts())
            contexts = {name: {key: value for key, value in asdict(each).items() if value} for name, each in changed.contexts.items()}
            content = {"format": FORMAT, "current": changed.current, "contexts": contexts}
            replace_private(path, json.dumps(content, indent=2).encode() + b"\n")
    except OSError as error:
        raise InvalidInput(f"{error.filename or path}: {error.strerror}") from error
    return changed


def chosen_context(option: str | None, *, config_given: bool) -> tuple[str, ServerContext] | None:
    """Return the context of a command, with its name; None if the settings apply.

    The order is: the option, a configuration file on the command line, the variable, the current context. Raises InvalidInput.
    """
    if option is not None:
        return option, read_contexts().named(option)
    if config_given:
        return None
    variable = os.environ.get(CONTEXT_VARIABLE)
    if variable == "":
        return None
    if variable is None and not _has_file():
        return None
    content = read_contexts()
    name = variable or content.current
    return (name, content.named(name)) if name else None


def _has_file() -> bool:
    """Return whether there is a file of contexts that this process can read. ``sudo`` may keep the home directory of another user."""
    try:
        return os.access(contexts_path(), os.R_OK)
    except InvalidInput:
        return False


def shown(name: str, content: ContextFile) -> dict[str, object]:
    """Return a context for output, without its token."""
    context = content.named(name)
    values = {each.name: getattr(context, each.name) for each in fields(context) if each.name != "token"}
    return {"current": name == content.current, "name": name, **values, "token": "stored" if context.token else ""}
