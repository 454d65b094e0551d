"""The journaled messages that a queue holds, by mid: waiting, delayed, unsettled by a consumer, or in a transaction.

A snapshot walks through these messages in turns. A message keeps its place here from its arrival until it is removed, so that a walk meets
each message that stays, even if the message moves between consumers and the queue meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from bascule.broker.message import BrokerMessage

#: Messages of one block. A block that gets older messages may grow to twice this number.
BLOCK_MESSAGES = 512


class HeldCopy:
    """The mids of the messages that a queue holds, copied piece by piece while messages come and go.

    All messages up to ``passed_mid`` are copied. The queue adds the mids of copied messages that it loses to ``removed``, and changed
    delivery counts to ``counts``. It calls ``on_change`` after a change that the copy does not contain: a new message, a reservation.
    """

    __slots__ = ("counts", "mids", "on_change", "passed_mid", "removed")

    def __init__(self, on_change: Callable[[], object] = lambda: None) -> None:
        self.on_change = on_change
        self.mids: list[int] = []  # ascending
        self.passed_mid = -1
        self.removed: list[int] = []
        self.counts: dict[int, int] = {}  # number of failed deliveries, by mid


class Held:
    """Messages by mid, in ascending blocks.

    Messages arrive with ascending mids. A load does not keep this order: it begins with the messages that prepared branches have received.
    """

    __slots__ = ("_blocks", "_firsts", "_tail", "copy", "newest")

    def __init__(self) -> None:
        self._tail: dict[int, BrokerMessage] = {}
        self._blocks = [self._tail]
        self._firsts = [-1]  # no mid of a block is lower than the first of the block
        self.newest = -1  # the highest mid that the queue has ever held
        self.copy: HeldCopy | None = None  # the copy for the snapshot that is being made

    def add(self, message: BrokerMessage) -> None:
        """Add a message that the queue holds from now on."""
        mid = message.mid
        if self.copy is not None:
            self.copy.on_change()
        if mid <= self.newest:
            self._insert(mid, message)
            return
        self.newest, tail = mid, self._tail
        if len(tail) >= BLOCK_MESSAGES:
            tail = self._tail = {}
            self._blocks.append(tail)
            self._firsts.append(mid)
        tail[mid] = message

    def _insert(self, mid: int, message: BrokerMessage) -> None:
        """Add a message to the block of its mid, and split the block if it is too long."""
        index = bisect_right(self._firsts, mid) - 1
        block = self._blocks[index]
        block[mid] = message
        if len(block) <= 2 * BLOCK_MESSAGES:
            return
        upper = sorted(block)[len(block) // 2 :]
        self._blocks.insert(index + 1, {each: block.pop(each) for each in upper})
        self._firsts.insert(index + 1, upper[0])
        self._tail = self._blocks[-1]

    def _block(self, mid: int) -> dict[int, BrokerMessage]:
        return self._blocks[bisect_right(self._firsts, mid) - 1]

    def remove(self, mid: int) -> None:
        """Remove a message that the queue no longer holds."""
        firsts = self._firsts
        index = 0 if len(firsts) == 1 or mid < firsts[1] else bisect_right(firsts, mid) - 1
        block = self._blocks[index]
        if block.pop(mid, None) is not None and self.copy is not None and mid <= self.copy.passed_mid:
            self.copy.removed.append(mid)
        if not block and len(firsts) > 1:
            del self._blocks[index], firsts[index]
            firsts[0] = -1
            self._tail = self._blocks[-1]

    def emptied(self) -> Iterator[int]:
        """Remove all messages block by block, of a queue that is deleted. Yield their numbers."""
        while self._blocks:
            block = self._blocks.pop()
            yield len(block)

    def get(self, mid: int) -> BrokerMessage | None:
        """Return the message with a mid, or None."""
        return self._block(mid).get(mid)

    def after(self, mid: int) -> list[BrokerMessage]:
        """Return the next messages with a higher mid, ascending. An empty list means that there are none."""
        for index in range(bisect_right(self._firsts, mid) - 1 if mid >= 0 else 0, len(self._blocks)):
            found = sorted(each for each in self._blocks[index] if each > mid)
            if found:
                block = self._blocks[index]
                return [block[each] for each in found]
        return []

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def __iter__(self) -> Iterator[BrokerMessage]:
        for block in self._blocks:
            yield from block.values()
