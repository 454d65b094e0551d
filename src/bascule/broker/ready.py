"""The messages of a queue that wait for a consumer: by priority, then in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bascule.broker.errors import ResourceLimit
from bascule.broker.fair_shares import SPARE, USER_SHARE, Beyond, beyond, of_user_beyond
from bascule.broker.message import PRIORITY_MAX, BrokerMessage
from bascule.broker.order import Line, Lines
from bascule.broker.turns import Allowance

#: Messages that a view examines before it searches its place again: a search for a place costs as much as a few messages.
_LOOK_AHEAD: Final = 64
#: Views that can be updated in one step when a message is added or removed.
_VIEWS_PER_STEP: Final = 5
#: Different selectors of the consumers of one queue: a message that enters or leaves the queue visits each of them in one turn.
SELECTORS_MAX: Final = 10_000
#: Returns True if a selector matches a message, and subtracts the cost from an allowance.
Matches = Callable[[BrokerMessage, Allowance], bool]


class Ready(Lines):
    """Waiting messages in order, with one view for each selector of consumers."""

    __slots__ = ("take_steps", "views")

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[str, SelectorView] = {}
        self.take_steps = 0  # steps that the views add to taking a message, or to putting it back

    def put_back(self, messages: list[BrokerMessage]) -> None:
        """Put messages that had been taken back into their places."""
        for message in messages:
            self.insert(message)

    def insert(self, message: BrokerMessage) -> None:
        """Insert a message at its place in the order."""
        super().insert(message)
        for view in self.views.values():
            view.put_back(message)

    def take(self, message: BrokerMessage) -> bool:
        """Take a waiting message. Return False if it does not wait."""
        if not self.remove(message):
            return False
        if self.views:
            for view in self.views.values():
                view.discard(message)
        return True

    def view(self, text: str, matches: Matches, user: str = "") -> SelectorView:
        """Return the view of a selector for a consumer of ``user``. Raises ResourceLimit."""
        view = self.views.get(text)
        if view is None:
            self._check(user)
            view = self.views[text] = SelectorView(self, matches, user)
            self.take_steps = len(self.views) // _VIEWS_PER_STEP
        view.users += 1
        return view

    def _check(self, user: str) -> None:
        """Check that a user may have one more selector that the queue does not have yet. Raises ResourceLimit."""
        total, whose, most = len(self.views), "the consumers", SELECTORS_MAX
        if total < (1 - SPARE) * most:
            return
        found = beyond(1, sum(view.user == user for view in self.views.values()), total, most)
        if found is None:
            return
        if found is Beyond.SHARE:
            whose, most = f"the consumers {of_user_beyond(user)}", int(USER_SHARE * most)
        raise ResourceLimit(f"{whose} of the queue may have {most} different selectors")

    @property
    def in_views(self) -> int:
        """Return the number of places that messages have in views."""
        return sum(view.kept for view in self.views.values())

    def leave(self, text: str) -> None:
        """Note that a consumer with a selector is gone. The view is removed with its last user."""
        view = self.views[text]
        view.users -= 1
        if not view.users:
            del self.views[text]
            self.take_steps = len(self.views) // _VIEWS_PER_STEP


class SelectorView:
    """The waiting messages that a selector matches, in order.

    The view evaluates each message once, when a consumer asks for a message, and remembers its progress. A deep queue is never scanned
    again, and a long scan continues in the next turns of the event loop.
    """

    __slots__ = ("_found", "_returned", "_seen", "matches", "ready", "user", "users")

    def __init__(self, ready: Ready, matches: Matches, user: str) -> None:
        self.ready = ready
        self.matches = matches
        self.user = user  # of the first consumer
        self.users = 0  # consumers
        self._seen = [-1] * (PRIORITY_MAX + 1)  # the position up to which messages were evaluated, by priority
        self._found = Lines()  # matching messages that nobody has taken
        self._returned = Lines()  # messages that came back before the evaluated position, not evaluated again yet

    @property
    def kept(self) -> int:
        """Return the number of messages that the view remembers."""
        return self._found.count + self._returned.count

    def put_back(self, message: BrokerMessage) -> None:
        """Note that a message is back in the queue. A message behind the evaluated position is evaluated later anyway."""
        if message.position <= self._seen[message.priority]:
            self._returned.insert(message)

    def discard(self, message: BrokerMessage) -> None:
        """Remove a message that was taken."""
        if not (self._found.count and self._found.remove(message)) and self._returned.count:
            self._returned.remove(message)

    def peek(self, allowance: Allowance) -> BrokerMessage | None:
        """Return the next message for a consumer with this selector.

        None means that there is none, or that the allowance is spent; the next call continues the search.
        """
        for priority in range(PRIORITY_MAX, -1, -1):
            line = self.ready.lines[priority]
            if line is None or not line.head:
                continue
            message = self._first_known(priority, allowance) or self._next_unseen(line, priority, allowance)
            if message is not None or allowance.left <= 0:
                return message
        return None

    def _first_known(self, priority: int, allowance: Allowance) -> BrokerMessage | None:
        returned = self._returned.lines[priority] if self._returned.count else None
        while allowance.left > 0:
            found = self._found.lines[priority]
            first = found.head[0] if found is not None and found.head else None
            if returned is None or not returned.head or (first is not None and first.position < returned.head[0].position):
                return first
            message = returned.head[0]
            self._returned.remove(message)
            if self.matches(message, allowance):
                self._found.insert(message)
        return None

    def _next_unseen(self, line: Line, priority: int, allowance: Allowance) -> BrokerMessage | None:
        seen = self._seen
        while allowance.left > 0:
            ahead = line.after(seen[priority], _LOOK_AHEAD)
            if not ahead:
                return None
            for message in ahead:
                seen[priority] = message.position
                if self.matches(message, allowance):
                    self._found.append(message)
                    return message
                if allowance.left <= 0:
                    return None
        return None
