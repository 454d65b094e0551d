"""The settings of the pipelines, as plain values that Spark ships to its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from bascule.broker.divert_access import DivertUser
from bascule.core.defaults import (
    DIVERT_KEY,
    DIVERT_TO,
    INGRESS_BODY,
    INGRESS_KEY_AS,
    INGRESS_UNBOUND,
    MAX_OFFSETS_PER_TRIGGER,
    MIN_INSYNC_REPLICAS,
    REPLICATION_FACTOR,
    SESSION_TIMEOUT_S,
    SPARK_MASTER,
    TARGET_PARTITIONS,
    TRANSACTION_BYTES,
    TRANSACTION_RECORDS,
    TRANSACTION_S,
)
from bascule.core.destination import Routing
from bascule.core.linear_regex import LinearRegex
from bascule.core.topics import MESSAGE_BYTES_MAX, JournalTopics
from bascule.writer.position import DEFAULT_GROUP, DIVERT, EARLIEST, LATEST

if TYPE_CHECKING:
    from bascule.config.pipeline import Divert, Ingress
    from bascule.config.settings import Settings


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where a new pipeline begins. ``timestamp_ms`` applies if ``at`` is neither ``earliest`` nor ``latest``."""

    at: str = LATEST
    timestamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class DivertSpec:
    """A divert of JMS messages from the addresses of ``source`` to the topics of ``target`` (with ``${address}``, ``${rest}``).

    ``user`` consumes the messages, "" for the owner of the broker.
    """

    name: str
    source: str
    target: str = DIVERT_TO
    selector: str = ""
    key: str = DIVERT_KEY
    exclusive: bool = False
    start: StartPosition = StartPosition()
    from_kafka: bool = False
    select: tuple[str, ...] = ()
    function: str | None = None
    enabled: bool = True
    group: str = DEFAULT_GROUP
    user: str = ""

    @property
    def transformed(self) -> bool:
        """Return True if the user has configured a transformation."""
        return bool(self.select) or self.function is not None


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """An ingress of Kafka records of ``topics``, or of topics that match ``pattern``, to the address of ``target``.

    ``target`` and ``reply_to`` may contain ``${topic}`` and ``${header:NAME}``. If ``reply_to`` is empty, JMSReplyTo comes from the headers
    of the record. ``tasks`` is the number of Spark tasks over which the source partitions are spread, or None for one for each core.
    ``user`` sends the messages, "" for the owner of the broker. Without ``keep_user_id``, JMSXUserID in the headers of a record is ignored,
    and the message gets ``user_id``, or none if it is "". ``masked`` are the patterns of a PropertyMask.
    """

    name: str
    target: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    routing: Routing = Routing.MULTICAST
    body: str = INGRESS_BODY
    start: StartPosition = StartPosition(EARLIEST)
    unbound: str = INGRESS_UNBOUND
    key_as: str = INGRESS_KEY_AS
    reply_to: str = ""
    enabled: bool = True
    tasks: int | None = None
    keep_user_id: bool = True
    masked: tuple[str, ...] = ()
    user: str = ""
    user_id: str = ""

    def names(self, topic: str) -> bool:
        """Return True if the ingress reads a topic with this name."""
        return topic in self.topics if self.pattern is None else _matches(self.pattern, topic)


@lru_cache(10_000)
def _matches(pattern: str, topic: str) -> bool:
    """Return whether a pattern matches a name. An ingress asks this for all topics of Kafka every few seconds."""
    return _regex(pattern).fullmatch(topic) is not None


_regex: Final = lru_cache(100)(LinearRegex)


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """Limits of one Kafka transaction. It ends at the end of a source record, and at the latest with Spark's batch."""

    records: int = TRANSACTION_RECORDS
    size_bytes: int = TRANSACTION_BYTES
    age_s: float = TRANSACTION_S


