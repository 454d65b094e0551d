"""The decision log in a compacted Kafka topic of one partition: the first decision in the order of the offsets stands.

Each entry has a key of its own, so compaction takes none away that was not deleted, and the order never changes. To decide is to append,
and to read up to one's own record. No Kafka transaction and no fence is needed: any number of processes may decide at once.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bascule.core import crash
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import DECISIONS
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import APPEND_TIMEOUT_S, CLIENT_SETTINGS, Appender, OffsetUnknown, Stored, TableReader
from bascule.kafka.guards import guard
from bascule.xa.log import Decision, Entry, Heuristic, LogDamaged, LogState, decode, encode
from bascule.xa.xid import Xid


class _Clients(NamedTuple):
    topics: Topics
    appender: Appender
    reader: TableReader


class KafkaLog:
    """A decision log for managers on any number of machines.

    The first call creates the topic, and looks whether its settings keep what is decided, as does each ``read``, by which a manager begins,
    and each recovery: UnsafeTopic is raised where they do not, and nothing is recovered until they do. What Kafka has deleted by
    then nobody knows: a branch prepared under it has its outcome at the other resources.
    """

    def __init__(self, kafka: Mapping[str, Any], *, topic: str = DECISIONS) -> None:
        """``kafka`` is for librdkafka: ``bootstrap.servers``, security."""
        self._kafka = {**CLIENT_SETTINGS, **kafka}
        self._topic = topic
        self._lock = threading.Lock()
        self._open: _Clients | None = None

    def decide(self, decision: Decision) -> Decision:
        """See DecisionLog."""
        table = self._append(decision)
        mine = _prefix(decision)
        found = sorted((stored.offset, key) for key, stored in table.items() if key.startswith(mine))
        # Gone again already: another process has seen it and finished what it says.
        first = self._entry(found[0][1], table[found[0][1]]) if found else decision
        if not isinstance(first, Decision):
            raise LogDamaged(f"{self._topic}, offset {found[0][0]}: a decision is expected behind key {found[0][1]!r}")
        return first

    def read(self) -> LogState:
        """See DecisionLog."""
        clients = self._clients()
        guard(clients.topics, own_topics.expected({self._topic: own_topics.DECISIONS}))
        state = LogState()
        for key, stored in sorted(clients.reader.read().items(), key=lambda each: each[1].offset):
            state.add(self._entry(key, stored))
        return state

    def record(self, heuristic: Heuristic) -> None:
        """See DecisionLog."""
        self._append(heuristic)

    def forget(self, gtrids: Iterable[bytes]) -> None:
        """See DecisionLog. Nobody waits for it."""
        try:
            self._delete([gtrid + b"#" for gtrid in gtrids])
        except Unavailable:
            return  # it comes back, and is forgotten then

    def forget_heuristic(self, xid: Xid) -> None:
        """See DecisionLog."""
        self._delete([str(xid).encode() + b"#"])

    def close(self) -> None:
        """Waits for what is under way, and frees the clients."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            opened.appender.close()
            opened.reader.close()

    def _entry(self, key: bytes, stored: Stored) -> Entry:
        try:
            return decode(stored.value)
        except LogDamaged as error:
            raise LogDamaged(f"{self._topic}, offset {stored.offset}, key {key!r}: {error}") from error

    def _append(self, entry: Entry) -> dict[bytes, Stored]:
        """The table as it is once the entry is in it."""
        clients = self._clients()
        key = _prefix(entry) + uuid.uuid4().hex.encode()
        try:
            offset = clients.appender.append(Outgoing(self._topic, key, encode(entry), partition=0)).result()
        except OffsetUnknown:
            # It is stored, before what is appended now. Of a second entry with a key of its own it is the first that counts.
            key = _prefix(entry) + uuid.uuid4().hex.encode()
            offset = clients.appender.append(Outgoing(self._topic, key, encode(entry), partition=0)).result()
        crash.point("xa.log.append.after")
        return clients.reader.reach(0, offset, APPEND_TIMEOUT_S)

    def _delete(self, prefixes: list[bytes]) -> None:
        clients = self._clients()
        for key in [key for key in clients.reader.known() if key.startswith(tuple(prefixes))]:
            clients.appender.append(Outgoing(self._topic, key, None, partition=0))

    def _clients(self) -> _Clients:
        with self._lock:
            if self._open is None:
                own_topics.prepare(self._kafka, {self._topic: own_topics.DECISIONS})
                self._open = _Clients(Topics(self._kafka), Appender(self._kafka), TableReader(self._kafka, self._topic, [0]))
            return self._open


def _prefix(entry: Entry) -> bytes:
    return (entry.gtrid if isinstance(entry, Decision) else str(entry.xid).encode()) + b"#"
