"""The settings tree: the meaning, default and check of each setting.

Every model is frozen and refuses unknown keys. Defaults are defined only here; limits have their reason next to them.
"""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from bascule.config.address import Address, AddressSettings, QueueDefinition, TopicDefinition, contradiction
from bascule.config.admin import Admin
from bascule.config.audit import Audit
from bascule.config.bridge import Bridge
from bascule.config.exposure import exposure
from bascule.config.fields import (
    ClientSettings,
    HostPort,
    HostPorts,
    Name,
    Port,
    Section,
    TopicName,
    is_loopback,
    located,
)
from bascule.config.limit import Limit
from bascule.config.log import Log
from bascule.config.metrics import MetricsSection
from bascule.config.named_roles import unknown_role
from bascule.config.oidc import Oidc
from bascule.config.openlineage import OpenLineage
from bascule.config.passwords import read_password
from bascule.config.permission import PermissionRule
from bascule.config.pipeline import Divert, Ingress, exclusive_excess
from bascule.config.pipeline_checks import check_own_topics, unknown_user
from bascule.config.reload_effect import AtOnce, AtRestart, ForNew
from bascule.config.tls import BrokerTls
from bascule.config.user_names import check_name
from bascule.config.validated_user import ValidatedUser
from bascule.config.websocket import WebSocketListener
from bascule.core.defaults import (
    DATA_DIR,
    EXCLUSIVE_DIVERTS_MAX,
    MAX_OFFSETS_PER_TRIGGER,
    MEMORY_BYTES,
    MIN_INSYNC_REPLICAS,
    QUEUES_MAX,
    REPLICATION_FACTOR,
    SPARK_MASTER,
    SPILL_BYTES,
    SPILL_FREE_BYTES,
    TARGET_PARTITIONS,
    TRANSACTION_BYTES,
    TRANSACTION_RECORDS,
    TRANSACTION_S,
    TRANSACTION_TIMEOUT_S,
)
from bascule.core.topics import MESSAGE_BYTES_MAX, PREFIX, JournalTopics

MIB = 1 << 20
#: Longest idle timeout in seconds: AMQP has 32 bits for its milliseconds.
IDLE_TIMEOUT_MAX_S = 4_294_967


