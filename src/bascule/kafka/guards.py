"""Checks of Bascule's own topics at each start, since their settings may have been changed.

An unsafe setting is refused; a weak one is reported. Each finding names the topic, the setting, its value, and the right value.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.core.log import get_log
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka import clients, restore_mark
from bascule.kafka.admin import Facts, Topics
from bascule.kafka.replication import replication_of

#: The caller has already waited for a transaction; a running Kafka answers at once.
EXPLAIN_TIMEOUT_S = 2.0

_log = get_log("bascule.kafka.guards")


class TopicRole(enum.Enum):
    """The purpose of a topic, which decides the settings that it needs."""

    JOURNAL = "every record counts until Bascule deletes it; a record that the topic refuses ends an epoch"
    LOG = "every record counts until Bascule deletes it"
    TABLE = "the newest record of each key counts, and is small"
    STORE = "messages by key; the newest of each counts"
    MARKS = "the newest record of each key counts, and is small; records before the oldest of them are deleted"
    OTHERS_LOG = "written by another process, which decides how long it is kept"
    WAITING = "records that wait to be processed; in any number of partitions"
    OUTPUT = "read by people"
    MESSAGES = "small messages between processes, which count for seconds"


#: Kafka's own topic, in which the coordinator stores whether a transaction was committed.
TRANSACTION_STATE = "__transaction_state"
#: Roles of topics whose records are found by key.
_BY_KEY = (TopicRole.TABLE, TopicRole.STORE, TopicRole.MARKS)


class UnsafeTopic(BasculeError):
    """A topic of Bascule would lose confirmed data; nothing is started on it."""

    retriable = False
    scope = Scope.PROCESS
    http_status = 409
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """A wrong setting. ``breaks``: the setting is unsafe; otherwise it is weak. ``remedy``: what to do, if not to set ``right``."""

    topic: str
    setting: str
    value: str
    right: str
    why: str
    breaks: bool
    remedy: str = ""

    def __str__(self) -> str:
        """Return the text for the log and for error messages."""
        return f"topic {self.topic!r} has {self.setting}={self.value}: {self.why}; {self.remedy or f'set {self.right}'}"


def findings(topic: str, role: TopicRole, facts: Facts, partitions: int | None, record_bytes: int = RECORD_BYTES_MAX) -> Iterator[Finding]:
    """Yield the wrong settings of a topic with this number of partitions (None: any), for records of up to ``record_bytes``."""
    settings, replicas = facts.settings, facts.replicas

    def found(setting: str, right: str, why: str, *, breaks: bool, value: str | None = None) -> Finding:
        return Finding(topic, setting, settings.get(setting, "") if value is None else value, right, why, breaks)

    if restore_mark.is_marked(settings):
        value = settings[restore_mark.SETTING]
        why = "`bascule restore` was interrupted, and the topic is not complete"
        yield Finding(topic, restore_mark.SETTING, value, "", why, breaks=True, remedy="repeat `bascule restore`")
        return
    if partitions is not None and facts.partitions != partitions:
        why = f"records outside the first {partitions} would not be read, or keys not be found"
        yield found("partitions", str(partitions), why, breaks=True, value=str(facts.partitions))
    policy = settings.get("cleanup.policy", "delete")
    if role in (TopicRole.TABLE, TopicRole.STORE) and policy != "compact":
        yield found("cleanup.policy", "compact", "Kafka deletes records by age although they are still needed", breaks=True)
    if role is TopicRole.MARKS and "compact" not in policy:
        yield found("cleanup.policy", "compact,delete", "Kafka deletes records by age although they are still needed", breaks=True)
    if role not in _BY_KEY and "compact" in policy:
        yield found("cleanup.policy", "delete", "Kafka deletes a record when a later one has the same key", breaks=True)
    if role in (TopicRole.JOURNAL, TopicRole.LOG, TopicRole.OTHERS_LOG, TopicRole.WAITING) or (
        role is TopicRole.MARKS and "delete" in policy
    ):
        why = (
            "Kafka deletes records that are still needed" if role is TopicRole.MARKS else "Kafka deletes messages that a queue still needs"
        )
        for setting in ("retention.ms", "retention.bytes"):
            if settings.get(setting, "-1") != "-1":
                yield found(setting, "-1", why, breaks=role in (TopicRole.JOURNAL, TopicRole.LOG, TopicRole.MARKS))
    limit = settings.get("max.message.bytes", "")
    if role not in (TopicRole.TABLE, TopicRole.MARKS, TopicRole.MESSAGES) and limit and int(limit) < record_bytes:
        yield too_small(topic, int(limit), record_bytes, breaks=role in (TopicRole.JOURNAL, TopicRole.STORE))
    if settings.get("unclean.leader.election.enable") == "true":
        why = "a replica that lags may become the leader, and confirmed records are lost"
        yield found("unclean.leader.election.enable", "false", why, breaks=replicas > 1)
    in_sync = int(settings.get("min.insync.replicas", "1"))
    if in_sync > replicas:
        yield found("min.insync.replicas", f"at most {replicas}", f"with {replicas} replicas, nothing can be stored", breaks=True)
    elif in_sync == 1 < replicas:
        why = f"with {replicas} replicas, a record is confirmed when a single replica has stored it, and the loss of one disk loses it"
        yield found("min.insync.replicas", str(max(2, replicas - 1)), why, breaks=False)
    if replicas == 1 < facts.brokers:
        yield found("replication factor", "3", "the loss of one disk loses all records", breaks=False, value="1")


def too_small(topic: str, limit: int, record_bytes: int, *, breaks: bool = True) -> Finding:
    """Return the finding for a topic that accepts records of ``limit`` bytes but needs larger ones."""
    return Finding(topic, "max.message.bytes", str(limit), str(record_bytes), "large transactions and messages cannot be stored", breaks)


def ensure(
    kafka: Mapping[str, Any],
    topic: str,
    role: TopicRole,
    partitions: int,
    config: Mapping[str, str],
    *,
    record_bytes: int = RECORD_BYTES_MAX,
) -> None:
    """Create a topic of a user's program if it does not exist, and check it; weak settings are logged.

    Raises UnsafeTopic for an unsafe setting, InvalidInput, Unavailable.
    """
    topics = Topics(kafka)
    if topic not in topics.partitions():
        replication = replication_of(kafka)
        topics.create(topic, partitions, {**config, **replication.settings}, replication_factor=replication.factor)
        topics.await_visible([topic])
    expected = None if role is TopicRole.WAITING else partitions
    for finding in guard(topics, {topic: (role, expected)}, record_bytes):
        _log.warning("weak topic setting", finding=finding)


def guard(topics: Topics, wanted: Mapping[str, tuple[TopicRole, int | None]], record_bytes: int = RECORD_BYTES_MAX) -> list[Finding]:
    """Return weak settings of topics with a role and a number of partitions; topics that do not exist are skipped.

    Raises UnsafeTopic for an unsafe setting, Unavailable.
    """
    found = [
        finding
        for topic, facts in topics.facts(wanted).items()
        for finding in findings(topic, wanted[topic][0], facts, wanted[topic][1], record_bytes)
    ]
    if broken := [str(finding) for finding in found if finding.breaks]:
        raise UnsafeTopic("; ".join(broken))
    return found


def guard_transactions(kafka: Mapping[str, Any]) -> list[Finding]:
    """Return weak settings of the topic in which Kafka keeps the state of transactions. It exists from the first transaction on.

    Raises UnsafeTopic for an unsafe setting. If the user may not read the settings, the function only logs this.
    """
    try:
        return guard(Topics(kafka), {TRANSACTION_STATE: (TopicRole.TABLE, None)})
    except Unavailable as error:
        _log.warning("could not read topic settings", topic=TRANSACTION_STATE, error=error)
        return []


def no_transaction(kafka: Mapping[str, Any], why: str) -> Unavailable:
    """Return the error for a transaction that cannot be started, with the reason that the state of the topic shows."""
    try:
        seen = _unusable(clients.admin(kafka))
    except KafkaException as error:
        _log.debug("could not describe topic", topic=TRANSACTION_STATE, error=error)
        seen = ""
    return Unavailable(f"no transaction can be started: {why}{seen and f'; {seen}'}")


def _unusable(admin: AdminClient) -> str:
    brokers = len(admin.list_topics(timeout=EXPLAIN_TIMEOUT_S).brokers)
    try:
        asked = admin.describe_topics(TopicCollection([TRANSACTION_STATE]), request_timeout=EXPLAIN_TIMEOUT_S)
        partitions = asked[TRANSACTION_STATE].result().partitions
    except KafkaException as error:
        if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise
        return (
            f"Kafka has not created its topic {TRANSACTION_STATE!r}: transaction.state.log.replication.factor (default: 3) must be"
            f" at most the number of running brokers, {brokers}"
        )
    resource = ConfigResource(ResourceType.TOPIC, TRANSACTION_STATE)
    settings = admin.describe_configs([resource], request_timeout=EXPLAIN_TIMEOUT_S)[resource].result()
    wanted = int(str(settings["min.insync.replicas"].value))
    return too_few_in_sync(wanted, [(len(each.replicas), len(each.isr)) for each in partitions])


def too_few_in_sync(wanted: int, partitions: Sequence[tuple[int, int]]) -> str:
    """Return which partitions, by replicas and in-sync replicas, accept no record; "" if all do."""
    short = [in_sync for replicas, in_sync in partitions if in_sync < min(wanted, replicas)]
    if not short:
        return ""
    return (
        f"topic {TRANSACTION_STATE!r} has min.insync.replicas={wanted}, but {len(short)} of its {len(partitions)} partitions have at most"
        f" {max(short)} replicas in sync; start the missing brokers"
    )
