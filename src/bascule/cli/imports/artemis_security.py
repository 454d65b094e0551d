"""``<security-settings>`` and ``<resource-limit-settings>`` of Artemis: permissions, roles and limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from bascule.cli.imports.artemis_precedence import TakenMatch, report_precedence
from bascule.cli.imports.context import ImportContext, whole_number, words_of
from bascule.cli.imports.toml_text import toml_value
from bascule.cli.imports.xml_tree import XmlNode
from bascule.config.user_names import check_name
from bascule.core.access import ANY_ROLE
from bascule.core.errors import InvalidInput
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission

#: Names of Artemis 1.
_OLD_NAMES: Final = {"createTempQueue": "createNonDurableQueue", "deleteTempQueue": "deleteNonDurableQueue"}
_MANAGEMENT: Final = (
    f'no management by messages; roles for HTTP and the commands are in [admin], and XA clients need `manage` on "{MANAGEMENT_ADDRESS}"'
)
#: The permissions of Artemis; `recover` is Bascule's own.
_KNOWN: Final = [each.value for each in Permission if each is not Permission.RECOVER]
#: Permissions that Artemis asks for only when an operation of its management is called.
_OF_OPERATIONS: Final = (Permission.VIEW, Permission.EDIT)
_OPERATIONS: Final = "Artemis asks for it in management operations (mops.*), Bascule when a client administers this address"
_NO_TABLE: Final = "without a table, less specific ones decide here, and may allow more"
#: Roles of all permissions together. Role mappings multiply them.
ROLES_MAX: Final = 100_000
_LIMITS: Final = {"max-connections": "max_connections", "max-queues": "max_queues", "max-sessions": "max_sessions"}


def import_security_settings(context: ImportContext, section: XmlNode, *, enabled: bool) -> None:
    """Import permissions. If security is not ``enabled``, Artemis ignores them."""
    permissions = _PermissionsImport(context, _role_mappings(context, section))
    nodes = list(section.each("security-setting"))
    counting = {node.attribute("match"): node for node in nodes}
    for node in nodes:
        match = node.attribute("match")
        if not enabled:
            context.none(node, "security-enabled is false, so Artemis ignores it, too; set it to true and import again to take it")
        elif counting[match] is not node:
            context.none(node, f"line {counting[match].line} replaces it, because it has the same match")
        elif match.split(".")[:2] == ["activemq", "management"] or match.split(".")[0] == "mops":
            context.none(node, _MANAGEMENT)
        else:
            permissions.add(node, match)
    report_precedence(context, permissions.taken, "its permissions may allow more; give such addresses a [[permission]] of their own")
    for node in section.each("security-setting-plugin"):
        context.none(node, "no plugins: roles come from the file of users, from [broker.roles], or from tokens ([broker.oidc])")


def deny_without_permissions(context: ImportContext, place: XmlNode) -> None:
    """Deny everything if the source gives no permission: so does Artemis, but Bascule allows everything without ``[[permission]]``."""
    if not list(context.draft.tables("permission")):
        context.draft.add("permission", {"match": "#"})
        note = "no permission was taken, so this table denies everything; without any [[permission]], every client could do everything"
        context.remark(place, '[[permission]] match = "#"', note, part="/permissions (not set)")


def _role_mappings(context: ImportContext, section: XmlNode) -> dict[str, list[str]]:
    """Return, for each role of the permissions, the roles that have its permissions, too."""
    found: dict[str, list[str]] = {}
    for node in section.each("role-mapping"):
        source, roles = node.attribute("from"), words_of(node.attribute("to"))
        try:
            check_name(source, "role")
        except ValueError as error:
            context.none(node, str(error))
            continue
        for role in roles:
            found.setdefault(role, []).append(source)
        context.taken(node, "", f"each permission of {', '.join(roles)} is also given to {source!r}")
    return {role: list(dict.fromkeys(sources)) for role, sources in found.items()}


@dataclass
class _PermissionsImport:
    """The import of ``<security-setting>``: a table ``[[permission]]`` for each."""

    context: ImportContext
    mappings: dict[str, list[str]]
    taken: list[TakenMatch] = field(default_factory=list)
    roles: int = 0

    def add(self, node: XmlNode, match: str) -> None:
        """Import one element. Raises InvalidInput if there are too many roles."""
        context = self.context
        try:
            pattern = context.syntax.pattern(match, literals=False)
            context.draft.add("permission", {"match": pattern})
        except ValueError as error:
            context.none(node, f"cannot be a match of [[permission]]: {error}; {_NO_TABLE}")
            return
        self.taken.append(TakenMatch(node, match, pattern))
        if pattern != match:
            note = "words and wildcards are written as in Bascule"
            context.differs(node, f"[[permission]] match = {toml_value(pattern)}", note, attribute="match")
        elements: dict[str, list[XmlNode]] = {}
        for permission in node.each("permission"):
            kind = permission.attribute("type")
            name = _OLD_NAMES.get(kind, kind)
            if name in _KNOWN:
                elements.setdefault(name, []).append(permission)
            else:
                context.none(permission, f"unknown permission; known are {', '.join(_KNOWN)}")
        for name, permissions in elements.items():
            self._give(permissions, pattern, name)

    def _give(self, permissions: list[XmlNode], pattern: str, name: str) -> None:
        """Give a permission to the roles of all its elements."""
        given = [(node, self._given(node)) for node in permissions]
        roles = list(dict.fromkeys(role for _, each in given for role in each or ()))
        taken = [node for node, each in given if each is not None]
        self.roles += len(roles)
        if self.roles > ROLES_MAX:
            raise InvalidInput(f"{self.context.file}:{permissions[0].line}: permissions name roles more than {ROLES_MAX:,} times")
        if taken:
            self.context.draft.merge("permission", pattern, name, roles)
        setting = f"[[permission]] match = {toml_value(pattern)}, {name} = {toml_value(roles)}"
        for node in taken:
            if name in _OF_OPERATIONS:
                self.context.differs(node, setting, _OPERATIONS, attribute="roles")
            else:
                self.context.taken(node, setting, self._unmapped(node), attribute="roles")

    def _given(self, node: XmlNode) -> list[str] | None:
        """Return the roles of an element, with those that a mapping adds; None if it cannot be taken, which is reported."""
        written = node.attributes.get("roles", "")
        named = words_of(written)
        if ANY_ROLE in named:
            self.context.none(node, f"a role {ANY_ROLE!r} means all clients in Bascule; rename the role", attribute="roles")
            return None
        try:
            for role in named:
                check_name(role, "role")
        except ValueError as error:
            self.context.none(node, str(error), attribute="roles")
            return None
        exact = set(written.split(","))
        return [each for role in named for each in (role, *(self.mappings.get(role, ()) if role in exact else ()))]

    def _unmapped(self, node: XmlNode) -> str:
        """Return a note about roles that have a mapping, which Artemis does not find because of a blank."""
        written = node.attributes.get("roles", "")
        roles = [role for role in words_of(written) if role in self.mappings and role not in written.split(",")]
        return f"no role-mapping for {', '.join(roles)}: Artemis finds none if there is a blank beside the name" if roles else ""


def named_roles(context: ImportContext) -> Iterator[str]:
    """Yield the roles that the taken permissions name, each once."""
    tables = context.draft.tables("permission")
    roles = (role for table in tables for key, value in table.items() if key != "match" for role in value)
    return iter(dict.fromkeys(roles))


def import_resource_limits(context: ImportContext, section: XmlNode) -> None:
    """Import limits of users."""
    nodes = list(section.each("resource-limit-setting"))
    counting = {node.attribute("match"): node for node in nodes}
    for node in nodes:
        user = node.attribute("match")
        if not user:
            context.none(node, "names no user")
            continue
        if counting[user] is not node:
            context.none(node, f"line {counting[user].line} replaces it, because it has the same match")
            continue
        limits: dict[str, Any] = {}
        for child in node.each(*_LIMITS):
            if (limit := _limit(context, child)) is not None:
                key = _LIMITS[child.name]
                limits[key] = limit
                context.taken(child, f"[[limit]] users = {toml_value([user])}, {key} = {limit}")
        if limits:
            context.draft.add("limit", {"users": [user], **limits})


def _limit(context: ImportContext, child: XmlNode) -> int | None:
    """Return a limit, 0 for no limit; None if it cannot be taken, which is reported."""
    try:
        found = whole_number(child.text)
    except ValueError as error:
        context.none(child, str(error))
        return None
    if found == 0:
        context.none(child, "0 means nothing is allowed in Artemis, and no limit in Bascule; remove the user in place of it")
        return None
    return max(found, 0)
