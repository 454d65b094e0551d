"""Bascule's own topics in Kafka: their names, which no message or pattern may use, and their maximum record size."""

from __future__ import annotations

from dataclasses import dataclass

#: The maximum record size: a message is in one journal record, so Kafka's own limit is raised.
MESSAGE_BYTES_MAX = 64 << 20
#: A journal record holds a whole transaction, as large as the largest message; the rest is for the other entries.
RECORD_BYTES_MAX = 70 << 20
XA_PREFIX = "bascule.xa"
#: The decision log of transactions.
DECISIONS = f"{XA_PREFIX}.decisions"
#: Marks of committed transactions of the adapter's senders.
OUTBOUND = "bascule.outbound"
#: Default names of the topics of transactions and of the resource adapter.
SHARED = frozenset({DECISIONS, f"{XA_PREFIX}.side", f"{XA_PREFIX}.log", OUTBOUND})
#: Headers of a record of ``PREFIX.ingress``: ``keep`` or ``drop`` for messages that no queue or subscription takes, and the user of the
#: ingress, which is missing if the owner of the broker sends the messages.
UNBOUND_HEADER = "unbound"
INGRESS_USER_HEADER = "user"
#: The defaults of the settings ``journal.prefix`` and ``bridge.id``.
PREFIX = "bascule"
BRIDGE_ID = "bascule"


@dataclass(frozen=True, slots=True)
class JournalTopics:
    """One journal and the Kafka topics that belong to it.

    ``prefix`` is setting ``journal.prefix``. ``dead_letter_topic`` is setting ``pipelines.dead_letter_topic``; empty = the default name.
    ``partition`` is the partition of the topics ``journal`` and ``ingress`` that holds the records. ``audit_topic`` is setting
    ``audit.topic``; empty = none.
    """

    prefix: str = PREFIX
    dead_letter_topic: str = ""
    partition: int = 0
    audit_topic: str = ""

    @property
    def journal(self) -> str:
        """Decisions of the broker."""
        return f"{self.prefix}.journal"

    @property
    def snapshots(self) -> str:
        """Snapshots of the broker's state, from which an epoch starts."""
        return f"{self.prefix}.snapshots"

    @property
    def store(self) -> str:
        """Bodies of messages that outlive their part of the journal."""
        return f"{self.prefix}.store"

    @property
    def ingress(self) -> str:
        """Messages made from Kafka records, for the broker."""
        return f"{self.prefix}.ingress"

    @property
    def positions(self) -> str:
        """The positions of the pipelines."""
        return f"{self.prefix}.positions"

    @property
    def control(self) -> str:
        """What administrators want the pipelines to do."""
        return f"{self.prefix}.control"

    @property
    def reports(self) -> str:
        """What the driver of the pipelines reports about them."""
        return f"{self.prefix}.pipelines"

    @property
    def redrive(self) -> str:
        """Which records of the dead-letter topic are done."""
        return f"{self.prefix}.redrive"

    @property
    def dead_letters(self) -> str:
        """Records that no pipeline can convert. A setting may change the name."""
        return self.dead_letter_topic or f"{self.prefix}.dead-letter"

    @property
    def brokers(self) -> str:
        """The consumer group that elects one of the brokers of this journal, and the topic for messages between these brokers."""
        return f"{self.prefix}.brokers"

    def drivers(self, bridge_id: str) -> str:
        """Return the consumer group that elects one of the drivers of a bridge."""
        return f"{self.prefix}.{bridge_id}.drivers"

    def transactional_id(self, bridge_id: str, position_key: str) -> str:
        """Return the only transactional id with which bridge ``bridge_id`` may change the position with this key."""
        return f"{self.prefix}.{bridge_id}.{position_key}"

    @property
    def own(self) -> frozenset[str]:
        """Topics that only Bascule writes and reads, those of this journal. Each new topic of a broker or driver belongs here."""
        return frozenset({
            self.journal, self.snapshots, self.store, self.ingress, self.positions, self.brokers, self.control, self.reports, self.redrive,
        })  # fmt: skip

    @property
    def internal(self) -> frozenset[str]:
        """Topics that only Bascule writes, including those shared by all bridges on one Kafka, without the dead-letter topic."""
        return SHARED | self.own

    @property
    def reserved(self) -> frozenset[str]:
        """Topics that no divert may write because of a message's address and that no pattern of an ingress may match."""
        return self.internal | {self.dead_letters} | ({self.audit_topic} if self.audit_topic else set())
