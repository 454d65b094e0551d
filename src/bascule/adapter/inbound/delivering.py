"""What a delivery promises: at least once, or within a transaction."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from bascule.adapter.inbound.deliveries import Phase, RecordDelivery
from bascule.adapter.inbound.log import InboundLog
from bascule.adapter.inbound.log_protocol import Superseded
from bascule.adapter.inbound.record import KEY_TOO, VALUE_AND_HEADERS, Record, cause_of, dead_letter_of, retry_of
from bascule.adapter.inbound.spec import ActivationSpec, Backoff, Xa
from bascule.adapter.inbound.state import Ref
from bascule.adapter.inbound.workers import Counts, Late, Workers
from bascule.core import crash
from bascule.core.errors import BasculeError, Scope, TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.kafka.compacted import await_stored
from bascule.xa.errors import HeuristicOutcome, ResourceFailed, TransactionInDoubt, TransactionRolledBack, XaError
from bascule.xa.two_phase import TransactionStatus

#: What cannot be done because Kafka, the database or the decision log is away is tried again after this time, and counts as no failure.
AWAY_PAUSE_S = 1.0
#: What the dead-letter topic has no room for waits for its owner.
REFUSED: Final = Backoff()
#: A transaction in doubt is looked at so often.
DOUBT_PAUSE_S = 0.2

_log = get_log("bascule.adapter")


class NotNow(BasculeError):
    """Something that is needed is away; the record is as it was."""

    retriable = True
    scope = Scope.OPERATION


class Mode(Protocol):
    """How a record is handled, and how it is moved away."""

    def deliver(self, delivery: RecordDelivery, work: Callable[[], None]) -> None:
        """Raises Superseded, NotNow, Late, or why it failed; then it is in flight as before."""

    def move(self, delivery: RecordDelivery, outgoing: Outgoing) -> None:
        """To the retry or dead-letter topic. Raises as ``deliver`` does, and TooLarge."""


class AtLeastOnce:
    """Done with when the endpoint has returned."""

    def __init__(self, log: InboundLog) -> None:
        self._log = log

    def deliver(self, delivery: RecordDelivery, work: Callable[[], None]) -> None:
        """See Mode."""
        work()
        self._log.done(delivery.ref.place, delivery.keys)

    def move(self, delivery: RecordDelivery, outgoing: Outgoing) -> None:
        """See Mode. Killed in between, the record is in both."""
        await_stored(self._log.append(outgoing))
        self._log.done(delivery.ref.place, delivery.keys, wait=True)


class InTransaction:
    """The receipt of the record, and all that the endpoint enlists, commit together."""

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
        except BasculeError as error:  # it was closed too early
            raise NotNow(str(error)) from error
        try:
            with transaction:
                transaction.enlist(self._xa.log).take(ref)
                work()
            if transaction.status is not TransactionStatus.COMMITTED:
                raise TransactionRolledBack("was rolled back by its endpoint", transaction_id=transaction.id)
        except ResourceFailed as error:
            raise NotNow(str(error)) from error
        except TransactionRolledBack as error:
            if error.transaction_id != transaction.id:  # a transaction of the endpoint's own
                raise
            reason = error.cause
            if isinstance(reason, Superseded):
                raise reason from None
            if isinstance(reason, XaError):
                if isinstance(reason.cause, TooLarge):
                    raise reason.cause from None
                if reason.retriable:
                    raise NotNow(str(error)) from error
            raise
        except (TransactionInDoubt, HeuristicOutcome) as error:
            if error.transaction_id != transaction.id:
                raise
            _log.warning("transaction of a record not finished", place=ref.place, offset=ref.offset, error=error)
            if self._in_flight(ref):
                if isinstance(error, TransactionInDoubt):  # what did not answer may do so the next time
                    raise NotNow(str(error)) from error
                raise

    def _in_flight(self, ref: Ref) -> bool:
        """Whether the record is still to be handled, once its transaction is no longer in doubt."""
        while not self._stopping():
            try:
                flights = self._xa.log.flights(ref.place)
            except Unavailable as error:
                _log.warning("record in doubt", place=ref.place, offset=ref.offset, error=error)
            else:
                if ref.offset not in flights.claims.values():
                    return ref.offset in flights.keys
            time.sleep(DOUBT_PAUSE_S)
        raise NotNow(f"{ref.place}, offset {ref.offset} is in doubt; recovery finishes it")


class Deliverer:
    """Calls the endpoint for a delivery, and does what its failure asks for."""

    def __init__(self, spec: ActivationSpec, log: InboundLog, mode: Mode, counts: Counts) -> None:
        self._spec = spec
        self._log = log
        self._mode = mode
        self._counts = counts
        #: Records that hold up their lanes since no dead letter can be written of them, and why.
        self.unburied: dict[Ref, str] = {}

    def handle(self, workers: Workers, delivery: RecordDelivery, call: Callable[[Record], None]) -> float | None:
        """When to try again, in monotonic seconds; None where that is not needed. Raises Late."""

        def work() -> None:
            crash.point("inbound.deliver.before")
            call(delivery.record)
            workers.settle(delivery)
            crash.point("inbound.deliver.after")

        try:
            if delivery.failure is None:
                self._deliver(workers, delivery, work)
            if delivery.failure is not None:
                return self._failed(delivery, delivery.failure)
        except Late:
            raise
        except Superseded as error:
            self._counts.add("superseded")
            _log.info("record given up", place=delivery.ref.place, offset=delivery.ref.offset, reason=error)
        except TooLarge as error:
            delivery.refusals += 1
            pause_s = REFUSED.pause_s(delivery.refusals)
            ref = delivery.ref
            why = f"{ref.place}, offset {ref.offset} cannot be dead-lettered: {error}; raise max.message.bytes of that topic"
            self.unburied[ref] = why
            _log.error("record not dead-lettered", place=ref.place, offset=ref.offset, reason=why, retry_s=pause_s)
            return time.monotonic() + pause_s
        except (NotNow, Unavailable) as error:
            _log.warning("record waits", place=delivery.ref.place, offset=delivery.ref.offset, error=error, retry_s=AWAY_PAUSE_S)
            return time.monotonic() + AWAY_PAUSE_S
        except BaseException as error:  # a worker that ended of it would leave the record, and those behind it, where they are
            _log.warning("record not moved", place=delivery.ref.place, offset=delivery.ref.offset, error=cause_of(error))
            return time.monotonic() + AWAY_PAUSE_S
        return None

    def _deliver(self, workers: Workers, delivery: RecordDelivery, work: Callable[[], None]) -> None:
        try:
            self._mode.deliver(delivery, work)
            self._counts.add("delivered")
        except (Late, Superseded):
            raise
        except BaseException as error:  # sys.exit() and a cancelled task end an endpoint, too
            returned = delivery.phase is Phase.SETTLING
            if not returned:
                workers.settle(delivery)
            if isinstance(error, NotNow) or (returned and not isinstance(error, Exception)):  # in the latter case it may be done
                raise
            self._counts.add("failed")
            delivery.failure = error

    def _failed(self, delivery: RecordDelivery, error: BaseException) -> float | None:
        record, spec = delivery.record, self._spec
        failures = record.failures + 1
        _log.warning("record failed", **record_at(record), attempt=failures, attempts_max=spec.retries + 1, error=cause_of(error))
        if failures > spec.retries:
            self._bury(delivery, error)
            return None
        pause_s = spec.backoff.pause_s(failures)
        if spec.in_place:
            delivery.keys = (*delivery.keys, self._log.failed(delivery.ref, failures))
            delivery.record = replace(record, failures=failures)
            delivery.failure = None
            self._counts.add("retried")
            return time.monotonic() + pause_s
        crash.point("inbound.retry.before")
        try:
            self._mode.move(delivery, retry_of(record, spec, error, int((time.time() + pause_s) * 1000)))
        except TooLarge as refused:
            _log.error("record not retried", **record_at(record), error=refused)
            self._bury(delivery, error)
            return None
        crash.point("inbound.retry.after")
        self._counts.add("retried")
        return None

    def _bury(self, delivery: RecordDelivery, error: BaseException) -> None:
        """To the dead letters; without what they have no room for, for its lane shall not stand for ever."""
        crash.point("inbound.dead_letter.before")
        try:
            self._mode.move(delivery, dead_letter_of(delivery.record, self._spec, error))
        except TooLarge as refused:
            try:
                self._bury_without(VALUE_AND_HEADERS, delivery, error, refused)
            except TooLarge as again:
                self._bury_without(KEY_TOO, delivery, error, again)
        self.unburied.pop(delivery.ref, None)
        self._counts.add("dead_lettered")

    def _bury_without(self, left_out: str, delivery: RecordDelivery, error: BaseException, refused: TooLarge) -> None:
        _log.error("record dead-lettered in part", **record_at(delivery.record), left_out=left_out, error=refused)
        self._mode.move(delivery, dead_letter_of(delivery.record, self._spec, error, left_out=left_out, why=str(refused)))


def record_at(record: Record) -> dict[str, str | int]:
    """Return the fields of a log line that name a record."""
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}
