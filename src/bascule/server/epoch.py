"""One epoch of the journal: from its start record over the load of the state to the first append that fails.

Everything here runs on the event loop but what its name says: the delivery thread of the log posts outcomes, loads run in an executor.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import bascule
from bascule.broker.addresses import Diverts
from bascule.broker.engine import Engine
from bascule.broker.errors import BrokerFault, JournalUnavailable
from bascule.broker.journaling import Journaling
from bascule.broker.message import Bodies, BodyStore
from bascule.broker.policy import Policy
from bascule.core import crash
from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.core.log import get_log
from bascule.core.topics import JournalTopics
from bascule.journal.offsets import UNKNOWN_OFFSET, OffsetMap
from bascule.journal.records import (
    KEY_OF_KIND,
    DamagedRecord,
    ForeignRecord,
    Kind,
    Op,
    RecordError,
    decode_header,
    encode_record,
    json_entry,
)
from bascule.kafka.log import JournalWriter, Outcome, PartitionReader, takes_appends
from bascule.server.following import CREATED_AGAIN, Following
from bascule.server.housekeeping import Housekeeping
from bascule.threads.background import in_background

log = get_log(__name__)

#: Appends on their way at once: while they travel, what comes gathers in the next record. More would only make records smaller.
IN_FLIGHT_MAX = 4
#: What nobody waits for (an acknowledgement alone) may wait for company: the next send takes it along and saves an append.
LINGER_S = 0.005
#: Bytes on their way at which producers get no more credit.
IN_FLIGHT_BYTES_MAX = 32 << 20
#: How often the age of the oldest append is looked at.
WATCH_S = 0.5
#: While appends are stalled, a new client asks at this interval whether Kafka takes appends. If Kafka does so twice, and the old producer
#: gets no answer in between, the epoch ends and the next one has a new producer.
PROBE_S = 5.0
#: Of the session time, after which Kafka replaces a broker. It counts from the last heartbeat, which was up to a twelfth of it before this
#: process stood still, and another one may have been lost.
STILL_MAX = 10 / 12


class AppendOffsetUnknown(JournalUnavailable):
    """Kafka has stored a record and the client cannot say where: only a load of the journal tells what counts."""


class SteppedDown(BasculeError):
    """Another broker started a newer epoch: this one must not answer anybody any more."""

    retriable = True
    scope = Scope.PROCESS
    http_status = 503
    exit_code = 4


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """Where the journal is, and what bounds it."""

    kafka: dict[str, Any]
    topics: JournalTopics
    bridge: str
    append_timeout_s: float
    snapshot_records: int
    session_timeout_s: float
    retention_s: float
    pinned_bytes_max: int  # 0 for no quota


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Epoch:
    """A loaded engine and its way into the journal.

    ``on_ended(error)`` is called once, when the epoch cannot go on; ``on_confirmed()`` after each round of confirmations,
    ``on_ticked()`` when a timer has done what was due, by which nobody knows more of Kafka;
    ``on_stalled(error)`` when appends have been out for too long.
    """

    def __init__(
        self, place: JournalPlace, policy: Policy, diverts: Diverts, bodies: BodyStore | None, memory_bytes: int,
        *, on_ended: Callable[[BasculeError], None], on_confirmed: Callable[[], None], on_ticked: Callable[[], None],
        on_stalled: Callable[[BasculeError], None],
    ) -> None:  # fmt: skip
        self.place = place
        self._policy = policy
        self._diverts = diverts
        self._bodies = bodies
        self._memory_bytes = memory_bytes
        self._on_ended = on_ended
        self._on_confirmed = on_confirmed
        self._on_ticked = on_ticked
        self._on_stalled = on_stalled
        self._loop = asyncio.get_running_loop()
        self._writer = JournalWriter(place.kafka, place.topics.journal, place.topics.partition, self._post)
        self._started: asyncio.Future[int] | None = None
        self._next_offset = -1
        self._flush_due = False
        self._oldest_since_s = 0.0
        self._probing = False
        self._probe_task: asyncio.Task[None] | None = None
        self._reached = False  # a new client has reached Kafka since the appends in flight were out for too long
        self.housekeeping: Housekeeping | None = None  # from the start on
        self._watch: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None  # for what the engine has to do later
        self.loaded = False
        self.ended = False
        self.offsets = OffsetMap()
        self.engine = self._fresh_engine()
        self._seen_s = 0.0  # when this process was last known to run; since it was watched first
        self.following = Following(place, self._fresh_engine)

    def _fresh_engine(self) -> Engine:
        bodies = Bodies(self._bodies, self._memory_bytes)
        return Engine(Journaling(self._append, on_work=self._work), bodies, _now_ms, self._policy)

    @property
    def journal_offset(self) -> int:
        """Before it all of the journal has been read, by who stands by, or is stored, by who serves."""
        return self._next_offset if self.loaded else self.following.next_offset

    # -- start -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Write the start record and take the state before it. Raises Unavailable, JournalUnavailable, RecordError or SteppedDown."""
        crash.point("epoch.start.before")
        offset = await self._write_start()
        crash.point("epoch.start.after")
        started_s = time.monotonic()
        loader = await self.following.up_to(offset + 1)
        self.engine = loader.engine
        self.offsets = loader.offsets
        self.engine.journaling.begin(offset, loader.fence.sequence)
        self.engine.addresses.use(self._diverts)
        self._next_offset = offset + 1
        self.housekeeping = Housekeeping(self.place, self.engine, self.offsets, self.following.store, lambda: not self.ended)
        self.engine.create_configured()
        self.engine.schedule.on_earlier = self._set_timer
        self._set_timer()
        self._look()
        crash.point("epoch.loaded")
        self.loaded = True
        waiting = sum(queue.held_messages for queue in self.engine.addresses.queues.values())
        log.info(
            "epoch %d: %d queues, %d messages, loaded in %.2f s",
            offset,
            len(self.engine.addresses.queues),
            waiting,
            time.monotonic() - started_s,
        )

    async def _write_start(self) -> int:
        self._started = self._loop.create_future()
        content = {
            "exclusive": [divert.name for divert in self._diverts.exclusive], "diverts": self._diverts.names,
            "host": socket.gethostname(), "pid": os.getpid(), "version": bascule.__version__,
        }  # fmt: skip
        value = encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, content))
        self._writer.append(KEY_OF_KIND[Kind.EPOCH], value)
        try:
            return await asyncio.wait_for(self._started, self.place.append_timeout_s)
        except TimeoutError:
            raise Unavailable(
                f"journal {self.place.topics.journal}: Kafka has not stored the start record in {self.place.append_timeout_s:.0f} s"
            ) from None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_ms = self.engine.schedule.next_ms
        if due_ms is not None:
            self._timer = self._loop.call_later(max(0.0, (due_ms - _now_ms()) / 1000), self._tick)

    def _tick(self) -> None:
        if self.awake():
            self._timer = None
            with self._or_end("what was due could not be done"):
                self.engine.tick()
                self.engine.dispatch()
            self._set_timer()
            self._on_ticked()

    # -- appends -----------------------------------------------------------------------------------------------------

    def _append(self, key: bytes, value: bytes) -> None:
        """Whoever was the one to close the record: without it the epoch cannot go on, and nothing may be stored behind it."""
        if self.ended:
            return
        if len(self.engine.journaling.in_flight) == 1:
            self._oldest_since_s = time.monotonic()
        try:
            self._writer.append(key, value)
        except BasculeError as error:
            self.end(error)
            raise

    def _work(self, urgent: bool) -> None:
        if urgent:
            self._loop.call_soon(self.flush)
        else:
            self._loop.call_later(LINGER_S, self.flush)

    def flush(self) -> None:
        """Append what has gathered, unless enough is on its way already."""
        if self.ended:
            return
        if len(self.engine.journaling.in_flight) >= IN_FLIGHT_MAX:
            self._flush_due = True
            return
        self._flush_due = False
        try:
            crash.point("journal.append.before")
            self.engine.journaling.flush()
            crash.point("journal.append.after")
        except BasculeError as error:
            self.end(error)

    def _post(self, outcomes: list[Outcome]) -> None:
        self._loop.call_soon_threadsafe(self._settle, outcomes)

    def _settle(self, outcomes: list[Outcome]) -> None:
        if not self.awake():
            return
        with self._or_end("what a stored record decided could not be done"):
            for outcome in outcomes:
                if not self.ended:
                    self._settle_one(*outcome)
        if self.ended:
            return
        self._oldest_since_s = time.monotonic()
        self.engine.stalled = None
        self._reached = False
        if self._flush_due:
            self.flush()
        self._on_confirmed()

    def _settle_one(self, offset: int, error: str | None) -> None:
        if error is not None:
            self.end(JournalUnavailable(f"journal {self.place.topics.journal}: append failed: {error}"))
        elif offset == UNKNOWN_OFFSET:
            self.end(
                AppendOffsetUnknown(f"journal {self.place.topics.journal}: Kafka has stored a record and does not say at which offset")
            )
        elif self._started is not None and not self._started.done():
            self._started.set_result(offset)
        elif offset == self._next_offset or self._own_gap(self._next_offset, offset):
            self._next_offset = offset + 1
            self.offsets.note(self.engine.journaling.in_flight[0].sequence, offset)
            assert self.housekeeping is not None
            self.housekeeping.appended(self.engine.journaling.in_flight[0].size_bytes)
            crash.point("journal.confirm.before")
            self.engine.confirm()
            crash.point("journal.confirm.after")

    def _own_gap(self, start: int, end: int) -> bool:
        """Somebody else wrote between our records: a newer epoch ends this one, anything else is alarmed and passed over.

        A record of our own there has lost its answer, and later ones have not: what is told next would be taken for others.
        """
        try:
            if self.following.created_again():
                raise DamagedRecord(f"journal {self.place.topics.journal} {CREATED_AGAIN}")
        except BasculeError as error:
            self.end(error)
            return False
        reader = PartitionReader(self.place.kafka, self.place.topics.journal, self.place.topics.partition)
        try:
            reader.seek(start)
            for message in reader.up_to(end):
                value = message.value()
                try:
                    header = decode_header(None if value is None else bytes(value))
                except ForeignRecord as error:
                    self.following.foreign += 1
                    log.error("journal %s, offset %s: foreign record passed over: %s", self.place.topics.journal, message.offset(), error)
                    continue
                except RecordError as error:  # a newer broker's, perhaps: what comes behind it cannot be judged
                    self.end(type(error)(f"journal {self.place.topics.journal}, offset {message.offset()}: {error}"))
                    return False
                if header.kind is Kind.EPOCH:
                    self.end(SteppedDown(f"another broker started epoch {message.offset()} of journal {self.place.topics.journal}"))
                    return False
                if header.epoch == self.engine.journaling.epoch:
                    place = f"journal {self.place.topics.journal}, offset {message.offset()}"
                    self.end(JournalUnavailable(f"{place}: Kafka has answered for a later record, not for this one"))
                    return False
        finally:
            reader.close()
        return True

    def _look(self) -> None:
        """Appends that Kafka has not answered for too long: nobody must wait for them."""
        if not self.awake():  # timers come first when a process wakes: this one must not wipe out that it stood still
            return
        self._watch = self._loop.call_later(WATCH_S, self._look)
        self._seen_s = time.monotonic()
        age_s = time.monotonic() - self._oldest_since_s
        if self.engine.journaling.in_flight and age_s > self.place.append_timeout_s and self.engine.stalled is None:
            size = self.engine.journaling.in_flight_bytes
            self.engine.stalled = JournalUnavailable(
                f"journal {self.place.topics.journal}: Kafka has not stored {size} bytes in {age_s:.0f} s;"
                " nothing persistent is taken until it does"
            )
            self._on_stalled(self.engine.stalled)
        if self.engine.stalled is not None and not self._probing:
            self._probing = True
            self._probe_task = self._loop.create_task(self._probe())

    async def _probe(self) -> None:
        place = self.place
        asked = in_background(
            lambda: takes_appends(place.kafka, place.topics.journal, place.topics.partition, place.append_timeout_s), "journal-probe"
        )
        reached = await asyncio.wrap_future(asked)
        if reached and self._reached and not self.ended and self.engine.stalled is not None:
            self.end(JournalUnavailable(f"{self.engine.stalled}; Kafka answers a new client, so a new producer takes over"))
            return
        self._reached = reached and self.engine.stalled is not None
        self._loop.call_later(PROBE_S, self._may_probe)

    def _may_probe(self) -> None:
        self._probing = False

    def awake(self) -> bool:
        """Whether this process has run all the time. One that was stopped may have been replaced, and must not act before it knows."""
        still_s = time.monotonic() - self._seen_s
        if self._watch is not None and still_s > STILL_MAX * self.place.session_timeout_s and not self.ended:
            self.end(SteppedDown(f"this process stood still for {still_s:.0f} s"))
        return not self.ended

    # -- end ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _or_end(self, what: str) -> Iterator[None]:
        """A fault half-way leaves what only a load from the journal puts right; the confirmations to come would be taken for others."""
        try:
            yield
        except Exception as error:
            log.exception("%s", what)
            self.end(BrokerFault(f"{what}: {error!r}"))

    def end(self, error: BasculeError) -> None:
        """The epoch cannot go on: nothing is answered any more."""
        if not self.ended:
            self.ended = True
            if isinstance(error, JournalUnavailable) and self._started is not None and not self._started.done():
                self._started.set_exception(error)
            self._on_ended(error)

    async def close(self) -> None:
        """Release what the epoch holds."""
        self.ended = True
        await self.following.close()
        for each in (self._watch, self._timer, self._probe_task):
            if each is not None:
                each.cancel()
        await self._loop.run_in_executor(None, self._writer.close)
