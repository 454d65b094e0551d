"""Messages in the order of delivery: by priority, then by position. An operation costs the same in a short and in a deep queue.

A place in this order is (priority, position). A reader keeps the place of the last message that it has seen and continues behind it in
another turn of the event loop, even if messages were added and removed meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from bascule.broker.message import PRIORITY_MAX, BrokerMessage

#: Messages of one block of a line. An insertion in the middle moves at most twice as many.
BLOCK_MESSAGES = 512


class QueuePlace(NamedTuple):
    """A place in the order of delivery, behind the message that has this priority and position."""

    priority: int
    position: int


#: The place before all messages.
FRONT: Final = QueuePlace(PRIORITY_MAX, -1)


def place_of(message: BrokerMessage) -> QueuePlace:
    """Return the place behind a message."""
    return QueuePlace(message.priority, message.position)


def _position(message: BrokerMessage) -> int:
    return message.position


def _first(block: deque[BrokerMessage]) -> int:
    return block[0].position


class Line:
    """Messages of one priority in the order of their positions, in blocks. Only the last block may be empty."""

    __slots__ = ("_blocks", "head", "tail")

    def __init__(self) -> None:
        self.head: deque[BrokerMessage] = deque()  # the first block
        self.tail = self.head  # the last block
        self._blocks = [self.head]

    def append(self, message: BrokerMessage) -> None:
        """Add a message behind all others."""
        tail = self.tail
        if len(tail) >= BLOCK_MESSAGES:
            tail = self.tail = deque()
            self._blocks.append(tail)
        tail.append(message)

    def insert(self, message: BrokerMessage) -> None:
        """Add a message at its place."""
        position, tail = message.position, self.tail
        if not tail or tail[-1].position < position:
            self.append(message)
            return
        index = max(0, self._index(position))
        block = self._blocks[index]
        block.insert(bisect_left(block, position, key=_position), message)
        if len(block) > 2 * BLOCK_MESSAGES:
            self._split(index)

    def _split(self, index: int) -> None:
        block = self._blocks[index]
        half = deque(islice(block, len(block) // 2, None))
        for _ in half:
            block.pop()
        self._blocks.insert(index + 1, half)
        self.tail = self._blocks[-1]

    def _index(self, position: int) -> int:
        """Return the index of the block in which a position lies; -1 if it lies before all blocks."""
        blocks = self._blocks
        return bisect_right(blocks, position, hi=len(blocks) - (not self.tail), key=_first) - 1

    def remove(self, message: BrokerMessage) -> bool:
        """Remove a message. Return False if it is not in the line."""
        head = self.head
        if head and head[0] is message:
            head.popleft()
            if not head and len(self._blocks) > 1:
                self._drop(0)
            return True
        index = self._index(message.position)
        if index < 0:
            return False
        block = self._blocks[index]
        place = bisect_left(block, message.position, key=_position)
        if place == len(block) or block[place] is not message:
            return False
        del block[place]
        if not block:
            self._drop(index)
        return True

    def _drop(self, index: int) -> None:
        blocks = self._blocks
        if len(blocks) > 1:
            del blocks[index]
            self.head, self.tail = blocks[0], blocks[-1]

    def pop_block(self) -> deque[BrokerMessage]:
        """Remove and return some of the first messages."""
        block = self.head
        if len(self._blocks) == 1:
            self.head = self.tail = deque()
            self._blocks[0] = self.head
        else:
            self._drop(0)
        return block

    def after(self, position: int, count: int) -> list[BrokerMessage]:
        """Return the next messages behind a position, at most ``count``. An empty list means that there are none."""
        index = max(0, self._index(position))
        found: list[BrokerMessage] = []
        for number in range(index, len(self._blocks)):
            block = self._blocks[number]
            start = bisect_right(block, position, key=_position) if number == index else 0
            found += islice(block, start, start + count - len(found))
            if len(found) >= count:
                break
        return found

    def __iter__(self) -> Iterator[BrokerMessage]:
        for block in self._blocks:
            yield from block


class Lines:
    """Messages of all priorities. ``count`` is their number."""

    __slots__ = ("_top", "count", "lines", "size_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0
        self._top = 0  # no message has a higher priority
        self.lines: list[Line | None] = [None] * (PRIORITY_MAX + 1)

    def line(self, priority: int) -> Line:
        """Return the line of a priority."""
        line = self.lines[priority]
        if line is None:
            line = self.lines[priority] = Line()
        return line

    def append(self, message: BrokerMessage) -> None:
        """Add a message behind all others of its priority."""
        priority = message.priority
        line = self.lines[priority] or self.line(priority)
        if len(line.tail) < BLOCK_MESSAGES:  # as Line.append does; a call costs more
            line.tail.append(message)
        else:
            line.append(message)
        if priority > self._top:
            self._top = priority
        self.count += 1
        self.size_bytes += message.size_bytes

    def insert(self, message: BrokerMessage) -> None:
        """Add a message at its place."""
        priority = message.priority
        self.line(priority).insert(message)
        self._top = max(priority, self._top)
        self.count += 1
        self.size_bytes += message.size_bytes

    def peek(self) -> BrokerMessage | None:
        """Return the first message, or None."""
        if not self.count:
            return None
        lines, top = self.lines, self._top
        while (line := lines[top]) is None or not line.head:
            top -= 1
        self._top = top
        return line.head[0]

    def remove(self, message: BrokerMessage) -> bool:
        """Remove a message. Return False if it is not in the lines."""
        line = self.lines[message.priority]
        if line is None:
            return False
        head = line.head
        if head and head[0] is message and (len(head) > 1 or head is line.tail):
            head.popleft()
        elif not line.remove(message):
            return False
        self.count -= 1
        self.size_bytes -= message.size_bytes
        return True

    def pop_some(self) -> deque[BrokerMessage]:
        """Remove and return some messages; an empty deque if there are none."""
        for line in self.lines:
            if line is not None and line.head:
                block = line.pop_block()
                self.count -= len(block)
                self.size_bytes -= sum(message.size_bytes for message in block)
                return block
        return deque()

    def after(self, place: QueuePlace, count: int) -> list[BrokerMessage]:
        """Return the next messages behind a place, at most ``count``, all of one priority. An empty list means that there are none."""
        for priority in range(place.priority, -1, -1):
            line = self.lines[priority]
            if line is not None:
                found = line.after(place.position if priority == place.priority else -1, count)
                if found:
                    return found
        return []

    def __iter__(self) -> Iterator[BrokerMessage]:
        for line in reversed(self.lines):
            if line is not None:
                yield from line
