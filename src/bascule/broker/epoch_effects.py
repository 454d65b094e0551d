"""The effects of an epoch of the journal, and its limits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bascule.broker.engine import Engine
from bascule.broker.errors import JournalUnavailable
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.core.effects import Severity, Timer, Waiter
from bascule.core.errors import BasculeError
from bascule.journal.fence import IN_FLIGHT_MAX

#: An append costs broker, Kafka and readers about the same for one message and for many, up to this size.
SMALL_RECORD_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class EpochLimits:
    """The limits of an epoch; times in seconds."""

    append_timeout_s: float
    #: If a process was suspended for longer than this, it may have been replaced.
    still_max_s: float
    #: Appends in flight at once. Further entries gather in the next record meanwhile; a higher limit would only make records smaller.
    in_flight_max: int = IN_FLIGHT_MAX
    #: While an append is in flight, a record that is smaller than this collects further entries.
    small_record_bytes: int = SMALL_RECORD_BYTES
    #: Delay of entries that nobody waits for (an acknowledgement alone): the next send takes them along and saves an append.
    linger_s: float = 0.005
    #: How often the age of the oldest append is checked.
    watch_s: float = 0.5
    #: While appends are stalled, a new client asks at this interval whether Kafka accepts appends.
    probe_s: float = 5.0


class EpochEffects(Protocol):
    """The effects of an epoch. All calls happen in one thread; ``now_s`` never goes back."""

    def now_s(self) -> float:
        """Return the time of a monotonic clock that continues while the machine is suspended."""
        ...

    def soon(self, action: Callable[[], None]) -> object:
        """Call ``action`` after the current turn."""
        ...

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Call ``action`` after ``delay_s``, unless the timer is cancelled."""
        ...

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        """Run a protocol concurrently. The protocol raises nothing."""
        ...

    def waiter(self) -> Waiter[Any]:
        """Return a waiter for a later value."""
        ...

    def append(self, key: bytes, value: bytes) -> None:
        """Send a record to Kafka. ``EpochProtocol.outcomes`` gets the outcomes, in the order of the appends. Raises BasculeError."""
        ...

    async def append_large(self, key: bytes, make: Callable[[], bytes]) -> None:
        """Send the record whose value ``make`` returns, as ``append`` does, without blocking this thread. Raises BasculeError."""
        ...

    async def records(self, start: int, end: int) -> Sequence[tuple[int, bytes | None]]:
        """Return the journal's records from ``start`` up to but not including ``end``, with their offsets. Raises BasculeError."""
        ...

    async def recreated(self) -> bool:
        """Return True if the topic of the journal was recreated. Raises Unavailable."""
        ...

    async def takes_appends(self) -> bool:
        """Return True if a new client finds that Kafka accepts appends to the journal."""
        ...

    async def state_before(self, end: int) -> Loader:
        """Return the state of all records before ``end``. Raises Unavailable or RecordError."""
        ...

    def fresh_engine(self, journaling: Journaling) -> Engine:
        """Return an engine without state."""
        ...

    def loaded(self) -> None:
        """Note that the engine has its state. No client is served yet."""
        ...

    def stored(self, size_bytes: int) -> None:
        """Note that a record of this epoch is stored."""
        ...

    def confirmed(self) -> None:
        """Note the end of a round of outcomes."""
        ...

    def ticked(self) -> None:
        """Note that a timer has done the due work. This says nothing about Kafka."""
        ...

    def stalled(self, error: JournalUnavailable) -> None:
        """Note that Kafka has not answered in time: clients must not wait for this broker."""
        ...

    def ended(self, error: BasculeError) -> None:
        """Note that the epoch has ended. Called once."""
        ...

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Write an event to the log."""
        ...
