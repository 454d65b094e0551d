"""``<addresses>``, ``<queues>`` and ``<diverts>`` of Artemis: tables ``[[queue]]`` and ``[[topic]]``."""

from __future__ import annotations

from typing import Final

from bascule.cli.imports.artemis_address_settings import HINTS as SETTING_HINTS
from bascule.cli.imports.context import ImportContext, true_or_false
from bascule.cli.imports.toml_text import toml_value
from bascule.cli.imports.xml_tree import XmlNode
from bascule.jms.selector import SelectorError, compile_selector

_ANYCAST: Final = "anycast"
_FILTER: Final = "no filter of a queue: give the selector to the consumer, or to a divert"
_NO_OWNER: Final = "queues of the file have no owner"
_SUBSCRIPTION: Final = "a subscription cannot be in the file; start its durable subscriber once before the first message is sent"
#: Attributes of a queue without a counterpart, and the element of <address-setting> whose hint they share.
_AS_DEFAULT: Final = {
    "max-consumers": "default-max-consumers",
    "purge-on-no-consumers": "default-purge-on-no-consumers",
    "last-value": "default-last-value-queue",
    "last-value-key": "default-last-value-key",
    "non-destructive": "default-non-destructive",
    "ring-size": "default-ring-size",
    "consumers-before-dispatch": "default-consumers-before-dispatch",
    "delay-before-dispatch": "default-delay-before-dispatch",
    "group-rebalance": "default-group-rebalance",
    "group-rebalance-pause-dispatch": "default-group-rebalance-pause-dispatch",
    "group-buckets": "default-group-buckets",
    "group-first-key": "default-group-first-key",
}
#: Values of attributes that say how Bascule always behaves.
_AS_ALWAYS: Final = {
    ("max-consumers", "-1"),
    ("purge-on-no-consumers", "false"),
    ("last-value", "false"),
    ("non-destructive", "false"),
    ("ring-size", "-1"),
    ("enabled", "true"),
}


def import_addresses(context: ImportContext, section: XmlNode) -> None:
    """Import the queues and topics of ``<addresses>``."""
    for address in section.each("address"):
        name = address.attribute("name")
        try:
            translated = context.syntax.name(name)
        except ValueError as error:
            context.none(address, f"cannot be the name of a queue or topic: {error}")
            continue
        if translated != name:
            context.differs(address, "", f"clients name it {translated!r}: Bascule has dots between words", attribute="name")
        kinds = list(address.each(_ANYCAST, "multicast"))
        for kind in kinds:
            _import_kind(context, kind, name, translated)
        if not kinds:
            context.none(address, "an address without anycast or multicast: the first client that uses it creates it (auto_create)")


def _import_kind(context: ImportContext, kind: XmlNode, original: str, name: str) -> None:
    """Define the destination once, at the element that is nearest to it."""
    array = "queue" if kind.name == _ANYCAST else "topic"
    queues = list(kind.each("queue"))
    same = next((queue for queue in queues if array == "queue" and queue.attributes.get("name") == original), None)
    node = same or kind
    try:
        if not context.draft.has(array, name):
            context.draft.add(array, {"name": name})
    except ValueError as error:
        context.none(kind, f"cannot be a {array} of Bascule: {error}")
        return
    context.taken(node, f"[[{array}]] name = {toml_value(name)}")
    for queue in queues:
        _import_queue(context, queue, original, name, array)


def _import_queue(context: ImportContext, queue: XmlNode, original: str, address: str, array: str) -> None:
    name = queue.attribute("name")
    if array == "topic":
        context.none(queue, _SUBSCRIPTION)
        return
    if name == original:
        queue.reported.add("")
    else:
        note = f"an address has one queue, with its name: consumers of {name!r} use {address!r} in place of it"
        context.differs(queue, f"[[queue]] name = {toml_value(address)}", note)
    _import_queue_options(context, queue, address)


