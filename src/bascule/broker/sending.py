"""Sending: which queues take a message, whether they have room, and what the journal stores. A part of the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from bascule.amqp.types import Timestamp, UByte, UInt
from bascule.broker.addresses import TEMPORARY_PREFIX, ExclusiveDivert, Route, durable_ids
from bascule.broker.delivery import Deliveries
from bascule.broker.destinations import Destinations
from bascule.broker.dropping import DroppedMessages
from bascule.broker.duplicates import DuplicateWindow, DuplicateWindows, digest_of
from bascule.broker.errors import JournalUnavailable, QueueFull, RecordTooLarge
from bascule.broker.journaling import RECORD_BYTES_SOFT
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import BLOCK
from bascule.broker.ports import SendPort
from bascule.broker.queue import BrokerQueue
from bascule.broker.transactions import Draft, LocalTransaction
from bascule.broker.turns import AfterStored, Retry
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.jms.annotate import (
    DELIVERIES,
    MOVED_AT,
    ORIGINAL_ADDRESS,
    ORIGINAL_EXPIRY,
    ORIGINAL_QUEUE,
    ORIGINAL_ROUTING,
    REASON,
    annotated,
)
from bascule.jms.checks import SECTIONS_BEFORE_BODY_BYTES_MAX
from bascule.jms.errors import MalformedMessage
from bascule.jms.lookup import selector_lookup
from bascule.jms.sections import Scan, application_property
from bascule.journal.records import INDEX_BITS, EncodedRoute, SendFlag, encode_diverts, routed_send_entry

#: Maximum size in bytes of a SEND entry besides body, address and queues: fixed fields, two digests, and some names of diverts.
SEND_OVERHEAD_BYTES = 256
#: Queues that are examined for room in one step.
LOOKS_PER_STEP: Final = 2
#: Bytes of a message per step, for the annotations that a move has to examine, and the most steps of one message.
MOVED_BYTES_PER_STEP, MOVE_STEPS_MAX = 8, 1_500
#: Bytes of a message that a move copies in one step.
COPIED_BYTES_PER_STEP = 4_096
DUPLICATE_ID_PROPERTY = "_AMQ_DUPL_ID"
_DUPLICATE_ID_BYTES = DUPLICATE_ID_PROPERTY.encode()
_new: Final = tuple.__new__  # makes a Draft at less cost than Draft(...)
_FLAGS_OF_DIGESTS = (0, SendFlag.DUPLICATE_ID, SendFlag.DUPLICATE_ID | SendFlag.SECOND_DUPLICATE_ID)


class RoomDue(enum.Enum):
    """When there is room for a message, or its sender has to try again."""

    NOW = enum.auto()
    NEXT_TURN = enum.auto()
    STORED = enum.auto()  # once all decisions so far are stored


#: Where a message goes: the route of its address, the queues that take it, its entry for the journal (b"" if the journal stores nothing),
#: and whether the message survives a crash. A plain tuple for speed: each sent message has one.
SendPlan = tuple[Route, tuple[BrokerQueue, ...], bytes, bool]
#: A message of a commit, its queues, and its delivery time.
Stored = tuple[BrokerMessage, tuple[BrokerQueue, ...], int]


def move_steps(message: BrokerMessage) -> int:
    """Return the most steps for examining the annotations of a message that moves, besides the move itself."""
    return annotation_steps(message.size_bytes)


def annotation_steps(size_bytes: int) -> int:
    """Return the most steps for examining the annotations of a message of this size."""
    return min(size_bytes // MOVED_BYTES_PER_STEP, MOVE_STEPS_MAX)


def taken_by(diverts: tuple[ExclusiveDivert, ...], body: bytes) -> tuple[str, ...]:
    """Return the names of the exclusive diverts that take a message."""
    return tuple(divert.name for divert in diverts if divert.matches(body))


class TransactionHooks(Protocol):
    """Functions of transactions that sending calls; see LocalTransactions."""

    def gather(self, transaction: LocalTransaction, draft: Draft, route: Route) -> BasculeError | None:
        """Keep a message on its route for the commit of its transaction. Return why the message is refused, or None."""
        ...

    def doom(self, transaction: LocalTransaction, error: BasculeError) -> None:
        """Allow only a rollback of the transaction."""
        ...

    def message_refused(self, transaction: LocalTransaction, error: BasculeError) -> None:
        """Note that a message of the transaction was not accepted."""
        ...


class Sending:
    """The way of messages into queues. ``stalled`` says why the journal accepts no more, or is None."""

    def __init__(
        self,
        deliveries: Deliveries,
        destinations: Destinations,
        windows: DuplicateWindows,
    ) -> None:
        self.stalled: JournalUnavailable | None = None
        self.windows = windows
        self.addresses = destinations.addresses
        self.policy = destinations.policy
        self.journaling = deliveries.journaling
        self.counters = deliveries.counters
        self.clock = deliveries.clock
        self._deliveries = deliveries
        self._destinations = destinations
        self.transactions: TransactionHooks  # set by LocalTransactions, which need this part
        self.memory = deliveries.memory

    def send(
        self, address: str, routing: Routing, body: bytes, scan: Scan, container: str, port: SendPort, token: Any,
        transaction: LocalTransaction | None = None, *, waits: bool = False, duplicate_ids: tuple[bytes, ...] | None = None,
        user: str = "", number: int = 0,
    ) -> Retry | None:  # fmt: skip
        """Accept or refuse a message, and answer ``port``: once the message is stored, or at once in a transaction.

        If the message has to wait for room or for other messages, and the caller ``waits``, return a function to call later; else None.
        Without ``waits`` it goes in at once, and the queue makes room later. ``duplicate_ids`` are those that an earlier try has found.
        ``user`` is the login of the sender, "" without one: only the user that has sent a message repeats it. ``number`` is the number
        of the sender among those that wait for other messages, 0 if it has not waited yet.
        """
        fan_out = self._deliveries.fan_out
        try:
            if routing is Routing.ANYCAST and address not in self.addresses.anycast:
                self._destinations.queue(address)
            if duplicate_ids is None:
                duplicate_ids = self._duplicate_ids(address, body, scan, container, user, in_transaction=transaction is not None)
            if (self.stalled is not None or self.memory.blocked) and not self._known(address, duplicate_ids):
                refusal = self._refusal(scan.durable, transaction)
                if refusal is not None:
                    self._refuse_waiting(number, port, token, refusal, transaction)
                    return None
            route = self.addresses.routes.get((address, routing)) or self.addresses.route(address, routing)
            stored = scan.durable and route.recorded
            late = waits and not stored and not fan_out.admits(route.queues, number)
            if late or route.limited:
                due = RoomDue.NEXT_TURN if late else self._make_room(route, address, duplicate_ids, waits=waits)
                if due is not RoomDue.NOW:
                    number = fan_out.wait(route.queues, number, stored=stored)
                    options: dict[str, Any] = {"waits": True, "duplicate_ids": duplicate_ids, "number": number}
                    retry = partial(self.send, address, routing, body, scan, container, port, token, transaction, **options)
                    return AfterStored(retry) if due is RoomDue.STORED else retry
        except BasculeError as error:
            self._refuse_waiting(number, port, token, error, transaction)
            return None
        if number:
            fan_out.line.leave(number)
        self.counters.messages_in += 1
        now_ms = self.clock()
        expiry_ms = scan.absolute_expiry_ms or (now_ms + scan.ttl_ms if scan.ttl_ms else 0)
        if route.expiring:
            expiry_ms = self.policy.of(address).expiry_of(expiry_ms, now_ms)
        message = BrokerMessage(body, scan.priority, expiry_ms, scan.group_id)
        due_ms = scan.delivery_time_ms or (now_ms + scan.delivery_delay_ms if scan.delivery_delay_ms else 0)
        draft = _new(Draft, (message, address, routing, body, scan.durable, container, duplicate_ids, due_ms))
        if transaction is not None:
            self._gather(transaction, draft, route, port, token)
            return None
        # Making room may have changed the queues of the address.
        queues = self.decide(draft, now_ms, None if route.limited else route)
        if message.mid >= 0:
            self.journaling.then_tell(self._deliveries.put_in, (message, queues, due_ms), port.accepted, token)
        elif self._put(draft, queues):
            self.journaling.tell(port.accepted, token)
        else:
            port.accepted(token)
        if self.journaling.batch.size_bytes > RECORD_BYTES_SOFT:
            self.journaling.close_if_full()
        return None

    def _gather(self, transaction: LocalTransaction, draft: Draft, route: Route, port: SendPort, token: Any) -> None:
        """Keep a message for the commit of its transaction, and answer."""
        refusal = self.transactions.gather(transaction, draft, route)
        if refusal is None:
            port.accepted(token)
        else:
            self.refuse(port, token, refusal, transaction)

    def _refuse_waiting(
        self, number: int, port: SendPort, token: Any, error: BasculeError, transaction: LocalTransaction | None
    ) -> None:  # fmt: skip
        """Refuse a message whose sender may wait in the line: see ``send``."""
        self._deliveries.fan_out.line.leave(number)
        self.refuse(port, token, error, transaction)

    def refuse(self, port: SendPort, token: Any, error: BasculeError, transaction: LocalTransaction | None) -> None:
        """Report that a message is not accepted. Its transaction, if any, can only be rolled back from then on."""
        if transaction is not None:
            self.transactions.message_refused(transaction, error)
        port.refused(token, error)

    def _refusal(self, durable: bool, transaction: LocalTransaction | None) -> BasculeError | None:
        """Return why a message cannot be accepted now, or None. The journal may be stalled, or memory may be short.

        While producers are blocked, a message whose producer had credit is accepted. A message in a transaction is not, because its body
        cannot go to the spill files. The error is returned, not raised: if the same error object were raised repeatedly, it would keep the
        frames of each raise, and with them the messages.
        """
        if transaction is None:
            if durable and self.stalled is not None:
                return self.stalled
            return self.memory.refusal() if self.memory.blocked and self.memory.exhausted else None
        if self.memory.blocked and transaction.doomed is None:
            self.transactions.doom(transaction, self.memory.refusal())
        return transaction.doomed if self.memory.blocked else None

    def _make_room(self, route: Route, address: str, duplicate_ids: tuple[bytes, ...], *, waits: bool) -> RoomDue:
        """Make room for a message in queues with limits. Return when there is room, or when the sender must try again.

        Raises QueueFull. A queue that blocks its producers is skipped: a producer that still sends had its credit before the queue was
        full.
        """
        self._deliveries.turns.left -= len(route.queues) // LOOKS_PER_STEP
        dropping = False
        with self.dropped_messages() as dropped:
            for queue in route.queues:
                if queue.settings.when_full == BLOCK or not queue.full():
                    continue
                if queue.dropping and waits:
                    return RoomDue.NEXT_TURN  # the queues behind it are marked already, or are examined later
                dropped.drop(queue)
                if queue.dropping:
                    dropping = True  # the next turns make room
                elif queue.entering and queue.volatile is not None and queue.full():
                    if waits:
                        return RoomDue.NEXT_TURN  # a message that enters in a later turn can be dropped then, as those of queues behind it
                elif waits and queue.incoming and queue.volatile is not None and queue.full():
                    return RoomDue.STORED  # a message of a transaction, once the journal has stored it, can be dropped
                elif queue.full() and not self._known(address, duplicate_ids):
                    raise QueueFull(f"queue {queue.name!r} is full: {queue.held_messages} messages, {queue.held_bytes} bytes")
        return RoomDue.NEXT_TURN if dropping and waits else RoomDue.NOW

    def dropped_messages(self) -> DroppedMessages:
        """Return a context in which full queues drop messages to make room."""
        return DroppedMessages(self._deliveries)

    def _known(self, address: str, duplicate_ids: tuple[bytes, ...]) -> bool:
        """Return True if a message repeats one that is stored or in flight. It then gets the same answer as the first one."""
        window = self.windows.window(address)
        return any(digest in window for digest in duplicate_ids) or self.windows.repeats_pending(duplicate_ids)

    def _duplicate_ids(
        self, address: str, body: bytes, scan: Scan, container: str, user: str, *, in_transaction: bool
    ) -> tuple[bytes, ...]:  # fmt: skip
        """Return the digests by which a repetition of the message is recognised: of its id, and of ``_AMQ_DUPL_ID`` if the sender sets it.

        A client repeats an unanswered send with the same id. It never repeats a send of a transaction, since the whole transaction is in
        doubt. Clients of different users may have the same container id and message ids, by accident or in order to harm.
        """
        ids: list[bytes] = []
        if scan.message_id is not None and not in_transaction:
            plain: bytes | None = None
            if user and self.windows.plain_until_ms:
                plain = self.windows.plain_digest_of(address, container, scan.message_id)
            ids.append(plain or digest_of(address, container, scan.message_id, user))
        if body.find(_DUPLICATE_ID_BYTES, 0, SECTIONS_BEFORE_BODY_BYTES_MAX) >= 0:
            value = application_property(body, DUPLICATE_ID_PROPERTY)
            if value is not None:
                ids.append(digest_of(address, DUPLICATE_ID_PROPERTY, str(value).encode()))
        return tuple(ids)

    def _put(self, draft: Draft, queues: tuple[BrokerQueue, ...] | None) -> bool:
        """Put a message without transaction into the queues that ``decide`` has returned.

        Return True if the message, or the one it repeats, gets there only once it is stored.
        """
        if queues is None:
            return draft.durable
        if draft.message.mid >= 0:
            self.journaling.then(self._deliveries.put_in, draft.message, queues, draft.delivery_time_ms)
            return True
        self._deliveries.put_in(draft.message, queues, draft.delivery_time_ms)
        return False

    def decide(self, draft: Draft, now_ms: int, route: Route | None = None) -> tuple[BrokerQueue, ...] | None:
        """Decide which queues take a message, and journal the decision. Return None for a duplicate.

        ``route`` is the current route of the address, if the caller knows it. Changes nothing if it raises.
        """
        message, address, ids = draft.message, draft.address, draft.duplicate_ids
        message.durable = draft.durable
        window: DuplicateWindow | None = None
        if ids:
            window = self.windows.by_address.get(address) or self.windows.window(address)
            if (self.windows.pending and self.windows.repeats_pending(ids)) or not window.admit(ids, now_ms):
                self.counters.duplicates += 1
                return None
        try:
            if route is None:
                if self._lacks_queue(draft):
                    self._destinations.recreate(address)  # the queue was deleted since the check for it
                route = self.addresses.route(address, draft.routing)
            if route.filtered:
                self._deliveries.turns.left -= route.steps
            _, queues, entry, durable = self._plan(draft, route, now_ms)
            mid = self.journaling.add_send(entry, ids) if entry else -1
        except Exception:
            if window is not None:
                window.take_back(ids)
            raise
        if entry and window is not None:
            window.sequence = mid >> INDEX_BITS
        if durable:
            message.mid = mid
        size_bytes = message.size_bytes
        for queue in queues:  # as BrokerQueue.expect does; a call costs more
            queue.incoming += 1
            queue.incoming_bytes += size_bytes
        entries = self.journaling.open_entries
        if entries is not None:
            entries.undo(self._undo_route, message, queues)
            if window is not None:
                entries.undo(window.take_back, ids)
        return queues

    def _plan(self, draft: Draft, route: Route, now_ms: int) -> SendPlan:
        """Return the queues of a message on its route, and its entry for the journal. Changes nothing."""
        taken: tuple[str, ...] = ()
        if route.exclusive:
            taken = taken_by(route.exclusive, draft.body)
        queues = () if taken else route.queues
        if route.filtered:
            lookup = selector_lookup(draft.body)
            queues = tuple(queue for queue in queues if self._deliveries.wants(queue, draft.container, lookup))
        durable = draft.durable and route.recorded
        if not (durable or (route.diverted and self.stalled is None)):
            return route, queues, b"", False
        target = route.target
        if queues is not route.queues or not durable:
            target = EncodedRoute.of(draft.address, durable_ids(queues) if durable else ())
        return route, queues, self._send_entry(draft, target, taken, now_ms), durable

    # -- messages that are planned: see planned_sends.py -------------------------------------------------------------

    def plan_ahead(self, draft: Draft, now_ms: int) -> tuple[Draft, SendPlan | None]:
        """Return a message with its plan for a later commit; with None if the commit must create the queue of the message."""
        if self._lacks_queue(draft):
            return draft, None
        return draft, self._plan(draft, self.addresses.route(draft.address, draft.routing), now_ms)

    def _lacks_queue(self, draft: Draft) -> bool:
        address = draft.address
        return draft.routing is Routing.ANYCAST and address not in self.addresses.anycast and not address.startswith(TEMPORARY_PREFIX)

    def recreate(self, address: str) -> None:
        """Create the queue of a message that was accepted earlier."""
        self._destinations.recreate(address)

    def look_for_use(self, address: str) -> None:
        """Watch the queue of an address, which is deleted if it stays unused."""
        self._destinations.look_for_use(self.addresses.anycast[address])

    def undo(self, action: Callable[..., None], *arguments: Any) -> None:
        """Register an action that reverts a change in memory if the open context of the journal is removed again."""
        if self.journaling.open_entries is not None:
            self.journaling.open_entries.undo(action, *arguments)

    @staticmethod
    def _undo_route(message: BrokerMessage, queues: tuple[BrokerQueue, ...]) -> None:
        message.mid = -1
        for queue in queues:
            queue.unexpect(message)

    # -- entries of the journal, and moves ---------------------------------------------------------------------------

    def _send_entry(self, draft: Draft, target: EncodedRoute, taken: tuple[str, ...], now_ms: int) -> bytes:
        flags = SendFlag.DURABLE if draft.durable else SendFlag.PIPELINES_ONLY
        options = b""
        if draft.duplicate_ids:
            flags |= _FLAGS_OF_DIGESTS[len(draft.duplicate_ids)]
            options = b"".join(draft.duplicate_ids)
        if taken:
            flags |= SendFlag.DIVERTS
            options += encode_diverts(taken)
        message = draft.message
        if message.group is not None:
            flags |= SendFlag.GROUPED
        return routed_send_entry(
            flags, draft.routing, message.priority, now_ms, message.expiry_ms, draft.delivery_time_ms, target, options, draft.body
        )

    def move(self, queue: BrokerQueue, message: BrokerMessage, address: str, reason: str) -> bool:
        """Move a message that was taken out of its queue to another address, with its removal here in the same record.

        Without an address the message is just removed. Return False, and do nothing, if the address is this queue's own, or the queue is
        deleted. If the annotations of the message cannot be read, or the journal has no room for more, the copy has no annotations about
        the move. Changes nothing if it raises.
        """
        if queue.deleted or queue is self.addresses.anycast.get(address):
            return False
        if not address:
            self._deliveries.gone(queue, message)
            return True
        annotations = {
            ORIGINAL_ADDRESS: queue.address, ORIGINAL_QUEUE: queue.name, ORIGINAL_ROUTING: UByte(queue.routing), REASON: reason,
            MOVED_AT: Timestamp(self.clock()), DELIVERIES: UInt(queue.delivery_count(message)),
            ORIGINAL_EXPIRY: Timestamp(message.expiry_ms) if message.expiry_ms else None,
        }  # fmt: skip
        self._deliveries.turns.left -= move_steps(message) + message.size_bytes // COPIED_BYTES_PER_STEP
        body = self._deliveries.bodies.read(message)
        try:
            self.pass_on(queue, message, BrokerMessage(annotated(body, annotations), message.priority, 0, message.group), address)
        except (MalformedMessage, RecordTooLarge):
            self.pass_on(queue, message, BrokerMessage(body, message.priority, 0, message.group), address)
        return True

    def pass_on(self, queue: BrokerQueue, message: BrokerMessage, copy: BrokerMessage, address: str, due_ms: int = 0) -> None:
        """Send a copy to another queue and remove the message from this one, in one record. Changes nothing if it raises."""
        draft = Draft(copy, address, Routing.ANYCAST, self._deliveries.bodies.read(copy), message.durable, "", (), due_ms)
        with self.journaling.atomic(copy.size_bytes + SEND_OVERHEAD_BYTES):
            queues = self.decide(draft, self.clock())
            self._deliveries.journal_gone(queue, message)
        self._put(draft, queues)
        self._deliveries.forget(queue, message)

    def put_into(self, queue: BrokerQueue, message: BrokerMessage, draft: Draft, target: BrokerQueue) -> None:
        """Send a copy into one queue without routing, and remove the message from this one, as ``pass_on`` does."""
        copy = draft.message
        copy.durable = draft.durable
        with self.journaling.atomic(copy.size_bytes + SEND_OVERHEAD_BYTES):
            if draft.durable and target.durable:
                entry = self._send_entry(draft, EncodedRoute.of(draft.address, (target.id,)), (), self.clock())
                copy.mid = self.journaling.add_send(entry, draft.duplicate_ids)
            self._deliveries.journal_gone(queue, message)
        target.expect(copy)
        self._put(draft, (target,))
        self._deliveries.forget(queue, message)
