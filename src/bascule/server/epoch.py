"""One epoch of the journal in a broker process. It performs the effects of :mod:`bascule.broker.epoch` with asyncio and Kafka's client.

All code here runs on the event loop, except that blocking calls run in threads.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bascule
from bascule.broker.addresses import Diverts
from bascule.broker.containment import ErrorContainment
from bascule.broker.coverage import DivertCoverage
from bascule.broker.engine import Engine
from bascule.broker.epoch import EpochProtocol
from bascule.broker.epoch_effects import EpochLimits
from bascule.broker.errors import JournalUnavailable
from bascule.broker.housekeeping import HousekeepingLimits
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import Bodies, BodyStore
from bascule.broker.policy import Policy
from bascule.broker.retention import OwnersRetention
from bascule.broker.send_times import SendTimes
from bascule.core.errors import BasculeError
from bascule.core.log import get_log
from bascule.core.topics import JournalTopics
from bascule.journal.offsets import OffsetMap
from bascule.kafka.journal_writer import journal_writer
from bascule.kafka.log import PartitionReader, offset_of, takes_appends
from bascule.kafka.replication import CLUSTER_DEFAULT
from bascule.server.coverage import CoverageControl
from bascule.server.divert_users import DivertUsers
from bascule.server.effects import LoopEffects
from bascule.server.following import Following
from bascule.server.housekeeping import Housekeeping

log = get_log(__name__)

#: Bytes in flight at which the broker reads no more from clients: Kafka's client holds the bytes until they are stored.
IN_FLIGHT_BYTES_MAX = 32 << 20
#: Part of the session timeout, after which Kafka replaces a broker. The timeout counts from the last heartbeat, which was sent up to a
#: twelfth of it before a suspension, and another heartbeat may have been lost.
STILL_MAX = 10 / 12


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """The place of the journal, and its limits."""

    kafka: dict[str, Any]
    topics: JournalTopics
    bridge: str
    append_timeout_s: float
    snapshot_records: int
    session_timeout_s: float
    retention: OwnersRetention
    pinned_bytes_max: int  # 0 for no quota
    scratch_directory: Path | None = None  # for data that a load does not keep in memory; None for the system's own
    #: Names of the pipelines in the configuration file: a divert with one of these names cannot be defined at run time.
    pipelines: frozenset[str] = frozenset()
    replication_factor: int = CLUSTER_DEFAULT
    min_insync_replicas: int | None = None  # None for the default of the cluster

    @property
    def limits(self) -> EpochLimits:
        """Return the limits of an epoch."""
        return EpochLimits(append_timeout_s=self.append_timeout_s, still_max_s=STILL_MAX * self.session_timeout_s)

    @property
    def housekeeping_limits(self) -> HousekeepingLimits:
        """Return the limits of the journal."""
        return HousekeepingLimits(
            snapshot_records=self.snapshot_records,
            announce_timeout_s=self.append_timeout_s,
            retention=self.retention,
            partition=self.topics.partition,
        )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Epoch:
    """A loaded engine with its journal.

    ``on_ended(error)`` is called once, when the epoch cannot continue; ``on_confirmed()`` after each round of confirmations;
    ``on_ticked()`` after the due work of a timer, which brings no news from Kafka; ``on_stalled(error)`` when appends are unanswered for
    too long. ``errors`` contains errors that must not end the epoch; ``send_times`` counts answers to senders; ``users`` decides about
    diverts with a user.
    """

    def __init__(
        self, place: JournalPlace, policy: Policy, diverts: Diverts, bodies: BodyStore | None, memory_bytes: int,
        *, on_ended: Callable[[BasculeError], None], on_confirmed: Callable[[], None], on_ticked: Callable[[], None],
        on_stalled: Callable[[BasculeError], None], errors: ErrorContainment, send_times: SendTimes | None = None,
        users: DivertUsers | None = None,
    ) -> None:  # fmt: skip
        self.place = place
        self.housekeeping: Housekeeping | None = None  # from the start on
        self._effects = _Effects(self, policy, bodies, memory_bytes, on_ended, on_confirmed, on_ticked, on_stalled)
        self._control = CoverageControl(
            place.kafka, place.topics,
            replication_factor=place.replication_factor, min_insync_replicas=place.min_insync_replicas, users=users,
        )  # fmt: skip
        self._coverage = DivertCoverage(self._control, place.pipelines.union(diverts.names), place.append_timeout_s)
        self.protocol = EpochProtocol(
            self._effects, place.limits, place.topics.journal, diverts,
            coverage=self._coverage, errors=errors, send_times=send_times,
        )  # fmt: skip
        topics = place.topics
        self.writer = journal_writer(place.kafka, topics.journal, topics.partition, self.protocol.outcomes, asyncio.get_running_loop())
        self.following = Following(place, self.protocol.fresh_engine)

    @property
    def engine(self) -> Engine:
        """Return the engine, which is empty until the epoch is loaded."""
        return self.protocol.engine

    @property
    def offsets(self) -> OffsetMap:
        """Return the offsets of the journal's records."""
        return self.protocol.offsets

    @property
    def loaded(self) -> bool:
        """Return whether the state is complete."""
        return self.protocol.loaded

    @property
    def ended(self) -> bool:
        """Return True if the epoch has ended and answers nothing."""
        return self.protocol.ended

    @property
    def foreign_records(self) -> int:
        """Return the number of foreign records in the part of the journal that was read."""
        return self.following.foreign + self.protocol.foreign

    @property
    def journal_offset(self) -> int:
        """Return the offset up to which a standby has read the journal, or up to which an active broker has stored it."""
        return self.protocol.next_offset if self.loaded else self.following.next_offset

    def held_for_diverts(self) -> Mapping[str, tuple[str, int]]:
        """Return from where on the journal is kept for diverts that are defined at run time, with the ids of their definitions, by name."""
        return self._coverage.held

    async def start(self) -> None:
        """Write the start record and load the state before it. Raises Unavailable, JournalUnavailable, RecordError or SteppedDown."""
        await self.protocol.start({"host": socket.gethostname(), "pid": os.getpid(), "version": bascule.__version__})

    def flush(self) -> None:
        """Append the gathered entries, unless enough records are in flight."""
        self.protocol.flush()

    def awake(self) -> bool:
        """Return whether this process ran all the time. A suspended broker may have been replaced, and must check before it acts."""
        return self.protocol.awake()

    def lose_election(self) -> None:
        """End the epoch because another broker was elected."""
        self.protocol.lose_election()

    def end(self, error: BasculeError) -> None:
        """End the epoch because of an error. Nothing is answered after that."""
        self.protocol.end(error)

    async def close(self) -> None:
        """Release the resources of the epoch."""
        self.protocol.close()
        self.writer.stop()
        self._effects.cancel_spawned()
        await self._control.close()
        await self.following.close()
        await self._effects.off_loop(self.writer.close)


