"""The state of an epoch to come: it follows the journal, and is whole as soon as the epoch's start is stored."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bascule.broker import snapshot as snapshots
from bascule.broker.engine import Engine
from bascule.broker.loading import Loader
from bascule.broker.snapshot import Snapshot
from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.core.log import get_log
from bascule.journal.records import DamagedRecord, ForeignRecord, RecordError
from bascule.kafka.admin import Topics
from bascule.kafka.log import ANSWER_TIMEOUT_S, PartitionReader, Trimmed
from bascule.kafka.snapshots import SnapshotStore
from bascule.server.housekeeping import StoredMessages

if TYPE_CHECKING:
    from bascule.server.epoch import JournalPlace

log = get_log(__name__)

#: How long a read at the journal's end waits for more before it is looked whether the end is known.
READ_S = 0.05
HELP = "Restore it; or delete all of Bascule's topics to begin anew"
CREATED_AGAIN = f"was deleted and created again: what it held is gone. {HELP}"


@contextmanager
def _collector_off() -> Iterator[None]:
    """What a load makes lives long and has no cycles: looking at it again and again would take a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Closed(BasculeError):
    """Nobody wants the state any more."""

    retriable = False
    scope = Scope.OPERATION


class Following:
    """A thread that loads the newest snapshot and applies the journal's records as they come, until it is told where to stop."""

    def __init__(self, place: JournalPlace, fresh_engine: Callable[[], Engine]) -> None:
        self._place = place
        self._fresh_engine = fresh_engine
        self._end: int | None = None
        self._closing = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="journal-follow")
        self.store = StoredMessages(place.kafka, place.topics.store)
        self.foreign = 0  # records that are not Bascule's
        self.next_offset = 0  # of the journal: what is before it has been read
        self.journal_id = ""  # of the topic
        self.loader: asyncio.Future[Loader] = asyncio.get_running_loop().run_in_executor(self._executor, self._run)

    async def up_to(self, end: int) -> Loader:
        """The state of all records before ``end``. Raises Unavailable or RecordError."""
        self._end = end
        return await self.loader

    def _run(self) -> Loader:
        """Who serves may trim the journal before this one has read it, but only behind a newer snapshot.

        The snapshot of an epoch behind ``end`` is announced there, where this one does not look.
        """
        tried: list[str] | None = None
        while True:
            candidates = self._candidates()
            try:
                return self._load(candidates)
            except Trimmed as error:
                names = [each.id for each in candidates]
                if self._end is not None and any(each.epoch >= self._end for each in candidates):
                    raise Unavailable(f"{error}: another broker has begun a newer epoch, and this one must not serve") from error
                if names == tried:
                    raise DamagedRecord(f"{error}, and no usable snapshot covers what was before") from error
                log.info("%s: loading anew", error)
                tried, self.foreign, self.store = names, 0, StoredMessages(self._place.kafka, self._place.topics.store)

    def _load(self, candidates: list[Snapshot]) -> Loader:
        # Also what no snapshot names: it was written for one that never came to be, and goes with the next.
        stored = self.store.read()
        reader = PartitionReader(self._place.kafka, self._place.topics.journal, self._place.topics.partition)
        try:
            first, high = reader.range()
            for newest in candidates[:1]:
                if newest.next_offset > high:
                    raise DamagedRecord(
                        f"journal {self._place.topics.journal} ends at offset {high}, and snapshot {newest.id} was made at"
                        f" {newest.next_offset}: it has lost its end. {HELP}"
                    )
            for snapshot in [*candidates, None]:
                loader = self._beginning(snapshot, stored, first)
                if loader is None:
                    continue
                reader.seek(loader.first_offset)
                with _collector_off():
                    position = self._apply(reader, loader, loader.first_offset, lambda: high)
                if snapshot is not None and not loader.announced:
                    log.warning("snapshot %s was never announced: not used", snapshot.id)
                    continue
                base = f"snapshot {snapshot.id}" if snapshot is not None else "the beginning"
                log.info("loaded from %s, journal read from offset %d to %d", base, loader.first_offset, position)
                stored.clear()  # whoever stands by holds them once
                self._apply(reader, loader, position, lambda: self._end)
                loader.finish()
                return loader
        finally:
            reader.close()
        raise AssertionError("the whole journal is always a candidate")

    def _candidates(self) -> list[Snapshot]:
        """The newest first."""
        found: list[Snapshot] = []
        store = SnapshotStore(self._place.kafka, self._place.topics.snapshots)
        for name, data in store.read().items():
            try:
                found.append(snapshots.decode(data))
            except DamagedRecord as error:
                log.error("snapshot %s cannot be used: %s", name, error)
        self._recognise(store)
        return sorted(found, key=lambda snapshot: snapshot.sequence, reverse=True)

    def _recognise(self, store: SnapshotStore) -> None:
        """The journal's topic must be the one that was there at the first start. Raises DamagedRecord, Unavailable."""
        self.journal_id = self._id_now()
        if store.journal_id(self.journal_id) != self.journal_id:
            raise DamagedRecord(f"journal {self._place.topics.journal} {CREATED_AGAIN}")

    def created_again(self) -> bool:
        """Whether the journal's topic is another one of its name by now. Raises Unavailable."""
        return self._id_now() != self.journal_id

    def _id_now(self) -> str:
        return Topics(self._place.kafka).id(self._place.topics.journal)

    def _beginning(self, snapshot: Snapshot | None, stored: Mapping[int, bytes], first: int) -> Loader | None:
        try:
            loader = Loader(self._fresh_engine(), snapshot, stored)
        except DamagedRecord as error:
            log.error("snapshot cannot be used: %s", error)
            return None
        if loader.first_offset >= first:
            return loader
        if snapshot is None:
            raise Trimmed(f"journal {self._place.topics.journal} begins at offset {first}")
        log.error("snapshot %s needs journal offset %d; it begins at %d", snapshot.id, loader.first_offset, first)
        return None

    def _apply(self, reader: PartitionReader, loader: Loader, position: int, end: Callable[[], int | None]) -> int:
        """Apply records from ``position`` on, until the end (None: not known yet) is reached; returns the offset after the last one."""
        since_s = time.monotonic()
        while True:
            known = end()
            if known is not None and position >= known:
                return position
            if self._closing.is_set():
                raise Closed("the broker stops")
            messages = reader.read(timeout_s=READ_S)
            if messages or known is None:
                since_s = time.monotonic()
            elif time.monotonic() - since_s > ANSWER_TIMEOUT_S:
                raise Unavailable(
                    f"reading {self._place.topics.journal}: nothing for {ANSWER_TIMEOUT_S:.0f} s at offset {position} of {known}"
                )
            for message in messages:
                offset, value = message.offset(), message.value()
                assert offset is not None
                if self._end is not None and offset >= self._end:
                    return self._end  # another broker's, which the fence will meet
                self._apply_one(loader, offset, None if value is None else bytes(value))
                self.next_offset = position = offset + 1

    def _apply_one(self, loader: Loader, offset: int, value: bytes | None) -> None:
        try:
            loader.apply(offset, value)
        except ForeignRecord as error:
            self.foreign += 1
            log.error("journal %s, offset %d: foreign record passed over: %s", self._place.topics.journal, offset, error)
        except RecordError as error:
            raise type(error)(f"journal {self._place.topics.journal}, offset {offset}: {error}") from error

    async def close(self) -> None:
        """Stop following."""
        self._closing.set()
        await asyncio.wait([self.loader])
        if not self.loader.cancelled():
            self.loader.exception()  # seen
        self._executor.shutdown(wait=False)
