"""The messages of a queue that wait for a consumer: by priority, then in the order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from bascule.broker.message import PRIORITY_MAX, BrokerMessage

#: Entries of messages that were taken by another way are swept when they outnumber the live ones and this.
SWEEP_MIN = 256


def _position(message: BrokerMessage) -> int:
    return message.position


def _merge(line: deque[BrokerMessage], messages: list[BrokerMessage]) -> None:
    """Put messages that had left ``line`` back to their places, which are near the head."""
    last = max(message.position for message in messages)
    head = list(messages)
    while line and line[0].position < last:
        head.append(line.popleft())
    head.sort(key=_position, reverse=True)
    line.extendleft(head)


class Ready:
    """Waiting messages in order, with one view for each selector that consumers ask by.

    A message enters every view that wants it once, when it arrives or when the view is made: a deep queue is never scanned again for
    a selector. A message taken by a view stays in its line, and one taken past a view stays in the view: ``stale`` and ``held`` say so,
    and such an entry is dropped when its turn comes.
    """

    __slots__ = ("count", "held", "lines", "size_bytes", "stale", "views")

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0
        self.lines: list[deque[BrokerMessage] | None] = [None] * (PRIORITY_MAX + 1)
        self.views: dict[str, SelectorView] = {}
        self.held: set[int] | None = None  # positions that wait; kept while there are views
        self.stale: set[int] = set()  # positions in a line that a view has taken

    def append(self, message: BrokerMessage) -> None:
        """A message arrived."""
        line = self.lines[message.priority]
        if line is None:
            line = self.lines[message.priority] = deque()
        line.append(message)
        self.count += 1
        self.size_bytes += message.size_bytes
        if self.held is not None:
            self.held.add(message.position)
            for view in self.views.values():
                view.offer(message)

    def put_back(self, messages: list[BrokerMessage]) -> None:
        """Messages that had been taken are back: each goes to its place in the order."""
        self.count += len(messages)
        returned: dict[int, list[BrokerMessage]] = {}
        for message in messages:
            self.size_bytes += message.size_bytes
            if message.position in self.stale:
                self.stale.remove(message.position)
            else:
                returned.setdefault(message.priority, []).append(message)
        for priority, group in returned.items():
            line = self.lines[priority]
            if line is None:
                line = self.lines[priority] = deque()
            _merge(line, group)
        if self.held is not None:
            self.held.update(message.position for message in messages)
            for view in self.views.values():
                view.put_back(messages)

    def insert(self, message: BrokerMessage) -> None:
        """A message comes from elsewhere: to its place in the order."""
        line = self.lines[message.priority]
        if line and line[-1].position > message.position:
            self.put_back([message])
        else:
            self.append(message)

    def peek(self) -> BrokerMessage | None:
        """The next message for a consumer without a selector."""
        if not self.count:
            return None
        stale = self.stale
        for line in reversed(self.lines):
            if not line:
                continue
            while line:
                message = line[0]
                if not stale or message.position not in stale:
                    return message
                stale.remove(message.position)
                line.popleft()
        return None

    def volatile(self) -> Iterator[BrokerMessage]:
        """Of each priority the non-persistent message that came first."""
        for line in self.lines:
            found = next((message for message in line or () if not message.durable and message.position not in self.stale), None)
            if found is not None:
                yield found

    def take(self, message: BrokerMessage) -> None:
        """The message that a peek returned is taken."""
        self.count -= 1
        self.size_bytes -= message.size_bytes
        line = self.lines[message.priority]
        if line is not None and line[0] is message:
            line.popleft()
        else:
            self.stale.add(message.position)
            if len(self.stale) > self.count + SWEEP_MIN:
                self._sweep()
        if self.held is not None:
            self.held.discard(message.position)

    def view(self, text: str, matches: Callable[[BrokerMessage], bool]) -> SelectorView:
        """The view of a selector; the first consumer that asks by it scans the queue once."""
        view = self.views.get(text)
        if view is None:
            if self.held is None:
                self.held = {message.position for message in self}
            view = self.views[text] = SelectorView(self, matches)
        view.users += 1
        return view

    @property
    def in_views(self) -> int:
        """Places that messages have in views."""
        return sum(len(view.members) for view in self.views.values())

    def leave(self, text: str) -> None:
        """A consumer that asked by a selector is gone; the last one takes the view with it."""
        view = self.views[text]
        view.users -= 1
        if not view.users:
            del self.views[text]
            if not self.views:
                self.held = None

    def _sweep(self) -> None:
        for line in self.lines:
            if line is not None:
                live = [message for message in line if message.position not in self.stale]
                line.clear()
                line.extend(live)
        self.stale.clear()

    def __iter__(self) -> Iterator[BrokerMessage]:
        stale = self.stale
        for line in reversed(self.lines):
            for message in line or ():
                if message.position not in stale:
                    yield message


class SelectorView:
    """The waiting messages that a selector matches, in order."""

    __slots__ = ("lines", "matches", "members", "ready", "users")

    def __init__(self, ready: Ready, matches: Callable[[BrokerMessage], bool]) -> None:
        self.ready = ready
        self.matches = matches
        self.users = 0
        self.members: set[int] = set()  # positions in the lines, waiting or not
        self.lines: list[deque[BrokerMessage]] = [deque() for _ in range(PRIORITY_MAX + 1)]
        for message in ready:
            self.offer(message)

    def offer(self, message: BrokerMessage) -> None:
        """A message arrived in the queue."""
        if self.matches(message):
            self.members.add(message.position)
            self.lines[message.priority].append(message)
            if len(self.members) > 2 * self.ready.count + SWEEP_MIN:
                self._sweep()

    def put_back(self, messages: list[BrokerMessage]) -> None:
        """Messages are back in the queue."""
        returned: dict[int, list[BrokerMessage]] = {}
        for message in messages:
            if message.position not in self.members and self.matches(message):
                self.members.add(message.position)
                returned.setdefault(message.priority, []).append(message)
        for priority, group in returned.items():
            _merge(self.lines[priority], group)

    def _sweep(self) -> None:
        """Let go of what went to consumers without this selector while nobody asked here."""
        held = self.ready.held or set()
        self.members &= held
        for line in self.lines:
            live = [message for message in line if message.position in held]
            line.clear()
            line.extend(live)

    def peek(self) -> BrokerMessage | None:
        """The next message for a consumer with this selector."""
        held = self.ready.held or set()
        for line in reversed(self.lines):
            while line:
                if line[0].position in held:
                    return line[0]
                self.members.discard(line.popleft().position)
        return None
