"""``<address-settings>`` of Artemis: a table ``[[address]]`` for each match."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from bascule.cli.imports.artemis_precedence import MatchInheritance, TakenMatch, report_precedence
from bascule.cli.imports.context import ImportContext, seconds, signed_bytes, true_or_false, whole_number
from bascule.cli.imports.toml_text import toml_value
from bascule.cli.imports.xml_tree import XmlNode
from bascule.core.permissions import MANAGEMENT_ADDRESS

_CONSUMERS: Final = "Bascule has no such setting for consumers; `exclusive` and `prefetch` of [[address]] say how messages are distributed"
_LAST_VALUE: Final = 'no last-value queues; a divert with key = "property:NAME" to a compacted Kafka topic keeps the last value of each key'
_GROUPS: Final = "message groups (JMSXGroupID) need no setting, and have none"
_PAGING: Final = "no paging: bodies of messages go to spill files when memory is short (broker.memory_bytes, broker.spill_bytes)"
_SLOW: Final = "Bascule does not end slow consumers; `bascule check` and the metrics show queues that grow"
_MANAGEMENT: Final = "no management by messages; use the commands, HTTP or the console"
_ADDRESSES: Final = "Bascule creates and deletes an address with its queues and subscriptions"
_RESOURCES: Final = (
    "Bascule creates dead-letter and expiry queues; for a queue of its own, give this match another dead_letter_address or expiry_address"
)
_REMOVED: Final = "a destination that is removed from the file stays until an administrator deletes it (`bascule queue delete`)"
_ROUTING: Final = "clients name a queue or a topic, so no default is needed"

#: Elements without a counterpart, and what to do instead.
HINTS: Final = {
    "auto-create-dead-letter-resources": _RESOURCES,
    "dead-letter-queue-prefix": _RESOURCES,
    "dead-letter-queue-suffix": _RESOURCES,
    "auto-create-expiry-resources": _RESOURCES,
    "expiry-queue-prefix": _RESOURCES,
    "expiry-queue-suffix": _RESOURCES,
    "min-expiry-delay": "no shortest time to live; the sender sets it, max_expiry_s limits it",
    "no-expiry": "messages always expire at the time that their sender set",
    "redelivery-collision-avoidance-factor": "redelivery delays have no random part",
    "max-size-bytes-reject-threshold": 'senders wait for credit with when_full = "block"; to refuse messages, use "reject"',
    "disk-full-policy": "when the disk of the spill files is full, senders wait (broker.spill_free_bytes)",
    "max-read-page-bytes": _PAGING,
    "max-read-page-messages": _PAGING,
    "prefetch-page-bytes": _PAGING,
    "prefetch-page-messages": _PAGING,
    "page-size-bytes": _PAGING,
    "page-max-cache-size": _PAGING,
    "message-counter-history-day-limit": "no history of counters in the broker; let Prometheus scrape /metrics",
    "last-value-queue": _LAST_VALUE,
    "default-last-value-queue": _LAST_VALUE,
    "default-last-value-key": _LAST_VALUE,
    "default-non-destructive": "no non-destructive queues; consumers of Kafka read a divert's topic as often as they like",
    "default-ring-size": 'no ring queues; nearest: max_messages with when_full = "drop-oldest-nonpersistent"',
    "default-group-rebalance": _GROUPS,
    "default-group-rebalance-pause-dispatch": _GROUPS,
    "default-group-buckets": _GROUPS,
    "default-group-first-key": _GROUPS,
    "default-consumers-before-dispatch": _CONSUMERS,
    "default-delay-before-dispatch": _CONSUMERS,
    "default-consumer-window-size": "Artemis counts bytes; set `prefetch` (messages) here, or jms.prefetchPolicy.all in the client's URL",
    "default-max-consumers": "no limit on consumers; with exclusive = true, one consumer at a time gets messages",
    "default-purge-on-no-consumers": "queues keep their messages without consumers; use a topic, or expiry_s",
    "redistribution-delay": "no cluster: one broker serves, the others are standbys",
    "send-to-dla-on-no-route": "a message to a topic without subscribers is dropped; journal.replayable keeps it for later diverts",
    "slow-consumer-threshold": _SLOW,
    "slow-consumer-threshold-measurement-unit": _SLOW,
    "slow-consumer-check-period": _SLOW,
    "slow-consumer-policy": _SLOW,
    "auto-create-jms-queues": "an old name that Artemis ignores; auto_create",
    "auto-delete-jms-queues": "an old name that Artemis ignores; auto_delete",
    "auto-create-jms-topics": "an old name that Artemis ignores; auto_create",
    "auto-delete-jms-topics": "an old name that Artemis ignores; auto_delete",
    "auto-delete-created-queues": "queues of [[queue]], and those that an administrator creates, are never deleted automatically",
    "auto-delete-queues-message-count": "only empty queues are deleted automatically",
    "auto-delete-queues-skip-usage-check": "only unused queues are deleted automatically",
    "auto-delete-addresses": _ADDRESSES,
    "auto-delete-addresses-delay": _ADDRESSES,
    "auto-delete-addresses-skip-usage-check": _ADDRESSES,
    "config-delete-queues": _REMOVED,
    "config-delete-addresses": _REMOVED,
    "config-delete-diverts": _REMOVED,
    "default-queue-routing-type": _ROUTING,
    "default-address-routing-type": _ROUTING,
    "management-browse-page-size": _MANAGEMENT,
    "management-message-attribute-size-limit": _MANAGEMENT,
    "retroactive-message-count": "no retroactive addresses; journal.replayable keeps a topic's messages for later diverts",
    "enable-metrics": "every queue has metrics",
    "enable-ingress-timestamp": "the journal has the time of each message: `bascule why MESSAGE_ID`",
    "initial-queue-buffer-size": "queues have no buffer of a fixed size",
}
#: Values with which these elements say how Bascule always behaves.
_AS_ALWAYS: Final = {
    "default-last-value-queue": "false",
    "last-value-queue": "false",
    "default-non-destructive": "false",
    "default-ring-size": "-1",
    "default-max-consumers": "-1",
    "default-purge-on-no-consumers": "false",
    "default-group-rebalance": "false",
    "default-consumers-before-dispatch": "0",
    "default-delay-before-dispatch": "-1",
    "no-expiry": "false",
    "min-expiry-delay": "-1",
    "redistribution-delay": "-1",
    "send-to-dla-on-no-route": "false",
    "slow-consumer-threshold": "-1",
    "enable-metrics": "true",
    "auto-delete-queues-message-count": "0",
    "auto-delete-queues-skip-usage-check": "false",
    "config-delete-queues": "OFF",
    "config-delete-addresses": "OFF",
    "config-delete-diverts": "OFF",
    "retroactive-message-count": "0",
}
#: Limits of an address, and the key for each.
_LIMITS: Final = {"max-size-bytes": "max_bytes", "max-size-messages": "max_messages"}
_PAGE_LIMITS: Final = {"page-limit-bytes": "max_bytes", "page-limit-messages": "max_messages"}
_WHEN_FULL: Final = {"BLOCK": "block", "FAIL": "reject", "DROP": "drop-oldest-nonpersistent"}
_PER_QUEUE: Final = "the limit is for each queue and subscription, not for the address"
_NOTHING: Final = "0 allows no message in Artemis, and is no limit in Bascule; remove the permission `send` in place of it"
_IGNORED_LIFETIME: Final = "Artemis ignores it where expiry-delay is set; Bascule limits the time that a sender has set"
_DROPS_OLDEST: Final = "Artemis drops the new message, Bascule the oldest non-persistent one; without any, it refuses the new message"

Convert = Callable[[str], Any]


def _multiplier(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _attempts(text: str) -> int:
    return max(whole_number(text), 0)  # -1 in Artemis: without limit


def _longest_delay(text: str) -> float:
    if whole_number(text) <= 0:
        raise ValueError("with it, Artemis redelivers at once; redelivery_delay_s = 0 does the same, and 0 here means no limit")
    return seconds(text)


def _lifetime(text: str) -> float:
    if whole_number(text) == 0:
        raise ValueError("with 0, a message expires at once in Artemis, and never in Bascule")
    return seconds(text)


def _bound(child: XmlNode) -> int:
    return (signed_bytes if child.name.endswith("bytes") else whole_number)(child.text)


#: Elements that one key takes over.
_DIRECT: Final[dict[str, tuple[str, Convert]]] = {
    "max-delivery-attempts": ("max_delivery_attempts", _attempts),
    "redelivery-delay": ("redelivery_delay_s", seconds),
    "redelivery-delay-multiplier": ("redelivery_multiplier", _multiplier),
    "max-redelivery-delay": ("redelivery_delay_max_s", _longest_delay),
    "expiry-delay": ("expiry_s", _lifetime),
    "max-expiry-delay": ("max_expiry_s", _lifetime),
    "default-exclusive-queue": ("exclusive", true_or_false),
    "id-cache-size": ("duplicate_window_count", whole_number),
    "auto-delete-queues": ("auto_delete", true_or_false),
    "auto-delete-queues-delay": ("auto_delete_after_s", seconds),
}


def import_address_settings(context: ImportContext, section: XmlNode) -> None:
    """Import all address settings."""
    nodes = list(section.each("address-setting"))
    counting = {node.attribute("match"): node for node in nodes}
    taken: list[TakenMatch] = []
    for node in nodes:
        match = node.attribute("match")
        if counting[match] is not node:
            context.none(node, f"line {counting[match].line} replaces it, because it has the same match")
        elif _is_of_management(match):
            context.none(node, _MANAGEMENT)
        elif (pattern := _pattern(context, node, match)) is not None:
            taken.append(TakenMatch(node, match, pattern))
    inheritance = MatchInheritance(context.syntax, taken)
    for each in taken:
        _AddressSettingImport(context, each, inheritance.general(each.pattern)).run()
    report_precedence(context, taken, "give such addresses an [[address]] of their own")
    _report_other_defaults(context, section, counting.get(context.syntax.any_words))


def _pattern(context: ImportContext, node: XmlNode, match: str) -> str | None:
    """Add the table of a match, and return its pattern; None if it cannot be taken, which is reported."""
    try:
        pattern = context.syntax.pattern(match)
        context.draft.add("address", {"match": pattern})
    except ValueError as error:
        context.none(node, f"cannot be a match of [[address]]: {error}; the settings of less specific ones apply")
        return None
    if pattern != match:
        note = "words and wildcards are written as in Bascule"
        context.differs(node, f"[[address]] match = {toml_value(pattern)}", note, attribute="match")
    return pattern


def _is_of_management(match: str) -> bool:
    return match.split(".")[:2] == ["activemq", "management"] or match == MANAGEMENT_ADDRESS


class _AddressSettingImport:
    """One ``<address-setting>``, and the less specific ones from which it inherits."""

    def __init__(self, context: ImportContext, taken: TakenMatch, general: Sequence[XmlNode]) -> None:
        self._context = context
        self._node = taken.node
        self._match = taken.pattern
        self._general = general

    def run(self) -> None:
        """Import the element."""
        for child in self._node.children:
            self._child(child)
        self._limits_of_policy()
        self._limit_of_delay()

    def _child(self, child: XmlNode) -> None:
        name, context = child.name, self._context
        if name in _DIRECT:
            key, convert = _DIRECT[name]
            ignored = name == "max-expiry-delay" and self._inherited("expiry-delay") is not None
            self._set(child, key, convert, _IGNORED_LIFETIME if ignored else "")
        elif name in ("dead-letter-address", "expiry-address"):
            self._set(child, name.replace("-", "_"), context.syntax.name)
        elif name in ("auto-create-queues", "auto-create-addresses"):
            self._auto_create(child)
        elif name in _LIMITS or name in _PAGE_LIMITS:
            self._limit(child)
        elif name in ("address-full-policy", "page-full-policy"):
            self._policy(child)
        elif _AS_ALWAYS.get(name) == child.text:
            context.taken(child, note="Bascule always does this")
        elif name in HINTS:
            context.none(child, HINTS[name])

    def _set(self, child: XmlNode, key: str, convert: Convert, differs: str = "") -> None:
        try:
            value = convert(child.text)
            self._context.draft.merge("address", self._match, key, value)
        except ValueError as error:
            self._context.none(child, f"{key} cannot have this value: {error}")
            return
        setting = f"{key} = {toml_value(value)}"
        if differs:
            self._context.differs(child, setting, differs)
        else:
            self._context.taken(child, setting)

    def _auto_create(self, child: XmlNode) -> None:
        """Take two settings as one: Bascule creates an address together with its queue."""
        other = "auto-create-addresses" if child.name == "auto-create-queues" else "auto-create-queues"
        inherited = self._inherited(other)
        both = [child.text.lower(), "true" if inherited is None else inherited.text.lower()]
        differs = "" if len(set(both)) == 1 else "one setting for queues and addresses; it is true only if both are"
        self._set(child, "auto_create", lambda text: all(true_or_false(each) for each in (text, *both)), differs)

    def _inherited(self, name: str) -> XmlNode | None:
        """Return a setting of this element, or of the nearest one that has it."""
        found = (node.child(name) for node in (self._node, *self._general))
        return next((each for each in found if each is not None), None)

    @property
    def _pages(self) -> bool:
        policy = self._inherited("address-full-policy")
        return policy is None or policy.text.upper() == "PAGE"

    def _limit(self, child: XmlNode) -> None:
        try:
            limit = _bound(child)
        except ValueError as error:
            self._context.none(child, str(error))
            return
        if child.name in _LIMITS and self._pages:
            if limit >= 0:
                self._context.none(child, f"needs no limit with PAGE: {_PAGING}")
            else:
                self._context.taken(child, note="no limit, as by default")
        elif child.name in _PAGE_LIMITS and not self._pages:
            self._context.none(child, "has no effect in Artemis either, without the policy PAGE")
        elif child.name in _PAGE_LIMITS and limit >= 0 and self._inherited("page-full-policy") is None:
            self._context.none(child, "has no effect in Artemis either, without page-full-policy")
        elif limit == 0:
            self._context.none(child, _NOTHING)
        else:
            key = {**_LIMITS, **_PAGE_LIMITS}[child.name]
            self._set(child, key, lambda _: max(limit, 0), _PER_QUEUE if limit > 0 else "")

    def _policy(self, child: XmlNode) -> None:
        policy = child.text.upper()
        if child.name == "address-full-policy" and policy == "PAGE":
            self._context.differs(child, "", _PAGING)
        elif child.name == "page-full-policy" and not self._pages:
            self._context.none(child, "has no effect in Artemis either, without the policy PAGE")
        elif policy in _WHEN_FULL:
            self._set(child, "when_full", lambda _: _WHEN_FULL[policy], _DROPS_OLDEST if policy == "DROP" else "")
        else:
            self._context.none(child, f"unknown policy; Artemis knows PAGE, {', '.join(_WHEN_FULL)}")

    def _limits_of_policy(self) -> None:
        """Give this match the limits that hold with its own policy, if a less specific match has another one."""
        policy = self._node.child("address-full-policy")
        if policy is None:
            return
        table = self._context.draft.table("address", self._match)
        for name, key in _LIMITS.items():
            limit = self._inherited(name)
            if key in table or limit is None or limit in self._node.children:
                continue
            try:
                value = 0 if self._pages else max(_bound(limit), 0)
                self._context.draft.merge("address", self._match, key, value)
            except ValueError:
                continue  # reported where it stands
            note = f"by the policy of this match, and <{name}> in line {limit.line}"
            self._context.remark(policy, f"{key} = {value}", note, part=f"/../{name} (not set)")

    def _limit_of_delay(self) -> None:
        """Write Artemis' default for the longest delay, which is ten times the first one; Bascule's is without limit."""
        delay = self._node.child("redelivery-delay")
        if delay is None or self._inherited("max-redelivery-delay") is not None:
            return
        table = self._context.draft.table("address", self._match)
        if not table.get("redelivery_delay_s"):
            return
        longest = table["redelivery_delay_s"] * 10
        try:
            self._context.draft.merge("address", self._match, "redelivery_delay_max_s", longest)
        except ValueError:
            return  # a delay of decades
        note = "the default of Artemis, ten times the delay; Bascule's default is no limit"
        self._context.remark(delay, f"redelivery_delay_max_s = {toml_value(longest)}", note, part="/../max-redelivery-delay (not set)")


def _report_other_defaults(context: ImportContext, section: XmlNode, common: XmlNode | None) -> None:
    """Report defaults that differ and that the source does not set for all addresses."""
    for name, note in _unset(common):
        context.remark(section, "", note, part=f"/{name} (not set)")


def _unset(common: XmlNode | None) -> Iterator[tuple[str, str]]:
    def unset(name: str) -> bool:
        return common is None or common.child(name) is None

    if unset("dead-letter-address"):
        yield (
            "dead-letter-address",
            'without it, Artemis drops dead letters; Bascule keeps them in the queue DLQ. To drop them: dead_letter_address = ""',
        )
    if unset("expiry-address"):
        yield (
            "expiry-address",
            'without it, Artemis drops expired messages; Bascule keeps them in ExpiryQueue. To drop them: expiry_address = ""',
        )
    deletes = common.child("auto-delete-queues") if common is not None else None
    if unset("auto-delete-queues-delay") and (deletes is None or deletes.text.lower() == "true"):
        yield "auto-delete-queues-delay", "Artemis deletes an unused queue at once, Bascule after auto_delete_after_s (300 s)"