class _Effects(LoopEffects):
    """The effects of an epoch: see bascule.broker.epoch.EpochEffects."""

    def __init__(
        self, epoch: Epoch, policy: Policy, bodies: BodyStore | None, memory_bytes: int, on_ended: Callable[[BasculeError], None],
        on_confirmed: Callable[[], None], on_ticked: Callable[[], None], on_stalled: Callable[[BasculeError], None],
    ) -> None:  # fmt: skip
        super().__init__("journal-look")
        self._epoch = epoch
        self._place = epoch.place
        self._policy = policy
        self._bodies = bodies
        self._memory_bytes = memory_bytes
        self.ended = on_ended
        self.confirmed = on_confirmed
        self.ticked = on_ticked
        self.stalled: Callable[[JournalUnavailable], None] = on_stalled
        self._started_s = 0.0

    def append(self, key: bytes, value: bytes) -> None:
        """Append a record. Raises Unavailable."""
        self._epoch.writer.append(key, value)

    async def append_large(self, key: bytes, make: Callable[[], bytes]) -> None:
        """Append a record in another thread. Raises Unavailable."""
        writer = self._epoch.writer
        await self.off_loop(lambda: writer.append(key, make()))

    async def records(self, start: int, end: int) -> Sequence[tuple[int, bytes | None]]:
        """Return the journal's records between two offsets. Raises Unavailable."""
        return await self.off_loop(self._read, start, end)

    def _read(self, start: int, end: int) -> list[tuple[int, bytes | None]]:
        place = self._place
        reader = PartitionReader(place.kafka, place.topics.journal, place.topics.partition)
        try:
            reader.seek(start)
            return [(offset_of(message), message.value()) for message in reader.up_to(end)]
        finally:
            reader.close()

    async def recreated(self) -> bool:
        """Return True if the topic of the journal was recreated. Raises Unavailable."""
        return await self.off_loop(self._epoch.following.recreated)

    async def takes_appends(self) -> bool:
        """Return whether a new client finds that Kafka accepts appends."""
        place = self._place
        return await self.off_loop(takes_appends, place.kafka, place.topics.journal, place.topics.partition, place.append_timeout_s)

    async def state_before(self, end: int) -> Loader:
        """Return the state of all records before an offset. Raises Unavailable, RecordError."""
        self._started_s = time.monotonic()
        return await self._epoch.following.up_to(end)

    def fresh_engine(self, journaling: Journaling) -> Engine:
        """Return an engine without state."""
        return Engine(journaling, Bodies(self._bodies, self._memory_bytes), _now_ms, self._policy)

    def loaded(self) -> None:
        """Start housekeeping."""
        epoch = self._epoch
        epoch.housekeeping = Housekeeping(
            self._place, epoch.engine, epoch.offsets, epoch.following.store, lambda: not epoch.ended, epoch.held_for_diverts,
        )  # fmt: skip
        queues = epoch.engine.addresses.queues
        waiting = sum(queue.held_messages for queue in queues.values())
        loaded_s = time.monotonic() - self._started_s
        number = epoch.engine.journaling.epoch
        log.info("epoch loaded", epoch=number, queues=len(queues), messages=waiting, loaded_s=round(loaded_s, 2))

    def stored(self, size_bytes: int) -> None:
        """Count a stored record for housekeeping."""
        if self._epoch.housekeeping is not None:
            self._epoch.housekeeping.protocol.appended(size_bytes)


def is_congested(engine: Engine) -> bool:
    """Return whether so many bytes are in flight to the journal, or so many answers wait for it, that nothing is read from clients."""
    journaling, memory = engine.journaling, engine.memory
    return journaling.in_flight_bytes > min(IN_FLIGHT_BYTES_MAX, memory.in_flight_max_bytes) or journaling.actions > memory.actions_max
