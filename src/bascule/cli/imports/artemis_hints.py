"""Elements of ``<core>`` of Artemis without a counterpart, and what to do instead."""

from __future__ import annotations

from typing import Final

_JOURNAL: Final = "the journal is a Kafka topic: see [journal] and [kafka]"
_STANDBYS: Final = (
    "no clusters: start `bascule broker` more than once on one Kafka; one serves, the others are standbys, and clients list all of them in"
    " failover:(...) or get the list from broker.failover"
)
_OTHER_BROKERS: Final = "no connections to other brokers; to share messages, carry them over Kafka with a divert and an ingress"
_MANAGEMENT: Final = "no management by JMX or messages; use the commands, HTTP ([admin]) or the console"
_COUNTERS: Final = "no history of counters in the broker; let Prometheus scrape /metrics"
_NETWORK: Final = "no check of the network: a broker that cannot reach Kafka stops serving, and a standby takes over"
_ANALYZER: Final = "use the watchdog of systemd (deploy/systemd), and /healthz"
_THREADS: Final = "a setting of the JVM's threads; Bascule needs none"
_CACHES: Final = "a cache of Artemis; a change of users, roles or permissions takes effect at once"
_INTERCEPTORS: Final = "no interceptors; transform messages in a divert, or record them with [audit]"
_MQTT: Final = "Bascule speaks AMQP 1.0 only, not MQTT"
_DISK: Final = "the journal is in Kafka; broker.spill_free_bytes is for the disk of the spill files"
_SCAN: Final = "nothing to set: Bascule decides when it checks this"
_MASKED: Final = 'no codec for passwords; write "file:PATH" or "credential:NAME" in place of a secret'
_PAGING: Final = "no paging: bodies of messages go to spill files when memory is short"

#: The element, and everything in it.
CORE_HINTS: Final = {
    "name": "brokers have no name of their own; broker.instance names a broker in the election of the active one",
    "system-property-prefix": "settings from the environment have the prefix BASCULE_",
    "connectors": _STANDBYS,
    "cluster-connections": _STANDBYS,
    "ha-policy": _STANDBYS,
    "broadcast-groups": _STANDBYS,
    "discovery-groups": _STANDBYS,
    "grouping-handler": _STANDBYS,
    "cluster-user": _STANDBYS,
    "cluster-password": _STANDBYS,
    "connection-routers": _STANDBYS,
    "lock-coordinators": _STANDBYS,
    "bridges": _OTHER_BROKERS,
    "federations": _OTHER_BROKERS,
    "broker-connections": _OTHER_BROKERS,
    "connector-services": _OTHER_BROKERS,
    "mirror-ack-manager-queue-attempts": _OTHER_BROKERS,
    "mirror-ack-manager-page-attempts": _OTHER_BROKERS,
    "mirror-ack-manager-retry-delay": _OTHER_BROKERS,
    "mirror-ack-manager-warn-unacked": _OTHER_BROKERS,
    "mirror-page-transaction": _OTHER_BROKERS,
    "metrics": "metrics need no plugin: the admin server has them at /metrics, in Prometheus' form",
    "metrics-plugin": "metrics need no plugin: the admin server has them at /metrics, in Prometheus' form",
    "broker-plugins": "no plugins; [audit] records who did what, and `bascule why` shows the life of a message",
    "store": _JOURNAL,
    "bindings-directory": _JOURNAL,
    "create-bindings-dir": _JOURNAL,
    "create-journal-dir": _JOURNAL,
    "node-manager-lock-directory": _STANDBYS,
    "large-messages-directory": "messages have at most 64 MiB, and are in the journal",
    "large-message-sync": _JOURNAL,
    "persist-id-cache": "ids of duplicates are always stored",
    "max-redelivery-records": "the number of deliveries is always stored",
    "paging-directory": _PAGING,
    "purge-page-folders": _PAGING,
    "page-max-concurrent-io": _PAGING,
    "page-sync-timeout": _PAGING,
    "read-whole-page": _PAGING,
    "global-max-messages": "memory is limited by bytes (broker.memory_bytes), queues by max_messages",
    "global-max-size-percent-of-jvm-max-memory": "set broker.memory_bytes",
    "max-disk-usage": _DISK,
    "disk-scan-period": _SCAN,
    "management-address": _MANAGEMENT,
    "management-notification-address": _MANAGEMENT,
    "management-message-rbac": _MANAGEMENT,
    "management-rbac-prefix": _MANAGEMENT,
    "view-permission-method-match-pattern": _MANAGEMENT,
    "jmx-management-enabled": _MANAGEMENT,
    "jmx-notification-enabled": _MANAGEMENT,
    "jmx-domain": _MANAGEMENT,
    "jmx-use-broker-name": _MANAGEMENT,
    "suppress-session-notifications": _MANAGEMENT,
    "message-counter-enabled": _COUNTERS,
    "message-counter-sample-period": _COUNTERS,
    "message-counter-max-day-history": _COUNTERS,
    "memory-warning-threshold": "the metrics show the memory; alert rules are in deploy/prometheus",
    "memory-measure-interval": "the metrics show the memory; alert rules are in deploy/prometheus",
    "server-dump-interval": "`bascule top` and the metrics show the state",
    "log-delegate-factory-class-name": "the log has no plugin; its level and format are in [log]",
    "password-codec": _MASKED,
    "mask-password": _MASKED,
    "remoting-incoming-interceptors": _INTERCEPTORS,
    "remoting-outgoing-interceptors": _INTERCEPTORS,
    "resolve-protocols": "Bascule speaks AMQP 1.0 only",
    "security-invalidation-interval": _CACHES,
    "authentication-cache-size": _CACHES,
    "authorization-cache-size": _CACHES,
    "thread-pool-max-size": _THREADS,
    "scheduled-thread-pool-max-size": _THREADS,
    "message-expiry-thread-priority": _THREADS,
    "async-connection-execution-enabled": _THREADS,
    "executor-services": _THREADS,
    "message-expiry-scan-period": _SCAN,
    "transaction-timeout-scan-period": _SCAN,
    "address-queue-scan-period": _SCAN,
    "connection-ttl-check-interval": _SCAN,
    "configuration-file-refresh-period": "the file is read at `bascule config reload` and SIGHUP",
    "graceful-shutdown-enabled": "a broker that is stopped closes its connections, and a standby takes over",
    "graceful-shutdown-timeout": "a broker that is stopped closes its connections, and a standby takes over",
    "temporary-queue-namespace": "temporary queues have generated names and the settings of their names",
    "uuid-namespace": "temporary queues have generated names and the settings of their names",
    "internal-naming-prefix": "Bascule has no internal addresses",
    "amqp-use-core-subscription-naming": "subscriptions have names of their own: `bascule subscription list`",
    "mqtt-session-scan-interval": _MQTT,
    "mqtt-session-state-persistence-timeout": _MQTT,
    "mqtt-subscription-persistence-enabled": _MQTT,
    "literal-match-markers": "must be two characters",
}
#: Beginnings of names of elements.
PREFIX_HINTS: Final = {
    "journal-": _JOURNAL,
    "log-journal-": _JOURNAL,
    "network-check-": _NETWORK,
    "critical-analyzer": _ANALYZER,
}


def core_hint(name: str) -> str | None:
    """Return what to do in place of an element of ``<core>``; None if it is not known."""
    return CORE_HINTS.get(name) or next((hint for prefix, hint in PREFIX_HINTS.items() if name.startswith(prefix)), None)
