"""The way of records from the ingress topic into the journal, without IO: read committed, decode, and take in order with the position.

``IngressReading`` runs where records are read, ``IngressTaking`` in the thread of the engine. :mod:`bascule.server.ingress` performs the
effects with a thread and the event loop, and the simulator of the tests performs them in its simulated world.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple, NoReturn, Protocol

from bascule.broker.containment import ErrorKind
from bascule.broker.engine import Engine
from bascule.broker.errors import ResourceLimit
from bascule.broker.ingress_access import Arrival
from bascule.broker.intake import TAKE_STEPS, IntakePlan
from bascule.core import crash
from bascule.core.destination import ADDRESS_MAX, Routing
from bascule.core.effects import Severity
from bascule.core.errors import BasculeError, InvalidInput, Scope, Unavailable
from bascule.jms.sections import scan
from bascule.journal.errors import ForeignRecord
from bascule.journal.reading import CutOff
from bascule.journal.records import MESSAGES_PER_RECORD_MAX, Op, Send, decode_header, decode_send, entries

#: Bytes of one chunk.
CHUNK_BYTES: Final = 256 * 1024
#: Messages of one chunk, whatever their size.
CHUNK_MESSAGES: Final = 4_000
#: Chunks that wait for room, or are in flight to the journal, before reading pauses.
CHUNKS_MAX: Final = 8
#: How often an idle reader checks whether the topic was recreated: the records of the new topic would otherwise not be read.
LOOK_S: Final = 5.0
#: After the client has asked for metadata, the topic is checked after each read for this time: the node that answers the check may learn
#: of a recreated topic a little later than the node that is read.
SETTLES_S: Final = 1.0
RETRY_S: Final = 1.0
#: How long an end before the position is not believed. A former leader that is cut off from the cluster reports an old end; clients find
#: another node within seconds.
STALE_END_S: Final = 30.0
#: A chunk that could not be journaled is tried again after this time.
FAILED_RETRY_MS: Final = 60_000
_ROUTINGS: Final = frozenset(Routing)

#: The offset behind a record, and its messages.
RecordSends = tuple[int, list[Arrival]]
#: Records that are handed over together. Each record is taken as a whole, together with the position behind it.
Chunk = deque[RecordSends]


class IngressTailViolation(enum.StrEnum):
    """Rules of the intake that a test can break."""

    UNCOMMITTED_TAKEN = "records of uncommitted transactions are taken"
    STALE_END_BELIEVED = "the first end before the position is believed although a former leader may have reported it"
    VIEW_NOT_CHECKED = "the topic is not checked although the client may have begun to read a recreated one"
    RECORD_SKIPPED_AFTER_FAULT = "a reader that restarts skips a record"


class TopicRecreated(BasculeError):
    """Raised when the positions belong to a topic that was deleted and recreated."""

    retriable = False
    scope = Scope.PIPELINE
    http_status = 409


class IngressRecord(NamedTuple):
    """A record of the ingress topic."""

    offset: int
    value: bytes | None
    keep: bool  # whether its messages are kept if no queue is bound to their address
    user: str = ""  # who sends the messages, "" for the owner of the broker


class IngressEffects(Protocol):
    """The effects of reading. Coroutines may raise Unavailable."""

    def now_s(self) -> float:
        """Return the time of a monotonic clock."""
        ...

    def ending(self) -> bool:
        """Return True if no more records are wanted."""
        ...

    async def topic_id(self) -> str:
        """Return the current id of the topic."""
        ...

    def topic_view(self) -> int | None:
        """Return a number that changes before ``read`` returns records of a recreated topic; None if the reader does not know."""
        ...

    def read_topic_id(self) -> str:
        """Return the id of the topic to which the records belong that ``read`` has returned; "" if the reader does not know."""
        ...

    async def open(self, offset: int, committed: bool) -> None:
        """Begin to read at an offset, and close the previous reader."""
        ...

    async def read(self) -> Sequence[IngressRecord]:
        """Return the next records; none if no record arrives for a moment. Raises CutOff, Trimmed."""
        ...

    async def open_transaction(self) -> int:
        """Return the offset where the first open transaction begins; -1 if there is none."""
        ...

    async def pause(self, delay_s: float) -> None:
        """Wait for ``delay_s``, or less if no more records are wanted."""
        ...

    async def hand_over(self, chunk: Chunk) -> None:
        """Wait until there is room for a chunk, and give it to ``IngressTaking.gather``."""
        ...

    def first_seen(self, topic_id: str) -> None:
        """Tell the engine that its positions belong to this topic."""
        ...

    def largest(self) -> int:
        """Return the size in bytes of the largest message that fits into the journal."""
        ...

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Write an event to the log."""
        ...


