"""The tail of the ingress topic in a thread: it performs the effects of :mod:`bascule.broker.ingress_tail`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from bascule.broker.engine import Engine
from bascule.broker.ingress_tail import CHUNKS_MAX, Chunk, IngressReading, IngressRecord, IngressTaking
from bascule.core.effects import Severity, run_blocking
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.core.topics import INGRESS_USER_HEADER, UNBOUND_HEADER
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory, readable_headers
from bascule.kafka.log import PartitionReader, offset_of
from bascule.server.effects import write_note
from bascule.threads.lasting import end_process, lasting_thread

log = get_log(__name__)

#: How long the reader waits for records before it checks whether it should end.
READ_S = 0.1
READ_RECORDS = 1000
#: How long a request about the topic may take before it is repeated. Kafka answers in milliseconds, and the end of the epoch waits for the
#: request.
ANSWER_S = 2.0


class IngressTail:
    """Reads one partition, ``read_committed``, in a thread; hands chunks to the engine on the loop."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, partition: int, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._partition = partition
        self._effects = _Effects(self, kafka, topic, partition, engine, loop)
        self._reading = IngressReading(self._effects, topic, partition, topic_id=engine.ingress_topic_id)
        self.taking = IngressTaking(
            engine, topic, partition, soon=loop.call_soon, taken=self._effects.room.release, ending=self._effects.ending
        )
        self._start()

    def _start(self) -> None:
        self._thread = lasting_thread(self._run, "ingress-tail", on_failure=end_process)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_blocking(self._reading.run(self._engine.ingress_positions.get(self._partition, 0)))
        finally:
            self._effects.close()

    @property
    def failure(self) -> str:
        """Return why reading has stopped or waits; "" if it works."""
        return self._reading.failure or self.taking.waits or self._reading.held_up

    @property
    def foreign(self) -> int:
        """Return the number of records that were skipped."""
        return self._reading.foreign

    async def reset(self) -> None:
        """Continue with all records of a recreated topic, for which reading has stopped. Raises InvalidInput, Unavailable."""
        topic_id, first = await self._loop.run_in_executor(None, self._effects.found)
        self.taking.reset(self._reading, self._thread.is_alive(), topic_id, first)
        self._start()

    def close(self) -> None:
        """Stop reading; records that were handed over are still processed."""
        self._effects.over.set()
        self._thread.join()


def _record(offset: int, value: bytes | None, headers: Mapping[str, Any]) -> IngressRecord:
    user = headers.get(INGRESS_USER_HEADER) or b""
    return IngressRecord(
        offset, value, headers.get(UNBOUND_HEADER) == b"keep", user.decode(errors="replace") if isinstance(user, bytes) else str(user)
    )


class _Effects:
    """The effects of reading: see bascule.broker.ingress_tail.IngressEffects. They block the thread that reads."""

    def __init__(
        self, tail: IngressTail, kafka: Mapping[str, Any], topic: str, partition: int, engine: Engine, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._tail = tail
        self._kafka = kafka
        self._topic = topic
        self._partition = partition
        self._engine = engine
        self._loop = loop
        self.over = threading.Event()
        self.room = threading.Semaphore(CHUNKS_MAX)
        self._reader: PartitionReader | None = None
        self._topics: Topics | None = None
        self._history: TopicHistory | None = None

    def now_s(self) -> float:
        """Return the time of a monotonic clock."""
        return time.monotonic()

    def ending(self) -> bool:
        """Return True if no more records are wanted."""
        return self.over.is_set()

    def found(self) -> tuple[str, int]:
        """Return the topic's id and its first offset, read with separate clients. Raises Unavailable."""
        return Topics(self._kafka).id(self._topic), TopicHistory(self._kafka, self._topic, self._partition).earliest()

    async def topic_id(self) -> str:
        """Return the current id of the topic. Raises Unavailable."""
        if self._topics is None:
            self._topics = Topics(self._kafka)
        return self._topics.id(self._topic, ANSWER_S)

    def topic_view(self) -> int | None:
        """Return a number that changes before ``read`` returns records of a recreated topic; None if the reader does not know."""
        return None if self._reader is None else self._reader.topic_view

    def read_topic_id(self) -> str:
        """Return the id of the topic to which the records belong that ``read`` has returned; "" if the reader does not know."""
        return "" if self._reader is None else self._reader.read_topic_id

    async def open(self, offset: int, committed: bool) -> None:
        """Begin to read at an offset. Raises Unavailable."""
        self.close()
        self._reader = PartitionReader(self._kafka, self._topic, self._partition, committed_only=committed, following=True)
        self._reader.seek(offset)

    async def read(self) -> Sequence[IngressRecord]:
        """Return the next records. Raises Unavailable, CutOff, Trimmed."""
        if self._reader is None:
            raise Unavailable(f"no Kafka client is open to read {self._topic}")
        messages = self._reader.read_at_once(READ_RECORDS, READ_S)
        return [_record(offset_of(message), message.value(), dict(readable_headers(message) or ())) for message in messages]

    async def open_transaction(self) -> int:
        """Return the offset of the first open transaction, or -1 if there is none or Kafka does not answer; the next call retries."""
        with suppress(Unavailable):
            if self._history is None:
                self._history = TopicHistory(self._kafka, self._topic, self._partition, ANSWER_S)
            if (stable := self._history.stable()) < self._history.latest():
                return stable
        return -1

    async def pause(self, delay_s: float) -> None:
        """Wait; return early if no more records are wanted."""
        self.over.wait(delay_s)

    async def hand_over(self, chunk: Chunk) -> None:
        """Wait for room, and pass a chunk to the loop."""
        while not self.room.acquire(timeout=READ_S):
            if self.over.is_set():
                return
        self._loop.call_soon_threadsafe(self._tail.taking.gather, chunk)

    def first_seen(self, topic_id: str) -> None:
        """Tell the engine, on the loop, that its positions belong to this topic."""
        engine = self._engine
        self._loop.call_soon_threadsafe(lambda: engine.ingress_is(topic_id, dict(engine.ingress_positions)))

    def largest(self) -> int:
        """Return the size of the largest message for which the journal has room."""
        return self._engine.local_transactions.bytes_max

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Write to the log."""
        write_note(log, severity, event, detail, error)

    def close(self) -> None:
        """Release the clients."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._topics = self._history = None