class Broker(AddressSettings):
    """The JMS provider, and the settings of addresses that no ``[[address]]`` names."""

    host: AtRestart[str] = Field(default="127.0.0.1", description="Address on which the broker listens")
    port: AtRestart[Port] = Field(default=5672, description="AMQP port (5671 is usual with TLS); 0 = any free port")
    tls: BrokerTls = Field(default=BrokerTls(), description="TLS of this listener: `[broker.tls]`")
    websocket: WebSocketListener = Field(default=WebSocketListener(), description="AMQP over WebSocket: `[broker.websocket]`")
    oidc: Oidc = Field(default=Oidc(), description="Log-in with tokens of an OpenID Connect provider: `[broker.oidc]`")
    users: AtOnce[dict[str, SecretStr]] = Field(
        default={},
        description='Names of users, each with a password, its hash (`bascule user hash`), or "file:PATH" to read either from a file',
    )
    users_file: AtOnce[Path | None] = Field(
        default=None,
        description="File with more users and their roles, which `bascule user add` writes. The broker reads it again when it changes",
    )
    roles: AtOnce[dict[str, tuple[str, ...]]] = Field(
        default={},
        description="Names of roles, each with its users. A client with a certificate has the user that tls.user_from finds in it; a"
        " client without a login is the user `anonymous`. `[[permission]]` says what a role may do",
    )
    allow_anonymous: ForNew[bool | None] = Field(
        default=None,
        description="Let clients connect without a user or a certificate; unset = yes on a loopback host without users, client_ca and oidc",
    )
    allow_insecure: ForNew[bool] = Field(
        default=False,
        description="Accept the risk that other machines can reach a broker without TLS, which means that passwords and messages can be"
        " read on the network, or without any `[[permission]]`, which means that each client may do everything. The admin server then also"
        " accepts the tokens of `[admin]` from other machines without TLS, and commands send them",
    )
    validated_user: ForNew[ValidatedUser] = "off"
    max_message_bytes: AtRestart[ByteSize] = Field(
        default=ByteSize(MESSAGE_BYTES_MAX),
        gt=0,
        le=MESSAGE_BYTES_MAX,
        description="Largest message that the broker accepts, at most 64 MiB",
    )
    handshake_timeout_s: ForNew[float] = Field(
        default=10, gt=0, description="Close a connection that has not logged in and opened after N seconds, TLS included"
    )
    max_handshakes: AtOnce[int] = Field(
        default=2000,
        ge=0,
        description="Maximum number of connections that have not logged in. Further connections wait; if one of the connections takes"
        " longer than a second, the broker closes it in favour of a waiting one; 0 = no limit",
    )
    max_handshakes_per_address: AtOnce[int] = Field(
        default=1000, ge=0, description="Maximum number of connections from one remote address that have not logged in; 0 = no limit"
    )
    idle_timeout_s: ForNew[float] = Field(
        default=60,
        gt=0,
        le=IDLE_TIMEOUT_MAX_S,
        description="Close a connection that has been silent for N seconds. The broker tells clients to send heartbeats",
    )
    transaction_timeout_s: ForNew[float] = Field(
        default=TRANSACTION_TIMEOUT_S,
        gt=0,
        description="Roll back a local transaction that has held messages for N seconds, because other consumers wait for these messages",
    )
    session_timeout_s: AtRestart[float] = Field(
        default=6, ge=1, description="Replace a broker by a standby if Kafka has not heard from the broker for N seconds"
    )
    takeover_after_s: AtRestart[float] = Field(
        default=0.5,
        ge=0,
        description="Replace a broker that is cut off from a standby and silent in Kafka for N seconds; 0 = wait for session_timeout_s",
    )
    standby_port: AtRestart[Port] = Field(default=0, description="Port for connections of standbys; 0 = any free port")
    standby_address: AtRestart[HostPort | None] = Field(
        default=None, description="HOST:PORT to which standbys connect; unset = standby_port at host, or at the name of the machine"
    )
    instance: AtRestart[Name | None] = Field(
        default=None,
        description="Name of this broker in the election of the active broker; unset = derived from host name and data directory",
    )
    failover: ForNew[HostPorts] = Field(
        default=(),
        description="HOST:PORT of this broker and its standbys. The broker sends the list to each client that connects, for its failover",
    )
    memory_bytes: AtOnce[ByteSize] = Field(
        default=ByteSize(MEMORY_BYTES),
        ge=MIB,
        description="Memory that the broker may use for its clients. From a quarter of it on, message bodies go to spill files, in deep"
        " queues earlier; near the limit, producers wait and transactions are refused",
    )
    spill_bytes: AtOnce[ByteSize] = Field(
        default=ByteSize(SPILL_BYTES), ge=MIB, description="Size of the spill files (in embedded.data_dir) at which producers wait"
    )
    spill_free_bytes: AtOnce[ByteSize] = Field(
        default=ByteSize(SPILL_FREE_BYTES), description="Free space on the disk of the spill files below which producers wait; 0 = no limit"
    )
    max_queues: AtOnce[int] = Field(
        default=QUEUES_MAX, ge=1, le=QUEUES_MAX, description="Maximum number of queues and subscriptions, which clients can create"
    )
    max_queues_per_user: AtOnce[int] = Field(
        default=32_000,
        ge=0,
        description="Maximum number of queues and subscriptions that the clients of one user have created, including temporary ones;"
        " 0 = no limit",
    )
    max_durable_subscriptions_per_user: AtOnce[int] = Field(
        default=10_000, ge=0, description="Maximum number of durable subscriptions that the clients of one user have created; 0 = no limit"
    )
    max_connections: AtOnce[int] = Field(
        default=10_000,
        ge=0,
        description="Maximum number of connections that have logged in, within the limit on file descriptors; 0 = only the limit on"
        " file descriptors",
    )
    max_connections_per_address: AtOnce[int] = Field(
        default=5_000, ge=0, description="Maximum number of connections from one remote address; 0 = no limit"
    )
    max_connections_per_user: AtOnce[int] = Field(
        default=5_000, ge=0, description="Maximum number of connections of one user. All anonymous clients count as one user; 0 = no limit"
    )
    max_sessions_per_user: AtOnce[int] = Field(default=50_000, ge=0, description="Maximum number of sessions of one user; 0 = no limit")
    max_links_per_user: AtOnce[int] = Field(
        default=100_000, ge=0, description="Maximum number of producers and consumers of one user; 0 = no limit"
    )
    max_transactions_per_user: AtOnce[int] = Field(
        default=50_000, ge=0, description="Maximum number of open local transactions of one user; 0 = no limit"
    )
    max_prepared_branches_per_user: AtOnce[int] = Field(
        default=0, ge=0, description="Maximum number of prepared branches of one user; 0 = only the limit for all users together"
    )
    max_messages_per_s_per_user: AtOnce[int] = Field(
        default=0,
        ge=0,
        description="Messages that the producers of one user may send in a second, together. The broker gives no more credit, so that a"
        " faster producer waits; 0 = no limit. `[[limit]]` gives users and roles limits of their own",
    )

    @field_validator("users")
    @classmethod
    def _passwords_readable(cls, users: dict[str, SecretStr]) -> dict[str, SecretStr]:
        read: dict[str, SecretStr] = {}
        for name, given in users.items():
            try:
                check_name(name, "user")
                read[name] = SecretStr(read_password(given.get_secret_value()))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return read

    @model_validator(mode="after")
    def _somebody_may_connect(self) -> Broker:
        if not self.has_logins and not self.anonymous_allowed:
            ways = "set users, users_file, oidc.issuer, tls.client_ca, or allow_anonymous = true"
            raise ValueError(f"no client could connect to host {self.host!r}; {ways}")
        return self

    @property
    def has_logins(self) -> bool:
        """Return whether clients can log in: with a password, a certificate or a token."""
        return self.has_passwords or self.tls.client_ca is not None or self.oidc.enabled

    @property
    def anonymous_allowed(self) -> bool:
        """Return whether a client without a user may connect."""
        if self.allow_anonymous is not None:
            return self.allow_anonymous
        return not self.has_logins and is_loopback(self.host)

    @property
    def has_passwords(self) -> bool:
        """Return whether clients can log in with a password."""
        return bool(self.users) or self.users_file is not None

    @property
    def plain_allowed(self) -> bool:
        """Return whether clients may send passwords (SASL PLAIN) and tokens."""
        return self.tls.enabled or is_loopback(self.host) or self.allow_insecure

    @property
    def passwords(self) -> dict[str, str]:
        """Return the password of each user, in clear or as its hash."""
        return {name: password.get_secret_value() for name, password in self.users.items()}

    @property
    def url_scheme(self) -> str:
        """Return the scheme of the URL that clients use."""
        return "amqps" if self.tls.enabled else "amqp"


