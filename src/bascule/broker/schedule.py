"""The scheduled actions of the engine, by the clock that the caller gives."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final

from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.turns import Allowance

#: Cancelled actions are removed when there are more of them than this, and more than half of all entries.
CANCELLED_MAX: Final = 1000
#: Entries that are examined at each cancellation, until the cancelled ones are removed: a purge may cancel a million actions.
SORTED_OUT_AT_ONCE: Final = 8


class ScheduledAction:
    """A scheduled action, which can be cancelled."""

    __slots__ = ("_action", "_arguments", "_schedule")

    def __init__(self, schedule: Schedule, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._schedule: Schedule | None = schedule
        self._action: Callable[..., None] | None = action
        self._arguments = arguments

    @property
    def pending(self) -> bool:
        """Return True until the action runs or is cancelled."""
        return self._action is not None

    def cancel(self) -> None:
        """Cancel the action, and release everything that it refers to."""
        schedule, self._schedule, self._action, self._arguments = self._schedule, None, None, ()
        if schedule is not None:
            schedule.cancelled()

    def take(self) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """Return the action and its arguments, because it is due; None if it was cancelled."""
        action, arguments = self._action, self._arguments
        self._schedule, self._action, self._arguments = None, None, ()
        return None if action is None else (action, arguments)


#: Due time, number (keeps the order of actions that are due at the same time), action.
_Entry = tuple[int, int, ScheduledAction]


class Schedule:
    """Actions by due time. ``on_earlier`` is called when an action becomes the next one."""

    __slots__ = ("_cancelled", "_entries", "_errors", "_number", "_unsorted", "on_earlier")

    def __init__(self, errors: ErrorContainment | None = None) -> None:
        self._errors = errors or ErrorContainment()
        self._entries: list[_Entry] = []  # a heap
        self._unsorted: list[_Entry] = []  # another heap, whose entries move to the first one if they are not cancelled
        self._number = 0
        self._cancelled = 0  # number of cancelled entries
        self.on_earlier: Callable[[], None] = lambda: None

    @property
    def next_ms(self) -> int | None:
        """Return the due time of the next action in ms since the epoch, or None."""
        earliest = self._earliest()
        return earliest[0][0] if earliest else None

    def __len__(self) -> int:
        return len(self._entries) + len(self._unsorted)

    def _earliest(self) -> list[_Entry]:
        """Return the heap with the next action. It is empty if there is no action."""
        if not self._unsorted or (self._entries and self._entries[0] < self._unsorted[0]):
            return self._entries
        return self._unsorted

    def at(self, due_ms: int, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action for a time in ms since the epoch."""
        self.cancellable(due_ms, action, *arguments)

    def cancellable(self, due_ms: int, action: Callable[..., None], *arguments: Any) -> ScheduledAction:
        """Schedule an action, and return it so that it can be cancelled."""
        self._number += 1
        next_ms = self.next_ms
        scheduled = ScheduledAction(self, action, arguments)
        heapq.heappush(self._entries, (due_ms, self._number, scheduled))
        if next_ms is None or due_ms < next_ms:
            self.on_earlier()
        return scheduled

    def cancelled(self) -> None:
        """Note that one of the entries was cancelled."""
        self._cancelled += 1
        if not self._unsorted and self._cancelled > max(CANCELLED_MAX, len(self._entries) // 2):
            self._unsorted, self._entries = self._entries, []
        self._sort_out(SORTED_OUT_AT_ONCE)

    def _sort_out(self, count: int) -> None:
        """Drop cancelled entries. Without its last entry, a heap is still a heap."""
        unsorted = self._unsorted
        for _ in range(min(count, len(unsorted))):
            entry = unsorted.pop()
            if entry[2].pending:
                heapq.heappush(self._entries, entry)
            else:
                self._cancelled -= 1

    def run(self, now_ms: int, most: int, steps: Allowance) -> None:
        """Run due actions, at most ``most``, until their steps are spent. An error of one action is contained.

        Actions that are scheduled for now meanwhile run in the next call.
        """
        self._sort_out(most)
        newest, done = self._number, 0
        while done < most and steps.left > 0 and (entries := self._earliest()):
            due_ms, number, scheduled = entries[0]
            if due_ms > now_ms or number > newest:
                return
            heapq.heappop(entries)
            done += 1
            taken = scheduled.take()
            if taken is None:
                self._cancelled -= 1
                continue
            action, arguments = taken
            self._errors.run(ErrorKind.TIMER, action, *arguments)
