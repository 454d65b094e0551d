"""A record on its way to an endpoint, and where it is. Without IO: no Kafka, no threads, no clock."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from bascule.adapter.inbound.record import Record
from bascule.adapter.inbound.state import Ref
from bascule.core.errors import BasculeError, Scope
from bascule.core.states import Transitions


class OutOfTurn(BasculeError):
    """Something happened to a delivery, or to a source partition, that cannot happen in its state: a fault of Bascule."""

    retriable = False
    scope = Scope.OPERATION


class Phase(enum.StrEnum):
    """The state of a delivery. Only ``WORKING`` can hang; a commit is limited by the timeouts of its transaction."""

    WAITING = "waiting"
    WORKING = "in its endpoint"
    SETTLING = "being settled"
    LATE = "given up"


class DeliveryStep(enum.StrEnum):
    """What happens to a delivery."""

    TAKEN = "a worker takes it"
    RETURNED = "its endpoint returns or raises"
    HANGS = "its endpoint has not returned in time"
    FINISHED = "the worker is done with it, or tries again later"


#: What is not here cannot happen. A delivery that failed is settled by later workers without its endpoint, so WORKING may be FINISHED.
PHASES: Final = Transitions[Phase, DeliveryStep](
    "delivery",
    {
        (Phase.WAITING, DeliveryStep.TAKEN): Phase.WORKING,
        (Phase.WORKING, DeliveryStep.RETURNED): Phase.SETTLING,
        (Phase.WORKING, DeliveryStep.HANGS): Phase.LATE,
        (Phase.WORKING, DeliveryStep.FINISHED): Phase.WAITING,
        (Phase.SETTLING, DeliveryStep.FINISHED): Phase.WAITING,
    },
)


@dataclass(slots=True, eq=False)
class RecordDelivery:
    """A record on its way to an endpoint. ``keys`` are those of the inbound log that say it is in flight."""

    ref: Ref
    record: Record
    keys: tuple[bytes, ...]
    due_s: float = 0.0
    #: Whether the inbound log says that it is in flight.
    logged: bool = False
    phase: Phase = Phase.WAITING
    #: Why it failed, until it is moved away or waits for its next try.
    failure: BaseException | None = None
    #: How often the dead-letter topic had no room for it, whatever was left out.
    refusals: int = 0

    @property
    def failures(self) -> int:
        """How often the record has failed before."""
        return self.record.failures

    @property
    def key(self) -> bytes | None:
        """Of the record."""
        return self.record.key

    def step(self, step: DeliveryStep) -> None:
        """Move to the next phase. Raises OutOfTurn if the step cannot happen now."""
        after = PHASES.get((self.phase, step))
        if after is None:
            raise OutOfTurn(f"{self.ref.place}, offset {self.ref.offset}: step {step} is not allowed in phase {self.phase}")
        self.phase = after
