"""``<security-settings>`` and ``<resource-limit-settings>`` of Artemis: permissions, roles and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bascule.cli.imports.context import ImportContext, whole_number, words_of
from bascule.cli.imports.toml_text import toml_value
from bascule.cli.imports.xml_tree import XmlNode
from bascule.core.access import ANY_ROLE
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission

#: Names of Artemis 1.
_OLD_NAMES: Final = {"createTempQueue": "createNonDurableQueue", "deleteTempQueue": "deleteNonDurableQueue"}
_MANAGEMENT: Final = (
    f'no management by messages; roles for HTTP and the commands are in [admin], and XA clients need `manage` on "{MANAGEMENT_ADDRESS}"'
)
_LIMITS: Final = {"max-connections": "max_connections", "max-queues": "max_queues", "max-sessions": "max_sessions"}


def import_security_settings(context: ImportContext, section: XmlNode, *, enabled: bool) -> None:
    """Import permissions. If security is not ``enabled``, Artemis ignores them."""
    mappings = _role_mappings(context, section)
    nodes = list(section.each("security-setting"))
    counting = {node.attribute("match"): node for node in nodes}
    for node in nodes:
        match = node.attribute("match")
        if not enabled:
            context.none(node, "security-enabled is false, so Artemis ignores it, too; set it to true and import again to take it")
        elif counting[match] is not node:
            context.none(node, f"line {counting[match].line} replaces it, because it has the same match")
        elif match.split(".")[:2] == ["activemq", "management"]:
            context.none(node, _MANAGEMENT)
        else:
            _import_permissions(context, node, match, mappings)
    for node in section.each("security-setting-plugin"):
        context.none(node, "no plugins: roles come from the file of users, from [broker.roles], or from tokens ([broker.oidc])")


def _role_mappings(context: ImportContext, section: XmlNode) -> dict[str, list[str]]:
    """Return, for each role of the permissions, the roles that have its permissions, too."""
    found: dict[str, list[str]] = {}
    for node in section.each("role-mapping"):
        source = node.attribute("from")
        for role in words_of(node.attribute("to")):
            found.setdefault(role, []).append(source)
        context.taken(node, "", f"each permission of {node.attributes.get('to', '')} is also given to {source!r}")
    return found


def _import_permissions(context: ImportContext, node: XmlNode, match: str, mappings: dict[str, list[str]]) -> None:
    try:
        pattern = context.syntax.pattern(match)
        context.draft.add("permission", {"match": pattern})
    except ValueError as error:
        context.none(node, f"cannot be a match of [[permission]]: {error}; without a table, the less specific ones decide here")
        return
    if pattern != match:
        context.differs(node, f'[[permission]] match = "{pattern}"', "words and wildcards are written as in Bascule", attribute="match")
    for permission in node.each("permission"):
        kind = permission.attribute("type")
        name = _OLD_NAMES.get(kind, kind)
        if name not in set(Permission):
            context.none(permission, f"unknown permission; known are {', '.join(Permission)}")
            permission.attribute("roles")
            continue
        _give(context, permission, pattern, name, mappings)


def _give(context: ImportContext, node: XmlNode, pattern: str, name: str, mappings: dict[str, list[str]]) -> None:
    named = words_of(node.attributes.get("roles", ""))
    before = next(table for table in context.draft.tables("permission") if table["match"] == pattern).get(name, [])
    roles = list(dict.fromkeys([*before, *(each for role in named for each in (role, *mappings.get(role, ())))]))
    if ANY_ROLE in named:
        context.none(node, f"a role {ANY_ROLE!r} means all clients in Bascule; rename the role", attribute="roles")
        return
    context.draft.merge("permission", pattern, name, roles)
    context.taken(node, f"[[permission]] match = {toml_value(pattern)}, {name} = {toml_value(roles)}", attribute="roles")


def named_roles(context: ImportContext) -> Iterator[str]:
    """Yield the roles that the taken permissions name, each once."""
    tables = context.draft.tables("permission")
    roles = (role for table in tables for key, value in table.items() if key != "match" for role in value)
    return iter(dict.fromkeys(roles))


def import_resource_limits(context: ImportContext, section: XmlNode) -> None:
    """Import limits of users."""
    for node in section.each("resource-limit-setting"):
        user = node.attribute("match")
        if not user:
            context.none(node, "names no user")
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