class Journal(Section):
    """Bascule's own topics."""

    prefix: AtRestart[Name] = Field(
        default=PREFIX, description="First part of the names of Bascule's own topics: PREFIX.journal and others"
    )
    append_timeout_s: AtRestart[float] = Field(
        default=15,
        gt=0,
        description="Close client connections if Kafka has not answered an append for N seconds. Clients with failover reconnect and"
        " repeat their sends",
    )
    snapshot_records: AtRestart[int] = Field(
        default=50_000, ge=100, description="Number of journal records between two snapshots. It limits the time of a restart"
    )
    retention_s: AtRestart[float] = Field(
        default=604_800,
        ge=0,
        description="Keep the journal for N seconds, for new diverts that start in the past; 0 = keep only what queues and pipelines need",
    )
    retention_bytes: AtRestart[ByteSize] = Field(
        default=ByteSize(0),
        description="Limit the part of the journal that retention_s keeps to the last N bytes; 0 = no limit",
    )
    pinned_bytes: AtRestart[ByteSize] = Field(
        default=ByteSize(0),
        description="Size of the journal that a stalled pipeline may keep from being deleted. Beyond this size the pipeline loses its"
        " unread messages and stops; 0 = no limit",
    )
    replication_factor: AtRestart[int] = Field(
        default=REPLICATION_FACTOR, ge=1, le=32767, description="Number of replicas of Bascule's own topics (3 on a cluster)"
    )
    replayable: AtRestart[tuple[str, ...]] = Field(
        default=(),
        description="Addresses or patterns of JMS topics whose persistent messages are journaled even if no durable subscription and"
        " no divert wants them, for future diverts and Spark jobs. Persistent messages of queues are always journaled",
    )
    min_insync_replicas: AtRestart[int] = Field(
        default=MIN_INSYNC_REPLICAS,
        ge=1,
        description="Least number of replicas that must have stored a record before Kafka acknowledges it (2 of 3 on a cluster)",
    )

    @model_validator(mode="after")
    def _replicas_enough(self) -> Journal:
        if self.min_insync_replicas > self.replication_factor:
            raise ValueError(f"min_insync_replicas {self.min_insync_replicas} is more than replication_factor {self.replication_factor}")
        return self


