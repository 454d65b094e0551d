"""Import of ``broker.xml`` of Apache Artemis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from bascule.cli.imports.artemis_acceptors import CertificateFiles, import_acceptors, take_host
from bascule.cli.imports.artemis_address_settings import import_address_settings
from bascule.cli.imports.artemis_destinations import import_addresses, import_diverts, import_legacy_queues
from bascule.cli.imports.artemis_hints import core_hint
from bascule.cli.imports.artemis_security import deny_without_permissions, import_resource_limits, import_security_settings
from bascule.cli.imports.context import AddressSyntax, ImportContext, seconds, size_bytes, true_or_false, whole_number
from bascule.cli.imports.xml_tree import XmlNode
from bascule.core.errors import InvalidInput

#: Elements of <core> that one key takes over: table, key, conversion, and what differs.
_DIRECT: Final[dict[str, tuple[str, str, Callable[[str], Any], str]]] = {
    "id-cache-size": ("broker", "duplicate_window_count", whole_number, "Bascule also forgets ids by time: duplicate_window_s, one hour"),
    "transaction-timeout": (
        "broker", "transaction_timeout_s", seconds,
        "counts from the first message that a local transaction holds; for XA, the transaction manager decides",
    ),
    "connection-ttl-override": ("broker", "idle_timeout_s", seconds, "the broker closes a connection that is silent for this time"),
    "global-max-size": (
        "broker", "memory_bytes", size_bytes, "memory of the broker: bodies go to spill files from a quarter of it on",
    ),
    "min-disk-free": ("broker", "spill_free_bytes", size_bytes, "for the disk of the spill files; the journal is in Kafka"),
}  # fmt: skip
#: Values with which elements say how Bascule always behaves.
_AS_ALWAYS: Final = {
    ("persistence-enabled", "true"),
    ("persist-delivery-count-before-delivery", "true"),
    ("persist-id-cache", "true"),
    ("wild-card-routing-enabled", "true"),
    ("populate-validated-user", "false"),
    ("reject-empty-validated-user", "false"),
    ("global-max-messages", "-1"),
}
_FALSE: Final = {
    "persistence-enabled": "persistent messages are always in Kafka",
    "persist-delivery-count-before-delivery": "the broker always stores that a message was delivered before a crash",
    "wild-card-routing-enabled": "subscribers may always use patterns; permissions decide who may",
}
_CONFIRMED: Final = "a persistent message is confirmed when Kafka has it: replicas of a cluster keep it, or embedded.fsync = true"
_OF_KAFKA: Final = {
    "journal-datasync": _CONFIRMED,
    "journal-sync-transactional": _CONFIRMED,
    "journal-sync-non-transactional": _CONFIRMED,
}
_PERIODS_S: Final = {"DAYS": 86_400, "HOURS": 3600, "MINUTES": 60, "SECONDS": 1}


def import_artemis(context: ImportContext, root: XmlNode, *, files: CertificateFiles, allow_insecure: bool) -> None:
    """Import a broker.xml. Raises InvalidInput if it is no configuration of Artemis."""
    core = root.child("core") if root.name == "configuration" else None
    if core is None:
        raise InvalidInput(
            f"{context.file}:{root.line}: <{root.name}> is not a configuration of Artemis, which has <core> in <configuration>"
        )
    context.syntax = _syntax(context, core)
    enabled = _security(context, core)
    _validated_user(context, core)
    # A queue may add a setting to the table of its address, so the tables of addresses come first.
    for node in sorted(core.children, key=lambda node: node.name in ("addresses", "queues")):
        _import_core(context, node, enabled=enabled)
    if enabled:
        deny_without_permissions(context, core)
    listeners = [import_acceptors(context, node, files) for node in core.each("acceptors")]
    for node in root.children:
        if node is not core:
            context.none(node, "only <core> has settings of the broker")
    context.rest(root)
    for listener in listeners:
        if listener is not None:
            take_host(context, listener, allow_insecure=allow_insecure)


def _import_core(context: ImportContext, node: XmlNode, *, enabled: bool) -> None:
    if "" in node.reported:
        return
    match node.name:
        case "acceptors":
            pass  # needs the permissions, so it comes last
        case "address-settings":
            import_address_settings(context, node)
        case "addresses":
            import_addresses(context, node)
        case "queues":
            import_legacy_queues(context, node)
        case "diverts":
            import_diverts(context, node)
        case "security-settings":
            import_security_settings(context, node, enabled=enabled)
        case "resource-limit-settings":
            import_resource_limits(context, node)
        case "journal-retention-directory":
            _retention(context, node)
        case name if name in _DIRECT:
            _direct(context, node)
        case name if (name, node.text.lower()) in _AS_ALWAYS:
            context.taken(node, note="Bascule always does this")
        case name if name in _OF_KAFKA:
            context.differs(node, "", _OF_KAFKA[name])
        case name if name in _FALSE:
            context.none(node, _FALSE[name])
        case name if (hint := core_hint(name)) is not None:
            context.none(node, hint)
        case _:
            return  # reported as unknown at the end
    node.reported.add("")


def _direct(context: ImportContext, node: XmlNode) -> None:
    section, key, convert, differs = _DIRECT[node.name]
    try:
        value = convert(node.text)
    except ValueError as error:
        context.none(node, str(error))
        return
    if value == 0 and node.name != "id-cache-size":
        context.none(node, f"no limit in Artemis; {section}.{key} keeps its default")
        return
    context.set(node, section, key, value, differs=differs)


def _syntax(context: ImportContext, core: XmlNode) -> AddressSyntax:
    """Return how the file writes addresses."""
    section = core.child("wildcard-addresses") or core.child("wild-card-addresses")
    marks = core.child("literal-match-markers")
    found = {"delimiter": ".", "any-words": "#", "single-word": "*"}
    for node in section.children if section is not None else ():
        if node.name not in found:
            continue
        if len(node.text) != 1:
            raise InvalidInput(f"{context.file}:{node.line}: <{node.name}> must be one character, and is {node.text!r}")
        if node.text == found[node.name]:
            context.taken(node, note="as in Bascule")
        else:
            note = f"Bascule always writes {found[node.name]!r}; names and matches are translated, and clients must use the new names"
            context.differs(node, "", note)
        found[node.name] = node.text
    for node in section.each("routing-enabled", "enabled") if section is not None else ():
        if node.text.lower() == "true":
            context.taken(node, note="Bascule always does this")
        else:
            context.none(node, _FALSE["wild-card-routing-enabled"])
    if marks is not None and len(marks.text) == 2:
        context.taken(
            marks, note="the marks are left out of the matches of [[address]]; Artemis does not apply them to permissions, either"
        )
    return AddressSyntax(found["delimiter"], found["any-words"], found["single-word"], marks.text if marks and len(marks.text) == 2 else "")


def _security(context: ImportContext, core: XmlNode) -> bool:
    """Return whether Artemis checks users and permissions; if not, every client may connect."""
    node = core.child("security-enabled")
    if node is None:
        return True
    try:
        if true_or_false(node.text):
            context.taken(node, note="users log in, and [[permission]] says what they may do")
            return True
    except ValueError as error:
        raise InvalidInput(f"{context.file}:{node.line}: security-enabled: {error}") from error
    context.set(node, "broker", "allow_anonymous", True, note="no permissions: every client may do everything")
    return False


def _validated_user(context: ImportContext, core: XmlNode) -> None:
    populate, reject = core.child("populate-validated-user"), core.child("reject-empty-validated-user")
    if populate is not None and populate.text.lower() == "true":
        context.set(populate, "broker", "validated_user", "set")
        if reject is not None and reject.text.lower() == "true":
            context.differs(reject, "", 'with "set", each message has the user of its sender, also `anonymous`; see broker.allow_anonymous')
    elif reject is not None and reject.text.lower() == "true":
        context.set(reject, "broker", "validated_user", "require", differs="a message must name its own sender")


def _retention(context: ImportContext, node: XmlNode) -> None:
    """Take how long Artemis keeps its journal."""
    unit = node.attributes.get("unit", "DAYS").upper()
    try:
        if "period" in node.attributes:
            if unit not in _PERIODS_S:
                raise ValueError(f"{unit!r} is no unit of time; known are {', '.join(_PERIODS_S)}")
            retention_s = whole_number(node.attributes["period"]) * _PERIODS_S[unit]
            differs = "the journal is kept in Kafka, for new diverts that start in the past"
            context.set(node, "journal", "retention_s", retention_s, differs=differs, attribute="period")
        if "storage-limit" in node.attributes:
            limit = size_bytes(node.attributes["storage-limit"])
            context.set(node, "journal", "retention_bytes", limit, differs="the limit of the kept part", attribute="storage-limit")
    except ValueError as error:
        context.none(node, str(error))
        return
    node.attribute("unit")
    if node.text:
        context.none(node, "the journal is a Kafka topic, and has no directory")
