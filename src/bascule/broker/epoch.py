"""One epoch of the journal, without IO: from the start record and the load of the state to the end of the epoch.

All rules of an epoch are in this module. :mod:`bascule.server.epoch` performs its effects with asyncio and Kafka's client, and the
simulator of the tests performs them in its simulated world. See docs/architecture.md, "Epochs and the fence".
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from bascule.broker.addresses import Diverts
from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.coverage import DivertCoverage
from bascule.broker.engine import Engine
from bascule.broker.epoch_effects import EpochEffects, EpochLimits
from bascule.broker.errors import BrokerFault, JournalUnavailable
from bascule.broker.following import RECREATED
from bascule.broker.journaling import Journaling
from bascule.broker.send_times import SendTimes
from bascule.broker.states import EPOCH_TRANSITIONS, LIVE, EpochEvent, EpochState
from bascule.core import crash
from bascule.core.effects import Severity, Timer, Waiter
from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.journal.errors import DamagedRecord, ForeignRecord, RecordError
from bascule.journal.offsets import UNKNOWN_OFFSET, OffsetMap
from bascule.journal.records import KEY_OF_KIND, Kind, Op, decode_header, encode_record, json_entry

#: The outcome of an append: (offset, None) for a stored record, (UNKNOWN_OFFSET, None) for a record stored at an offset that the client
#: does not know, (-1, reason) for a failure.
Outcome = tuple[int, str | None]


#: Longest timer of the event loop. Messages may be delayed by any number of years, and the clock may be set meanwhile: due work is late by
#: at most this time after the clock was set forward.
TIMER_S_MAX = 60.0


class SteppedDown(BasculeError):
    """Raised when another broker has started a newer epoch: this broker must not answer any more."""

    retriable = True
    scope = Scope.EPOCH
    http_status = 503


class AppendOffsetUnknown(JournalUnavailable):
    """Raised when Kafka has stored a record at an offset that the client does not know: the journal must be loaded again."""

    scope = Scope.EPOCH


class EpochViolation(enum.StrEnum):
    """Rules of an epoch that a test can break. The simulation must find each of these faults."""

    GAP_NOT_READ = "a gap between two records of an epoch is not read"
    FAILED_APPEND_PASSED_OVER = "a failed append counts as stored"
    UNKNOWN_OFFSET_IS_NEXT = "a record stored at an unknown offset counts as the next record"
    ELECTION_LOSS_IGNORED = "a lost election is ignored"
    STOPPED_PROCESS_ACTS = "a process that was suspended continues without reading the journal"


class EpochProtocol:
    """The state machine of one epoch: a loaded engine, and its appends to the journal."""

    def __init__(
        self,
        effects: EpochEffects,
        limits: EpochLimits,
        topic: str,
        diverts: Diverts,
        *,
        coverage: DivertCoverage | None = None,
        errors: ErrorContainment | None = None,
        send_times: SendTimes | None = None,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``diverts`` are those of the configuration. ``coverage`` follows those that are defined at run time."""
        self._effects = effects
        self._limits = limits
        self._topic = topic
        self._diverts = diverts
        self._coverage = coverage
        self._violations = violations
        self._ends_after_suspension = EpochViolation.STOPPED_PROCESS_ACTS not in violations
        self._errors = errors or ErrorContainment()
        self._send_times = send_times or SendTimes()
        self.state = EpochState.FOLLOWING
        self.ended = False  # True once the epoch may answer nothing more; an attribute, because it is read 15 times for a message
        self.loaded = False
        self.offsets = OffsetMap()
        self.next_offset = -1  # of the journal, behind the last record that is known to be stored
        self.foreign = 0  # records of other programs between the records of this epoch
        self.engine = self.fresh_engine()
        self._start: Waiter[int] | None = None  # waits for the outcome of the start record
        self._outcomes: deque[Outcome] = deque()  # not processed yet
        #: Keys of records that wait for room in flight, with their values or what makes them.
        self._closed_records: deque[tuple[bytes, bytes | Callable[[], bytes]]] = deque()
        self._appending_large = False  # another thread makes and appends a record; the records behind it wait
        self._on_their_way = 0  # appends without an outcome
        self._in_gap = False  # records between two records of this epoch are being read
        self._flush_due = False
        self._linger: Timer | None = None  # appends an open record that has no waiting sender
        self._oldest_since_s = 0.0
        self._seen_s: float | None = None  # when this process was last known to run; None before the watch begins
        self._watch: Timer | None = None
        self._probe: Timer | None = None
        self._probing = self._reached = False
        self._timer: Timer | None = None  # for the scheduled actions of the engine
        self._turn_planned = False  # a turn in which the engine continues long work

    def fresh_engine(self) -> Engine:
        """Return an engine without state, whose decisions go into this epoch."""
        return self._effects.fresh_engine(
            Journaling(
                self._append,
                append_large=self._append,
                on_work=self._work,
                errors=self._errors,
                send_times=self._send_times,
                violations=self._violations,
            )
        )

    def _move(self, event: EpochEvent) -> None:
        try:
            self.state = EPOCH_TRANSITIONS[self.state, event]
        except KeyError:
            raise BrokerFault(f"epoch of journal {self._topic}: {event.value!r} in state {self.state.value!r}") from None
        self.ended = self.state not in LIVE

    # -- start -------------------------------------------------------------------------------------------------------

    async def start(self, content: Mapping[str, Any]) -> None:
        """Write the start record with ``content``, and load the state of the records before it.

        Raises Unavailable, JournalUnavailable (AppendOffsetUnknown), RecordError, SteppedDown.
        """
        if self.ended:  # it ended while the caller asked for the journal's limits
            raise SteppedDown(f"the epoch of journal {self._topic} has ended before its start record was written")
        self._move(EpochEvent.ELECTED)
        crash.point("epoch.start.before")
        names = {"exclusive": [divert.name for divert in self._diverts.exclusive], "diverts": self._diverts.names}
        epoch = await self._write_start(encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {**names, **content})))
        crash.point("epoch.start.after")
        if self._coverage is not None:
            await self._coverage.load()
        loader = await self._effects.state_before(epoch + 1)
        if self.ended:
            raise SteppedDown(f"epoch {epoch} of journal {self._topic} has ended before its state was loaded")
        self.engine = loader.engine
        self.offsets = loader.offsets
        self.next_offset = epoch + 1
        self.engine.journaling.begin(epoch, loader.fence.sequence)
        self.engine.addresses.use(self._diverts)
        if self._coverage is not None:
            self._coverage.begin(self)
        self._effects.loaded()
        self.engine.create_configured()
        self.engine.schedule.on_earlier = self._set_timer
        self._set_timer()
        self.engine.turns.on_backlog = self._plan_turn
        self._plan_turn()
        self._move(EpochEvent.LOADED)
        self._look()
        crash.point("epoch.loaded")
        self.loaded = True

    @property
    def number(self) -> int:
        """Return the offset of the start record, -1 before the state is loaded."""
        return self.engine.journaling.epoch

    def cover(self, patterns: tuple[str, ...]) -> None:
        """Journal the messages for these addresses, besides those for the diverts of the configuration."""
        self.engine.addresses.use(replace(self._diverts, patterns=self._diverts.patterns + patterns))

    def after_barrier(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call an action when a record of this epoch is stored that was made after the call."""
        self.engine.journaling.after_barrier(action, *arguments)

    async def _write_start(self, value: bytes) -> int:
        start = self._start = self._effects.waiter()
        self._effects.append(KEY_OF_KIND[Kind.EPOCH], value)
        timeout_s = self._limits.append_timeout_s
        try:
            return int(await start.wait(timeout_s))
        except TimeoutError:
            error = Unavailable(f"journal {self._topic}: Kafka has not stored the start record within {timeout_s:g} s")
            self.end(error)  # a later answer is ignored: the next epoch has its own start record
            raise error from None

    # -- appends -----------------------------------------------------------------------------------------------------

    def _append(self, key: bytes, value: bytes | Callable[[], bytes]) -> None:
        """Append a closed record as soon as there is room in flight. ``value`` may be a function that makes the value of a large record.

        If an append fails, the epoch ends and no later record may be stored.
        """
        if not self.ended:
            self._closed_records.append((key, value))
            self._append_closed()

    def _append_closed(self) -> None:
        while self._closed_records and not self._appending_large and self._on_their_way < self._limits.in_flight_max and not self.ended:
            if self._on_their_way == 0:
                self._oldest_since_s = self._effects.now_s()
            key, value = self._closed_records.popleft()
            if not isinstance(value, bytes):
                self._appending_large = True
                self._on_their_way += 1
                self._effects.spawn(self._append_large(key, value))
                return
            try:
                self._effects.append(key, value)
            except Exception as error:  # the outcome of the next record would be taken for the outcome of this one
                self._append_failed(error)
                raise
            self._on_their_way += 1

    async def _append_large(self, key: bytes, make: Callable[[], bytes]) -> None:
        """Append a large record while others are served, and then the records behind it."""
        try:
            await self._effects.append_large(key, make)
            self._appending_large = False
            self._append_closed()
        except Exception as error:
            self._append_failed(error)

    def _append_failed(self, error: Exception) -> None:
        self.end(error if isinstance(error, BasculeError) else BrokerFault(f"journal {self._topic}: append failed: {error!r}"))

    def _work(self, urgent: bool) -> None:
        if urgent:
            self._effects.soon(self.flush)
        elif self._linger is None:
            self._linger = self._effects.after(self._limits.linger_s, self.flush)

    def flush(self) -> None:
        """Append the open record, unless enough records are in flight. A small record waits for those in flight."""
        if self._linger is not None:
            # The timer would wake the process, and append the first acknowledgements of a later record without the next send.
            self._linger.cancel()
            self._linger = None
        if self.ended:
            return
        in_flight, limits = len(self.engine.journaling.in_flight), self._limits
        if in_flight >= (1 if self.engine.journaling.batch.size_bytes < limits.small_record_bytes else limits.in_flight_max):
            self._flush_due = True
            return
        self._flush_due = False
        try:
            crash.point("journal.append.before")
            self.engine.journaling.flush()
            crash.point("journal.append.after")
        except Exception as error:  # part of a record may exist; if Kafka's client refused an append, the epoch has ended already
            self.end(
                error if isinstance(error, BasculeError) else BrokerFault(f"journal {self._topic}: a record could not be made: {error!r}")
            )

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Process the outcomes of appends, in the order of the appends."""
        if self.awake():
            self._outcomes.extend(outcomes)
            self._settle()

    def _settle(self) -> None:
        try:
            while self._outcomes and not self._in_gap and not self.ended:
                self._settle_one(*self._outcomes.popleft())
        except Exception as error:
            self._end_after_fault("the effects of a stored record could not be applied", error)
        if self.ended or self._in_gap:
            return
        self._answered()
        if self._flush_due:
            self.flush()
        self._effects.confirmed()

    def _answered(self) -> None:
        self._oldest_since_s = self._effects.now_s()
        self._reached = False
        if self.state in (EpochState.SERVING, EpochState.STALLED):
            self._move(EpochEvent.ANSWERED)
            self.engine.stalled = None

    def _settle_one(self, offset: int, failure: str | None) -> None:
        if failure is not None:
            if EpochViolation.FAILED_APPEND_PASSED_OVER in self._violations and self.engine.journaling.in_flight:
                self._on_their_way -= 1
                self.engine.confirm()
                self._append_closed()
                return
            self.end(JournalUnavailable(f"journal {self._topic}: append failed: {failure}"))
        elif offset == UNKNOWN_OFFSET and (self._start is not None or EpochViolation.UNKNOWN_OFFSET_IS_NEXT not in self._violations):
            self.end(AppendOffsetUnknown(f"journal {self._topic}: Kafka has stored a record and has not reported its offset"))
        elif self._start is not None:
            start, self._start = self._start, None
            self._move(EpochEvent.START_STORED)
            start.keep(offset)
        elif offset in (self.next_offset, UNKNOWN_OFFSET) or EpochViolation.GAP_NOT_READ in self._violations:
            self._confirm(self.next_offset if offset == UNKNOWN_OFFSET else offset)
        else:
            self._in_gap = True
            self._effects.spawn(self._look_into_gap(self.next_offset, offset))

    def _confirm(self, offset: int) -> None:
        oldest = self.engine.journaling.in_flight[0]
        self.next_offset = offset + 1
        self.offsets.note(oldest.sequence, offset, oldest.size_bytes)
        self._effects.stored(oldest.size_bytes)
        self._on_their_way -= 1
        self._append_closed()
        crash.point("journal.confirm.before")
        self.engine.confirm()
        crash.point("journal.confirm.after")

    async def _look_into_gap(self, start: int, end: int) -> None:
        """Read the records of other writers between two records of this epoch. Later outcomes wait meanwhile."""
        try:
            try:
                await self._judge_gap(start, end)
            except BasculeError as error:
                self.end(error)
                return
            self._in_gap = False
            if not self.awake():
                return
            self._confirm(end)
        except Exception as error:
            self._end_after_fault(f"the journal's records from offset {start} to {end} could not be checked", error)
        self._settle()

    async def _judge_gap(self, start: int, end: int) -> None:
        """Raise an error if the records of a gap end this epoch. Foreign records and records of older epochs do not.

        The start record of a newer epoch ends this epoch. An unreadable record may come from a newer broker, so nothing behind it can be
        judged. If a record of this epoch is found, its answer was lost while later answers arrived: outcomes could no longer be assigned to
        records.
        """
        if await self._effects.recreated():
            raise DamagedRecord(f"journal {self._topic} {RECREATED}")
        for offset, value in await self._effects.records(start, end):
            place = f"journal {self._topic}, offset {offset}"
            try:
                header = decode_header(value)
            except ForeignRecord as error:
                self.foreign += 1
                self._effects.note(Severity.ERROR, "foreign record skipped", f"{place}: foreign record skipped: {error}")
                continue
            except RecordError as error:
                raise type(error)(f"{place}: {error}") from error
            if header.kind is Kind.EPOCH:
                raise SteppedDown(f"another broker started epoch {offset} of journal {self._topic}")
            if header.epoch == self.engine.journaling.epoch:
                raise JournalUnavailable(f"{place}: Kafka has acknowledged a later record, but not this one")

    # -- time ----------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self.engine.schedule.next_ms
        if due_ms is not None and not self.ended:
            delay_s = min(max(0.0, (due_ms - self.engine.clock()) / 1000), TIMER_S_MAX)
            self._timer = self._effects.after(delay_s, self._tick)

    def _tick(self) -> None:
        if self.awake():
            self._timer = None
            try:
                self.engine.tick()
                self.engine.dispatch()
                self._set_timer()
            except Exception as error:
                self._end_after_fault("due work could not be done", error)
            self._effects.ticked()

    def _plan_turn(self) -> None:
        if not self._turn_planned:
            self._turn_planned = True
            self._effects.soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_planned = False
        if self.awake():
            try:
                self.engine.go_on()
            except Exception as error:
                self._end_after_fault("work that the last turn left could not be done", error)
            self._effects.ticked()

    def _look(self) -> None:
        """Detect appends that Kafka has not answered in time, and refuse persistent messages while they are pending."""
        if not self.awake():  # timers run first when a process wakes: this one must not hide that the process was suspended
            return
        self._watch = self._effects.after(self._limits.watch_s, self._look)
        now_s = self._seen_s = self._effects.now_s()
        age_s, journaling = now_s - self._oldest_since_s, self.engine.journaling
        if self.state is EpochState.SERVING and journaling.in_flight and age_s > self._limits.append_timeout_s:
            self._move(EpochEvent.APPENDS_LATE)
            self.engine.stalled = JournalUnavailable(
                f"journal {self._topic}: Kafka has not stored {journaling.in_flight_bytes} bytes within {age_s:.0f} s;"
                " persistent messages are refused until Kafka stores them"
            )
            self._effects.stalled(self.engine.stalled)
        if self.state is EpochState.STALLED and not self._probing:
            self._probing = True
            self._effects.spawn(self._probe_new_client())

    async def _probe_new_client(self) -> None:
        """Ask with a new client whether Kafka accepts appends.

        If Kafka accepts them twice, and the old producer gets no answer in between, the epoch ends, so that the next epoch uses a new
        producer.
        """
        try:
            reached = await self._effects.takes_appends()
        except Exception as error:
            self._errors.contain(ErrorKind.TIMER, error, topic=self._topic)
            reached = False
        if self.state is EpochState.STALLED and reached and self._reached:
            self.end(JournalUnavailable(f"{self.engine.stalled}; Kafka answers a new client, so a new epoch starts with a new producer"))
        elif not self.ended:
            self._reached = reached and self.state is EpochState.STALLED
            self._probe = self._effects.after(self._limits.probe_s, self._may_probe_again)

    def _may_probe_again(self) -> None:
        self._probing = False

    def awake(self) -> bool:
        """Return True if this process has run without a long suspension. A suspended process may have been replaced, so its epoch ends."""
        if self.ended:
            return False
        if self._seen_s is not None and self._ends_after_suspension:
            still_s = self._effects.now_s() - self._seen_s
            if still_s > self._limits.still_max_s:
                self.end(SteppedDown(f"this process was suspended for {still_s:.0f} s"))
        return not self.ended

    # -- end ---------------------------------------------------------------------------------------------------------

    def _end_after_fault(self, what: str, error: Exception) -> None:
        """End the epoch after a fault: only a load from the journal repairs the state, and later outcomes would be assigned wrongly."""
        self._effects.note(Severity.ERROR, "broker fault", f"{what}: {error!r}", error)
        self.end(BrokerFault(f"{what}: {error!r}"))

    def lose_election(self) -> None:
        """End the epoch because another broker has been elected."""
        if EpochViolation.ELECTION_LOSS_IGNORED not in self._violations:
            self.end(SteppedDown("another broker has been elected"))

    def end(self, error: BasculeError) -> None:
        """End the epoch because of an error. Nothing is answered after that."""
        if not self.ended:
            self._move(EpochEvent.SUPERSEDED if isinstance(error, SteppedDown) else EpochEvent.FAILED)
            self._stop()
            if self._start is not None:
                self._start.fail(error)
            self._effects.ended(error)

    def close(self) -> None:
        """End the epoch in an orderly way."""
        if not self.ended:
            self._move(EpochEvent.CLOSED)
        self._stop()

    def _stop(self) -> None:
        for timer in (self._watch, self._timer, self._probe, self._linger):
            if timer is not None:
                timer.cancel()
        if self._coverage is not None:
            self._coverage.close()
