"""Messages of one journal record that are planned in short turns: their routes, journal entries, duplicate ids and places in queues.

A plan consists of pieces. Making a plan changes nothing else. The turn that carries out the plan does little for each message, because
the pieces are complete. The decisions must hold in that turn: a piece is outdated if the bindings of its addresses have changed, or if
one of its duplicate ids was sent by others. Outdated pieces are planned again, in further turns if they are many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, Generic, TypeVar

from bascule.broker.addresses import Route
from bascule.broker.duplicates import PendingIds
from bascule.broker.errors import BindingsChanged
from bascule.broker.matching import EVALUATION_STEPS
from bascule.broker.message import BrokerMessage
from bascule.broker.plans import PlanInTurns
from bascule.broker.queue import BrokerQueue
from bascule.broker.sending import Sending, SendPlan
from bascule.broker.transactions import Draft
from bascule.broker.turns import Work
from bascule.core.destination import Routing

T = TypeVar("T")

#: Places in queues that one piece takes: a message on a topic takes one place in each subscription.
PIECE_PLACES: Final = 200
#: Steps to plan a message of a client, besides those of its route.
SEND_STEPS: Final = 4
#: Steps to work out the route of an address, which the broker then keeps.
NEW_ROUTE_STEPS: Final = 25
#: Bytes of a message for one more step, if a selector reads its properties.
READ_BYTES_PER_STEP: Final = 1_000
#: Steps of planning after which other work runs.
PIECE_STEPS: Final = 200
#: Outdated pieces with at most this many steps are planned again in the turn that carries out the plan.
AT_ONCE_STEPS: Final = 2_000
#: The same after ROUNDS_MAX rounds.
LAST_AT_ONCE_STEPS: Final = 20_000
#: Steps to compare routes in that turn.
COMPARED_AT_ONCE_STEPS: Final = 20_000
#: Steps to compare a route, and queues of it for one more step: the route is worked out again.
COMPARE_STEPS: Final = 5
QUEUES_PER_STEP: Final = 2
#: Rounds in which outdated pieces are planned again in further turns. After them one longer turn ends the plan, if that is enough: clients
#: that change bindings all the time must not delay a commit without end.
ROUNDS_MAX: Final = 5
#: After this many rounds the plan fails: to plan the rest in one turn could take the broker minutes.
FAILED_ROUNDS: Final = 20

#: A message, and where it goes; None if its queue does not exist and must be created first.
Planned = tuple[Draft, SendPlan | None]


def _route_steps(route: Route) -> int:
    return route.steps + len(route.exclusive) * EVALUATION_STEPS


def decision_steps(draft: Draft, route: Route) -> int:
    """Return the steps to find the queues of a message on its route: selectors and diverts may read the whole message."""
    steps = _route_steps(route)
    return steps + draft.message.size_bytes // READ_BYTES_PER_STEP if route.filtered or route.exclusive else steps


class Piece(Generic[T]):
    """Consecutive messages that enter their queues together: at most PIECE_PLACES places, or one message."""

    __slots__ = (
        "_numbered", "_parts", "_places", "digests", "entries", "ids", "items", "lacking", "messages", "pending", "routes", "size_bytes",
        "stalled", "version", "volatile",
    )  # fmt: skip

    def __init__(self, version: int, *, stalled: bool) -> None:
        self.items: list[T] = []  # from which the piece was planned, and can be planned again
        self.entries = b""  # SEND entries, once the piece is complete
        self.messages = 0  # number of entries
        self.digests: list[bytes] = []  # duplicate ids in the entries
        self.ids: dict[str, list[bytes]] = {}  # duplicate ids to remember, by address
        self.pending: PendingIds | None = None  # adds these ids to their windows; None before the decision
        self.routes: dict[tuple[str, Routing], Route] = {}
        self.version = version  # of the bindings with which the routes were last compared
        self.stalled = stalled  # whether the journal was stalled
        self.volatile = False  # whether the entry of a message depends on that
        self.lacking = False  # whether a queue must be created first
        self.size_bytes = 0  # of the messages
        self._parts: list[bytes] = []
        self._places = 0
        #: Messages, their queues, their delivery times, and the numbers of their entries in the piece; -1 if the message has no mid.
        self._numbered: list[tuple[BrokerMessage, tuple[BrokerQueue, ...], int, int]] = []

    def has_room(self, places: int) -> bool:
        """Return True if a message with this number of places may be added."""
        return not self._places or self._places + places <= PIECE_PLACES

    def add(self, item: T, draft: Draft, plan: SendPlan | None) -> None:
        """Add a message."""
        self.items.append(item)
        self.size_bytes += draft.message.size_bytes
        if plan is None:
            self._places += 1
            self.lacking = True
            return
        route, queues, entry, durable = plan
        self._places += max(1, len(queues))
        self.routes[draft.address, draft.routing] = route
        number = self.messages if durable else -1
        if entry:
            self._parts.append(entry)
            self.messages += 1
            self.digests += draft.duplicate_ids
        if route.diverted and not draft.durable:
            self.volatile = True
        draft.message.durable = draft.durable
        if queues:
            self._numbered.append((draft.message, queues, draft.delivery_time_ms, number))

    def complete(self) -> None:
        """Note that the piece gets no more messages."""
        self.entries, self._parts = b"".join(self._parts), []

    def count(self, incoming: dict[BrokerQueue, list[int]], sign: int) -> None:
        """Add the messages and bytes for each queue to ``incoming``, or subtract them."""
        for message, queues, _, _ in self._numbered:
            size_bytes = sign * message.size_bytes
            for queue in queues:
                sums = incoming.get(queue)
                if sums is None:
                    incoming[queue] = [sign, size_bytes]
                else:
                    sums[0] += sign
                    sums[1] += size_bytes

    def put_in(self, put_in: Callable[[BrokerMessage, tuple[BrokerQueue, ...], int], Work | None], first_mid: int) -> Work | None:
        """Put the messages into their queues with ``put_in``. ``first_mid`` is the mid of the first entry.

        Return the rest of this work: a message for so many queues that they are entered in several turns is alone in its piece.
        """
        rest: Work | None = None
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.add(self.ids, journaled=bool(self.digests))
        numbered, self._numbered, self.items, self.entries = self._numbered, [], [], b""
        for message, queues, due_ms, number in numbered:
            if number >= 0:
                message.mid = first_mid + number
            rest = put_in(message, queues, due_ms)
        return rest


#: A piece that is in the open record, and the mid of its first entry.
Placed = tuple[Piece[Any], int]


class PlannedSends(PlanInTurns, Generic[T]):
    """A plan of messages. ``incoming`` has the number and bytes of the messages for each queue."""

    __slots__ = (
        "_admits", "_common", "_compared", "_ids", "_plan_one", "_rounds", "_send_steps", "_sending", "count", "duplicates", "incoming",
        "messages", "now_ms", "pieces", "size_bytes",
    )  # fmt: skip

    def __init__(
        self, sending: Sending, plan_one: Callable[[T, int], Planned], items: Iterable[T], size_bytes: int, now_ms: int,
        *, admits: bool, send_steps: int = SEND_STEPS,
    ) -> None:  # fmt: skip
        """Begin a plan. ``plan_one(item, now_ms)`` plans one message and changes nothing; ``now_ms`` is the time of the messages.

        ``size_bytes`` is the approximate memory of the plan. If ``admits`` is true, repeated messages are dropped. ``send_steps`` are the
        steps to plan a message, besides those of its route.
        """
        self._sending = sending
        self._plan_one = plan_one
        self._admits = admits
        self._send_steps = send_steps
        self._rounds = 0
        self._ids: set[bytes] = set()  # duplicate ids of all pieces
        self._compared: PendingIds | None = None  # the newest pending ids that were compared with the plan
        self._common: list[PendingIds] = []  # pending ids, some of which are in the plan
        self.now_ms = now_ms
        self.count = 0  # messages so far, with duplicates
        self.duplicates = 0
        self.messages = 0  # entries of all pieces
        self.size_bytes = 0  # of the entries
        self.pieces: list[Piece[T]] = []
        self.incoming: dict[BrokerQueue, list[int]] = {}
        super().__init__(self._work_out(items), sending.memory, size_bytes)

    def _work_out(self, items: Iterable[T]) -> Generator[int, None, None]:
        steps = 0
        for item in items:
            steps += self._add(self.pieces, item)
            self.count += 1
            if steps >= PIECE_STEPS:
                yield steps
                steps = 0
        if self.pieces:
            self._close(self.pieces[-1])
        yield steps

    def _add(self, pieces: list[Piece[T]], item: T, create: Callable[[str], None] | None = None) -> int:
        """Plan a message, and add it to the last piece or to a new one. Return the steps.

        ``create`` creates the queue of an address if it is missing. Without ``create`` the piece lacks the queue.
        """
        addresses = self._sending.addresses
        searched, routes_bytes = addresses.searched, addresses.routes_bytes
        draft, plan = self._plan_one(item, self.now_ms)
        ids = draft.duplicate_ids if self._admits else ()
        if ids and self._repeats(draft.address, ids):
            self.duplicates += 1
            return self._send_steps
        if plan is None and create is not None:
            create(draft.address)
            draft, plan = self._plan_one(item, self.now_ms)
        piece = self._piece(pieces, len(plan[1]) if plan is not None else 1)
        piece.add(item, draft, plan)
        if ids:
            self._ids.update(ids)
            piece.ids.setdefault(draft.address, []).extend(ids)
        steps = self._send_steps + addresses.searched - searched
        if addresses.routes_bytes != routes_bytes:
            steps += NEW_ROUTE_STEPS
        if plan is not None:
            steps += decision_steps(draft, plan[0])
        return steps

    def _piece(self, pieces: list[Piece[T]], places: int) -> Piece[T]:
        """Return the piece for the next message, with this number of places. All messages of a piece have the same bindings."""
        version, stalled = self._sending.addresses.version, self._sending.stalled is not None
        if pieces:
            last = pieces[-1]
            if last.has_room(places) and last.version == version and last.stalled is stalled:
                return last
            self._close(last)
        pieces.append(Piece(version, stalled=stalled))
        return pieces[-1]

    def _repeats(self, address: str, ids: tuple[bytes, ...]) -> bool:
        """Return True if a message repeats another one: of this plan, or one that the journal has or gets before this plan."""
        if not self._ids.isdisjoint(ids):
            return not self._sending.windows.admits_repeats
        windows = self._sending.windows
        window = windows.by_address.get(address)
        return windows.repeats_pending(ids) or (window is not None and window.repeats(ids, self.now_ms))

    def _close(self, piece: Piece[T]) -> None:
        """Complete a piece, and add it to the sums of the plan."""
        piece.complete()
        self._sum(piece, 1)

    def _sum(self, piece: Piece[T], sign: int) -> None:
        piece.count(self.incoming, sign)
        self.messages += sign * piece.messages
        self.size_bytes += sign * len(piece.entries)

    # -- outdated pieces ---------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Return True if the plan may be carried out in this turn. If the result is False, call this function in the next turn again.

        If a piece is outdated after all, the turn that carries out the plan plans the piece again.
        """
        if not self.over:
            return False
        if self.failed or self._few_outdated(LAST_AT_ONCE_STEPS if self._rounds >= ROUNDS_MAX else AT_ONCE_STEPS):
            return True
        if self._rounds >= FAILED_ROUNDS:
            self.fail(BindingsChanged(f"subscriptions have changed {self._rounds} times while {self.count} messages were planned"))
            return True
        self._rounds += 1
        self.go_on(self._renewed(self._recreate))
        return False

    def _few_outdated(self, steps_max: int) -> bool:
        """Return True if planning the outdated pieces again takes few steps, and so does finding them."""
        left, outdated = COMPARED_AT_ONCE_STEPS, 0
        for piece in self.pieces:
            if self._known_outdated(piece) is False:
                continue
            looking = self._look(piece)
            try:
                while left >= 0:
                    left -= next(looking)
            except StopIteration as end:
                outdated += end.value
            if left < 0 or outdated > steps_max:
                return False
        return True

    def _look(self, piece: Piece[T]) -> Generator[int, None, int]:
        """Return the steps to plan a piece again on the routes of now; 0 if it is not outdated. Yields steps."""
        addresses, changed, most = self._sending.addresses, bool(self._known_outdated(piece)), 0
        version = addresses.version
        for key, route in piece.routes.items():
            searched = addresses.searched
            now = addresses.route(*key)
            most = max(most, _route_steps(now))
            if now is route:
                yield 1
                continue
            if now == route:
                piece.routes[key] = now  # the next comparison is short
            else:
                changed = True
            yield COMPARE_STEPS + len(route.queues) // QUEUES_PER_STEP + addresses.searched - searched
        if not changed:
            piece.version = version
            changed = bool(self._known_outdated(piece))
        return len(piece.items) * (self._send_steps + most) + piece.size_bytes // READ_BYTES_PER_STEP if changed else 0

    def _known_outdated(self, piece: Piece[T]) -> bool | None:
        """Return True if a message of a piece would be planned in another way now; None if its routes have to be compared first."""
        if piece.lacking or (piece.volatile and piece.stalled is not (self._sending.stalled is not None)):
            return True
        if piece.version != self._sending.addresses.version:
            return None
        by_address = self._sending.windows.by_address
        if self._sending.windows.pending and self._repeats_pending(piece):
            return True
        return any(address in by_address and not by_address[address].digests.isdisjoint(ids) for address, ids in piece.ids.items())

    def _repeats_pending(self, piece: Piece[T]) -> bool:
        """Return True if an id of a piece is pending. Each set of pending ids is compared with the whole plan once."""
        pending = self._sending.windows.pending
        if pending[-1] is not self._compared:
            start = pending.index(self._compared) + 1 if self._compared in pending else 0
            self._common += [each for each in pending[start:] if not each.digests.isdisjoint(self._ids)]
            self._compared = pending[-1]
        return any(not each.digests.isdisjoint(ids) for each in self._common if each in pending for ids in piece.ids.values())

    def _recreate(self, address: str) -> None:
        """Create a queue before the plan is carried out. If the plan is dropped, the queue is deleted like any unused queue."""
        self._sending.recreate(address)
        self._sending.look_for_use(address)

    def _renewed(self, create: Callable[[str], None]) -> Generator[int, None, None]:
        """Plan outdated pieces again."""
        renewed: list[Piece[T]] = []
        for piece in self.pieces:
            if self._known_outdated(piece) is not False and (yield from self._look(piece)):
                yield from self._again(piece, renewed, create)
            else:
                renewed.append(piece)
                yield 1
        self.pieces = renewed

    def _again(self, piece: Piece[T], renewed: list[Piece[T]], create: Callable[[str], None]) -> Generator[int, None, None]:
        """Plan a piece again, as one or more pieces. Yields the steps of each message, whose route may have become a long one."""
        self._sum(piece, -1)
        for ids in piece.ids.values():
            self._ids.difference_update(ids)
        fresh: list[Piece[T]] = []
        for item in piece.items:
            yield self._add(fresh, item, create)
        if fresh:
            self._close(fresh[-1])
        renewed += fresh

    # -- the turn that carries out the plan --------------------------------------------------------------------------

    def decide(self) -> list[Placed]:
        """Write all messages into the open record, and return the pieces, which enter their queues once the record is stored.

        Call this after ``finish``, within ``Journaling.atomic``, which reverts everything if its body raises.
        """
        sending = self._sending
        journaling, windows = sending.journaling, sending.windows
        if any(self._known_outdated(piece) is not False for piece in self.pieces):
            for _ in self._renewed(sending.recreate):
                pass
        sending.counters.duplicates += self.duplicates
        self._expect(1)
        sending.undo(self._expect, -1)
        placed = [(piece, journaling.add_sends(piece.entries, piece.messages, piece.digests)) for piece in self.pieces]
        remembered = [piece for piece in self.pieces if piece.ids]
        if remembered:
            pending = PendingIds(windows, self._ids, self.now_ms, journaling.batch.sequence, len(remembered), journaling.turns)
            for piece in remembered:
                piece.pending = pending
            windows.pending.append(pending)
            sending.undo(windows.pending.remove, pending)
        return placed

    def _expect(self, sign: int) -> None:
        """Count the messages as decided for their queues, or stop counting them."""
        for queue, (messages, size_bytes) in self.incoming.items():
            queue.incoming += sign * messages
            queue.incoming_bytes += sign * size_bytes
