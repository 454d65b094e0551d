"""The decision log in a compacted Kafka topic with one partition. ``log_topic`` has the rules."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import DECISIONS
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.appender import APPEND_TIMEOUT_S, CLIENT_SETTINGS, Appender, OffsetUnknown
from bascule.kafka.compacted import Stored, TableReader
from bascule.kafka.guards import guard
from bascule.threads.joint import JointTry
from bascule.xa import log_topic
from bascule.xa.blocking import now_ms
from bascule.xa.forks import abandon
from bascule.xa.log import Decision, Heuristic, LogDamaged, LogState
from bascule.xa.log_topic import LogRecord
from bascule.xa.xid import Xid, new_log_id


class _Clients(NamedTuple):
    topics: Topics
    appender: Appender
    reader: TableReader


class KafkaLog:
    """A decision log for managers on any number of machines.

    The first call creates the topic and checks that its settings keep decisions. Each ``read``, with which a manager and a recovery begin,
    checks them again. Otherwise UnsafeTopic is raised, and nothing is recovered until the settings are safe. Decisions that Kafka has
    deleted by then are lost: the outcome of a branch prepared under them is known only to the other resources.
    """

    def __init__(self, kafka: Mapping[str, Any], *, topic: str = DECISIONS) -> None:
        """``kafka`` are librdkafka settings: ``bootstrap.servers``, security."""
        self._kafka = {**CLIENT_SETTINGS, **kafka}
        self._topic = topic
        self._lock = threading.Lock()
        self._opening = JointTry(self._lock)
        self._open: _Clients | None = None
        self._log_id = ""  # of the topic that this process works with

    def decide(self, decision: Decision) -> Decision:
        """See DecisionLog."""
        with self._named():
            return run_blocking(log_topic.decide(_Calls(self._clients(), self._topic), decision))

    def read(self) -> LogState:
        """See DecisionLog."""
        clients = self._clients()
        guard(clients.topics, own_topics.expected({self._topic: own_topics.DECISIONS}))
        with self._named():
            state = run_blocking(log_topic.read(_Calls(clients, self._topic)))
            if not state.log_id:
                if self._log_id:
                    raise LogDamaged(f"the topic was replaced by an empty one while a manager uses it. Restore log {self._log_id}")
                run_blocking(log_topic.identify(_Calls(clients, self._topic), new_log_id(), now_ms()))
                state = run_blocking(log_topic.read(_Calls(clients, self._topic)))
            if state.log_id != (self._log_id or state.log_id):
                raise LogDamaged(f"the topic was replaced by another log: its id is {state.log_id}. Restore log {self._log_id}")
            self._log_id = state.log_id
            return state

    def record(self, heuristic: Heuristic) -> None:
        """See DecisionLog."""
        run_blocking(log_topic.store_heuristic(_Calls(self._clients(), self._topic), heuristic))

    def forget(self, gtrids: Iterable[bytes]) -> None:
        """See DecisionLog. Does not wait."""
        with suppress(Unavailable):  # the decision reappears and is forgotten then
            log_topic.forget(_Calls(self._clients(), self._topic), gtrids)

    def forget_heuristic(self, xid: Xid) -> None:
        """See DecisionLog."""
        log_topic.forget_heuristic(_Calls(self._clients(), self._topic), xid)

    def close(self) -> None:
        """Wait for pending operations, and close the clients."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            opened.appender.close()
            opened.reader.close()

    def after_fork(self) -> None:
        """See Forks."""
        abandon(self._open, self._lock)
        self._open, self._lock = None, threading.Lock()
        self._opening = JointTry(self._lock)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the topic to errors about entries."""
        try:
            yield
        except LogDamaged as error:
            raise LogDamaged(f"decision log {self._topic!r}: {error}") from error

    def _clients(self) -> _Clients:
        return self._open or self._opening(self._opened)

    def _opened(self) -> _Clients:
        if self._open is None:
            own_topics.prepare(self._kafka, {self._topic: own_topics.DECISIONS})
            self._open = _Clients(Topics(self._kafka), Appender(self._kafka), TableReader(self._kafka, self._topic, [0]))
        return self._open


class _Calls:
    """The effects of the protocol, performed by the calling thread."""

    def __init__(self, clients: _Clients, topic: str) -> None:
        self._clients = clients
        self._topic = topic

    def new_key(self) -> bytes:
        """See TopicCalls."""
        return uuid.uuid4().hex.encode()

    async def append(self, key: bytes, value: bytes) -> int | None:
        """See TopicCalls."""
        try:
            return self._clients.appender.append(Outgoing(self._topic, key, value, partition=0)).result()
        except OffsetUnknown:
            return None

    async def reach(self, offset: int) -> Mapping[bytes, LogRecord]:
        """See TopicCalls."""
        return _records(self._clients.reader.reach(0, offset, APPEND_TIMEOUT_S))

    async def tail(self, *, barrier: bool = True) -> Mapping[bytes, LogRecord]:
        """See TopicCalls."""
        return _records(self._clients.reader.read_behind_barrier() if barrier else self._clients.reader.read())

    def known(self) -> Iterable[bytes]:
        """See TopicCalls."""
        return self._clients.reader.known()

    def post(self, key: bytes, value: bytes | None) -> None:
        """See TopicCalls."""
        self._clients.appender.append(Outgoing(self._topic, key, value, partition=0))


def _records(table: Mapping[bytes, Stored]) -> dict[bytes, LogRecord]:
    return {key: LogRecord(stored.value, stored.offset) for key, stored in table.items()}
