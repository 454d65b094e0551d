"""The effects of takeovers and of reading (``taking_over``), performed with Kafka's clients and a transaction manager, blocking."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from bascule.adapter.inbound.deliveries import RecordDelivery
from bascule.adapter.inbound.log import InboundLog
from bascule.adapter.inbound.record import record_of
from bascule.adapter.inbound.spec import ActivationSpec
from bascule.adapter.inbound.state import FLIGHT, Flights, Place, Ref, key_of
from bascule.adapter.inbound.taking_over import ClaimOfOthers, Run
from bascule.adapter.inbound.workers import Workers
from bascule.core.kafka_records import GroupOffset, KafkaRecord
from bascule.core.log import get_log
from bascule.core.xid import Xid
from bascule.kafka.consumer import GroupConsumer
from bascule.xa.log import Outcome
from bascule.xa.xid import log_id_of_gtrid, manager_of_gtrid

_log = get_log("bascule.adapter")


class BlockingTakeover:
    """The blocking effects of a takeover."""

    def __init__(
        self, spec: ActivationSpec, log: InboundLog, run: Run[RecordDelivery], held: Callable[[Run[RecordDelivery]], GroupOffset | None]
    ) -> None:
        self._spec = spec
        self._log = log
        self._run = run
        self._held = held

    async def owner(self, place: Place) -> str | None:
        """See TakeoverEffects."""
        return self._log.owner(place)

    async def held(self, _place: Place) -> GroupOffset | None:
        """See TakeoverEffects."""
        return self._held(self._run)

    async def take(self, place: Place, after: str | None) -> str:
        """See TakeoverEffects."""
        return self._log.take(place, after)

    async def flights(self, place: Place) -> Flights:
        """See TakeoverEffects."""
        return self._log.flights(place)

    async def finish(self, place: Place, claims: Sequence[Xid]) -> None:
        """See TakeoverEffects. Roll back transactions without a decision: the previous owner of the partition can decide nothing more.

        Raises ClaimOfOthers for a transaction of another manager, which may have another decision log.
        """
        xa = self._spec.transacted
        own = xa.manager.name if xa is not None else None
        others = [xid for xid in claims if xa is None or not xa.manager.owns(xid.gtrid)]
        for xid in claims:
            if xa is None or xid in others:
                continue
            # Finish only the claim, which is in the way: a database that hangs must not delay this.
            stands = xa.manager.recoverer().finish_now(xid, Outcome.ROLLBACK, who="the next member", only=xa.log.name)
            xa.manager.recover_soon()
            _log.info("transaction of earlier member finished", group=self._spec.group, place=place, xid=xid, outcome=stands)
        if others:
            managers = sorted({_manager(xid, own) for xid in others})
            who = f"manager {own!r}" if own is not None else "an endpoint without a transaction manager"
            raise ClaimOfOthers(
                f"is blocked: transactions {', '.join(map(str, others))} of manager {', '.join(managers)} claim its records, "
                f"and {who} cannot finish them; run `bascule xa recover` or `bascule xa rollback` with a manager of that name"
            )


def _manager(xid: Xid, own: str | None) -> str:
    """Return the name of a transaction's manager for display, with its decision log if this manager has the same name."""
    name = manager_of_gtrid(xid.gtrid) or "(unknown)"
    return f"{name!r} with decision log {log_id_of_gtrid(xid.gtrid)}" if name == own else repr(name)


@dataclass(frozen=True, slots=True)
class BlockingReading:
    """The blocking effects of handling records that were read."""

    log: InboundLog
    consumer: GroupConsumer
    workers: Workers
    deliveries: list[RecordDelivery]
    ends: Sequence[Ref]
    advanced: dict[Place, int]
    take_over_again: Callable[[Collection[Place]], None]

    async def schedule(self) -> None:
        """See Reading. Records that were found in flight are already in the log."""
        new = [delivery for delivery in self.deliveries if not (delivery.logged or delivery.record.redelivered)]
        self.log.schedule([delivery.ref for delivery in new])
        for delivery in new:
            delivery.logged = True

    async def advance(self) -> None:
        """See Reading."""
        new = [end for end in self.ends if self.advanced.get(end.place) != end.offset]
        self.log.advance(new)
        self.advanced.update({end.place: end.offset for end in new})

    def give_up(self) -> None:
        """See Reading."""
        places = {end.place for end in self.ends if self.advanced.get(end.place) != end.offset}
        self.consumer.pause(places)
        self.take_over_again(places)

    async def commit(self) -> None:
        """See Reading."""
        self.consumer.commit({end.place: end.offset for end in self.ends})

    async def deliver(self) -> None:
        """See Reading."""
        self.workers.add(self.deliveries)


def delivery_of(
    spec: ActivationSpec, ref: Ref, received: KafkaRecord, keys: tuple[bytes, ...] = (), *, failures: int = 0, redelivered: bool = False
) -> RecordDelivery:
    """Return the delivery of a record that was read, or found in flight under ``keys``. A record that failed before has a due time."""
    record, due_ms = record_of(received, spec.retry_topic, failures=failures, redelivered=redelivered)
    # The pause is bounded, because any writer of the retry topic can set the due time.
    pause_s = min(due_ms / 1000 - time.time(), spec.backoff.longest_s)
    return RecordDelivery(ref, record, keys or (key_of(FLIGHT, ref),), time.monotonic() + pause_s if pause_s > 0 else 0.0)