class Kafka(Section):
    """An external Kafka. Without ``bootstrap_servers``, Bascule uses the embedded Kafka."""

    bootstrap_servers: AtRestart[str | None] = Field(
        default=None, min_length=1, description="HOST:PORT,... of an external Kafka; unset = the embedded Kafka"
    )
    client: AtRestart[ClientSettings] = Field(
        default={},
        description='Settings of librdkafka (security.protocol, sasl.*, ssl.* and more). A secret may be "file:PATH" or "credential:NAME"',
    )

    @field_validator("client")
    @classmethod
    def _client_settings(cls, client: ClientSettings) -> ClientSettings:
        for key in client:
            if key in _KAFKA_RESERVED:
                raise ValueError(f"{key!r} is set by Bascule: {_KAFKA_RESERVED[key]}")
        return client


#: Client settings that exactly-once depends on.
_KAFKA_RESERVED = {
    "bootstrap.servers": "set kafka.bootstrap_servers instead",
    "enable.idempotence": "every write is idempotent",
    "transactional.id": "it is the identity of a pipeline",
    "message.timeout.ms": "a record that times out alone would leave a gap in the journal",
    "acks": "a record counts when all in-sync replicas have it",
    "group.id": "groups belong to the bridge",
    "isolation.level": "each reader sets its own",
}


class Embedded(Section):
    """The single-node Kafka that ``bascule up`` and ``bascule kafka`` run."""

    data_dir: AtRestart[Path] = Field(default=Path(DATA_DIR), description="Directory of Kafka's data, logs, process ids, ports, spills")
    port: AtRestart[Port] = Field(default=9092, description="Kafka port; 0 = any free port")
    fsync: AtRestart[bool] = Field(
        default=False, description="Write each record to the disk before it is acknowledged: it survives a power cut, but writes are slower"
    )
    heap_mb: AtRestart[int] = Field(default=512, ge=128, description="Java heap of Kafka in MiB")
    jvm_options: AtRestart[tuple[str, ...]] = Field(
        default=(), description='Further options of Kafka\'s JVM; ["-XX:TieredStopAtLevel=1"] is faster in the first minutes, slower later'
    )


class Pipelines(MetricsSection):
    """The Spark driver that runs all diverts and ingresses."""

    enabled: AtRestart[bool] = Field(default=True, description="Whether `bascule up` starts the pipelines")
    master: AtRestart[str] = Field(
        default=SPARK_MASTER, min_length=1, description="URL of the Spark master; a cluster needs a core for each task"
    )
    spark: AtRestart[ClientSettings] = Field(
        default={}, description='Settings passed to Spark. A secret may be "file:PATH" or "credential:NAME"'
    )
    trigger_interval_ms: AtRestart[int] = Field(
        default=0, ge=0, description="Least ms between two micro-batches; above 0, all transformations are carried in micro-batches"
    )
    max_offsets_per_trigger: AtRestart[int] = Field(
        default=MAX_OFFSETS_PER_TRIGGER, ge=1, description="Maximum number of journal records in one micro-batch of a transformation"
    )
    checkpoint_dir: AtRestart[Path | None] = Field(
        default=None, description="Directory for Spark's checkpoints, emptied at every start; unset = a temporary directory"
    )
    transaction_records: AtRestart[int] = Field(
        default=TRANSACTION_RECORDS, ge=1, description="Maximum number of records in one Kafka transaction"
    )
    transaction_bytes: AtRestart[ByteSize] = Field(
        default=ByteSize(TRANSACTION_BYTES), ge=1, description="Maximum number of bytes in one Kafka transaction, keys and headers included"
    )
    transaction_s: AtRestart[float] = Field(
        default=TRANSACTION_S,
        gt=0,
        le=20,
        description="Commit a Kafka transaction after N seconds, at most 20. Kafka aborts it at 30 s",
    )
    instance: AtRestart[Name | None] = Field(
        default=None,
        description="Name of this driver in the election among the drivers of a bridge. A driver that was killed and restarted under its"
        " name continues at once, without a wait for `broker.session_timeout_s`; no two drivers may have the same name. Unset = a new"
        " name at each start; `bascule up` uses the name of its broker",
    )
    target_partitions: AtRestart[int] = Field(
        default=TARGET_PARTITIONS, ge=0, description="Number of partitions of a target topic that a divert creates; 0 = never create topics"
    )
    on_error: AtRestart[Literal["dead-letter", "stop"]] = Field(
        default="dead-letter", description="Dead-letter a record that cannot be carried, or stop the pipeline"
    )
    dead_letter_topic: AtRestart[TopicName | None] = Field(
        default=None, description="Topic for records that cannot be carried; unset = PREFIX.dead-letter"
    )
    openlineage: OpenLineage = Field(default=OpenLineage(), description="OpenLineage events: `[pipelines.openlineage]`")