@dataclass(frozen=True, slots=True)
class PipelinesSpec:
    """All settings of a driver. ``kafka`` are librdkafka settings. ``masked`` and ``keep_user_id`` are for new ingresses."""

    bridge_id: str
    kafka: dict[str, Any]
    diverts: tuple[DivertSpec, ...] = ()
    ingresses: tuple[IngressSpec, ...] = ()
    topics: JournalTopics = field(default_factory=JournalTopics)
    limits: TransactionLimits = TransactionLimits()
    message_bytes_max: int = MESSAGE_BYTES_MAX
    stop_on_error: bool = False
    target_partitions: int = TARGET_PARTITIONS
    replication_factor: int = REPLICATION_FACTOR
    min_insync_replicas: int = MIN_INSYNC_REPLICAS
    master: str = SPARK_MASTER
    spark: dict[str, str] = field(default_factory=dict)
    trigger_interval_ms: int = 0
    max_offsets_per_trigger: int = MAX_OFFSETS_PER_TRIGGER
    checkpoint_dir: str | None = None
    session_timeout_s: float = SESSION_TIMEOUT_S
    instance: str | None = None
    masked: tuple[str, ...] = ()
    keep_user_id: bool = True

    def transactional_id(self, position_key: str) -> str:
        """Return the one transactional id that may move a position."""
        return self.topics.transactional_id(self.bridge_id, position_key)


def from_settings(settings: Settings, bootstrap_servers: str) -> PipelinesSpec:
    """Return the pipelines of a configuration, on the Kafka at ``bootstrap_servers``."""
    run = settings.pipelines
    masked, keep_user_id = settings.admin.masked_properties, settings.broker.validated_user == "off"
    return PipelinesSpec(
        bridge_id=settings.bridge.id,
        kafka={"bootstrap.servers": bootstrap_servers, **settings.kafka.client},
        diverts=tuple(map(divert_spec, settings.divert)),
        ingresses=tuple(ingress_spec(one, masked, keep_user_id=keep_user_id) for one in settings.ingress),
        masked=masked,
        keep_user_id=keep_user_id,
        topics=settings.journal_topics,
        limits=TransactionLimits(records=run.transaction_records, size_bytes=run.transaction_bytes, age_s=run.transaction_s),
        message_bytes_max=settings.broker.max_message_bytes,
        stop_on_error=run.on_error == "stop",
        target_partitions=run.target_partitions,
        replication_factor=settings.journal.replication_factor,
        min_insync_replicas=settings.journal.min_insync_replicas,
        master=run.master,
        spark={name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in run.spark.items()},
        trigger_interval_ms=run.trigger_interval_ms,
        max_offsets_per_trigger=run.max_offsets_per_trigger,
        checkpoint_dir=str(run.checkpoint_dir) if run.checkpoint_dir else None,
        session_timeout_s=settings.broker.session_timeout_s,
        instance=run.instance,
    )  # fmt: skip


def divert_spec(one: Divert) -> DivertSpec:
    """Return a divert of a configuration."""
    return DivertSpec(
        name=one.name, source=one.from_address, target=one.to, selector=one.selector, key=one.key, exclusive=one.exclusive,
        start=_start(one), from_kafka=one.from_kafka, select=tuple(one.select), function=one.python, enabled=one.enabled,
        group=one.group or DEFAULT_GROUP, user=one.user or "",
    )  # fmt: skip


def user_of(spec: DivertSpec | IngressSpec) -> DivertUser | None:
    """Return the user of a divert that acts as one. An ingress runs in any case: the broker checks each of its messages."""
    return DivertUser(spec.user, spec.source) if isinstance(spec, DivertSpec) and spec.user else None


def user_of_definition(pipeline: str, settings: Mapping[str, Any]) -> DivertUser | None:
    """Return the user of a divert that is defined at run time. The settings may be those of a later version."""
    user = settings.get("user")
    address = settings.get("from", settings.get("from_address", ""))  # the configuration accepts the name of the field, too
    return DivertUser(str(user), str(address)) if user and pipeline.startswith(DIVERT) else None


def ingress_spec(one: Ingress, masked: tuple[str, ...], *, keep_user_id: bool) -> IngressSpec:
    """Return an ingress of a configuration.

    ``keep_user_id`` applies if the ingress does not say it: the broker does not validate user ids. If it does, a message has the user whose
    permissions it needs.
    """
    validated = not keep_user_id and one.keep_user_id is None
    return IngressSpec(
        name=one.name, target=one.to, topics=tuple(one.topics), pattern=one.pattern, routing=one.routing_type, body=one.body,
        start=_start(one), unbound=one.unbound, key_as=one.key_as, reply_to=one.reply_to, enabled=one.enabled,
        tasks=one.tasks, masked=masked, keep_user_id=keep_user_id if one.keep_user_id is None else one.keep_user_id,
        user=one.user or "", user_id=(one.user or "") if validated else "",
    )  # fmt: skip


def _start(pipeline: Any) -> StartPosition:
    return StartPosition(pipeline.start) if pipeline.start_ms is None else StartPosition("timestamp", pipeline.start_ms)
