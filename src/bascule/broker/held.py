"""The journaled messages that a queue holds, by mid: waiting, delayed, unsettled by a consumer, or in a transaction.

A snapshot walks through these messages in turns. A message keeps its place here from its arrival until it is removed, so that a walk meets
each message that stays, even if the message moves between consumers and the queue meanwhile.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
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
        self.mids: array[int] = array("Q")  # ascending
        self.passed_mid = -1
        self.removed: list[int] = []
        self.counts: dict[int, int] = {}  # number of failed deliveries, by mid


class HeldBlock:
    """Messages in the order of their mids. A removed message leaves an empty place; ``live`` counts the others.

    Packed mids and a list take 16 bytes for each message. A dict with an integer object for each key would take 68.
    """

    __slots__ = ("live", "messages", "mids")

    def __init__(self) -> None:
        self.mids: array[int] = array("Q")  # ascending
        self.messages: list[BrokerMessage | None] = []
        self.live = 0

    @classmethod
    def of(cls, messages: list[BrokerMessage]) -> HeldBlock:
        """Return a block of messages, whose mids are ascending."""
        block = cls()
        block.mids.extend([message.mid for message in messages])
        block.messages.extend(messages)
        block.live = len(messages)
        return block

    def insert(self, mid: int, message: BrokerMessage) -> None:
        """Add a message at its place."""
        place = bisect_left(self.mids, mid)
        if place < len(self.mids) and self.mids[place] == mid:
            self.live += self.messages[place] is None
            self.messages[place] = message
            return
        self.mids.insert(place, mid)
        self.messages.insert(place, message)
        self.live += 1

    def place_of(self, mid: int) -> int:
        """Return the place of a message, -1 if the block does not have it."""
        place = bisect_left(self.mids, mid)
        found = place < len(self.mids) and self.mids[place] == mid and self.messages[place] is not None
        return place if found else -1

    def after(self, mid: int) -> list[BrokerMessage]:
        """Return the messages with a higher mid, ascending."""
        return [message for message in self.messages[bisect_right(self.mids, mid) :] if message is not None]

    def mids_between(self, mid: int, limit: int) -> array[int]:
        """Return the mids of messages that are higher than ``mid`` and not higher than ``limit``, ascending."""
        start, end = bisect_right(self.mids, mid), bisect_right(self.mids, limit)
        mids = self.mids[start:end]
        if self.live == len(self.messages):
            return mids
        return array("Q", [each for each, message in zip(mids, self.messages[start:end], strict=True) if message is not None])


class Held:
    """Messages by mid, in ascending blocks.

    Messages arrive with ascending mids. A load does not keep this order: it begins with the messages that prepared branches have received.
    """

    __slots__ = ("_blocks", "_firsts", "_tail", "copy", "newest")

    def __init__(self) -> None:
        self._tail = HeldBlock()
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
        if len(tail.messages) >= BLOCK_MESSAGES:
            tail = self._tail = HeldBlock()
            self._blocks.append(tail)
            self._firsts.append(mid)
        tail.mids.append(mid)
        tail.messages.append(message)
        tail.live += 1

    def _insert(self, mid: int, message: BrokerMessage) -> None:
        """Add a message to the block of its mid, and split the block if it is too long."""
        index = self._index(mid)
        block = self._blocks[index]
        block.insert(mid, message)
        if len(block.messages) <= 2 * BLOCK_MESSAGES:
            return
        messages = block.after(-1)
        half = len(messages) // 2 if len(messages) > BLOCK_MESSAGES else len(messages)  # few messages among empty places stay together
        self._blocks[index] = HeldBlock.of(messages[:half])
        if messages[half:]:
            self._blocks.insert(index + 1, HeldBlock.of(messages[half:]))
            self._firsts.insert(index + 1, messages[half].mid)
        self._tail = self._blocks[-1]

    def _index(self, mid: int) -> int:
        """Return the index of the block in which a mid lies."""
        firsts = self._firsts
        return 0 if len(firsts) == 1 or mid < firsts[1] else bisect_right(firsts, mid) - 1

    def remove(self, mid: int) -> BrokerMessage | None:
        """Remove a message that the queue no longer holds. Return the message, or None if the queue does not hold it."""
        firsts = self._firsts
        index = 0 if len(firsts) == 1 or mid < firsts[1] else bisect_right(firsts, mid) - 1
        block = self._blocks[index]
        mids, messages = block.mids, block.messages
        place = bisect_left(mids, mid)  # as HeldBlock.place_of does; a call costs more
        if place == len(messages) or mids[place] != mid or (message := messages[place]) is None:
            return None
        messages[place] = None
        block.live -= 1
        if self.copy is not None and mid <= self.copy.passed_mid:
            self.copy.removed.append(mid)
        if not block.live and (len(firsts) > 1 or len(messages) >= BLOCK_MESSAGES):
            self._drop(index)
        return message

    def _drop(self, index: int) -> None:
        """Drop a block without messages; the last one becomes empty."""
        blocks, firsts = self._blocks, self._firsts
        if len(firsts) > 1:
            del blocks[index], firsts[index]
            firsts[0] = -1
        else:
            blocks[0] = HeldBlock()
        self._tail = blocks[-1]

    def emptied(self) -> Iterator[int]:
        """Remove all messages block by block, of a queue that is deleted. Yield their numbers."""
        while self._blocks:
            yield self._blocks.pop().live

    def get(self, mid: int) -> BrokerMessage | None:
        """Return the message with a mid, or None."""
        block = self._blocks[self._index(mid)]
        place = block.place_of(mid)
        return block.messages[place] if place >= 0 else None

    def after(self, mid: int) -> list[BrokerMessage]:
        """Return the next messages with a higher mid, ascending. An empty list means that there are none."""
        for index in range(self._index(mid), len(self._blocks)):
            if found := self._blocks[index].after(mid):
                return found
        return []

    def mids_between(self, mid: int, limit: int) -> array[int]:
        """Return the mids of the next messages that are higher than ``mid`` and not higher than ``limit``, ascending.

        An empty array means that there are none.
        """
        for index in range(self._index(mid), len(self._blocks)):
            if self._firsts[index] > limit:
                break
            if found := self._blocks[index].mids_between(mid, limit):
                return found
        return array("Q")

    def __len__(self) -> int:
        return sum([block.live for block in self._blocks])

    def __iter__(self) -> Iterator[BrokerMessage]:
        for block in self._blocks:
            yield from block.after(-1)