class Settings(BaseSettings):
    """All settings of Bascule. The constructor reads no file and no environment: `bascule.config.load` does."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True, env_prefix="BASCULE_", env_nested_delimiter="__")

    bridge: Bridge = Bridge()
    broker: Broker = Broker()
    journal: Journal = Journal()
    kafka: Kafka = Kafka()
    embedded: Embedded = Embedded()
    pipelines: Pipelines = Pipelines()
    admin: Admin = Admin()
    audit: Audit = Audit()
    log: Log = Log()
    address: tuple[Address, ...] = ()
    queue: tuple[QueueDefinition, ...] = ()
    topic: tuple[TopicDefinition, ...] = ()
    permission: tuple[PermissionRule, ...] = ()
    limit: tuple[Limit, ...] = ()
    divert: tuple[Divert, ...] = ()
    ingress: tuple[Ingress, ...] = ()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the values given to the constructor."""
        return (init_settings,)

    @property
    def instance(self) -> str:
        """Return the name of this broker in the election, which is the same after a restart."""
        if self.broker.instance is not None:
            return self.broker.instance
        place = hashlib.sha256(str(self.embedded.data_dir.absolute()).encode()).hexdigest()[:8]
        return f"{socket.gethostname()}-{place}"

    @property
    def listed_users(self) -> frozenset[str]:
        """Return the users that have a password or a role in these settings, besides those of `broker.users_file`."""
        return frozenset(self.broker.users).union(*self.broker.roles.values())

    @property
    def journal_topics(self) -> JournalTopics:
        """Return the journal of this broker and its pipelines, and its topics."""
        return JournalTopics(self.journal.prefix, self.pipelines.dead_letter_topic or "", audit_topic=self.audit.topic or "")

    @model_validator(mode="after")
    def _names_unique(self) -> Settings:
        seen: set[str] = set()
        for section, pipelines in (("divert", self.divert), ("ingress", self.ingress)):
            for position, pipeline in enumerate(pipelines):
                if pipeline.name in seen:
                    raise located((section, position, "name"), f"the name {pipeline.name!r} is given twice")
                seen.add(pipeline.name)
        if (excess := exclusive_excess(self.divert)) is not None:
            raise located(("divert", excess, "exclusive"), f"more than {EXCLUSIVE_DIVERTS_MAX} enabled diverts are exclusive")
        return self

    @model_validator(mode="after")
    def _addresses_agree(self) -> Settings:
        for section, key in (("address", "match"), ("permission", "match"), ("queue", "name"), ("topic", "name")):
            seen: set[str] = set()
            for position, table in enumerate(getattr(self, section)):
                if (value := getattr(table, key)) in seen:
                    raise located((section, position, key), f"{value!r} is given twice")
                seen.add(value)
        for position, address in enumerate(self.address):
            if what := contradiction({**self.broker.given(), **address.given()}):
                raise located(("address", position), f"with the settings of [broker], {what}")
        return self

    @model_validator(mode="after")
    def _access_complete(self) -> Settings:
        wrong = unknown_role(self.permission, self.limit, self.admin, self.broker.roles, self.broker.oidc.roles)
        if wrong is not None and self.broker.users_file is None:  # the file of users has roles, too; it is not read here
            raise located(wrong.path, wrong.reason)
        broker = self.broker
        # Without permissions, everybody may do everything. The pipelines get neither permissions nor users.
        if self.permission and broker.users_file is None and (unlisted := unknown_user(self.divert, self.ingress, self.listed_users)):
            raise located(*unlisted)
        lacks = exposure(broker.host, tls=broker.tls.enabled, permissions=bool(self.permission))
        if lacks is not None and not broker.allow_insecure:
            raise located(("broker", "host"), lacks)
        return self

    @model_validator(mode="after")
    def _own_topics_untouched(self) -> Settings:
        topics = self.journal_topics
        if self.audit.topic is not None and (self.audit.topic in topics.internal or self.audit.topic == topics.dead_letters):
            raise located(("audit", "topic"), f"{self.audit.topic!r} is one of Bascule's own topics")
        check_own_topics(self.divert, self.ingress, topics)
        return self
