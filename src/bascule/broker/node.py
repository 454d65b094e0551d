"""The life of a broker process, without IO: stand by, be elected, load, serve, leave; and to what each error leads.

:mod:`bascule.server.node` performs the effects with asyncio, and the simulator of the tests performs them in its world.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Final, Protocol

from bascule.broker.errors import BrokerFault
from bascule.broker.states import NODE_TRANSITIONS, NodeEvent, NodeState
from bascule.core import crash
from bascule.core.effects import Severity
from bascule.core.errors import BasculeError, Scope, Unavailable

#: Between two tries to start an epoch while Kafka is away.
RETRY_S: Final = 1.0
#: Without an election for so long a broker says that it stands by: one that is alone is elected sooner.
STANDBY_AFTER_S: Final = 4.0
#: A hand-over waits so long for its snapshot. One of a million messages takes a few seconds to store.
HANDOVER_SNAPSHOT_S: Final = 6.0


class NodeViolation(enum.StrEnum):
    """Rules of a broker process that a test may break."""

    CLIENTS_KEPT_OPEN = "the connections of clients stay open at the end of an epoch"


class ElectionOutcome(enum.Enum):
    """What has come first."""

    ELECTED = enum.auto()
    STOPPING = enum.auto()
    LOAD_ENDED = enum.auto()
    TIMEOUT = enum.auto()


class NodeEffects(Protocol):
    """What a broker process asks of its surroundings. An epoch is the present one, from ``begin_epoch`` to ``close_epoch``."""

    def stopping(self) -> bool:
        """Whether it is told to end. Raises BasculeError when it must end because of it."""
        ...

    async def listen(self) -> None:
        """Take the port; clients are refused until ``serve``. Raises BasculeError."""
        ...

    def stop_listening(self) -> None:
        """Take no more clients."""
        ...

    def begin_epoch(self) -> None:
        """Make the next epoch, which follows the journal from now on."""
        ...

    async def close_epoch(self) -> None:
        """Release the epoch."""
        ...

    async def election(self, timeout_s: float | None) -> ElectionOutcome:
        """Wait until this broker is elected, told to stop, or cannot follow the journal any more."""
        ...

    def is_elected(self) -> bool:
        """Whether the election holds, as far as it is known."""
        ...

    async def confirmed(self) -> bool:
        """Whether Kafka says now that this broker is elected: what was so before a pause may be so no more."""
        ...

    async def load_ended(self) -> None:
        """Raises why the journal could not be followed."""
        ...

    async def start_epoch(self) -> None:
        """Begin the epoch and load its state. Raises BasculeError."""
        ...

    def lose_election(self) -> None:
        """The epoch ends: another broker has been elected."""
        ...

    async def serve(self) -> None:
        """Take clients."""
        ...

    async def epoch_end(self) -> BasculeError | None:
        """Wait until the epoch ends, and return why; None when the process is told to stop before."""
        ...

    def flush(self) -> None:
        """Append what has gathered."""
        ...

    async def stop_intake(self) -> None:
        """Take nothing more from the ingress topic."""
        ...

    def close_clients(self, error: BasculeError | None) -> None:
        """End every connection; None says that the broker goes down in order."""
        ...

    async def hand_over(self, timeout_s: float) -> None:
        """Make a snapshot for the next broker. Raises TimeoutError."""
        ...

    def check_room(self) -> None:
        """Raises BasculeError when the records in flight were too large for the journal: the next epoch could not store them, either."""
        ...

    async def pause(self, delay_s: float) -> None:
        """Wait, but not when the process is told to stop."""
        ...

    def standing_by(self) -> None:
        """Tell that another broker serves, or that Kafka has not decided yet."""
        ...

    def ready(self) -> None:
        """Tell that clients are served."""
        ...

    def note(self, severity: Severity, event: str, detail: str) -> None:
        """Something for the log."""
        ...


class NodeProtocol:
    """One broker: an epoch after another.

    ``reason`` says why clients are not served; "" while all is well. ``announced`` says whether the broker has told that it stands by or
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
        """Stand by, and serve while elected, until told to stop. Raises BasculeError when it cannot start, or must not go on."""
        effects = self._effects
        while not effects.stopping():
            # The port is this broker's from now on; clients are refused until it serves, and turn to another.
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

        Until the broker has announced that it stands by or serves, somebody waits for the outcome of the start, and any error is that
        outcome. From then on the broker outlives what may pass.
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
        if not effects.is_elected():  # lost while it was loading; that is told once only
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
        """Whether this broker is to serve; not when it is told to stop, or cannot follow any more. Raises BasculeError."""
        effects = self._effects
        waited = await effects.election(STANDBY_AFTER_S)
        if waited is ElectionOutcome.TIMEOUT:
            self.reason = "standing by"
            self.announced = True
            effects.standing_by()
            effects.note(Severity.INFO, "standing by", "another broker serves, or Kafka has not elected a broker yet")
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
            effects.close_clients(error)  # first: Kafka's client may take long to stop, and they must not wait for it
        await effects.stop_intake()
        if error is None:
            effects.flush()
            crash.point("handover.before")
            try:
                await effects.hand_over(HANDOVER_SNAPSHOT_S)
            except TimeoutError:
                unstored = "no snapshot for the next broker, which must read more of the journal: Kafka has not stored the snapshot in time"
                effects.note(Severity.WARNING, "housekeeping round failed", unstored)
            crash.point("handover.snapshot")

    # -- what happens to it ----------------------------------------------------------------------------------------------

    def election_lost(self) -> None:
        """Another broker has been elected."""
        if self.state in (NodeState.LOADING, NodeState.SERVING, NodeState.LEAVING):  # a hand-over is not for the broker that serves already
            self._effects.lose_election()

    def election_in_doubt(self, why: str, stalled: bool) -> None:
        """Another broker may serve, and nothing must be delivered twice; "" when that is over. ``stalled`` says whether appends are."""
        if self.state is not NodeState.SERVING:
            return
        if why:
            self.stalled(Unavailable(why))
        elif not stalled:
            self.reason = ""

    def confirmed(self) -> None:
        """Kafka has stored something."""
        if self.state is NodeState.SERVING:
            self.reason = ""

    def stalled(self, error: BasculeError) -> None:
        """Kafka does not answer: nobody must hang on us. A failover client comes back, and its repeated sends are recognised."""
        self.reason = str(error)
        self._effects.note(Severity.ERROR, "journal stalled", str(error))
        self._effects.close_clients(error)