class IngressReading:
    """The reader of one partition. ``failure`` says why it has stopped or is retrying; "" if it reads normally."""

    def __init__(
        self, effects: IngressEffects, topic: str, partition: int, *, topic_id: str, violations: Collection[enum.StrEnum] = frozenset()
    ) -> None:
        """Create a reader. ``topic_id`` is the id of the topic to which the journaled positions belong; "" if there are none."""
        self._effects = effects
        self._topic = topic
        self._partition = partition
        self._violations = violations
        self.topic_id = topic_id
        self.failure = ""
        self.held_up = ""
        self.foreign = 0  # foreign records that were skipped
        self._open_at = -1  # where the last check found the beginning of an open transaction
        self._looked_s = 0.0
        self._view: int | None = None  # of the reader, at the last check
        self._settled_s = 0.0  # when a check after each read is no longer needed
        self._cut_off_since_s: float | None = None  # since when the topic ends before the position

    async def run(self, position: int) -> None:
        """Read from a position on. Return if no more records are wanted, or if an error needs the attention of an operator."""
        effects = self._effects
        committed = IngressTailViolation.UNCOMMITTED_TAKEN not in self._violations
        self.failure = ""
        while not effects.ending():
            try:
                await effects.open(position, committed)
                await self._recognise()
                while not effects.ending():
                    self.failure = ""
                    for chunk in self._chunks(await self._read()):
                        behind = chunk[-1][0]
                        await effects.hand_over(chunk)
                        position = behind
            except Exception as error:
                # Errors that are not retriable stop the reader: no record is skipped silently. A topic that was cut off must not be read on
                # in its middle when it has grown again.
                if not (isinstance(error, BasculeError) and error.retriable):
                    self.failure = f"ingress {self._topic} has stopped: {error}"
                    effects.note(Severity.ERROR, "ingress stopped", self.failure, None if isinstance(error, BasculeError) else error)
                    return
                self.failure = str(error)
                effects.note(Severity.WARNING, "ingress read restarted", f"ingress: {error}; continuing at offset {position}")
                position += IngressTailViolation.RECORD_SKIPPED_AFTER_FAULT in self._violations
                await effects.pause(RETRY_S)

    async def _recognise(self) -> None:
        """Check that the topic is the one that the positions belong to. Raises TopicRecreated, Unavailable."""
        found = await self._effects.topic_id()
        self._looked_s = self._effects.now_s()
        if not self.topic_id:
            self.topic_id = found
            self._effects.first_seen(found)
        if found != self.topic_id:
            raise TopicRecreated(
                "the topic was recreated; messages that the broker had not journaled are lost."
                " Run `bascule ingress reset` to continue with the new topic"
            )

    async def _read(self) -> Sequence[IngressRecord]:
        try:
            records = await self._effects.read()
        except CutOff as error:
            await self._recognise()
            self._judge_end(error)
        self._cut_off_since_s = None
        # The check comes after the read and before any record is taken: by offset alone, records of a recreated topic look like the
        # expected ones, and leader epochs do not tell. The check is one request for one topic. Records that arrive meanwhile share the
        # next check.
        looked_long_ago = self._effects.now_s() - self._looked_s > LOOK_S
        if looked_long_ago or (records and not self._surely_of_the_same_topic()):
            await self._recognise()
        if records and (read := self._effects.read_topic_id()) and read != self.topic_id:
            await self._recognise()
            raise Unavailable(f"the records belong to topic id {read}, and Kafka reports {self.topic_id}; will retry until both agree")
        if records or looked_long_ago:
            await self._see_what_is_open(idle=not records)
        return records

    def _surely_of_the_same_topic(self) -> bool:
        """Return True if the records that were read belong to the topic that the last check has found."""
        view, now_s = self._effects.topic_view(), self._effects.now_s()
        if IngressTailViolation.VIEW_NOT_CHECKED in self._violations:
            return True
        if view is None:
            return False
        if view != self._view:
            self._view, self._settled_s = view, now_s + SETTLES_S
        return now_s >= self._settled_s

    def _judge_end(self, error: CutOff) -> NoReturn:
        """Raise Unavailable as long as a node that is cut off from the cluster may have reported its end; CutOff after that."""
        now_s = self._effects.now_s()
        if self._cut_off_since_s is None:
            self._cut_off_since_s = now_s
        if now_s - self._cut_off_since_s < STALE_END_S and IngressTailViolation.STALE_END_BELIEVED not in self._violations:
            raise Unavailable(f"{error}; will retry, because a node that is cut off from the others reports an old end") from error
        raise error

    async def _see_what_is_open(self, *, idle: bool) -> None:
        """If no records arrive, note whether the same transaction has been open since the last check."""
        before, self._open_at = self._open_at, -1
        if idle:
            self._open_at = await self._effects.open_transaction()
        self.held_up = ""
        if self._open_at == before >= 0:
            self.held_up = f"ingress {self._topic}-{self._partition} waits: a transaction that begins at offset {before} has not ended"

    def _chunks(self, records: Sequence[IngressRecord]) -> Iterator[Chunk]:
        """Yield chunks of records. Raises the error of a faulty record, with its offset, after the records before it."""
        chunk: Chunk = deque()
        messages = size_bytes = 0
        fault: BasculeError | None = None
        for record in records:
            try:
                found = self._sends(record.offset, record.value)
            except BasculeError as error:
                fault = type(error)(f"offset {record.offset}: {error}")
                break
            chunk.append((record.offset + 1, [Arrival(send, record.keep, record.user) for send in found]))
            messages += len(found)
            size_bytes += sum(len(send.body) for send in found)
            if size_bytes > CHUNK_BYTES or messages > CHUNK_MESSAGES:
                yield chunk
                chunk, messages, size_bytes = deque(), 0, 0
        if chunk:
            yield chunk
        if fault is not None:
            raise fault

    def _sends(self, offset: int, value: bytes | None) -> list[Send]:
        """Return the messages of a record.

        Records that no client could send are skipped, since any authorised program may write to the topic.
        """
        try:
            decode_header(value)
            data = value or b""
            sends = [decode_send(data, start, end) for op, start, end in entries(data) if op == Op.SEND]
            check_sends(sends)
        except (ForeignRecord, InvalidInput) as error:
            text = f"ingress {self._topic}, offset {offset}: foreign record skipped: {error}"
            self._effects.note(Severity.ERROR, "foreign record skipped", text)
            self.foreign += 1
            return []
        limit = self._effects.largest()
        for send in sends:
            if len(send.body) > limit:
                raise ResourceLimit(f"the message has {len(send.body)} bytes; the journal has room for {limit}")
        return sends