def _import_queue_options(context: ImportContext, queue: XmlNode, address: str) -> None:
    for key, value in queue.attributes.items():
        if key == "exclusive":
            _exclusive(context, queue, address)
        elif (key, value.strip()) in _AS_ALWAYS:
            context.taken(queue, note="Bascule always does this", attribute=key)
        elif key in _AS_DEFAULT:
            context.none(queue, SETTING_HINTS[_AS_DEFAULT[key]], attribute=key)
        elif key == "enabled":
            context.none(queue, "a queue cannot be disabled; take the permission `send` from its users", attribute=key)
        elif key == "user":
            context.none(queue, _NO_OWNER, attribute=key)
    for child in queue.children:
        if child.name == "filter":
            context.none(child, _FILTER)
        elif child.name == "durable":
            _durable(context, child)
        elif child.name == "user":
            context.none(child, _NO_OWNER)


def _exclusive(context: ImportContext, queue: XmlNode, address: str) -> None:
    try:
        value = true_or_false(queue.attributes["exclusive"])
        context.draft.merge("address", address, "exclusive", value)
    except ValueError as error:
        context.none(queue, str(error), attribute="exclusive")
        return
    context.taken(queue, f"[[address]] match = {toml_value(address)}, exclusive = {toml_value(value)}", attribute="exclusive")


def _durable(context: ImportContext, durable: XmlNode) -> None:
    if durable.text.lower() == "false":
        context.differs(durable, "", "queues are durable; a sender that needs no storage sends non-persistent messages")
    else:
        context.taken(durable, note="queues are durable")


def import_legacy_queues(context: ImportContext, section: XmlNode) -> None:
    """Import ``<queues>``, the form of Artemis 1."""
    for queue in section.each("queue"):
        name = queue.attribute("name")
        address = queue.child("address")
        try:
            if address is None or address.text != name:
                raise ValueError("its address has another name")
            translated = context.syntax.name(name)
            if not context.draft.has("queue", translated):
                context.draft.add("queue", {"name": translated})
        except ValueError as error:
            context.none(queue, f"cannot be a queue of Bascule: {error}; {_SUBSCRIPTION}")
            continue
        context.taken(address, f"[[queue]] name = {toml_value(translated)}")
        _import_queue_options(context, queue, translated)


def import_diverts(context: ImportContext, section: XmlNode) -> None:
    """Report diverts: those of Artemis forward to another address, those of Bascule to a Kafka topic."""
    for divert in section.each("divert"):
        divert.attribute("name")
        context.none(divert, _nearest(divert))


def _nearest(divert: XmlNode) -> str:
    def text(name: str) -> str:
        child = divert.child(name)
        return child.text if child is not None else ""

    source, target = text("address"), text("forwarding-address")
    if not source or not target:
        return "a divert without address or forwarding-address; Artemis refuses it, too"
    filters = divert.child("filter")
    selector = (filters.attributes.get("string") or filters.text).strip() if filters is not None else ""
    exclusive = ", exclusive = true" if text("exclusive").lower() == "true" else ""
    parts = [f"a divert of Bascule goes to Kafka, not to an address ({source} -> {target})"]
    if selector:
        try:
            compile_selector(selector)
            exclusive = f", selector = {toml_value(selector)}{exclusive}"
        except SelectorError as error:
            parts.append(f"its filter is no JMS selector (column {error.column}: {error.reason})")
    parts.append(
        f"nearest: [[divert]] from = {toml_value(source)}, to = {toml_value('jms.' + target)}{exclusive}, and [[ingress]]"
        f" topics = {toml_value(['jms.' + target])}, to = {toml_value(target)}; or let the readers of the copy subscribe to a topic"
    )
    if divert.child("transformer") is not None or divert.child("transformer-class-name") is not None:
        parts.append("in place of the transformer: `select` (Spark SQL) or `python` of the divert")
    return "; ".join(parts)
