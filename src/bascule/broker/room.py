"""Room in queues whose producers wait while the queues are full, and the senders that wait for room. A part of the engine.

The senders to one address form a line, in the order in which they began to wait. The line is registered at one queue: the first full queue
of its address. A topic may have thousands of full subscriptions and thousands of producers, so no producer is registered at each queue.
When the queue has room, the line looks for the next full queue, and resumes its senders if there is none. A sender that does not wait gets
no credit before the senders in the line, so each of them gets its turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

from bascule.broker.addresses import Route
from bascule.broker.containment import ErrorKind
from bascule.broker.delivery import GO_ON_STEPS, Deliveries
from bascule.broker.destinations import Destinations
from bascule.broker.policy import BLOCK
from bascule.broker.queue import BrokerQueue
from bascule.broker.turns import Work
from bascule.core.destination import Routing

#: Queues that are examined for room in one step.
ROOM_LOOKS_PER_STEP: Final = 2


class WaitingLine:
    """The senders to one address that wait for room."""

    __slots__ = ("address", "queue", "resuming", "routing", "senders")

    def __init__(self, address: str, routing: Routing) -> None:
        self.address = address
        self.routing = routing
        self.senders: OrderedDict[object, Callable[[], object]] = OrderedDict()
        self.queue: BrokerQueue | None = None  # the full queue at which the line is registered; None while it looks or resumes senders
        self.resuming = False


class SendersRoom:
    """The room for senders, by address. ``waiting`` is the number of senders that wait."""

    def __init__(self, deliveries: Deliveries, destinations: Destinations) -> None:
        self.waiting = 0
        self._addresses = destinations.addresses
        self._turns = deliveries.turns
        self._errors = deliveries.errors
        self._lines: dict[tuple[str, Routing], WaitingLine] = {}
        self._served: WaitingLine | None = None  # the line one of whose senders is being resumed

    def share(self, address: str, routing: Routing, wanted: int) -> int:
        """Return the credit of one sender to an address in messages, at most ``wanted``: all senders share the free room.

        Return 0 if there is none, or if other senders wait. The caller then calls ``wait``, unless it still has credit.
        """
        line = self._lines.get((address, routing))
        if line is not None and line.senders and line is not self._served:
            return 0
        route = self._addresses.route(address, routing)
        if not route.limited:
            return wanted
        senders = max(1, self._addresses.producers[address, routing])
        return min(wanted, -(-self._free(route, wanted * senders) // senders))

    def exists(self, address: str, routing: Routing) -> bool:
        """Return True if the queues of an address have room for a message, whoever waits."""
        route = self._addresses.route(address, routing)
        return not route.limited or self._free(route, 1) > 0

    def _free(self, route: Route, wanted: int) -> int:
        """Return the room in the fullest queue, in messages, at most ``wanted``."""
        looks = 0
        for queue in route.queues:
            looks += 1
            if queue.settings.when_full == BLOCK:
                wanted = queue.room(wanted)
                if not wanted:
                    break
        self._turns.left -= looks // ROOM_LOOKS_PER_STEP
        return wanted

    def wait(self, address: str, routing: Routing, sender: object, go_on: Callable[[], object]) -> None:
        """Call ``go_on`` once the queues of the address have room and it is the turn of ``sender``."""
        line = self._lines.get((address, routing))
        if line is None:
            line = self._lines[address, routing] = WaitingLine(address, routing)
        self.waiting += sender not in line.senders
        line.senders[sender] = go_on
        if line.queue is None and not line.resuming:
            self._look(line)

    def forget(self, address: str, routing: Routing, sender: object) -> None:
        """Cancel a call of ``wait``."""
        line = self._lines.get((address, routing))
        if line is not None and line.senders.pop(sender, None) is not None:
            self.waiting -= 1
            self._drop_if_empty(line)

    def _drop_if_empty(self, line: WaitingLine) -> None:
        if not line.senders and not line.resuming:
            if line.queue is not None:
                line.queue.blocked.pop(line, None)
            self._lines.pop((line.address, line.routing), None)

    def _look(self, line: WaitingLine) -> None:
        """Register a line at the first full queue of its address. If no queue is full, resume its senders."""
        line.queue = None
        if line.senders and not line.resuming and not self._register(line):
            line.resuming = True
            self._turns.begin(self._resumed(line))

    def _register(self, line: WaitingLine) -> bool:
        """Register a line at the first full queue of its address. Return False if there is none."""
        looks = 0
        for queue in self._addresses.route(line.address, line.routing).queues:
            looks += 1
            if queue.settings.when_full == BLOCK and queue.full():
                line.queue = queue
                queue.blocked[line] = partial(self._look, line)
                break
        self._turns.left -= looks // ROOM_LOOKS_PER_STEP
        return line.queue is not None

    def _serve(self, line: WaitingLine, go_on: Callable[[], object]) -> None:
        self._served = line
        try:
            self._errors.run(ErrorKind.LINK, go_on)
        finally:
            self._served = None

    def _resumed(self, line: WaitingLine) -> Work:
        """Resume the senders of a line, in order, until a queue is full again. Yields steps."""
        try:
            while line.senders:
                sender, go_on = line.senders.popitem(last=False)
                self.waiting -= 1
                self._serve(line, go_on)
                if sender in line.senders:  # a queue is full again: the sender stays the first of the line
                    line.senders.move_to_end(sender, last=False)
                    if self._register(line):
                        return
                yield GO_ON_STEPS
        finally:
            line.resuming = False
            self._drop_if_empty(line)
