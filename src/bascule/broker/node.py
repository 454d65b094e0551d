"""The life of a broker process, without IO: stand by, be elected, load, serve, leave; and the consequence of each error.

:mod:`bascule.server.node` performs the effects with asyncio, and the simulator of the tests performs them in its simulated world.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from contextlib import suppress
from typing import Final, Protocol

from bascule.broker.errors import BrokerFault
from bascule.broker.states import NODE_TRANSITIONS, NodeEvent, NodeState
from bascule.core import crash
from bascule.core.effects import Severity
from bascule.core.errors import BasculeError, Scope, Unavailable

#: Pause between two tries to start an epoch while Kafka is unavailable.
RETRY_S: Final = 1.0
#: A broker that is not elected within this time reports that it stands by. A broker without competitors is elected sooner.
STANDBY_AFTER_S: Final = 4.0
#: Longest wait until all that closed clients held is released, which takes a few milliseconds for a thousand links.
CLIENTS_LEAVE_S: Final = 3.0
#: Longest wait for the snapshot of a hand-over. Storing a snapshot of a million messages takes a few seconds.
HANDOVER_SNAPSHOT_S: Final = 6.0


#: Why a standby does not serve.
STANDING_BY: Final = "standing by"


class NodeViolation(enum.StrEnum):
    """Rules of a broker process that a test can break."""

    CLIENTS_KEPT_OPEN = "the connections of clients stay open at the end of an epoch"


class ElectionOutcome(enum.Enum):
    """The event that ended a wait for the election."""

    ELECTED = enum.auto()
    STOPPING = enum.auto()
    LOAD_ENDED = enum.auto()
    TIMEOUT = enum.auto()


class NodeEffects(Protocol):
    """The effects of a broker process. There is one current epoch from ``begin_epoch`` to ``close_epoch``."""

    def stopping(self) -> bool:
        """Return True if the process was told to stop. Raises BasculeError if it must end with an error."""
        ...

    async def listen(self) -> None:
        """Listen on the port; clients are refused until ``serve``. Raises BasculeError."""
        ...

    def stop_listening(self) -> None:
        """Accept no more clients."""
        ...

    def begin_epoch(self) -> None:
        """Create the next epoch, which follows the journal from now on."""
        ...

    async def close_epoch(self) -> None:
        """Release the epoch."""
        ...

    async def election(self, timeout_s: float | None) -> ElectionOutcome:
        """Wait until this broker is elected, told to stop, or cannot follow the journal any more."""
        ...

    def is_elected(self) -> bool:
        """Return True if the broker is elected, as far as it knows."""
        ...

    async def confirmed(self) -> bool:
        """Ask Kafka whether this broker is elected now, since the process may have been suspended."""
        ...

    async def load_ended(self) -> None:
        """Raise the error because of which the journal could not be followed."""
        ...

    async def start_epoch(self) -> None:
        """Begin the epoch and load its state. Raises BasculeError."""
        ...

    def lose_election(self) -> None:
        """End the epoch, because another broker has been elected."""
        ...

    async def serve(self) -> None:
        """Accept clients."""
        ...

    async def epoch_end(self) -> BasculeError | None:
        """Wait until the epoch ends, and return why; None if the process is told to stop first."""
        ...

    def flush(self) -> None:
        """Append the open record."""
        ...

    async def stop_intake(self) -> None:
        """Take no more records from the ingress topic."""
        ...

    def close_clients(self, error: BasculeError | None) -> None:
        """Close every connection; None means that the broker stops in an orderly way."""
        ...

    async def clients_left(self, timeout_s: float) -> None:
        """Wait until all that closed clients held is released, and the clients are told. Raises TimeoutError."""
        ...

    async def hand_over(self, timeout_s: float) -> None:
        """Make a snapshot for the next broker. Raises TimeoutError."""
        ...

    def check_room(self) -> None:
        """Check that the records in flight fit into the journal. Raises BasculeError, as the next epoch could not store them either."""
        ...

    async def pause(self, delay_s: float) -> None:
        """Wait for ``delay_s``, or until the process is told to stop."""
        ...

    def standing_by(self) -> None:
        """Report that another broker serves, or that Kafka has not decided yet."""
        ...

    def ready(self) -> None:
        """Report that clients are served."""
        ...

    def note(self, severity: Severity, event: str, detail: str) -> None:
        """Write an event to the log."""
        ...


class NodeProtocol:
    """The state machine of one broker process, which runs one epoch after another.

    ``reason`` says why clients are not served; "" if they are. ``announced`` says whether the broker has reported that it stands by or
    serves.
    """

    def __init__(self, effects: NodeEffects, *, violations: Collection[enum.StrEnum] = frozenset()) -> None:
        self._effects = effects
        self._violations = violations
        self.state = NodeState.STANDING_BY
        self.reason = "starting"
        self.announced = False

    def _move(self, event: NodeEvent) -> None:
        try:
            self.state = NODE_TRANSITIONS[self.state, event]
        except KeyError:
            raise BrokerFault(f"broker: {event.value!r} in state {self.state.value!r}") from None

    async def run(self) -> None:
        """Stand by, and serve while elected, until told to stop. Raises BasculeError if the broker cannot start, or must not continue."""
        effects = self._effects
        while not effects.stopping():
            # The port is taken before the election; clients are refused until this broker serves, and try another one.
            await effects.listen()
            try:
                effects.begin_epoch()
                try:
                    await self._one_epoch()
                    if self.state is NodeState.WAITING:
                        await effects.pause(RETRY_S)
                        self._move(NodeEvent.RETRY)
                finally:
                    await effects.close_epoch()
            finally:
                effects.stop_listening()

    async def _one_epoch(self) -> None:
        """Follow the journal until elected, then serve until the epoch ends or the process is told to stop."""
        effects = self._effects
        if not await self._wait_for_election():
            return
        if not await effects.confirmed():
            self._move(NodeEvent.DENIED)
            return
        self._move(NodeEvent.CONFIRMED)
        crash.point("election.confirmed")
        try:
            await effects.start_epoch()
        except BasculeError as error:
            if self._ends_process(error):
                raise
            self._not_started(error)
            return
        await self._serve()

    def _ends_process(self, error: BasculeError) -> bool:
        """Return whether the process ends because no epoch could be started.

        Until the broker has reported that it stands by or serves, its starter waits for the outcome of the start, and any error is that
        outcome. After that, the broker survives retriable errors.
        """
        if error.scope in (Scope.EPOCH, Scope.PROCESS):
            return error.scope is Scope.PROCESS
        return not (self.announced and error.retriable)

    def _not_started(self, error: BasculeError) -> None:
        self._effects.note(Severity.ERROR, "epoch ended", f"no epoch can be started: {error}")
        self.reason = str(error)
        self._move(NodeEvent.FAILED)

    async def _serve(self) -> None:
        effects = self._effects
        self._move(NodeEvent.LOADED)
        await effects.serve()
        self.reason = ""
        if not effects.is_elected():  # the election was lost while loading; the loss is reported only once
            effects.lose_election()
        self.announced = True
        effects.ready()
        why = await effects.epoch_end()
        effects.stop_listening()
        self._move(NodeEvent.STOP if why is None else NodeEvent.EPOCH_ENDED)
        await self._leave(why)
        self._move(NodeEvent.LEFT)
        if why is not None:
            effects.check_room()

    async def _wait_for_election(self) -> bool:
        """Return True if this broker is elected; False if it is told to stop, or cannot follow the journal. Raises BasculeError."""
        effects = self._effects
        waited = await effects.election(STANDBY_AFTER_S)
        if waited is ElectionOutcome.TIMEOUT:
            self.reason = STANDING_BY
            self.announced = True
            effects.standing_by()
            effects.note(Severity.INFO, STANDING_BY, "another broker serves, or Kafka has not elected a broker yet")
            waited = await effects.election(None)
        if effects.stopping():
            self._move(NodeEvent.STOP)
            return False
        if waited is ElectionOutcome.LOAD_ENDED:
            await self._cannot_follow()
            return False
        self._move(NodeEvent.ELECTED)
        return True

    async def _cannot_follow(self) -> None:
        try:
            await self._effects.load_ended()
        except BasculeError as error:
            if self._ends_process(error):
                raise
            self.reason = str(error)
        self._move(NodeEvent.FAILED)

    async def _leave(self, error: BasculeError | None) -> None:
        effects = self._effects
        self.reason = str(error) if error is not None else "stopping"
        if error is not None:
            effects.note(Severity.ERROR, "epoch ended", f"the epoch ends: {error}")
        if NodeViolation.CLIENTS_KEPT_OPEN not in self._violations:
            effects.close_clients(error)  # first: Kafka's client may take long to stop, and clients must not wait for it
        await effects.stop_intake()
        with suppress(TimeoutError):  # clients that are not told find their connections broken, as after a crash
            await effects.clients_left(CLIENTS_LEAVE_S)
        if error is None:
            effects.flush()
            crash.point("handover.before")
            try:
                await effects.hand_over(HANDOVER_SNAPSHOT_S)
            except TimeoutError:
                unstored = "the final snapshot was not stored in time; the next broker must read more of the journal"
                effects.note(Severity.WARNING, "housekeeping round failed", unstored)
            crash.point("handover.snapshot")

    # -- events from outside ----------------------------------------------------------------------------------------------

    def election_lost(self) -> None:
        """Note that another broker has been elected."""
        if self.state in (NodeState.LOADING, NodeState.SERVING, NodeState.LEAVING):  # another broker serves already
            self._effects.lose_election()

    def election_in_doubt(self, why: str, stalled: bool) -> None:
        """Note why another broker may be serving, so that nothing may be delivered; "" ends the doubt.

        ``stalled`` says whether appends stall.
        """
        if self.state is not NodeState.SERVING:
            return
        if why:
            self.stalled(Unavailable(why))
        elif not stalled:
            self.reason = ""

    def confirmed(self) -> None:
        """Note that Kafka has stored a record."""
        if self.state is NodeState.SERVING:
            self.reason = ""

    def stalled(self, error: BasculeError) -> None:
        """Close all clients, because Kafka does not answer. A failover client reconnects, and its repeated sends are recognised."""
        self.reason = str(error)
        self._effects.note(Severity.ERROR, "journal stalled", str(error))
        self._effects.close_clients(error)
