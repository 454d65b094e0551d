"""Whether Bascule's own topics are still as its promises need them: looked at by every start, since a hand may have changed them.

What breaks a promise is refused, what weakens one is told. Each finding names topic, setting, value, and what would be right.
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
from bascule.kafka import clients
from bascule.kafka.admin import Facts, Topics

#: Who waits for a transaction has waited long; a Kafka that is there answers at once.
EXPLAIN_TIMEOUT_S = 2.0

_log = get_log("bascule.kafka.guards")


class TopicRole(enum.Enum):
    """What a topic is for, and so what it must be like."""

    JOURNAL = "every record counts until Bascule deletes it; a record that the topic refuses ends an epoch"
    LOG = "every record counts until Bascule deletes it"
    TABLE = "the newest record of each key counts, and is small"
    STORE = "messages by key; the newest of each counts"
    MARKS = "the newest record of each key counts, and is small; records before the oldest of them are deleted"
    OTHERS_LOG = "written by another process, which decides how long it is kept"
    WAITING = "records that wait to be processed; in any number of partitions"
    OUTPUT = "read by people"


#: Kafka's own topic, of which its coordinator says whether a transaction was committed.
TRANSACTION_STATE = "__transaction_state"
#: What is needed of these is found by its key.
_BY_KEY = (TopicRole.TABLE, TopicRole.STORE, TopicRole.MARKS)


class UnsafeTopic(BasculeError):
    """A topic of Bascule's own would lose what was promised; nothing is started on it."""

    retriable = False
    scope = Scope.PROCESS
    http_status = 409
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """A setting that is wrong. ``breaks``: a promise does not hold with it; else it holds less firmly."""

    topic: str
    setting: str
    value: str
    right: str
    why: str
    breaks: bool

    def __str__(self) -> str:
        """For the log, or for whoever has to mend it."""
        return f"topic {self.topic!r} has {self.setting}={self.value}: {self.why}; set {self.right}"


def findings(topic: str, role: TopicRole, facts: Facts, partitions: int | None, record_bytes: int = RECORD_BYTES_MAX) -> Iterator[Finding]:
    """What is wrong with a topic that should have so many partitions (None: any number), for records of up to ``record_bytes``."""
    settings, replicas = facts.settings, facts.replicas

    def found(setting: str, right: str, why: str, *, breaks: bool, value: str | None = None) -> Finding:
        return Finding(topic, setting, settings.get(setting, "") if value is None else value, right, why, breaks)

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
        why = "Kafka deletes records that are still needed" if role is TopicRole.MARKS else "Kafka deletes messages that nobody has taken"
        for setting in ("retention.ms", "retention.bytes"):
            if settings.get(setting, "-1") != "-1":
                yield found(setting, "-1", why, breaks=role in (TopicRole.JOURNAL, TopicRole.LOG, TopicRole.MARKS))
    limit = settings.get("max.message.bytes", "")
    if role not in (TopicRole.TABLE, TopicRole.MARKS) and limit and int(limit) < record_bytes:
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
    """Of a topic that takes records of ``limit`` bytes and has to take larger ones."""
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
    """Creates a topic where it is not there, and looks at it; what weakens a promise is logged.

    Raises UnsafeTopic for what breaks one, InvalidInput, Unavailable.
    """
    topics = Topics(kafka)
    if topic not in topics.partitions():
        topics.create(topic, partitions, config)
        topics.await_visible([topic])
    expected = None if role is TopicRole.WAITING else partitions
    for finding in guard(topics, {topic: (role, expected)}, record_bytes):
        _log.warning("weak topic setting", finding=finding)


def guard(topics: Topics, wanted: Mapping[str, tuple[TopicRole, int | None]], record_bytes: int = RECORD_BYTES_MAX) -> list[Finding]:
    """What weakens a promise, of topics that should have a role and number of partitions; one that does not exist is passed over.

    Raises UnsafeTopic for what breaks one, Unavailable.
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
    """What weakens all that is written in transactions: where Kafka keeps what is decided of them. It is there from the first one on.

    Raises UnsafeTopic for what breaks it. Who may not look at it hears nothing but that.
    """
    try:
        return guard(Topics(kafka), {TRANSACTION_STATE: (TopicRole.TABLE, None)})
    except Unavailable as error:
        _log.warning("could not read topic settings", topic=TRANSACTION_STATE, error=error)
        return []


def no_transaction(kafka: Mapping[str, Any], why: str) -> Unavailable:
    """Of one that Kafka does not start. Its coordinator says only that it is not available; its topic may show the reason."""
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
    """Whether some of the partitions, by their replicas and those in sync, take no record; "" where all do."""
    short = [in_sync for replicas, in_sync in partitions if in_sync < min(wanted, replicas)]
    if not short:
        return ""
    return (
        f"topic {TRANSACTION_STATE!r} has min.insync.replicas={wanted}, but {len(short)} of its {len(partitions)} partitions have at most"
        f" {max(short)} replicas in sync; start the missing brokers"
    )
