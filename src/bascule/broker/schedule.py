"""What the engine has to do later: by the clock that it is given, never by one of its own."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from bascule.broker.containment import ErrorContainment, ErrorKind

#: Due time, number (keeps the order of what is due at the same time), action, arguments.
_Entry = tuple[int, int, Callable[..., None], tuple[Any, ...]]


class Schedule:
    """Actions by due time. ``on_earlier`` is called when something is due before all else."""

    __slots__ = ("_entries", "_errors", "_number", "on_earlier")

    def __init__(self, errors: ErrorContainment | None = None) -> None:
        self._errors = errors or ErrorContainment()
        self._entries: list[_Entry] = []
        self._number = 0
        self.on_earlier: Callable[[], None] = lambda: None

    @property
    def next_ms(self) -> int | None:
        """When the next action is due."""
        return self._entries[0][0] if self._entries else None

    def at(self, due_ms: int, action: Callable[..., None], *arguments: Any) -> None:
        """Do it then."""
        self._number += 1
        earlier = not self._entries or due_ms < self._entries[0][0]
        heapq.heappush(self._entries, (due_ms, self._number, action, arguments))
        if earlier:
            self.on_earlier()

    def run(self, now_ms: int, most: int) -> None:
        """Do what is due, ``most`` actions at most; an error of one is contained.

        What that puts on the schedule for now waits for the next time.
        """
        due: list[_Entry] = []
        while self._entries and self._entries[0][0] <= now_ms and len(due) < most:
            due.append(heapq.heappop(self._entries))
        for _, _, action, arguments in due:
            self._errors.run(ErrorKind.TIMER, action, *arguments)
