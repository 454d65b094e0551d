"""Delivery of a record by a worker: at least once, or in a transaction. ``settling`` decides what follows from a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from bascule.adapter.inbound.deliveries import Phase, RecordDelivery
from bascule.adapter.inbound.log import InboundLog
from bascule.adapter.inbound.record import KEY_TOO, VALUE_AND_HEADERS, Record, cause_of, dead_letter_of, retry_of
from bascule.adapter.inbound.settling import AWAY_PAUSE_S, MoveTarget, NotNow, RetryPolicy, SettlingEvent, meaning_of, resolve, try_once
from bascule.adapter.inbound.spec import ActivationSpec, Xa
from bascule.adapter.inbound.state import Flights, Ref
from bascule.adapter.inbound.workers import Counts, Workers
from bascule.core import crash
from bascule.core.effects import run_blocking
from bascule.core.errors import BasculeError, TooLarge, TransactionRolledBack
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.kafka.appender import await_stored
from bascule.xa.two_phase import TransactionStatus

_COUNTED: Final[Mapping[SettlingEvent, str]] = {
    SettlingEvent.DELIVERED: "delivered",
    SettlingEvent.FAILED: "failed",
    SettlingEvent.RETRIED: "retried",
    SettlingEvent.DEAD_LETTERED: "dead_lettered",
    SettlingEvent.SUPERSEDED: "superseded",
}
_LEFT_OUT: Final[Mapping[MoveTarget, str]] = {
    MoveTarget.DEAD_LETTER: "",
    MoveTarget.WITHOUT_VALUE: VALUE_AND_HEADERS,
    MoveTarget.WITHOUT_KEY: KEY_TOO,
}

_log = get_log("bascule.adapter")


class Mode(Protocol):
    """How a record is delivered, and how it is moved away."""

    def deliver(self, delivery: RecordDelivery, work: Callable[[], None]) -> None:
        """Deliver a record. Raises Superseded, NotNow, Late, or the error of the endpoint; the record then stays in flight."""

    def move(self, delivery: RecordDelivery, outgoing: Outgoing) -> None:
        """Move a record to the retry or dead-letter topic. Raises the errors of ``deliver``, and TooLarge."""


class AtLeastOnce:
    """Delivers at least once: a record is done when its endpoint has returned."""

    def __init__(self, log: InboundLog) -> None:
        self._log = log

    def deliver(self, delivery: RecordDelivery, work: Callable[[], None]) -> None:
        """See Mode."""
        work()
        self._log.done(delivery.ref.place, delivery.keys)

    def move(self, delivery: RecordDelivery, outgoing: Outgoing) -> None:
        """See Mode. After a crash between the two writes, the record is in both topics."""
        await_stored(self._log.append(outgoing))
        self._log.done(delivery.ref.place, delivery.keys, wait=True)


class InTransaction:
    """Delivers in a transaction: the receipt of the record and the work of the endpoint commit together."""

    def __init__(self, xa: Xa, timeout_s: float, stopping: Callable[[], bool]) -> None:
        self._xa = xa
        self._timeout_s = timeout_s
        self._stopping = stopping

    def deliver(self, delivery: RecordDelivery, work: Callable[[], None]) -> None:
        """See Mode."""
        self._run(delivery.ref, work)

    def move(self, delivery: RecordDelivery, outgoing: Outgoing) -> None:
        """See Mode."""

        def send() -> None:
            topic, key, value, headers, _, timestamp_ms = outgoing
            self._xa.manager.enlist(self._xa.kafka).send(topic, value, key, headers=headers, timestamp_ms=timestamp_ms)

        self._run(delivery.ref, send)

    def _run(self, ref: Ref, work: Callable[[], None]) -> None:
        try:
            transaction = self._xa.manager.begin(self._timeout_s)
        except BasculeError as error:  # the manager was closed too early
            raise NotNow(str(error)) from error
        try:
            with transaction:
                transaction.enlist(self._xa.log).take(ref)
                work()
            if transaction.status is not TransactionStatus.COMMITTED:
                raise TransactionRolledBack("was rolled back by the endpoint", transaction_id=transaction.id)
        except BasculeError as error:
            meaning = meaning_of(error, transaction.id)
            if meaning is None:
                _log.warning("transaction of record not finished", place=ref.place, offset=ref.offset, error=error)
                meaning = run_blocking(resolve(ref, error, _Doubt(self._xa.log, ref, self._stopping)))
            if meaning is error:
                raise
            if meaning is not None:
                raise meaning from error


@dataclass(frozen=True, slots=True)
class _Doubt:
    """The blocking effects of waiting for a transaction in doubt."""

    log: InboundLog
    ref: Ref
    stopping: Callable[[], bool]

    async def flights(self) -> Flights:
        """See DoubtEffects."""
        return self.log.flights(self.ref.place)

    async def sleep(self, pause_s: float) -> None:
        """See DoubtEffects."""
        time.sleep(pause_s)

    def note_doubt(self, error: BaseException) -> None:
        """See DoubtEffects."""
        _log.warning("record in doubt", place=self.ref.place, offset=self.ref.offset, error=error)


class Deliverer:
    """Calls the endpoint for a delivery, and handles failures as ``settling`` decides."""

    def __init__(self, spec: ActivationSpec, log: InboundLog, mode: Mode, counts: Counts) -> None:
        self.spec = spec
        self.log = log
        self.mode = mode
        self.counts = counts
        #: Records that block their lanes because no dead letter can be written for them, with the reason.
        self.unburied: dict[Ref, str] = {}

    def handle(self, workers: Workers, delivery: RecordDelivery, call: Callable[[Record], None]) -> float | None:
        """Try a delivery once. Return when to try again (monotonic seconds), or None. Raises Late."""
        policy = RetryPolicy(self.spec.retries, self.spec.backoff, self.spec.in_place, AWAY_PAUSE_S)
        pause_s = run_blocking(try_once(delivery, _Try(self, workers, delivery, call), policy))
        return None if pause_s is None else time.monotonic() + pause_s


@dataclass(frozen=True, slots=True)
class _Try:
    """The blocking effects of a try."""

    at: Deliverer
    workers: Workers
    delivery: RecordDelivery
    call: Callable[[Record], None]

    async def deliver(self) -> None:
        """See TryEffects."""
        self.at.mode.deliver(self.delivery, self._work)

    def _work(self) -> None:
        crash.point("inbound.deliver.before")
        self.call(self.delivery.record)
        self.workers.settle(self.delivery)
        crash.point("inbound.deliver.after")

    def settling(self) -> bool:
        """See TryEffects."""
        return self.delivery.phase is Phase.SETTLING

    def settle(self) -> None:
        """See TryEffects."""
        self.workers.settle(self.delivery)

    async def keep(self, failures: int) -> None:
        """See TryEffects."""
        delivery = self.delivery
        key = self.at.log.failed(delivery.ref, failures)
        delivery.keys = (*delivery.keys, key) if key not in delivery.keys else delivery.keys
        delivery.record = replace(delivery.record, failures=failures)

    async def move(self, target: MoveTarget, error: BaseException, pause_s: float, refused: TooLarge | None) -> None:
        """See TryEffects."""
        record, spec = self.delivery.record, self.at.spec
        if target is MoveTarget.RETRY:
            self.at.mode.move(self.delivery, retry_of(record, spec, error, int((time.time() + pause_s) * 1000)))
            return
        left_out = _LEFT_OUT[target]
        if left_out:
            _log.error("dead letter is incomplete", **record_at(record), left_out=left_out, error=refused)
        self.at.mode.move(self.delivery, dead_letter_of(record, spec, error, left_out=left_out, why=str(refused or "")))

    def note(self, event: SettlingEvent, error: BaseException | None = None, pause_s: float = 0.0) -> None:
        """See TryEffects."""
        if (counted := _COUNTED.get(event)) is not None:
            self.at.counts.add(counted)
        if event is SettlingEvent.DELIVERED:
            self.at.counts.arrived(self.delivery.record.timestamp_ms)
        place, offset = self.delivery.ref.place, self.delivery.ref.offset
        if event is SettlingEvent.FAILED and error is not None:
            failures, most = self.delivery.record.failures + 1, self.at.spec.retries + 1
            _log.warning("record failed", **record_at(self.delivery.record), attempt=failures, attempts_max=most, error=cause_of(error))
        elif event is SettlingEvent.RETRY_REFUSED:
            _log.error("could not write record to retry topic", **record_at(self.delivery.record), error=error)
        elif event is SettlingEvent.DEAD_LETTERED:
            self.at.unburied.pop(self.delivery.ref, None)
        elif event is SettlingEvent.REFUSED:
            why = f"could not dead-letter record {place}, offset {offset}: {error}; raise max.message.bytes of the dead-letter topic"
            self.at.unburied[self.delivery.ref] = why
            _log.error("could not dead-letter record, will retry", place=place, offset=offset, reason=why, retry_s=pause_s)
        elif event is SettlingEvent.SUPERSEDED:
            _log.info("record handled elsewhere", place=place, offset=offset, reason=error)
        elif event is SettlingEvent.AWAY and error is not None:
            said = str(error) if isinstance(error, BasculeError) else cause_of(error)
            _log.warning("could not settle record, will retry", place=place, offset=offset, error=said, retry_s=pause_s)


def record_at(record: Record) -> dict[str, str | int]:
    """Return the fields of a log line that name a record."""
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}
