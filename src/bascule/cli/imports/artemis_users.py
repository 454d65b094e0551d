"""``artemis-users.properties`` and ``artemis-roles.properties``: users of a file of users, and ``[broker.roles]``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bascule.cli.imports.context import words_of
from bascule.cli.imports.draft import SettingsDraft
from bascule.cli.imports.report import ImportOutcome, ImportReport, ImportRow
from bascule.cli.imports.substitution import PropertyEntry
from bascule.cli.imports.toml_text import toml_value
from bascule.config.user_names import check_name
from bascule.config.users_file import User
from bascule.core.errors import InvalidInput
from bascule.core.masking import MASK

#: A password that Artemis has hashed or encrypted.
_ENCODED: Final = "ENC("


class ImportedUser(NamedTuple):
    """A user; ``password`` is None if Artemis has only its hash."""

    name: str
    password: str | None

    def user(self, iterations: int) -> User:
        """Return the user with verifiers of the password."""
        return User(self.name, {}) if self.password is None else User.of(self.name, self.password, iterations=iterations)


def check_not_exchanged(users: Sequence[PropertyEntry], roles: Sequence[PropertyEntry], roles_file: Path | None) -> None:
    """Raise InvalidInput if the file of roles seems to be that of users, because the report would show its passwords."""
    names = {entry.key for entry in users}
    named = {name for entry in roles for name in words_of(entry.value)}
    exchanged = {name for entry in users for name in words_of(entry.value)} & {entry.key for entry in roles}
    if any(entry.value.startswith(_ENCODED) for entry in roles) or (exchanged and not names & named):
        raise InvalidInput(f"--roles {roles_file}: seems to be the file of users, with their passwords; give it with --users")


def _counting(entries: Sequence[PropertyEntry], file: str, kind: str, report: ImportReport) -> Iterator[PropertyEntry]:
    """Yield the entries that count: of several with the same key, the last one, as in Java. Report the others."""
    last = {entry.key: entry.line for entry in entries}
    for entry in entries:
        if entry.line == last[entry.key]:
            yield entry
        else:
            note = f"line {last[entry.key]} replaces it, because it has the same name"
            report.add(ImportRow(file, entry.line, f"{kind}/{entry.key}", MASK, ImportOutcome.NONE, "", note))


def import_users(entries: Sequence[PropertyEntry], file: str, users_file: Path, report: ImportReport) -> list[ImportedUser]:
    """Return the users of a file."""
    found: dict[str, ImportedUser] = {}
    for entry in _counting(entries, file, "users", report):
        outcome, note, password = ImportOutcome.TAKEN, "only verifiers of the password are stored", entry.value or None
        try:
            check_name(entry.key, "user")
        except ValueError as error:
            report.add(ImportRow(file, entry.line, f"users/{entry.key}", MASK, ImportOutcome.NONE, "", str(error)))
            continue
        if entry.value.startswith(_ENCODED) or password is None or not password.isprintable():
            password, outcome = None, ImportOutcome.DIFFERS
            note = f"the password cannot be read; set one: `bascule user passwd {entry.key} --file {users_file}`"
        if users_file.exists():
            note += "; a user of this file with the same name stays as it is"
        found[entry.key] = ImportedUser(entry.key, password)
        report.add(ImportRow(file, entry.line, f"users/{entry.key}", MASK, outcome, f"user in {users_file}", note))
    return list(found.values())


def import_roles(entries: Sequence[PropertyEntry], file: str, report: ImportReport) -> dict[str, list[str]]:
    """Return the users of each role of a file."""
    found: dict[str, list[str]] = {}
    for entry in _counting(entries, file, "roles", report):
        users = words_of(entry.value)
        try:
            check_name(entry.key, "role")
        except ValueError as error:
            report.add(ImportRow(file, entry.line, f"roles/{entry.key}", entry.value, ImportOutcome.NONE, "", str(error)))
            continue
        found[entry.key] = users
        setting = f"broker.roles.{_key(entry.key)} = {toml_value(users)}"
        report.add(ImportRow(file, entry.line, f"roles/{entry.key}", entry.value, ImportOutcome.TAKEN, setting, ""))
    return found


def _key(role: str) -> str:
    return role if role.isidentifier() else toml_value(role)


def define_roles(
    draft: SettingsDraft, report: ImportReport, given: dict[str, list[str]], named: Sequence[str], place: tuple[str, int]
) -> None:
    """Set ``[broker.roles]``. A role that permissions name and that has no users is there, too, because permissions need its definition."""
    roles = {**given, **{role: [] for role in named if role not in given}}
    for role in named:
        if not roles[role]:
            note = f"no user has this role; `bascule user roles NAME {role}`, or add users to broker.roles, or import with --roles"
            report.add(
                ImportRow(*place, f"security-settings/role {role}", "", ImportOutcome.DIFFERS, f"broker.roles.{_key(role)} = []", note)
            )
    if roles:
        draft.set_unchecked("broker", {"roles": roles})
