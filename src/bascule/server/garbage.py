"""Garbage collection in short pauses.

Waiting messages are many objects without cycles, so a collection that examines them finds nothing, and would block all clients: 200 ms
for 300,000 messages. Each full collection therefore freezes its survivors, and later collections do not examine them again. So the longest
collection examines the objects of the last six young collections, however many messages wait.

A frozen object is freed when nothing refers to it, unless it is part of a cycle. Of a connection, 4 KiB are part of a cycle. So while few
messages wait, the broker thaws all objects after many clients have gone, and examines them once.
"""

from __future__ import annotations

import gc
from typing import Final

#: New objects of a young collection; then young collections before one of middle age, and such collections before a full one. 50,000 new
#: objects at once would take 5 ms, and with the default of 700 the collector would take a tenth of the broker's time.
GC_THRESHOLDS: Final = (10_000, 1, 1)
#: Clients that have gone before objects are thawed, and the highest number of messages in queues for which this pause is short.
GONE_BEFORE_THAW: Final = 1_000
MESSAGES_TO_THAW: Final = 10_000


class GarbageCollection:
    """The garbage collection of a broker process, from ``start`` on."""

    def __init__(self) -> None:
        self._gone = 0
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        """Collect in short pauses from now on."""
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*GC_THRESHOLDS)
        gc.callbacks.append(self.freeze_survivors)

    def stop(self) -> None:
        """Collect as before, for the other users of a process that goes on."""
        gc.callbacks.remove(self.freeze_survivors)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    @staticmethod
    def freeze_survivors(phase: str, info: dict[str, int]) -> None:
        """Freeze all objects at the end of a full collection. The interpreter calls this function before and after each collection."""
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()

    def clients_gone(self, count: int, messages: int) -> None:
        """Note that clients have gone while ``messages`` are in queues. Examine all objects if this is due and short."""
        self._gone += count
        if self._gone >= GONE_BEFORE_THAW and messages <= MESSAGES_TO_THAW:
            self.thaw()

    def thaw(self) -> None:
        """Examine all objects, and free those in cycles."""
        self._gone = 0
        gc.unfreeze()
        gc.collect()
