"""Bascule's own topics in Kafka: their names, which no name from a message or a pattern may mean, and their largest record."""

from __future__ import annotations

from dataclasses import dataclass

#: A message is contained in one journal record, for which Kafka's own limit is raised.
MESSAGE_BYTES_MAX = 64 << 20
#: A journal record holds a whole transaction, as large as the largest message; the rest is for what stands around it.
RECORD_BYTES_MAX = 70 << 20
XA_PREFIX = "bascule.xa"
#: The decision log of transactions.
DECISIONS = f"{XA_PREFIX}.decisions"
#: Marks of transactions that the adapter's senders have committed.
OUTBOUND = "bascule.outbound"
#: What transactions and the resource adapter use, under the names that they have where a program says nothing else.
SHARED = frozenset({DECISIONS, f"{XA_PREFIX}.side", f"{XA_PREFIX}.log", OUTBOUND})
#: The defaults of the settings ``journal.prefix`` and ``bridge.id``.
PREFIX = "bascule"
BRIDGE_ID = "bascule"


@dataclass(frozen=True, slots=True)
class JournalTopics:
    """One journal and the Kafka topics that belong to it.

    ``prefix`` is setting ``journal.prefix``. ``dead_letter_topic`` is setting ``pipelines.dead_letter_topic``; empty = the default name.
    ``partition`` is the partition of the topics ``journal`` and ``ingress`` that holds the records.
    """

    prefix: str = PREFIX
    dead_letter_topic: str = ""
    partition: int = 0

    @property
    def journal(self) -> str:
        """What the broker has decided."""
        return f"{self.prefix}.journal"

    @property
    def snapshots(self) -> str:
        """States of the broker, from which an epoch starts."""
        return f"{self.prefix}.snapshots"

    @property
    def store(self) -> str:
        """Bodies of messages that outlive the part of the journal that they were in."""
        return f"{self.prefix}.store"

    @property
    def ingress(self) -> str:
        """Messages from Kafka records, which the broker takes in."""
        return f"{self.prefix}.ingress"

    @property
    def positions(self) -> str:
        """How far each pipeline has read."""
        return f"{self.prefix}.positions"

    @property
    def dead_letters(self) -> str:
        """Records that no pipeline can carry. The name may be the user's."""
        return self.dead_letter_topic or f"{self.prefix}.dead-letter"

    @property
    def brokers(self) -> str:
        """The consumer group in which the brokers of this journal elect one."""
        return f"{self.prefix}.brokers"

    def drivers(self, bridge_id: str) -> str:
        """The consumer group in which the drivers of a bridge elect one."""
        return f"{self.prefix}.{bridge_id}.drivers"

    def transactional_id(self, bridge_id: str, position_key: str) -> str:
        """The only transactional id under which bridge ``bridge_id`` may move the position with this key."""
        return f"{self.prefix}.{bridge_id}.{position_key}"

    @property
    def internal(self) -> frozenset[str]:
        """Topics that only Bascule writes, with those that all bridges on one Kafka share. Without the dead-letter topic."""
        return SHARED | {self.journal, self.snapshots, self.store, self.ingress, self.positions}

    @property
    def reserved(self) -> frozenset[str]:
        """Topics that no divert may write because of a message's address, and that no pattern of an ingress may match."""
        return self.internal | {self.dead_letters}
