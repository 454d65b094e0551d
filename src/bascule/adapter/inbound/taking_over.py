"""How a member takes over a source partition, and in which order records are read, logged and delivered.

Without IO: no Kafka, no threads, no clock. The inbound log first says that a record is in flight, then that the partition was read up to
it; after that the record is delivered. So, whatever dies, the record is either read again or found in flight by the next owner of its
partition, and a record that is done is not read again. A partition of which the log says nothing begins at the group's offset.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from bascule.adapter.inbound.deliveries import OutOfTurn
from bascule.adapter.inbound.log_protocol import LogViolation
from bascule.adapter.inbound.state import Flights, Place, Ref
from bascule.core import crash
from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.core.kafka_records import GroupOffset
from bascule.core.states import Transitions
from bascule.core.xid import Xid


class PartitionState(enum.StrEnum):
    """The state of a source partition, as a member sees it."""

    ASSIGNED = "taking over"
    OWNED = "owned; records in flight are not known yet"
    READY = "ready"
    GONE = "gone"


class PartitionEvent(enum.StrEnum):
    """An event of a source partition."""

    TAKEN = "the owner entry of the member counts in the inbound log"
    ADOPTED = "the records in flight are known, and none is claimed"
    LEFT = "the group revokes the partition, or the member stops"


PARTITION_STATES: Final = Transitions[PartitionState, PartitionEvent](
    "source partition",
    {
        (PartitionState.ASSIGNED, PartitionEvent.TAKEN): PartitionState.OWNED,
        (PartitionState.OWNED, PartitionEvent.ADOPTED): PartitionState.READY,
        (PartitionState.ASSIGNED, PartitionEvent.LEFT): PartitionState.GONE,
        (PartitionState.OWNED, PartitionEvent.LEFT): PartitionState.GONE,
        (PartitionState.READY, PartitionEvent.LEFT): PartitionState.GONE,
        #: A taker finds out later that the partition is gone.
        (PartitionState.GONE, PartitionEvent.TAKEN): PartitionState.GONE,
        (PartitionState.GONE, PartitionEvent.LEFT): PartitionState.GONE,
    },
)


class ClaimOfOthers(BasculeError):
    """Raised when a transaction that this endpoint cannot finish has claimed a record. The text says who must finish it."""

    retriable = True
    scope = Scope.OPERATION


class Located(Protocol):
    """A delivery, as far as its place is concerned."""

    @property
    def ref(self) -> Ref:
        """Return the record."""


ItemT = TypeVar("ItemT", bound=Located)
_BEGINNING: Final = GroupOffset(0)


@dataclass(slots=True, eq=False)
class Run(Generic[ItemT]):
    """A source partition that this member holds, from its assignment until it is gone."""

    place: Place
    token: str = ""
    state: PartitionState = PartitionState.ASSIGNED
    #: The group's offset, as the group reported it at the takeover.
    held: GroupOffset = _BEGINNING
    #: Records before this offset are in flight or done. If reading begins before it, they are skipped.
    next_offset: int = 0
    #: Records in flight after the group's offset: they are delivered when they have been read and that is committed.
    ahead: deque[ItemT] = field(default_factory=deque)
    trouble: str = ""
    #: Whether the partition waits for a transaction that this endpoint cannot finish.
    blocked: bool = False

    @property
    def ready(self) -> bool:
        """Return True if the records of the partition are read and delivered."""
        return self.state is PartitionState.READY

    @property
    def gone(self) -> bool:
        """Return True if the partition no longer belongs to this member."""
        return self.state is PartitionState.GONE

    def on(self, event: PartitionEvent) -> None:
        """Move to the next state. Raises OutOfTurn if the event is not allowed now."""
        after = PARTITION_STATES.get((self.state, event))
        if after is None:
            raise OutOfTurn(f"partition {self.place}: event {event} is not allowed in state {self.state}")
        self.state = after

    def begin_at(self, read_to: int | None, violations: Collection[enum.StrEnum] = ()) -> None:
        """Begin at the group's offset, or at the log's if that is larger: a delayed commit may have set the group back.

        An offset that an operator has set takes precedence, because an operator may set the group back on purpose.
        """
        log_counts = self.held.by_member and LogViolation.READ_ENTRIES_IGNORED not in violations
        self.next_offset = max(self.held.offset, read_to or 0) if log_counts else self.held.offset

    def adopt(self, items: Iterable[ItemT], violations: Collection[enum.StrEnum] = ()) -> list[ItemT]:
        """Become ready with the records in flight, and return those to deliver now.

        A member that died between log and commit has left records in flight after the group's offset. If they were done before the group
        reaches them, they would be read and delivered again. The group is not moved to them, because records before them may be missing in
        the log.
        """
        self.on(PartitionEvent.ADOPTED)
        items = list(items)
        if LogViolation.AHEAD_DELIVERED_AT_ONCE in violations:
            return items
        self.ahead.extend(item for item in items if item.ref.offset >= self.next_offset)
        return [item for item in items if item.ref.offset < self.next_offset]

    def receive(self, offset: int, make: Callable[[], ItemT]) -> list[ItemT] | None:
        """Take the record that was read at an offset, and return what to deliver. Return None if the record was read before."""
        if offset < self.next_offset:
            return None
        self.next_offset = offset + 1
        found: list[ItemT] = []
        while self.ahead and self.ahead[0].ref.offset <= offset:
            found.append(self.ahead.popleft())
        if not found or found[-1].ref.offset < offset:
            found.append(make())
        return found


class TakeoverEffects(Protocol):
    """The operations of the log (``LogProtocol``), the group and the transaction manager that a takeover needs.

    All may raise Unavailable.
    """

    async def owner(self, place: Place) -> str | None:
        """Return the token of the owner."""

    async def held(self, place: Place) -> GroupOffset | None:
        """Return the group's offset if the partition still belongs to this member at the time of the answer, otherwise None."""

    async def take(self, place: Place, after: str | None) -> str:
        """Take over the partition, and return the token."""

    async def flights(self, place: Place) -> Flights:
        """Return the records in flight."""

    async def finish(self, place: Place, claims: Sequence[Xid]) -> None:
        """Finish the transactions of earlier owners, which can decide nothing more. Raises ClaimOfOthers, BasculeError."""


