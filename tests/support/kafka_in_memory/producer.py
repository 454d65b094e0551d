"""A producer of the Kafka in memory, with transactions."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, Message, TopicPartition

from tests.support.kafka_in_memory.client import MemoryClient
from tests.support.kafka_in_memory.state import At, Stored, Transactional, failure

if TYPE_CHECKING:
    from tests.support.kafka_in_memory.cluster import KafkaInMemory


class MemoryProducer(MemoryClient):
    """A producer. With a ``transactional.id`` its records are in transactions."""

    def __init__(self, kafka: KafkaInMemory, settings: Mapping[str, Any], logger: Any) -> None:
        super().__init__(kafka, settings)
        self._logger = logger
        self._id = self.settings.get("transactional.id")
        self._epoch = self._producer_id = -1
        self._transaction: object = None
        self._broken: KafkaError | None = None
        self._touched: set[At] = set()
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._reports: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._reports)

    def produce(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int = -1,
        on_delivery: Any = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        self.kafka.meet("produce")
        if self._broken is not None:
            raise failure(KafkaError._STATE)
        if len(value or b"") > int(self.settings.get("message.max.bytes", 1_000_000)):
            raise failure(KafkaError.MSG_SIZE_TOO_LARGE)
        if len(self) >= int(self.settings.get("queue.buffering.max.messages", 100_000)):
            raise BufferError("Local: Queue full")
        self._waiting.append((topic, value, key, partition, on_delivery, timestamp, headers, self._transaction))
        self._send()

    def _send(self) -> None:
        if (held := self.kafka.held.get("send")) is not None and not held.is_set():
            return
        with self.kafka.turn:
            while self._waiting:
                self._store(*self._waiting.popleft())
            self.kafka.turn.notify_all()

    def _store(
        self, topic: str, value: Any, key: Any, partition: int, told: Any, timestamp: int, headers: Any, transaction: object
    ) -> None:
        error = self._refusal(topic, key, value)
        offset: int | None = None
        count = len(self.kafka.topics[topic].partitions) if topic in self.kafka.topics else 1
        number = partition if partition >= 0 else zlib.crc32(key or b"") % count
        if error is None:
            record = Stored(key, value, headers or None, timestamp or int(time.time() * 1000), transaction)
            offset = self.kafka.topics[topic].partitions[number].append(record)
            if transaction is not None:
                self._touched.add((topic, number))
        elif transaction is not None:
            self._broken = error
        if told is not None:
            message = Message(topic=topic, partition=number, offset=OFFSET_INVALID if offset is None else offset, key=key, value=value)
            self._reports.append(lambda: told(error, message))

    def _refusal(self, topic: str, key: bytes | None, value: bytes | None) -> KafkaError | None:
        faults = self.kafka.faults["delivery"]
        if faults:
            error: KafkaError = faults.popleft().args[0]
            return error
        if topic not in self.kafka.topics:
            return KafkaError(KafkaError._UNKNOWN_TOPIC)
        if topic in self.kafka.denied:
            return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        if key is None and "compact" in self.kafka.topics[topic].config["cleanup.policy"]:
            return KafkaError(KafkaError.INVALID_RECORD)
        if len(value or b"") > int(self.kafka.topics[topic].config["max.message.bytes"]):
            return KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
        if self._id is not None and self.kafka.transactional[self._id].epoch != self._epoch:
            return KafkaError(KafkaError._FENCED, fatal=True)
        return None

    def poll(self, timeout: float = -1) -> int:
        self.kafka.meet("poll")
        self._send()
        count = 0
        if not self._reports and timeout > 0:
            with self.kafka.turn:
                self.kafka.turn.wait_for(lambda: bool(self._reports or self._waiting), min(timeout, 0.05))
            self._send()
        while self._reports:
            count += 1
            self._reports.popleft()()
        return count

    def flush(self, timeout: float = -1) -> int:
        self.kafka.meet("flush")
        deadline_s = time.monotonic() + timeout
        self.poll(0)
        while len(self) and time.monotonic() < deadline_s:
            self.poll(0.01)
        return len(self)

    def purge(self) -> None:
        for _, _, _, _, told, *_ in self._waiting:
            if told is not None:
                message = Message(topic="", partition=0)
                self._reports.append(partial(told, KafkaError(KafkaError._PURGE_QUEUE), message))
        self._waiting.clear()

    # -- transactions ------------------------------------------------------------------------------------------------

    def init_transactions(self, timeout: float = -1) -> None:
        self.kafka.meet("init_transactions")
        with self.kafka.turn:
            known = self.kafka.transactional.setdefault(str(self._id), Transactional(self.kafka.new_producer_id()))
            if known.open is not None:
                self._end(known, committed=False)
                known.epoch += 1  # fences the earlier incarnation
            known.epoch += 1
            self._producer_id, self._epoch = known.producer_id, known.epoch
        if self._logger is not None and "eos" in str(self.settings.get("debug", "")):
            self._logger.log(10, "%s", f"Acquired PID{{Id:{self._producer_id},Epoch:{self._epoch}}} (InitProducerId)")

    def begin_transaction(self) -> None:
        self.kafka.meet("begin_transaction")
        known = self._current()
        known.open = self._transaction = object()
        known.touched = self._touched = set()

    def commit_transaction(self, timeout: float = -1) -> None:
        self.poll(0)
        self.kafka.meet("commit_transaction")
        if self._broken is not None:
            raise KafkaException(KafkaError(self._broken.code(), self._broken.str(), fatal=self._broken.fatal(), txn_requires_abort=True))
        if len(self):
            raise failure(KafkaError._TIMED_OUT, retriable=True)
        self._over(committed=True)

    def abort_transaction(self, timeout: float = -1) -> None:
        self.kafka.meet("abort_transaction")
        self.purge()
        self._broken = None
        self._over(committed=False)

    def send_offsets_to_transaction(self, offsets: list[TopicPartition], group: str, timeout: float = -1) -> None:
        self.kafka.meet("send_offsets_to_transaction")
        self._current()
        self._group_offsets = group, {(each.topic, each.partition): (each.offset, "") for each in offsets}

    def _over(self, *, committed: bool) -> None:
        with self.kafka.turn:
            known = self._current()
            self._end(known, committed=committed)
            if committed and hasattr(self, "_group_offsets"):
                group, offsets = self._group_offsets
                self.kafka.offsets[group] |= offsets
            self._transaction = None
            self.kafka.turn.notify_all()
        self.kafka.meet("after_commit")

    def _end(self, known: Transactional, *, committed: bool) -> None:
        for topic, number in known.touched:
            partition = self.kafka.topics[topic].partitions[number]
            partition.mark(known.open, committed=committed)
        known.open, known.touched = None, set()

    def _current(self) -> Transactional:
        with self.kafka.turn:
            known = self.kafka.transactional[str(self._id)]
            if known.epoch != self._epoch:
                raise failure(KafkaError._FENCED, fatal=True)
            return known
