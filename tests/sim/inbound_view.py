"""A member's view of the inbound log in the simulated world, and its appends."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

from bascule.adapter.inbound.state import LogFold, Place, PlaceState
from bascule.core.errors import Unavailable
from tests.sim.kafka import Appender, Kafka, KafkaFault, ToWrite
from tests.sim.world import Process, Promise, gather

R = TypeVar("R")

LOG: Final = "inbound"


class View:
    """The effects of the log's protocol for one member, and its view of the log."""

    def __init__(self, process: Process, kafka: Kafka, violations: Collection[enum.StrEnum]) -> None:
        self._process, self._kafka, self._violations = process, kafka, violations
        self.partition = kafka.partition(LOG)
        self._waiting: deque[Promise[int]] = deque()
        self._connect()
        self.restlessness = 0.0
        self._restart()

    def _connect(self) -> None:
        self._appender = Appender(self._kafka, self._process, self.partition, self._answered)

    def _restart(self) -> None:
        self.fold = LogFold(self._violations)
        self.next = self.partition.start

    def _answered(self, offset: int, error: str | None) -> None:
        promise = self._waiting.popleft()
        if error is None:
            promise.keep(offset)
        else:
            # An idempotent producer that has lost a record cannot continue; its records in flight may arrive all the same.
            self._appender.close()
            self._connect()
            lost, self._waiting = [promise, *self._waiting], deque()
            for each in lost:
                each.fail(Unavailable(error))

    def _append(self, key: bytes, value: bytes | None) -> Promise[int]:
        promise: Promise[int] = Promise()
        self._waiting.append(promise)
        self._appender.append(ToWrite(key, value))
        return promise

    async def append(self, key: bytes, value: bytes | None, place: Place) -> int | None:
        """See LogEffects."""
        offset = await self._append(key, value)
        return None if self._kafka.world.chance(self.restlessness) else offset

    async def store(self, entries: Sequence[tuple[Place, bytes, bytes | None]], *, many: bool) -> None:
        """See LogEffects."""
        await gather([self._append(key, value) for _, key, value in entries])

    def send(self, key: bytes, value: bytes | None, place: Place) -> None:
        """See LogEffects."""
        self._append(key, value)

    def delete_soon(self, place: Place, keys: Sequence[bytes]) -> None:
        """See LogEffects."""
        for key in keys:
            self.send(key, None, place)

    async def read(self, see: Callable[[LogFold], R]) -> R:
        """See LogEffects."""
        if self._kafka.world.chance(self.restlessness):
            self._kafka.world.note("read log anew", self._process.name)
            self._restart()
        await self._reach(await self._asked(self._kafka.end_of(self._process, self.partition)))
        return see(self.fold)

    look = read

    async def reach(self, place: Place, offset: int | None, see: Callable[[PlaceState], R]) -> R:
        """See LogEffects."""
        if offset is None:
            return await self.read(lambda fold: see(fold.place(place)))
        await self._reach(offset + 1)
        return see(self.fold.place(place))

    def known(self, see: Callable[[LogFold], R]) -> R:
        """See LogEffects."""
        return see(self.fold)

    async def _reach(self, end: int) -> None:
        while self.next < end:
            fold = self.fold
            records, read_to = await self._asked(self._kafka.fetch(self._process, self.partition, self.next, committed=False))
            if fold is not self.fold:
                continue  # another coroutine reads again
            for record in records:
                if record.offset >= self.next and record.key is not None:
                    self.fold.apply(record.key, record.value)
                    self.next = record.offset + 1
            self.next = max(self.next, read_to)

    async def _asked(self, promise: Promise[R]) -> R:
        try:
            return await promise
        except KafkaFault as fault:
            raise Unavailable(str(fault)) from fault
