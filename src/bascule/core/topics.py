"""Bascule's own topics in Kafka: their names, which no name from a message or a pattern may mean, and their largest record."""

from __future__ import annotations

#: A message travels in one journal record, for which Kafka's own limit is raised.
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


def own_topics(prefix: str) -> frozenset[str]:
    """Those of the bridge with this ``journal.prefix``, and the shared ones; not the dead-letter topic, whose name is the user's."""
    return SHARED.union(f"{prefix}.{name}" for name in ("journal", "snapshots", "store", "positions", "ingress"))
