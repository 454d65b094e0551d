"""The tail of ``bascule.ingress``: what pipelines (and user jobs) wrote for JMS destinations, into the journal with its position."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from bascule.broker.engine import Engine
from bascule.broker.errors import ResourceLimit
from bascule.core import crash
from bascule.core.errors import BasculeError, Unavailable
from bascule.journal.records import ForeignRecord, Op, Send, decode_header, decode_send, entries
from bascule.kafka.log import CutOff, PartitionReader

log = logging.getLogger(__name__)

#: Bytes taken in one journal record: they are atomic with the position behind them.
CHUNK_BYTES = 256 * 1024
#: Chunks that wait for room, or are on their way into the journal, before reading pauses.
CHUNKS_MAX = 8
#: How long the reader waits for records before it looks whether it should end.
READ_S = 0.1

Chunk = tuple[int, list[tuple[Send, bool]]]


class IngressTail:
    """Reads one partition, ``read_committed``, in a thread; hands chunks to the engine on the loop."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, partition: int, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._kafka = kafka
        self._topic = topic
        self._partition = partition
        self._engine = engine
        self._loop = loop
        self._failure = ""
        self._waits = ""
        self._read: deque[Chunk] = deque()  # and not taken yet
        self._ending = threading.Event()
        self._room = threading.Semaphore(CHUNKS_MAX)
        self._thread = threading.Thread(target=self._run, name="ingress-tail", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why it stands still, or waits; "" while all is well."""
        return self._failure or self._waits

    def _run(self) -> None:
        position = self._engine.ingress_positions.get(self._partition, 0)
        while not self._ending.is_set():
            try:
                with closing(PartitionReader(self._kafka, self._topic, self._partition, committed_only=True)) as reader:
                    reader.seek(position)
                    while not self._ending.is_set():
                        self._failure = ""
                        for next_offset, sends in self._chunks(reader):
                            self._hand_over(next_offset, sends)
                            position = next_offset
            except Exception as error:
                # A topic that was cut off may come to be as long again: then it would be read on in its middle.
                if isinstance(error, CutOff) or not isinstance(error, Unavailable):
                    # Nothing is passed over silently: the tail stands still here until somebody looks.
                    self._failure = f"ingress {self._topic} stands still: {error}"
                    log.error("%s", self._failure, exc_info=not isinstance(error, BasculeError))
                    return
                self._failure = str(error)
                log.warning("ingress: %s; reading on from offset %d", error, position)
                self._ending.wait(1.0)

    def _chunks(self, reader: PartitionReader) -> Iterator[Chunk]:
        """What has come, gathered to chunks. Raises what is wrong with a record behind the good ones, with its offset."""
        sends: list[tuple[Send, bool]] = []
        size_bytes = 0
        next_offset = -1
        fault: BasculeError | None = None
        for message in reader.read(1000, READ_S):
            offset = message.offset()
            assert offset is not None
            keep = dict(message.headers() or ()).get("unbound") == b"keep"
            try:
                found = self._sends(offset, message.value())
            except BasculeError as error:
                fault = type(error)(f"offset {offset}: {error}")
                break
            sends.extend((send, keep) for send in found)
            size_bytes += sum(len(send.body) for send in found)
            next_offset = offset + 1
            if size_bytes > CHUNK_BYTES:
                yield next_offset, sends
                sends, size_bytes, next_offset = [], 0, -1
        if next_offset >= 0:
            yield next_offset, sends
        if fault is not None:
            raise fault

    def _sends(self, offset: int, value: bytes | None) -> list[Send]:
        try:
            decode_header(value)
        except ForeignRecord as error:
            log.error("ingress %s, offset %d: foreign record passed over: %s", self._topic, offset, error)
            return []
        assert value is not None
        sends = [decode_send(value, start, end) for op, start, end in entries(value) if op == Op.SEND]
        limit = self._engine.policy.transaction_bytes_max
        for send in sends:
            if len(send.body) > limit:
                raise ResourceLimit(f"a message of {len(send.body)} bytes; the journal has room for {limit}")
        return sends

    def _hand_over(self, next_offset: int, sends: list[tuple[Send, bool]]) -> None:
        while not self._room.acquire(timeout=READ_S):
            if self._ending.is_set():
                return
        self._loop.call_soon_threadsafe(self._gather, (next_offset, sends))

    def _gather(self, chunk: Chunk) -> None:
        self._read.append(chunk)
        if len(self._read) == 1:
            self._take_in()

    def _take_in(self) -> None:
        """In order, as far as the queues have room: one that is full holds up what is behind its messages, too."""
        self._waits = ""
        while self._read and not self._ending.is_set():
            next_offset, sends = self._read[0]
            full = self._engine.lacks_room(sends)
            if full is not None:
                self._waits = f"ingress {self._topic} waits: queue {full.name!r} is full"
                # Not at once: a queue gets room in the middle of records that must stay whole.
                full.blocked.append(lambda: self._loop.call_soon(self._take_in))
                return
            crash.point("ingress.take.before")
            self._engine.take_in(self._partition, next_offset, sends)
            crash.point("ingress.take.after")
            self._read.popleft()
            self._engine.journaling.then(self._room.release)

    def close(self) -> None:
        """Stop reading; what is on its way goes on."""
        self._ending.set()
        self._thread.join()
