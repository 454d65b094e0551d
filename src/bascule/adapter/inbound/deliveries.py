"""A record on its way to an endpoint, and its state. Without IO: no Kafka, no threads, no clock."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from bascule.adapter.inbound.record import Record
from bascule.adapter.inbound.state import Ref
from bascule.core.errors import BasculeError, Scope
from bascule.core.states import Transitions


class OutOfTurn(BasculeError):
    """Raised when a step is not allowed in the current state of a delivery or source partition. This is a defect of Bascule."""

    retriable = False
    scope = Scope.OPERATION


class Phase(enum.StrEnum):
    """The phase of a delivery. Only ``WORKING`` can hang; the timeouts of its transaction limit a commit."""

    WAITING = "waiting"
    WORKING = "running in the endpoint"
    SETTLING = "settling"
    LATE = "timed out"


class DeliveryStep(enum.StrEnum):
    """A step of a delivery."""

    TAKEN = "a worker takes the record"
    RETURNED = "the endpoint returns or raises"
    HANGS = "the endpoint has not returned in time"
    FINISHED = "the worker has finished, or will retry"


#: The allowed steps. A delivery that failed is settled by later workers without its endpoint, so WORKING may be FINISHED.
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
    """A record on its way to an endpoint. ``keys`` are the entries of the inbound log that say that the record is in flight."""

    ref: Ref
    record: Record
    keys: tuple[bytes, ...]
    due_s: float = 0.0
    #: Whether the inbound log says that the record is in flight.
    logged: bool = False
    phase: Phase = Phase.WAITING
    #: The error, until the record is moved away or waits for its next try.
    failure: BaseException | None = None
    #: How often the dead-letter topic had no room for the record, even in its shortest form.
    refusals: int = 0

    @property
    def failures(self) -> int:
        """Return how often the record has failed before."""
        return self.record.failures

    @property
    def key(self) -> bytes | None:
        """Return the key of the record."""
        return self.record.key

    def step(self, step: DeliveryStep) -> None:
        """Move to the next phase. Raises OutOfTurn if the step is not allowed now."""
        after = PHASES.get((self.phase, step))
        if after is None:
            raise OutOfTurn(f"{self.ref.place}, offset {self.ref.offset}: step {step} is not allowed in phase {self.phase}")
        self.phase = after
