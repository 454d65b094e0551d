"""Import of the configuration of the JMS Bridge: ``jms-bridge.conf``, or the same as a properties file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from bascule.cli.imports.context import size_bytes, whole_number
from bascule.cli.imports.draft import SettingsDraft
from bascule.cli.imports.hocon import HoconLeaf
from bascule.cli.imports.report import ImportOutcome, ImportReport, ImportRow, shown_value
from bascule.cli.imports.toml_text import toml_value
from bascule.core.errors import InvalidInput
from bascule.core.masking import MASK
from bascule.core.topics import MESSAGE_BYTES_MAX

#: Settings that Kafka's client for Java and librdkafka have in common.
_KAFKA_COMMON: Final = frozenset(
    {
        "security.protocol", "sasl.mechanism", "sasl.kerberos.service.name", "client.id", "client.dns.lookup", "client.rack",
        "ssl.endpoint.identification.algorithm", "metadata.max.age.ms", "reconnect.backoff.ms", "reconnect.backoff.max.ms",
        "retry.backoff.ms", "connections.max.idle.ms",
    }
)  # fmt: skip
_JAVA_STORES: Final = "librdkafka reads PEM files: set ssl.ca.location, ssl.certificate.location and ssl.key.location in [kafka.client]"
_JAAS_OPTION = re.compile(r"(\w+)\s*=\s*[\"']([^\"']*)[\"']")
#: Settings of Kafka's client for Java that are secrets, and whose names do not say so.
_MORE_SECRETS: Final = re.compile(r"\.(keystore\.key|user\.info|userinfo)$")
_STREAMS: Final = "no Kafka Streams: the broker reads its journal itself"
_JOURNAL_TOPICS: Final = (
    "the journal is PREFIX.journal (journal.prefix) with one partition; Bascule creates its topics with the settings that they need"
)
_JAAS: Final = "no JAAS: users are in broker.users_file (`bascule user add`), in client certificates, or in tokens ([broker.oidc])"
#: Keys without a counterpart, by their beginning.
_HINTS: Final = {
    "kafka.ha.disabled": "several brokers on one Kafka always elect the one that serves",
    "ha.": "start `bascule broker` more than once: one serves, the others are standbys",
    "security.": _JAAS,
    "streams.": _STREAMS,
    "journals.ready": "the broker serves when it has loaded its state",
    "journals.": _JOURNAL_TOPICS,
    "routing.metadata.refresh.ms": "an ingress finds a new topic within 10 seconds",
    "routing.producer.": "diverts and ingresses use [kafka.client]",
    "routing.consumer.": "diverts and ingresses use [kafka.client]",
    "partner_sfdc_id": "not needed",
}
_TYPES: Final = {"TEXT": "text", "BYTES": "bytes"}
_KEYS: Final = {"JMSMessageID": "message-id", "JMSCorrelationID": "correlation-id", "JMSXGroupID": "group-id"}
_CORRELATION_FIRST: Final = ["coalesce(correlation_id, message_id) AS key", "value"]
_TOPIC: Final = "${topic}"
#: A regular expression that is one name, and the end of one that matches every name with the same beginning.
_LITERAL = re.compile(r"(?:[A-Za-z0-9_-]|\\?\.)+")
_ANY_END = re.compile(r"(?:\.\*|\.\+)$")
_REPLICAS_OF_A_CLUSTER: Final = 3


class _Rule(NamedTuple):
    number: int
    leaves: dict[str, HoconLeaf]

    def text(self, key: str, default: str) -> str:
        leaf = self.leaves.get(key)
        return default if leaf is None else leaf.value


def import_jms_bridge(leaves: Sequence[HoconLeaf], file: str, report: ImportReport, draft: SettingsDraft) -> None:
    """Import a configuration. Raises InvalidInput if it is none of the JMS Bridge."""
    ours = [leaf for leaf in leaves if leaf.path[0] == "bridge"]
    if not any(leaf.path[:2] in {("bridge", "id"), ("bridge", "kafka")} for leaf in ours):
        raise InvalidInput(f"{file}: not a configuration of the JMS Bridge, which has bridge.id and bridge.kafka")
    _JmsBridgeImport(file, report, draft).run(leaves)


@dataclass
class _JmsBridgeImport:
    file: str
    report: ImportReport
    draft: SettingsDraft
    client: dict[str, str] = field(default_factory=dict)

    def run(self, leaves: Sequence[HoconLeaf]) -> None:
        rules: dict[int, _Rule] = {}
        for leaf in _without_copies(leaves):
            key = ".".join(leaf.path[1:]) if leaf.path[0] == "bridge" else ""
            if leaf.path[:3] == ("bridge", "routing", "topics") and len(leaf.path) > 4 and leaf.path[3].isdigit():
                number = int(leaf.path[3])
                rules.setdefault(number, _Rule(number, {})).leaves[".".join(leaf.path[4:])] = leaf
            elif not key:
                self._row(leaf, ImportOutcome.NONE, "", "not a setting of the JMS Bridge")
            else:
                self._setting(leaf, key)
        if self.client:
            self.draft.set_unchecked("kafka", {"client": self.client})
        self._default_replication(leaves)
        for rule in rules.values():
            self._rule(rule)

    def _row(self, leaf: HoconLeaf, outcome: ImportOutcome, setting: str, note: str = "") -> None:
        key = ".".join(leaf.path)
        # A key of the source may contain a whole secret: the private key of a PEM file, or the user and password of a service.
        shown = MASK if _MORE_SECRETS.search(key) else shown_value(key, leaf.value)
        self.report.add(ImportRow(self.file, leaf.line, key, shown, outcome, setting, note))

    def _set(self, leaf: HoconLeaf, section: str, key: str, value: Any, differs: str = "") -> None:
        try:
            self.draft.set(section, key, value)
        except ValueError as error:
            self._row(leaf, ImportOutcome.NONE, "", f"{section}.{key} cannot have this value: {error}")
            return
        self._row(leaf, ImportOutcome.DIFFERS if differs else ImportOutcome.TAKEN, f"{section}.{key} = {toml_value(value)}", differs)

    def _setting(self, leaf: HoconLeaf, key: str) -> None:
        try:
            match key:
                case "id":
                    self._set(leaf, "bridge", "id", leaf.value)
                case "kafka.bootstrap.servers":
                    self._set(leaf, "kafka", "bootstrap_servers", leaf.value)
                case "journals.topic.replication":
                    self._replication(leaf)
                case "journals.topic.partitions" if leaf.value == "1":
                    self._row(leaf, ImportOutcome.TAKEN, "", "the journal always has one partition")
                case "journals.max.message.size":
                    size = min(size_bytes(leaf.value), MESSAGE_BYTES_MAX)
                    less = "the largest message of Bascule" if size < size_bytes(leaf.value) else ""
                    self._set(leaf, "broker", "max_message_bytes", size, less)
                case _:
                    self._other(leaf, key)
        except ValueError as error:
            self._row(leaf, ImportOutcome.NONE, "", str(error))

    def _other(self, leaf: HoconLeaf, key: str) -> None:
        hint = next((hint for start, hint in _HINTS.items() if key.startswith(start)), None)
        if hint is None and key.startswith("kafka."):
            self._client(leaf, key.removeprefix("kafka."))
        else:
            self._row(leaf, ImportOutcome.NONE, "", hint or "not known to Bascule, and not taken")

    def _client(self, leaf: HoconLeaf, key: str) -> None:
        if key == "sasl.jaas.config":
            self._jaas(leaf)
        elif key in _KAFKA_COMMON:
            try:
                self.draft.set("kafka", "client", {key: leaf.value})
            except ValueError as error:
                self._row(leaf, ImportOutcome.NONE, "", str(error))
                return
            self.client[key] = leaf.value
            self._row(leaf, ImportOutcome.TAKEN, f"kafka.client.{toml_value(key)} = {toml_value(leaf.value)}")
        else:
            note = _JAVA_STORES if key.startswith("ssl.") else "a setting of Kafka's client for Java; see the settings of librdkafka"
            self._row(leaf, ImportOutcome.NONE, "", note)

    def _jaas(self, leaf: HoconLeaf) -> None:
        """Take the user of a JAAS line; its password must come from a file."""
        options = dict(_JAAS_OPTION.findall(leaf.value))
        row = leaf._replace(value=" ".join(leaf.value.split()[:2]))
        if "username" not in options:
            self._row(row, ImportOutcome.NONE, "", "no JAAS: set sasl.username, sasl.password and others of librdkafka in [kafka.client]")
            return
        self.client["sasl.username"] = options["username"]
        note = 'the password is not taken: write it to a file, and set "sasl.password" = "file:PATH" in [kafka.client]'
        self._row(row, ImportOutcome.DIFFERS, f'kafka.client."sasl.username" = {toml_value(options["username"])}', note)

    def _replication(self, leaf: HoconLeaf) -> None:
        count = whole_number(leaf.value)
        self._set(leaf, "journal", "replication_factor", count)
        if count >= _REPLICAS_OF_A_CLUSTER:
            self.draft.set_unchecked("journal", {"min_insync_replicas": 2})
            note = "so that each confirmed message survives the loss of a machine; the JMS Bridge leaves it to the topic"
            self._row(leaf, ImportOutcome.DIFFERS, "journal.min_insync_replicas = 2", note)

    def _default_replication(self, leaves: Sequence[HoconLeaf]) -> None:
        if "replication_factor" in self.draft.section("journal"):
            return
        self.draft.set_unchecked("journal", {"replication_factor": _REPLICAS_OF_A_CLUSTER, "min_insync_replicas": 2})
        row = HoconLeaf(("bridge", "journals", "topic", "replication (not set)"), "", leaves[0].line)
        self._row(row, ImportOutcome.TAKEN, "journal.replication_factor = 3, min_insync_replicas = 2", "the default of the JMS Bridge")

    def _rule(self, rule: _Rule) -> None:
        """Make an ingress of a rule, and a divert if a pattern of addresses can say the same as its regular expression."""
        match = rule.leaves.get("match")
        if match is None:
            for leaf in rule.leaves.values():
                self._row(leaf, ImportOutcome.NONE, "", "a rule without match; the JMS Bridge refuses it, too")
            return
        expression = match.value.removeprefix("^").removesuffix("$")
        template = rule.text("address.template", f"kafka.{_TOPIC}")
        self._ingress(rule, match, expression, template)
        self._divert(rule, match, expression, template)
        for key, leaf in rule.leaves.items():
            if key not in _RULE_KEYS:
                self._row(leaf, ImportOutcome.NONE, "", "not known to Bascule, and not taken")

    def _ingress(self, rule: _Rule, match: HoconLeaf, expression: str, template: str) -> None:
        name = f"from-kafka-{rule.number + 1}"
        kind = rule.text("message.type", "BYTES").upper()
        body = _TYPES.get(kind, "bytes")
        table = {"name": name, "pattern": expression, "to": template, "routing": "multicast", "body": body, "start": "latest"}
        try:
            self.draft.add("ingress", table)
        except ValueError as error:
            self._row(match, ImportOutcome.NONE, "", f"cannot be an ingress: {error}")
            return
        note = "a regular expression of Python, which must match the whole name; records from now on"
        self._row(match, ImportOutcome.TAKEN, f'[[ingress]] name = "{name}", pattern = {toml_value(expression)}', note)
        if (leaf := rule.leaves.get("address.template")) is not None:
            self._row(leaf, ImportOutcome.TAKEN, f'[[ingress]] name = "{name}", to = {toml_value(template)}')
        if (leaf := rule.leaves.get("message.type")) is not None:
            note = "a header jms.JMSType does not change it"
            self._row(leaf, ImportOutcome.DIFFERS, f'[[ingress]] name = "{name}", body = "{table["body"]}"', note)
        if (leaf := rule.leaves.get("consume.always")) is not None:
            reads = ImportOutcome.TAKEN if leaf.value.lower() == "true" else ImportOutcome.DIFFERS
            self._row(leaf, reads, "", "an ingress always reads its topics, also while the JMS topic has no subscriber")

    def _divert(self, rule: _Rule, match: HoconLeaf, expression: str, template: str) -> None:
        found = _addresses(expression, template)
        name = f"to-kafka-{rule.number + 1}"
        if found is None:
            note = (
                f"no divert: no pattern of addresses means the same as {template!r} with this expression; write a [[divert]] for each JMS"
                " topic, with `from` (words, '*', '#') and `to`"
            )
            self._row(match, ImportOutcome.NONE, "", note)
            for key in ("key.property", "correlation.key.override"):
                if key in rule.leaves:
                    self._row(rule.leaves[key], ImportOutcome.NONE, "", "belongs to the divert")
            return
        source, target = found
        table: dict[str, Any] = {"name": name, "from": source, "to": target, **self._record_key(rule, name)}
        try:
            self.draft.add("divert", table)
        except ValueError as error:
            self._row(match, ImportOutcome.NONE, "", f"cannot be a divert: {error}")
            return
        self._row(match, ImportOutcome.TAKEN, f'[[divert]] name = "{name}", from = {toml_value(source)}, to = {toml_value(target)}')

    def _record_key(self, rule: _Rule, name: str) -> dict[str, Any]:
        """Return the settings of a divert for the key of its records."""
        override = rule.text("correlation.key.override", "true").lower() == "true"
        named = rule.text("key.property", "JMSMessageID")
        setting = f'[[divert]] name = "{name}", '
        if override and named == "JMSMessageID":
            table: dict[str, Any] = {"select": _CORRELATION_FIRST}
        else:
            table = {"key": _KEYS.get(named, f"property:{named}")}
        shown = ", ".join(f"{key} = {toml_value(value)}" for key, value in table.items())
        if (leaf := rule.leaves.get("correlation.key.override")) is not None:
            lost = override and named != "JMSMessageID"
            note = "the key is the property alone, or write `select`: coalesce(correlation_id, ...) AS key" if lost else ""
            self._row(leaf, ImportOutcome.DIFFERS if lost else ImportOutcome.TAKEN, setting + shown, note)
        if (leaf := rule.leaves.get("key.property")) is not None:
            self._row(leaf, ImportOutcome.TAKEN, setting + shown)
        return table


def _without_copies(leaves: Sequence[HoconLeaf]) -> Iterator[HoconLeaf]:
    """Leave out what a table has only because it refers to another one: ``streams = ${bridge.kafka}``."""
    kafka = {(leaf.line, leaf.path[2:]) for leaf in leaves if leaf.path[:2] == ("bridge", "kafka")}
    topic = {(leaf.line, leaf.path[3:]) for leaf in leaves if leaf.path[:3] == ("bridge", "journals", "topic")}
    for leaf in leaves:
        match leaf.path[1:]:
            case ("streams" | "ha", *rest) if (leaf.line, tuple(rest)) in kafka:
                continue
            case ("journals", "bindings" | "messages", "topic", *rest) | ("journals", "bindings" | "messages", _, "topic", *rest) if (
                leaf.line, tuple(rest),
            ) in topic:  # fmt: skip
                continue
        yield leaf


_RULE_KEYS: Final = frozenset({"match", "address.template", "message.type", "consume.always", "key.property", "correlation.key.override"})


def _addresses(expression: str, template: str) -> tuple[str, str] | None:
    """Return the addresses and the Kafka topic of a divert for a rule; None if no pattern of addresses has the same meaning."""
    before, placeholder, after = template.partition(_TOPIC)
    if not placeholder:
        return None
    if _LITERAL.fullmatch(expression):
        topic = expression.replace("\\.", ".")
        return f"{before}{topic}{after}", topic
    start = _ANY_END.sub("", expression)
    if after or start == expression or (start and not (_LITERAL.fullmatch(start) and start.endswith("."))):
        return None
    words = start.replace("\\.", ".")
    if not words and before and not before.endswith("."):
        return None
    return f"{before}{words}#", f"{words}${{rest}}"
