"""The effects of an epoch in virtual time, and what tests do with an epoch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from bascule.broker.addresses import Diverts
from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.engine import Engine
from bascule.broker.epoch import EpochProtocol
from bascule.broker.epoch_effects import EpochLimits
from bascule.broker.errors import JournalUnavailable
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import Bodies
from bascule.broker.policy import Policy
from bascule.broker.states import EpochState
from bascule.core.destination import Routing
from bascule.core.effects import Severity
from bascule.core.errors import BasculeError
from bascule.jms.sections import scan
from bascule.journal.records import Kind, encode_record
from bascule.testing.broker import Sender, message_bytes
from tests.sim.effects import PromiseWaiter, SimulatedTimer
from tests.sim.world import Process, Promise, World

#: Every record counts as large, so that several are in flight.
LIMITS = EpochLimits(append_timeout_s=2.0, still_max_s=10.0, small_record_bytes=0)
EPOCH = 5
FENCED = "another broker started epoch 7 of journal journal"


class EpochEffectsModel:
    """The effects of bascule.broker.epoch.EpochEffects. An append waits until the test decides its outcome."""

    def __init__(self) -> None:
        self.world = World(0)
        self.process = Process(self.world, "broker")
        self.appended: list[tuple[bytes, bytes]] = []
        self.between: list[tuple[int, bytes | None]] | BasculeError = []
        self.asked: list[tuple[int, int]] = []
        self.other_topic = False
        self.reachable: list[bool | Exception] = []
        self.ends: list[BasculeError] = []
        self.stalls: list[BasculeError] = []
        self.notes: list[str] = []
        self.contained: list[tuple[ErrorKind, str]] = []
        self.rounds = 0
        self.stored_bytes = 0
        self.made: Promise[None] = Promise()  # of the large records
        self.made.keep(None)
        self.refusal: Exception | None = None
        self.load_failure: BasculeError | None = None
        self.limits = LIMITS

    def now_s(self) -> float:
        return self.process.monotonic_ms / 1000

    def soon(self, action: Callable[[], None]) -> None:
        self.process.after(0, action)

    def after(self, delay_s: float, action: Callable[[], None]) -> SimulatedTimer:
        return SimulatedTimer(self.process, delay_s, action)

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        self.process.spawn(protocol)

    def waiter(self) -> PromiseWaiter[Any]:
        return PromiseWaiter(self.process)

    def append(self, key: bytes, value: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.appended.append((key, value))

    async def append_large(self, key: bytes, make: Callable[[], bytes]) -> None:
        await self.made
        self.append(key, make())

    async def records(self, start: int, end: int) -> Sequence[tuple[int, bytes | None]]:
        self.asked.append((start, end))
        if isinstance(self.between, BasculeError):
            raise self.between
        return self.between

    async def recreated(self) -> bool:
        return self.other_topic

    async def takes_appends(self) -> bool:
        found = self.reachable.pop(0) if self.reachable else False
        if isinstance(found, Exception):
            raise found
        return found

    async def state_before(self, end: int) -> Loader:
        if self.load_failure is not None:
            raise self.load_failure
        return Loader(self.epoch.fresh_engine())

    def fresh_engine(self, journaling: Journaling) -> Engine:
        return Engine(journaling, Bodies(None, 1 << 30), lambda: int(self.world.now_ms), Policy())

    def loaded(self) -> None: ...

    def stored(self, size_bytes: int) -> None:
        self.stored_bytes += size_bytes

    def confirmed(self) -> None:
        self.rounds += 1

    def ticked(self) -> None: ...

    def stalled(self, error: JournalUnavailable) -> None:
        self.stalls.append(error)

    def ended(self, error: BasculeError) -> None:
        self.ends.append(error)

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        self.notes.append(detail)

    # -- what tests do ---------------------------------------------------------------------------------------------------

    def make(self) -> EpochProtocol:
        errors = ErrorContainment(lambda kind, error, _: self.contained.append((kind, str(error))))
        self.epoch = EpochProtocol(self, self.limits, "journal", Diverts(), errors=errors)
        return self.epoch

    def run(self, seconds: float = 0.01) -> None:
        self.world.run(self.world.now_ms + seconds * 1000)

    def begin(self, *outcomes: tuple[int, str | None]) -> BaseException | None:
        """Start the epoch; Kafka answers the start record with the outcomes in the given order. Return the error of the start, if any."""
        started = self.process.spawn(self.epoch.start({}))
        self.run()
        self.epoch.outcomes(outcomes)
        self.run()
        return started.error if started.done else None

    def serving(self) -> EpochProtocol:
        epoch = self.make()
        assert self.begin((EPOCH, None)) is None
        assert epoch.state is EpochState.SERVING
        return epoch

    def send(self, *names: str, sender: Sender | None = None) -> Sender:
        """Send messages, each in its own record."""
        sender = sender or Sender()
        for name in names:
            body = message_bytes(name)
            self.epoch.engine.send("q", Routing.ANYCAST, body, scan(body), "client", sender, name)
            self.epoch.flush()
        return sender

    @property
    def why(self) -> str:
        (error,) = self.ends
        return f"{type(error).__name__}: {error}"


@pytest.fixture
def effects() -> EpochEffectsModel:
    return EpochEffectsModel()


def record(kind: Kind, epoch: int, sequence: int) -> bytes:
    return encode_record(kind, epoch, sequence, b"")
