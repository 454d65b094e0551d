"""Turns of clients: all clients together have a limited time in one turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Protocol

#: Time for the input of all clients, and for the next pieces of their output, in one turn of the event loop, besides the last piece. It is
#: not processor time, which takes 30 times as long to ask for. Together with the engine's share of the turn it stays below 50 ms.
CLIENTS_TURN_S: Final = 0.02
#: Processor time of work on all links of one client in one turn, beside the last link: a connection may have thousands of links.
SLICE_S: Final = 0.005
#: Share of the time of a turn that actions may use, in any number of turns, before the next turn is planned, which takes time itself.
UNPLANNED_SHARE: Final = 0.1
#: Share of the time of a turn for work for whose end other clients wait.
AWAITED_SHARE: Final = 0.5
#: Time for the output of all connections that got something, in one turn of the event loop, besides the last connection: a message to a
#: topic may be for thousands of connections, and each write is a system call.
OUTPUT_S: Final = 0.005


class ClientTurns:
    """The actions of clients in later turns, in order. Each action is short, and queues its rest again."""

    def __init__(self, turn_s: float = CLIENTS_TURN_S, slice_s: float = SLICE_S) -> None:
        self._turn_s = turn_s
        self._slice_s = slice_s
        self._spent_s = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._awaited: deque[Callable[[], None]] = deque()  # slices of work for whose end other clients wait
        self._planned = False

    @property
    def over(self) -> bool:
        """Return True if clients have used their time in this turn of the event loop."""
        return self._spent_s >= self._turn_s

    def later(self, action: Callable[[], None]) -> None:
        """Call ``action`` in another turn of the event loop, behind the actions that wait already."""
        self._waiting.append(action)
        self._plan()

    def soon(self, action: Callable[[], None]) -> None:
        """Call ``action`` at once if clients have time left in this turn, otherwise in another turn."""
        if not self.run(action):
            self.later(action)

    def run(self, action: Callable[[], None]) -> bool:
        """Call ``action`` at once, within the time of this turn. Return False, and do nothing, if the time is used up: see ``over``."""
        if self._spent_s >= self._turn_s:
            return False
        began_s = time.monotonic()
        action()
        self._spent_s += time.monotonic() - began_s
        if self._spent_s > UNPLANNED_SHARE * self._turn_s:
            self._plan()
        return True

    def in_slices(self, work: Iterator[None], behind: Callable[[], None], *, awaited: bool = False) -> None:
        """Do work piece by piece: a first slice at once, if this turn has time left, and the rest in later turns.

        ``behind`` is called after each slice in a later turn. Neither ``work`` nor ``behind`` may raise. ``awaited``: other clients wait
        for the end of the work, so it gets a share of each turn, however many clients are busy.
        """
        going_on = True
        if not self.over:
            began_s = time.thread_time()
            going_on = not self._slice(work)
            self._spent_s += time.thread_time() - began_s
            self._plan()
        if going_on:
            slices = self._awaited if awaited else self._waiting
            slices.append(partial(self._next_slice, work, behind, slices))
            self._plan()

    def _next_slice(self, work: Iterator[None], behind: Callable[[], None], slices: deque[Callable[[], None]]) -> None:
        if not self._slice(work):
            slices.append(partial(self._next_slice, work, behind, slices))
        behind()

    def _slice(self, work: Iterator[None]) -> bool:
        """Return whether the work is over."""
        end_s = time.thread_time() + self._slice_s
        return all(time.thread_time() < end_s for _ in work)

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Begin another turn of the event loop with the actions that wait."""
        self._planned = False
        self._spent_s = 0.0
        try:
            self._do_some(self._awaited, AWAITED_SHARE * self._turn_s)
            self._do_some(self._waiting, self._turn_s)
        finally:
            if self._waiting or self._awaited:
                self._plan()

    def _do_some(self, actions: deque[Callable[[], None]], until_s: float) -> None:
        """Do each action once, at least the first one, until ``until_s`` of the turn are used."""
        for _ in range(len(actions)):
            began_s = time.monotonic()
            actions.popleft()()
            self._spent_s += time.monotonic() - began_s
            if self._spent_s >= until_s:
                break


class WritesOutput(Protocol):
    """A connection, as its output sees it."""

    def send_output(self) -> None:
        """Write the output of the connection."""


class ConnectionOutput:
    """The connections that may have output, in the order in which they got it.

    A turn of the event loop writes for as many connections as its time allows, and the next turns write for the others.
    """

    def __init__(self, turn_s: float = OUTPUT_S) -> None:
        self._turn_s = turn_s
        self._touched: OrderedDict[WritesOutput, None] = OrderedDict()
        self._planned = False  # the time of this turn is used up

    def touch(self, connection: WritesOutput) -> None:
        """Note that a connection may have output."""
        self._touched[connection] = None

    def forget(self, connection: WritesOutput) -> None:
        """Drop a connection that has ended."""
        self._touched.pop(connection, None)

    def write(self) -> None:
        """Write the output of the connections, as far as the time of this turn allows."""
        touched = self._touched
        if self._planned or not touched:
            return
        end_s = time.monotonic() + self._turn_s
        while touched:
            connection, _ = touched.popitem(last=False)
            connection.send_output()
            if touched and time.monotonic() >= end_s:
                self._planned = True
                asyncio.get_running_loop().call_soon(self._write_more)
                return

    def _write_more(self) -> None:
        self._planned = False
        self.write()