def _size_bytes(sends: Sequence[Arrival]) -> int:
    return sum(len(send.body) for send, *_ in sends)


def check_sends(sends: Sequence[Send]) -> None:
    """Check that an AMQP client could send these messages. Raises InvalidInput."""
    if len(sends) > MESSAGES_PER_RECORD_MAX:
        raise InvalidInput(f"the record has {len(sends)} messages; a record of the journal holds at most {MESSAGES_PER_RECORD_MAX}")
    for send in sends:
        if send.routing not in _ROUTINGS:
            raise InvalidInput(f"routing {send.routing} is not one of {sorted(_ROUTINGS)}")
        if not 0 < len(send.address) <= ADDRESS_MAX:
            raise InvalidInput(f"an address has {len(send.address)} characters; 1 to {ADDRESS_MAX} are allowed")
        scan(send.body)


class IngressTaking:
    """The intake of chunks in order, as far as memory and queues have room. A full queue also blocks the records behind its messages.

    One turn of the event loop takes as many records as its steps allow, at least one. A record that takes longer than a turn is first
    planned over several turns, and then taken as a whole. ``soon(action)`` calls an action after the current turn; ``taken()`` is called
    when a chunk is stored.
    """

    def __init__(
        self, engine: Engine, topic: str, partition: int, *, soon: Callable[[Callable[[], None]], object], taken: Callable[[], None],
        ending: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._topic = topic
        self._partition = partition
        self._soon = soon
        self._taken = taken
        self._ending = ending
        self._chunks: deque[Chunk] = deque()  # not taken yet
        self._plan: tuple[int, IntakePlan] | None = None  # of the first record, if it takes long, with the offset behind the record
        self.waits = ""

    def gather(self, chunk: Chunk) -> None:
        """Add a chunk, and take it if no other one waits."""
        self._chunks.append(chunk)
        self._engine.memory.ingress_bytes += sum(_size_bytes(sends) for _, sends in chunk)
        if len(self._chunks) == 1:
            self._take()

    def _take(self) -> None:
        self.waits = ""
        left = self._engine.turns.steps
        while self._chunks and not self._ending():
            if left <= 0:
                self._soon(self._take)
                return
            spent = self._take_some(left)
            if not spent:
                return
            left -= spent
        if self._ending():
            self._drop_plan()

    def _take_some(self, left: int) -> int:
        """Take the next records. Return their steps, at least one, or 0 if ``_take`` is called again later."""
        engine, memory = self._engine, self._engine.memory
        if self._plan is None:
            if memory.blocked:
                self.waits = f"ingress {self._topic} waits: {memory.blocked}"
                memory.when_free(self, lambda: self._soon(self._take))
                return 0
            next_offset, sends, steps = self._next_records(left)
        else:  # a plan holds memory itself, so it does not wait for memory
            next_offset, sends, steps = self._plan[0], [], left
        try:
            if self._plan is None and steps > engine.turns.steps:
                self._plan = next_offset, engine.plan_intake(sends)
            plan = None if self._plan is None else self._plan[1]
            if plan is not None and not plan.ready():
                self._soon(self._take)
                return 0
            full = engine.lacks_room(sends) if plan is None else engine.plan_lacks_room(plan)
            if full is not None:
                self.waits = f"ingress {self._topic} waits: queue {full.name!r} is full"
                # Not in this turn: a queue may get room in the middle of records that must stay together.
                full.blocked[self] = lambda: self._soon(self._take)
                return 0
            crash.point("ingress.take.before")
            if plan is None:
                engine.take_in(self._partition, next_offset, sends)
            else:
                engine.take_in_plan(self._partition, next_offset, plan)
            crash.point("ingress.take.after")
        except Exception as error:
            self._not_taken(next_offset, error)
            return 0
        self._drop_plan()
        self._forget(next_offset)
        return max(1, steps)

    def _drop_plan(self) -> None:
        if self._plan is not None:
            self._plan[1].close()
            self._plan = None

    def _next_records(self, steps_max: int) -> tuple[int, list[Arrival], int]:
        """Return the first records of the first chunk: as many as fit into one journal record and into ``steps_max``, at least one.

        The result is the offset behind the records, their messages, and the steps. A record that takes longer than a turn comes alone.
        """
        behind, together, steps, size_bytes = 0, list[Arrival](), 0, 0
        long = self._engine.turns.steps // TAKE_STEPS
        for next_offset, arrived in self._chunks[0]:
            sends = self._engine.intake.access.decided(arrived)
            if len(sends) > long:  # its steps are not counted: this would take long itself
                return (behind, together, steps) if behind else (next_offset, sends, (len(sends) + 1) * TAKE_STEPS)
            cost_steps, cost_bytes = self._engine.intake_cost(sends)
            steps, size_bytes = steps + cost_steps, size_bytes + cost_bytes
            if behind and (steps > steps_max or size_bytes > CHUNK_BYTES or len(together) + len(sends) > MESSAGES_PER_RECORD_MAX):
                return behind, together, steps - cost_steps
            behind = next_offset
            together += sends
        return behind, together, steps

    def _forget(self, next_offset: int) -> None:
        """Release the records up to an offset, which are taken. After the last one of a chunk, ``taken`` is called once they are stored."""
        chunk = self._chunks[0]
        while chunk and chunk[0][0] <= next_offset:
            self._engine.memory.ingress_bytes -= _size_bytes(chunk.popleft()[1])
        if not chunk:
            self._chunks.popleft()
            self._engine.journaling.tell(self._taken)

    def _not_taken(self, next_offset: int, error: Exception) -> None:
        """Try the records again later. The records behind them wait, so that messages stay in order."""
        engine = self._engine
        self._drop_plan()
        engine.journaling.errors.contain(ErrorKind.INGRESS, error, topic=self._topic, next_offset=next_offset)
        self.waits = f"ingress {self._topic} waits: the records before offset {next_offset} could not be journaled: {error}"
        engine.schedule.at(engine.clock() + FAILED_RETRY_MS, self._take)

    def reset(self, reading: IngressReading, running: bool, topic_id: str, first: int) -> None:
        """Continue with all records of a recreated topic, after reading has stopped. Raises InvalidInput, Unavailable."""
        if running or topic_id == reading.topic_id:
            raise InvalidInput(f"topic {self._topic} was not recreated; there is nothing to reset")
        if self._chunks:
            raise Unavailable(f"messages from the deleted topic {self._topic} are not journaled yet: {self.waits}")
        reading.topic_id = topic_id
        self._engine.ingress_is(topic_id, {self._partition: first})
