"""A consumer of the Kafka in memory, with groups."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, Message, TopicPartition

from tests.support.kafka_in_memory.client import MemoryClient
from tests.support.kafka_in_memory.state import At, failure, readable

if TYPE_CHECKING:
    from tests.support.kafka_in_memory.cluster import KafkaInMemory


class MemoryConsumer(MemoryClient):
    """A consumer, either with assigned partitions or as a member of a group."""

    def __init__(self, kafka: KafkaInMemory, settings: Mapping[str, Any]) -> None:
        super().__init__(kafka, settings)
        self.closed = False
        self.group = str(self.settings["group.id"])
        self.instance = self.settings.get("group.instance.id")
        self.target: set[At] = set()  # the partitions that the coordinator assigns to this member
        self._at: dict[At, int] = {}
        self._told_end: set[At] = set()
        self._paused: set[At] = set()
        self._patterns: list[str] = []
        self._callbacks: dict[str, Any] = {}
        self._says: deque[KafkaError] = deque()
        self._commits: deque[tuple[KafkaError | None, list[TopicPartition]]] = deque()

    # -- reading -----------------------------------------------------------------------------------------------------

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._at, self._told_end = {}, set()
        self.incremental_assign(partitions)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        with self.kafka.turn:
            for each in partitions:
                self._at[each.topic, each.partition] = self._start(each)
                self._validate(each)

    def _start(self, at: TopicPartition) -> int:
        partition = self.kafka.there(at)
        if at.offset == OFFSET_BEGINNING:
            return partition.first
        if at.offset == OFFSET_END:
            return partition.end
        if at.offset >= 0:
            return at.offset
        committed = self.kafka.offsets[self.group].get((at.topic, at.partition))
        if committed is not None:
            return committed[0]
        return partition.end if self.settings.get("auto.offset.reset") == "latest" else partition.first

    def _validate(self, at: TopicPartition) -> None:
        """Report a truncation, as librdkafka does, if the log ends before an offset in the leader epoch that is given with it."""
        if at.leader_epoch is not None and (end := self.kafka.there(at).end_of(at.leader_epoch)) < at.offset:
            text = f"Partition log truncation detected at offset {at.offset}: broker end offset is {end} (offset leader epoch 0)"
            self._says.append(KafkaError(KafkaError._AUTO_OFFSET_RESET, text))

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        self.kafka.meet("incremental_unassign")
        for each in partitions:
            self._at.pop((each.topic, each.partition), None)

    def unassign(self) -> None:
        self._at = {}

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition(*at) for at in self._at]

    def pause(self, partitions: list[TopicPartition]) -> None:
        self._paused |= {(each.topic, each.partition) for each in partitions}

    def resume(self, partitions: list[TopicPartition]) -> None:
        self._paused -= {(each.topic, each.partition) for each in partitions}

    def seek(self, at: TopicPartition) -> None:
        self.kafka.meet("seek")
        self._at[at.topic, at.partition] = at.offset

    def poll(self, timeout: float = -1) -> Message | None:
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        self.kafka.meet("consume")
        self._serve()
        deadline_s = time.monotonic() + timeout
        found: list[Message] = []
        with self.kafka.turn:
            while True:
                found += self._fetched(num_messages - len(found))
                left_s = deadline_s - time.monotonic()
                if found or left_s <= 0 or self._to_serve():
                    return found
                self.kafka.turn.wait(min(left_s, 0.05))

    def _fetched(self, count: int) -> list[Message]:
        if self._says:
            return [Message(topic="", partition=0, offset=0, error=self._says.popleft())]
        found: list[Message] = []
        for at in [each for each in self._at if each not in self._paused]:
            if self.kafka.faults["fetch"]:
                found.append(Message(topic=at[0], partition=at[1], offset=0, error=self.kafka.faults["fetch"].popleft().args[0]))
            found += self._records(at, count - len(found))
        return found

    def _records(self, at: At, count: int) -> list[Message]:
        committed = self.settings.get("isolation.level", "read_committed") == "read_committed"
        topic = self.kafka.topics.get(at[0])
        if topic is None:
            return []
        partition, found = topic.partitions[at[1]], list[Message]()
        if not partition.first <= self._at[at] <= partition.end:
            if self.settings.get("auto.offset.reset") == "error":
                return [Message(topic=at[0], partition=at[1], offset=self._at[at], error=KafkaError(KafkaError._AUTO_OFFSET_RESET))]
            self._at[at] = partition.first
        end = partition.stable if committed else partition.end
        while self._at[at] < end and len(found) < count:
            offset = self._at[at]
            self._at[at] += 1
            record = partition.records.get(offset)
            if record is not None and readable(partition, offset, record, committed=committed):
                self._told_end.discard(at)
                found.append(
                    Message(
                        topic=at[0], partition=at[1], offset=offset, key=record.key, value=record.value,
                        headers=record.headers, timestamp=(1, record.timestamp_ms),
                    )
                )  # fmt: skip
        if self._at[at] >= end and at not in self._told_end and len(found) < count and self.settings.get("enable.partition.eof"):
            self._told_end.add(at)
            found.append(Message(topic=at[0], partition=at[1], offset=self._at[at], error=KafkaError(KafkaError._PARTITION_EOF)))
        return found

    def get_watermark_offsets(self, at: TopicPartition, timeout: float = -1, cached: bool = False) -> tuple[int, int]:
        self.kafka.meet("get_watermark_offsets")
        with self.kafka.turn:
            partition = self.kafka.there(at)
            return partition.first, partition.end

    # -- groups ------------------------------------------------------------------------------------------------------

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        self._patterns = list(topics)
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        with self.kafka.turn:
            members = self.kafka.members[self.group]
            for other in [each for each in members if self.instance is not None and each.instance == self.instance]:
                members.remove(other)
                self.target, other.target = other.target, set()
                other.fence()
            members.append(self)
            self.kafka.balance(self.group)

    def fence(self) -> None:
        """Fence this member: Kafka has given its name to another client, and its partitions are gone without a call."""
        self._says.append(KafkaError(KafkaError.FENCED_INSTANCE_ID, "fenced", fatal=True))
        self._callbacks = {}

    def expire(self) -> None:
        """End the session: other members get the partitions, and this one hears of it from its own client."""
        with self.kafka.turn:
            self.kafka.members[self.group].remove(self)
            self.target = set()
            self._callbacks["revoke"] = self._callbacks["lost"]
            self.kafka.balance(self.group)

    def memberid(self) -> str | None:
        with self.kafka.turn:
            return f"{self.instance}-{id(self)}" if self in self.kafka.members[self.group] else None

    def wanted_topics(self) -> set[str]:
        return {
            name
            for name in self.kafka.topics
            for each in self._patterns
            if (re.match(each, name) if each.startswith("^") else each == name)
        }

    def unsubscribe(self) -> None:
        with self.kafka.turn:
            if self in self.kafka.members[self.group]:
                self.kafka.members[self.group].remove(self)
            self.target = set()
            self.kafka.balance(self.group)

    def _to_serve(self) -> bool:
        return bool(self._callbacks) and self.target != set(self._at)

    def _serve(self) -> None:
        while self._commits:
            self.settings["on_commit"](*self._commits.popleft())
        if not self._to_serve():
            return
        gone, new = set(self._at) - self.target, self.target - set(self._at)
        if gone:
            self._callbacks["revoke"](self, [TopicPartition(*each) for each in sorted(gone)])
        if new:
            self._callbacks["assign"](self, [TopicPartition(*each) for each in sorted(new)])

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        self.kafka.meet("committed")
        with self.kafka.turn:
            stored = self.kafka.offsets[self.group]
            return [TopicPartition(at.topic, at.partition, *stored.get((at.topic, at.partition), (OFFSET_INVALID,))) for at in partitions]

    def commit(self, offsets: list[TopicPartition], asynchronous: bool = True) -> list[TopicPartition] | None:
        error: KafkaError | None = None
        try:
            self.kafka.meet("commit")
            if self._patterns and self not in self.kafka.members[self.group]:
                raise failure(KafkaError.UNKNOWN_MEMBER_ID)
            with self.kafka.turn:
                for each in offsets:
                    self.kafka.offsets[self.group][each.topic, each.partition] = each.offset, each.metadata or ""
        except KafkaException as raised:
            error = raised.args[0]
            if not asynchronous:
                raise
        if asynchronous:
            self._commits.append((error, offsets))
            return None
        return offsets

    def consumer_group_metadata(self) -> str:
        return self.group

    def close(self) -> None:
        self.kafka.meet("close")
        self.closed = True
        if self.settings.get("enable.auto.commit", True):  # as Kafka's clients do by default
            with self.kafka.turn:
                self.kafka.offsets[self.group].update({at: (offset, "") for at, offset in self._at.items()})
        if self.instance is None:
            self.unsubscribe()
        self._at = {}
