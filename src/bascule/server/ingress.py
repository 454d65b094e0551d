"""The tail of ``bascule.ingress``: what pipelines (and user jobs) wrote for JMS destinations, into the journal with its position."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

from bascule.broker.engine import Engine
from bascule.broker.errors import ResourceLimit
from bascule.core import crash
from bascule.core.errors import BasculeError, InvalidInput, Scope, Unavailable
from bascule.core.log import get_log
from bascule.jms.sections import group_of
from bascule.journal.records import ForeignRecord, Op, Send, SendFlag, decode_header, decode_send, entries
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from bascule.kafka.log import CutOff, PartitionReader
from bascule.threads.lasting import end_process, lasting_thread

log = get_log(__name__)

#: Bytes taken in one journal record: they are atomic with the position behind them.
CHUNK_BYTES = 256 * 1024
#: Chunks that wait for room, or are on their way into the journal, before reading pauses.
CHUNKS_MAX = 8
#: How long the reader waits for records before it looks whether it should end.
READ_S = 0.1
#: While nothing comes it is looked that often whether the topic is the one that it was: another one may have what is never read.
LOOK_S = 5.0
#: Kafka answers that in milliseconds, or it is asked again; whoever ends the epoch waits for it.
ANSWER_S = 2.0

Chunk = tuple[int, list[tuple[Send, bool]]]


class CreatedAgain(BasculeError):
    """The topic is not the one of which the positions are."""

    retriable = False
    scope = Scope.PIPELINE
    http_status = 409


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
        self._held_up = ""
        self._open_at = -1  # where an open transaction was seen to begin, by the last look
        self._read: deque[Chunk] = deque()  # and not taken yet
        self._ending = threading.Event()
        self._room = threading.Semaphore(CHUNKS_MAX)
        self._topic_id = engine.ingress_topic_id  # "" until it is seen for the first time
        self._looked_s = 0.0
        self._start()

    def _start(self) -> None:
        self._failure = ""
        self._thread = lasting_thread(self._run, "ingress-tail", on_failure=end_process)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why it stands still, or waits; "" while all is well."""
        return self._failure or self._waits or self._held_up

    async def begin_anew(self) -> None:
        """Go on with all that the topic has, where it stands still at one that was created again. Raises InvalidInput, Unavailable."""
        topic_id, first = await self._loop.run_in_executor(None, self._found)
        if self._thread.is_alive() or topic_id == self._topic_id:
            raise InvalidInput(f"{self._topic} is the topic that it was: there is nothing to begin anew")
        if self._read:
            raise Unavailable(f"messages of the topic of before are still to be taken: {self._waits}")
        self._topic_id = topic_id
        self._engine.ingress_is(topic_id, {self._partition: first})
        self._start()

    def _found(self) -> tuple[str, int]:
        return Topics(self._kafka).id(self._topic), TopicHistory(self._kafka, self._topic, self._partition).earliest()

    def _run(self) -> None:
        position = self._engine.ingress_positions.get(self._partition, 0)
        while not self._ending.is_set():
            try:
                with closing(PartitionReader(self._kafka, self._topic, self._partition, committed_only=True)) as reader:
                    topics = Topics(self._kafka)
                    history = TopicHistory(self._kafka, self._topic, self._partition, ANSWER_S)
                    self._recognise(topics)
                    reader.seek(position)
                    while not self._ending.is_set():
                        self._failure = ""
                        for next_offset, sends in self._chunks(reader, topics, history):
                            self._hand_over(next_offset, sends)
                            position = next_offset
            except Exception as error:
                # A topic that was cut off may come to be as long again: then it would be read on in its middle.
                if not (isinstance(error, BasculeError) and error.retriable):
                    # Nothing is passed over silently: the tail stands still here until somebody looks.
                    self._failure = f"ingress {self._topic} stands still: {error}"
                    log.error("%s", self._failure, exc_info=not isinstance(error, BasculeError))
                    return
                self._failure = str(error)
                log.warning("ingress: %s; reading on from offset %d", error, position)
                self._ending.wait(1.0)

    def _recognise(self, topics: Topics) -> None:
        """What has been read before is of the topic that it was. Raises CreatedAgain, Unavailable."""
        found = topics.id(self._topic, ANSWER_S)
        self._looked_s = time.monotonic()
        if not self._topic_id:
            self._topic_id = found
            self._loop.call_soon_threadsafe(lambda: self._engine.ingress_is(found, dict(self._engine.ingress_positions)))
        if found != self._topic_id:
            raise CreatedAgain(
                "it was deleted and created again: what had come and was not taken is lost;"
                " `bascule ingress begin-anew` goes on with what it has now"
            )

    def _messages(self, reader: PartitionReader, topics: Topics, history: TopicHistory) -> list[Any]:
        try:
            messages = reader.read(1000, READ_S)
        except CutOff:
            self._recognise(topics)
            raise
        # After each read, before anything of it is taken: by position alone records of another topic look like those that were to come, and
        # neither the client nor their leader epochs tell. It takes 0.6 ms for up to 1,000 records; few come together ten times a second.
        if messages or time.monotonic() - self._looked_s > LOOK_S:
            self._recognise(topics)
            self._see_what_is_open(None if messages else history)
        return messages

    def _see_what_is_open(self, idle: TopicHistory | None) -> None:
        """Where nothing comes: whether it is for somebody's transaction, open since the last look at least."""
        before, self._open_at = self._open_at, -1
        with suppress(Unavailable):  # the next look tells it
            if idle is not None and (stable := idle.stable()) < idle.latest():
                self._open_at = stable
        self._held_up = ""
        if self._open_at == before >= 0:
            self._held_up = f"ingress {self._topic}-{self._partition} waits: a transaction that begins at offset {before} is not ended"

    def _chunks(self, reader: PartitionReader, topics: Topics, history: TopicHistory) -> Iterator[Chunk]:
        """What has come, gathered to chunks. Raises what is wrong with a record behind the good ones, with its offset."""
        sends: list[tuple[Send, bool]] = []
        size_bytes = 0
        next_offset = -1
        fault: BasculeError | None = None
        for message in self._messages(reader, topics, history):
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
            if send.flags & SendFlag.GROUPED:
                group_of(send.body)  # whoever takes it reads that, and an epoch that fails of it would be followed by one that does
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
