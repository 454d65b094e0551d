"""A thread that loads the state of the next epoch: it performs the effects of :mod:`bascule.broker.following`."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bascule.broker.engine import Engine
from bascule.broker.following import FollowingProtocol
from bascule.broker.loading import Loader
from bascule.core.effects import Severity, run_blocking
from bascule.core.log import get_log
from bascule.kafka.admin import Topics
from bascule.kafka.log import RENEW_S, PartitionReader, offset_of
from bascule.kafka.snapshots import SnapshotStore
from bascule.server.effects import write_note
from bascule.server.housekeeping import StoredMessages

if TYPE_CHECKING:
    from bascule.server.epoch import JournalPlace

log = get_log(__name__)

#: How long a read at the end of the journal waits for records before it checks whether the end is known.
READ_S = 0.05
#: Records that a load takes from the client at a time. Until the engine has applied them, the client's copy and ours are both in memory,
#: and a record can have 64 KiB or more.
LOADED_AT_ONCE = 100


@contextmanager
def _collector_off() -> Iterator[None]:
    """Switch the garbage collector off, and freeze all objects at the end.

    The loaded objects live long and have no cycles. To collect while they are loaded would take a third of the time. Without the freeze,
    the first collections would examine all of them: a third of a second for a million messages.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Following:
    """Loads the newest snapshot and applies the journal's records as they arrive, up to the given end."""

    def __init__(self, place: JournalPlace, fresh_engine: Callable[[], Engine]) -> None:
        self._effects = _Effects(place, fresh_engine)
        self._protocol = FollowingProtocol(self._effects, place.topics.journal)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="journal-follow")
        self.loader: asyncio.Future[Loader] = asyncio.get_running_loop().run_in_executor(self._executor, self._run)

    @property
    def store(self) -> StoredMessages:
        """Return the store, as far as the load has read it."""
        return self._effects.store

    @property
    def foreign(self) -> int:
        """Return the number of foreign records."""
        return self._protocol.foreign

    @property
    def next_offset(self) -> int:
        """Return the journal offset before which all records were read."""
        return self._protocol.next_offset

    def _run(self) -> Loader:
        try:
            return run_blocking(self._protocol.run())
        finally:
            self._effects.close()
            self._effects.store.release()

    async def up_to(self, end: int) -> Loader:
        """Return the state of all records before ``end``. Raises Unavailable or RecordError."""
        self._effects.end = end
        return await self.loader

    def recreated(self) -> bool:
        """Return whether the journal's topic was recreated; blocks. Raises Unavailable."""
        return self._effects.id_now() != self._effects.journal_id

    async def close(self) -> None:
        """Stop following."""
        self._effects.over.set()
        await asyncio.wait([self.loader])
        self._effects.unfreeze()
        if not self.loader.cancelled():
            self.loader.exception()  # otherwise asyncio reports an error that nobody retrieved
        self._executor.shutdown(wait=False)


class _Effects:
    """The effects of a load: see bascule.broker.following.FollowingEffects. They block the thread that loads."""

    def __init__(self, place: JournalPlace, fresh_engine: Callable[[], Engine]) -> None:
        self._place = place
        self.fresh_engine = fresh_engine
        self.end: int | None = None
        self.over = threading.Event()
        self.store = StoredMessages(place.kafka, place.topics.store, place.scratch_directory)
        self._snapshots = SnapshotStore(place.kafka, place.topics.snapshots)  # as of the last read
        self.journal_id = ""  # of the topic
        self._reader: PartitionReader | None = None
        self._position = -1
        self._loading = False  # in ``bulk``: the records are in Kafka already
        self._frozen = False  # the objects of a load are frozen: see ``_collector_off``
        self._heard_s = time.monotonic()  # when the last record arrived, a client was made, or no record was expected

    def now_s(self) -> float:
        """Return the time of a monotonic clock."""
        return time.monotonic()

    def wanted_end(self) -> int | None:
        """Return where the load ends."""
        return self.end

    def closing(self) -> bool:
        """Return True if the state is no longer needed."""
        return self.over.is_set()

    async def recreated(self) -> bool:
        """Return whether the journal's topic differs from the topic at the first start."""
        self.journal_id = self.id_now()
        return self._snapshots.journal_id(self.journal_id) != self.journal_id

    def id_now(self) -> str:
        """Return the id of the journal's topic. Raises Unavailable."""
        return Topics(self._place.kafka).id(self._place.topics.journal)

    async def sleep(self, delay_s: float) -> None:
        """Sleep; return early if the state is no longer needed."""
        self.over.wait(delay_s)

    async def snapshots(self, *, behind_barrier: bool) -> Mapping[str, bytes]:
        """Return every complete snapshot by its id. Raises Unavailable."""
        self._snapshots = SnapshotStore(self._place.kafka, self._place.topics.snapshots)
        return self._snapshots.read(behind_barrier=behind_barrier)

    async def stored(self, *, behind_barrier: bool) -> Mapping[int, bytes]:
        """Return every record of the store by its mid. Raises Unavailable."""
        self.store.release()
        self.store = StoredMessages(self._place.kafka, self._place.topics.store, self._place.scratch_directory)
        return self.store.read(behind_barrier=behind_barrier)

    async def range(self) -> tuple[int, int]:
        """Return the first offset of the journal and its high watermark, from a new client. Raises Unavailable."""
        self.close()
        self._reader = PartitionReader(self._place.kafka, self._place.topics.journal, self._place.topics.partition)
        return self._reader.range()

    async def read(self, offset: int) -> Sequence[tuple[int, bytes | None]]:
        """Return some of the journal's records from an offset on. Raises Unavailable, Trimmed."""
        if self._reader is None:
            self._reader = PartitionReader(self._place.kafka, self._place.topics.journal, self._place.topics.partition)
        if offset != self._position:
            self._reader.seek(offset)
            self._position = offset
        # The client fetches the next records while the last ones are applied, so a load does not wait for a full batch. At the end of the
        # journal, a wait for more records costs a standby less than each record by itself.
        reader = self._reader
        messages = reader.read_at_once(LOADED_AT_ONCE, READ_S) if self._loading else reader.read(timeout_s=READ_S)
        found = [(offset_of(message), message.value()) for message in messages]
        now_s = time.monotonic()
        if found or self.end is None:
            self._heard_s = now_s
        elif now_s - self._heard_s > RENEW_S:
            self._heard_s = now_s
            self._reader.renew()
        if found:
            self._position = found[-1][0] + 1
        return found

    @contextmanager
    def bulk(self) -> Iterator[None]:
        """Switch the garbage collector off, and take records as they come."""
        if self._frozen:  # an earlier load was in vain, and its engine refers to itself
            self.unfreeze()
            gc.collect()
        self._loading = self._frozen = True
        try:
            with _collector_off():
                yield
        finally:
            self._loading = False

    def unfreeze(self) -> None:
        """Let the garbage collector examine the objects of the load, which may be garbage now."""
        if self._frozen:
            self._frozen = False
            gc.unfreeze()

    def note(self, severity: Severity, event: str, detail: str) -> None:
        """Write to the log."""
        write_note(log, severity, event, detail)

    def close(self) -> None:
        """Release the reader."""
        if self._reader is not None:
            self._reader.close()
            self._reader, self._position = None, -1
