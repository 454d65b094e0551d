"""What an epoch of the journal asks of its surroundings, and what bounds it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bascule.broker.engine import Engine
from bascule.broker.errors import JournalUnavailable
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.core.effects import Severity, Timer, Waiter
from bascule.core.errors import BasculeError
from bascule.journal.fence import IN_FLIGHT_MAX


@dataclass(frozen=True, slots=True)
class EpochLimits:
    """What bounds an epoch; times in seconds."""

    append_timeout_s: float
    #: A process that stood still for longer may have been replaced.
    still_max_s: float
    #: Appends on their way at once: while they travel, what comes gathers in the next record. More would only make records smaller.
    in_flight_max: int = IN_FLIGHT_MAX
    #: What nobody waits for (an acknowledgement alone) waits for company: the next send takes it along and saves an append.
    linger_s: float = 0.005
    #: How often the age of the oldest append is looked at.
    watch_s: float = 0.5
    #: While appends are stalled, a new client asks at this interval whether Kafka takes appends.
    probe_s: float = 5.0


class EpochEffects(Protocol):
    """What an epoch asks of its surroundings. All of it happens in one thread; ``now_s`` never goes back."""

    def now_s(self) -> float:
        """Time of a monotonic clock, which goes on while the machine is suspended."""
        ...

    def soon(self, action: Callable[[], None]) -> object:
        """Do it after what is being done."""
        ...

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Do it later, unless the timer is cancelled."""
        ...

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        """Run a protocol beside what is being done. It raises nothing."""
        ...

    def waiter(self) -> Waiter[Any]:
        """A value that comes later."""
        ...

    def append(self, key: bytes, value: bytes) -> None:
        """Send a record to Kafka; its outcome comes to ``EpochProtocol.outcomes``, in the order of the appends. Raises BasculeError."""
        ...

    async def records(self, start: int, end: int) -> Sequence[tuple[int, bytes | None]]:
        """The journal's records from ``start`` up to ``end`` (not included), with their offsets. Raises BasculeError."""
        ...

    async def recreated(self) -> bool:
        """Whether the journal's topic is another one of its name by now. Raises Unavailable."""
        ...

    async def takes_appends(self) -> bool:
        """Whether a client made now finds that Kafka takes appends to the journal."""
        ...

    async def state_before(self, end: int) -> Loader:
        """The state of all records before ``end``. Raises Unavailable or RecordError."""
        ...

    def fresh_engine(self, journaling: Journaling) -> Engine:
        """An engine without any state."""
        ...

    def loaded(self) -> None:
        """The engine has its state; nobody is served yet."""
        ...

    def stored(self, size_bytes: int) -> None:
        """A record of this epoch is stored."""
        ...

    def confirmed(self) -> None:
        """After each round of outcomes."""
        ...

    def ticked(self) -> None:
        """A timer has done what was due, by which nobody knows more of Kafka."""
        ...

    def stalled(self, error: JournalUnavailable) -> None:
        """Kafka has not answered in time: nobody must wait for it here."""
        ...

    def ended(self, error: BasculeError) -> None:
        """The epoch cannot go on. Called once."""
        ...

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Something for the log."""
        ...