async def take_over(run: Run[ItemT], effects: TakeoverEffects, violations: Collection[enum.StrEnum] = ()) -> Flights | None:
    """Take one step of a takeover. Return the records in flight, or None to try again later (or never, if the run is gone).

    Raises Unavailable, ClaimOfOthers; then try again.
    """
    if not run.token:
        crash.point("inbound.take.before")
        before = await effects.owner(run.place)
        # Ask the group after the owner was read: the owner that was read may be the next member.
        held = await effects.held(run.place)
        if held is None:
            return None
        run.held = held
        run.token = await effects.take(run.place, before)
        run.on(PartitionEvent.TAKEN)
    flights = await effects.flights(run.place)
    if flights.claims and LogViolation.OPEN_CLAIMS_IGNORED not in violations:
        run.trouble = f"waits for the outcome of transactions {', '.join(map(str, flights.claims))}"
        try:
            await effects.finish(run.place, list(flights.claims))
        except ClaimOfOthers:
            run.blocked = True
            raise
        return None
    run.blocked = False
    run.begin_at(flights.read_to, violations)
    return flights


class Reading(Protocol):
    """The effects of handling records that were read, in the order in which they must happen."""

    async def schedule(self) -> None:
        """Store in the log that the records are in flight, unless that is stored already. Raises Unavailable."""

    async def advance(self) -> None:
        """Store in the log up to where the partitions were read. Raises Unavailable."""

    def give_up(self) -> None:
        """Take over the records' partitions again, under new tokens, and continue to read at the group's offset."""

    async def commit(self) -> None:
        """Commit the group's offsets. Raises Unavailable."""

    async def deliver(self) -> None:
        """Pass the records to the endpoint."""


async def pass_on(reading: Reading, violations: Collection[enum.StrEnum] = ()) -> None:
    """Schedule the records that were read, advance the log, commit, and deliver. Can be repeated as a whole if it raises Unavailable.

    An entry whose append failed may be stored at any time. If it were stored after the receipt of its record, it would put the record in
    flight again. So it must not count then: the partitions are given up and taken over again under other tokens.
    """
    if LogViolation.OFFSETS_BEFORE_LOG in violations:
        await reading.commit()
    crash.point("inbound.log.before")
    try:
        if LogViolation.ADVANCED_BEFORE_FLIGHTS in violations:
            await reading.advance()
        await reading.schedule()
        if LogViolation.DELIVERED_BEFORE_COMMIT in violations:
            await reading.deliver()
        await reading.advance()
    except Unavailable:
        if LogViolation.DOUBTFUL_TOKEN_KEPT not in violations:
            reading.give_up()
        raise
    crash.point("inbound.log.after")
    await reading.commit()
    crash.point("inbound.commit.after")
    if LogViolation.DELIVERED_BEFORE_COMMIT not in violations:
        await reading.deliver()
