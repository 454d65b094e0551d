"""The broker engine: destinations, messages and consumers, without sockets, clocks or threads.

Commands are methods; effects go out through the ports: the log's ``append``, links, and the body store. Every decision about persistent
things is an entry of a journal record, and is carried out when that record is confirmed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from bascule.amqp.types import Timestamp, UByte, UInt
from bascule.broker.addresses import TEMPORARY_PREFIX, ExclusiveDivert, Route, durable_ids
from bascule.broker.branches import Branches
from bascule.broker.destinations import Destinations
from bascule.broker.duplicates import DuplicateWindows, digest_of
from bascule.broker.errors import JournalUnavailable, QueueFull, ResourceLimit
from bascule.broker.journaling import Journaling
from bascule.broker.message import PRIORITY_MAX, Bodies, Message
from bascule.broker.policy import BLOCK, DROP, Policy
from bascule.broker.ports import SendPort
from bascule.broker.queue import Consumer, Queue
from bascule.broker.transactions import Draft, Transaction
from bascule.core import crash
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, TransactionRolledBack, TransactionTimedOut
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
from bascule.jms.sections import MalformedMessage, Scan, application_property, group_of
from bascule.journal.records import (
    MESSAGES_PER_RECORD_MAX,
    Op,
    Send,
    SendFlag,
    Target,
    encode_diverts,
    ingress_entry,
    json_entry,
    routed_send_entry,
    send_entry,
)

#: What a SEND entry takes at most beside body, address and queues: fixed fields, two digests, and some names of diverts.
SEND_OVERHEAD_BYTES = 256
DUPLICATE_ID_PROPERTY = "_AMQ_DUPL_ID"
_DUPLICATE_ID_BYTES = DUPLICATE_ID_PROPERTY.encode()
_FLAGS_OF_DIGESTS = (0, SendFlag.DUPLICATE_ID, SendFlag.DUPLICATE_ID | SendFlag.SECOND_DUPLICATE_ID)


class EngineViolation(enum.StrEnum):
    """Rules of the engine that a test may break."""

    ROLLBACK_COMMITS = "a rolled back transaction is carried out"


class Engine(Destinations):
    """All state of one broker and the commands on it."""

    def __init__(
        self,
        journaling: Journaling,
        bodies: Bodies,
        clock: Callable[[], int],
        policy: Policy | None = None,
        *,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``violations`` are rules that the engine, its parts and its loader break, for tests only."""
        super().__init__(journaling, bodies, clock, policy)
        self.violations = violations
        self.windows = DuplicateWindows(self._window_limits, violations=violations)
        self.ingress_positions: dict[int, int] = {}
        self.confirmed_ingress: dict[int, int] = {}  # as ingress_positions, of confirmed records
        self.ingress_topic_id = ""  # of the topic that they are positions of, once that is confirmed
        self.transactions: dict[bytes, Transaction] = {}
        self.branches = Branches()
        self.stalled: JournalUnavailable | None = None
        self._transactions_due_ms = 0

    def _window_limits(self, address: str) -> tuple[int, int]:
        settings = self.policy.of(address)
        return settings.duplicate_count, settings.duplicate_ms

    # -- sending -----------------------------------------------------------------------------------------------------

    def share_of_room(self, address: str, routing: Routing, wanted: int) -> int:
        """Messages that one sender to an address may have on their way, ``wanted`` at most: all senders share what is free."""
        route = self.addresses.route(address, routing)
        if not route.limited:
            return wanted
        senders = max(1, self.addresses.producers[address, routing])
        free = wanted * senders
        for queue in route.queues:
            if queue.settings.when_full == BLOCK:
                free = queue.room(free)
        return min(wanted, -(-free // senders))

    def when_room(self, address: str, routing: Routing, go_on: Callable[[], None]) -> None:
        """Call this once a full queue of the address has room."""
        for queue in self.addresses.route(address, routing).queues:
            if queue.settings.when_full == BLOCK and queue.full():
                queue.blocked.append(go_on)

    def send(
        self, address: str, routing: Routing, body: bytes, scan: Scan, container: str, port: SendPort, token: Any,
        transaction: Transaction | None = None,
    ) -> None:  # fmt: skip
        """Take a message. ``port`` is answered when it is stored; in a transaction at once, and stored with the commit."""
        try:
            if routing is Routing.ANYCAST and address not in self.addresses.anycast:
                self.queue(address)
            duplicate_ids = self._duplicate_ids(address, body, scan, container, in_transaction=transaction is not None)
            if scan.durable and self.stalled is not None and transaction is None and not self._known(address, duplicate_ids):
                raise self.stalled
            route = self.addresses.route(address, routing)
            if route.limited:
                self._make_room(route, address, duplicate_ids)
        except BasculeError as error:
            port.refused(token, error)
            return
        self.counters.messages_in += 1
        now_ms = self.clock()
        expiry_ms = scan.absolute_expiry_ms or (now_ms + scan.ttl_ms if scan.ttl_ms else 0)
        if route.expiring:
            expiry_ms = self.policy.of(address).expiry_of(expiry_ms, now_ms)
        message = Message(body, min(scan.priority, PRIORITY_MAX), expiry_ms, scan.group_id)
        due_ms = scan.delivery_time_ms or (now_ms + scan.delivery_delay_ms if scan.delivery_delay_ms else 0)
        draft = Draft(message, address, routing, body, scan.durable, container, duplicate_ids, due_ms)
        if transaction is not None:
            self._gather(transaction, draft)
            port.accepted(token)
            return
        if self._put(draft, now_ms):
            self.journaling.then(port.accepted, token)
            self.journaling.close_if_full()
        else:
            port.accepted(token)

    def _make_room(self, route: Route, address: str, duplicate_ids: tuple[bytes, ...]) -> None:
        """For a message to queues with limits. Raises QueueFull. A producer that was to wait had its credit before the queue was full."""
        for queue in route.queues:
            if queue.settings.when_full == BLOCK or not queue.full():
                continue
            if queue.settings.when_full == DROP:
                self._drop_oldest(queue)
            if queue.full() and not self._known(address, duplicate_ids):
                raise QueueFull(f"queue {queue.name!r} is full: {queue.held_messages} messages, {queue.held_bytes} bytes")

    def _known(self, address: str, duplicate_ids: tuple[bytes, ...]) -> bool:
        """Whether a message repeats one that is stored, or on its way: it is answered as the first one is."""
        window = self.windows.window(address)
        return any(digest in window for digest in duplicate_ids)

    def _drop_oldest(self, queue: Queue) -> None:
        while queue.full():
            oldest = queue.oldest_volatile()
            if oldest is None:
                return
            queue.take_out(oldest)
            self.counters.dropped += 1
            self.gone(queue, oldest)

    def _duplicate_ids(self, address: str, body: bytes, scan: Scan, container: str, *, in_transaction: bool) -> tuple[bytes, ...]:
        """By what a repeat of the message would be known: its id (a client repeats an unanswered send), and an id the sender sets.

        A client never repeats a send of a transaction: that one is in doubt as a whole.
        """
        ids: list[bytes] = []
        if scan.message_id is not None and not in_transaction:
            ids.append(digest_of(address, container, scan.message_id))
        if _DUPLICATE_ID_BYTES in body:
            value = application_property(body, DUPLICATE_ID_PROPERTY)
            if value is not None:
                ids.append(digest_of(address, DUPLICATE_ID_PROPERTY, str(value).encode()))
        return tuple(ids)

    def _gather(self, transaction: Transaction, draft: Draft) -> None:
        if transaction.doomed is not None:
            return
        self._holds_something(transaction)
        drafts = transaction.drafts
        drafts.append(draft)
        address = draft.address
        transaction.size_bytes += (
            draft.message.size_bytes + len(address) + 4 * len(self.addresses.route(address, draft.routing).queues) + SEND_OVERHEAD_BYTES
        )
        limit = self.policy.transaction_bytes_max
        if transaction.size_bytes > limit:
            transaction.doomed = ResourceLimit(f"transaction larger than {limit} bytes: commit more often")
        elif len(drafts) > MESSAGES_PER_RECORD_MAX:
            transaction.doomed = ResourceLimit(f"transaction of more than {MESSAGES_PER_RECORD_MAX} messages: commit more often")
        if transaction.doomed is not None:
            drafts.clear()

    def _put(self, draft: Draft, now_ms: int) -> bool:
        """Take a message that stands for itself. True: it, or what it repeats, is in its queues only once it is stored."""
        queues = self._decide(draft, now_ms)
        if queues is None:
            return draft.durable
        if draft.message.mid >= 0:
            self.journaling.then(self.put_in, draft.message, queues, draft.delivery_time_ms)
            return True
        self.put_in(draft.message, queues, draft.delivery_time_ms)
        return False

    def _decide(self, draft: Draft, now_ms: int) -> tuple[Queue, ...] | None:
        """Which queues take a message, None for a repeat; what must survive a crash of it goes into the open record."""
        message, address, routing = draft.message, draft.address, draft.routing
        message.durable = draft.durable
        if draft.duplicate_ids and not self.windows.window(address).admit(draft.duplicate_ids, now_ms):
            self.counters.duplicates += 1
            return None
        if routing is Routing.ANYCAST and address not in self.addresses.anycast and not address.startswith(TEMPORARY_PREFIX):
            self.recreate(address)  # deleted since it was asked for
        route = self.addresses.route(address, routing)
        taken: tuple[str, ...] = ()
        if route.exclusive:
            taken = self._taken_by(route.exclusive, draft.body)
        queues = () if taken else route.queues
        if route.filtered:
            queues = tuple(queue for queue in queues if queue.wants(draft.container, draft.body))
        durable = draft.durable and route.recorded
        if durable or (route.diverted and self.stalled is None):
            target = route.target
            if queues is not route.queues or not durable:
                target = Target.of(address, durable_ids(queues) if durable else ())
            mid = self._journal_send(draft, target, taken, now_ms)
            if durable:
                message.mid = mid
        for queue in queues:
            queue.expect(message)
        return queues

    @staticmethod
    def _taken_by(diverts: tuple[ExclusiveDivert, ...], body: bytes) -> tuple[str, ...]:
        return tuple(divert.name for divert in diverts if divert.matches(body))

    def _journal_send(self, draft: Draft, target: Target, taken: tuple[str, ...], now_ms: int) -> int:
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
        entry = routed_send_entry(
            flags, draft.routing, message.priority, now_ms, message.expiry_ms, draft.delivery_time_ms, target, options, draft.body
        )
        return self.journaling.add_send(entry, draft.duplicate_ids)

    # -- messages that go on -----------------------------------------------------------------------------------------

    def move(self, queue: Queue, message: Message, address: str, reason: str) -> bool:
        """See Deliveries."""
        if queue.deleted or queue is self.addresses.anycast.get(address):
            return False
        if not address:
            self.gone(queue, message)
            return True
        annotations = {
            ORIGINAL_ADDRESS: queue.address, ORIGINAL_QUEUE: queue.name, ORIGINAL_ROUTING: UByte(queue.routing), REASON: reason,
            MOVED_AT: Timestamp(self.clock()), DELIVERIES: UInt(queue.delivery_count(message)),
            ORIGINAL_EXPIRY: Timestamp(message.expiry_ms) if message.expiry_ms else None,
        }  # fmt: skip
        body = self.bodies.read(message)
        with suppress(MalformedMessage):  # its own annotations, which nobody has looked at: it goes on without ours
            body = annotated(body, annotations)
        self.pass_on(queue, message, Message(body, message.priority, 0, message.group), address)
        return True

    def pass_on(self, queue: Queue, message: Message, copy: Message, address: str, due_ms: int = 0) -> None:
        """A copy goes to another queue as the message, which has been taken out, leaves this one: one record."""
        body = copy.body
        assert body is not None
        draft = Draft(copy, address, Routing.ANYCAST, body, message.durable, "", (), due_ms)
        self.journaling.together(copy.size_bytes + SEND_OVERHEAD_BYTES)
        self._put(draft, self.clock())
        self.gone(queue, message)
        self.journaling.part()

    def put_into(self, queue: Queue, draft: Draft) -> None:
        """A message into one queue, past all routing."""
        message = draft.message
        message.durable = draft.durable
        queue.expect(message)
        if draft.durable and queue.durable:
            message.mid = self._journal_send(draft, Target.of(draft.address, (queue.id,)), (), self.clock())
            self.journaling.then(self.put_in, message, (queue,), draft.delivery_time_ms)
        else:
            self.put_in(message, (queue,), draft.delivery_time_ms)

    # -- transactions ------------------------------------------------------------------------------------------------

    def in_transactions(self) -> Iterator[tuple[Queue, Message]]:
        """Messages that open transactions have acknowledged, and those of prepared ones."""
        for transaction in self.transactions.values():
            for consumer, message in transaction.acks:
                yield consumer.queue, message
        yield from self.branches.held()

    def begin(self, transaction_id: bytes) -> Transaction:
        """A new local transaction."""
        transaction = self.transactions[transaction_id] = Transaction(transaction_id)
        return transaction

    def acknowledge_in(self, transaction: Transaction, consumer: Consumer, message: Message) -> None:
        """An acknowledgement that counts with the commit."""
        if self.settled(consumer, message):
            self._holds_something(transaction)
            transaction.acks.append((consumer, message))
            transaction.size_bytes += 16

    def _holds_something(self, transaction: Transaction) -> None:
        """From now on: a transaction that holds things for ever keeps them from everybody else."""
        if transaction.since_ms:
            return
        transaction.since_ms = self.clock()
        if not self._transactions_due_ms:
            self._transactions_due_ms = transaction.since_ms + self.policy.transaction_ms_max
            self.schedule.at(self._transactions_due_ms, self._end_old_transactions)

    def _end_old_transactions(self) -> None:
        limit_ms = self.policy.transaction_ms_max
        oldest_ms = self.clock() - limit_ms
        holding = [transaction for transaction in self.transactions.values() if transaction.since_ms]
        for transaction in holding:
            if transaction.since_ms <= oldest_ms:
                self._give_up(transaction)
                transaction.since_ms = 0  # what it receives from here on has its own time
                if transaction.doomed is None:
                    transaction.doomed = TransactionTimedOut(f"the transaction was open for {limit_ms / 1000:g} s with messages in it")
        self._transactions_due_ms = min((each.since_ms + limit_ms for each in holding if each.since_ms), default=0)
        if self._transactions_due_ms:
            self.schedule.at(self._transactions_due_ms, self._end_old_transactions)

    def commit(self, transaction: Transaction, done: Callable[[BasculeError | None], None], ended: bytes = b"") -> None:
        """All of it, as one journal record; ``done(None)`` once that is stored, ``done(error)`` when it was rolled back instead.

        ``ended`` is an entry to go with it: the name of a branch that is committed in one phase.
        """
        persistent = any(draft.durable for draft in transaction.drafts) or any(message.mid >= 0 for _, message in transaction.acks)
        error = transaction.doomed or (self.stalled if persistent else None)
        if error is not None:
            self.rollback(transaction)
            done(TransactionRolledBack(str(error), cause=error))
            return
        crash.point("transaction.commit.before")
        self.transactions.pop(transaction.id, None)
        acks = [(consumer.queue, message) for consumer, message in transaction.acks]
        self.carry_out(transaction.drafts, acks, transaction.size_bytes, partial(done, None), ended)
        crash.point("transaction.commit.after")

    def carry_out(
        self, drafts: list[Draft], acks: list[tuple[Queue, Message]], size_bytes: int, done: Callable[[], None], ended: bytes = b""
    ) -> None:
        """What a transaction has gathered, as one journal record, with an entry that says so; ``done()`` once that is stored."""
        now_ms = self.clock()
        stored: list[tuple[Message, tuple[Queue, ...], int]] = []
        self.journaling.together(size_bytes, len(drafts))
        if ended:
            self.journaling.add(ended)
        for draft in drafts:
            queues = self._decide(draft, now_ms)
            if queues is not None:
                stored.append((draft.message, queues, draft.delivery_time_ms))
        for queue, message in acks:
            self.counters.acknowledged += 1
            self.gone(queue, message)
        self.journaling.part()
        self.journaling.then(self._carried_out, stored, done)

    def _carried_out(self, stored: list[tuple[Message, tuple[Queue, ...], int]], done: Callable[[], None]) -> None:
        self.counters.committed += 1
        for message, queues, due_ms in stored:
            self.put_in(message, queues, due_ms)
        done()

    def rollback(self, transaction: Transaction) -> None:
        """None of it: the sends are forgotten, what was received is delivered again, with its count raised."""
        self.counters.rolled_back += 1
        self.transactions.pop(transaction.id, None)
        if EngineViolation.ROLLBACK_COMMITS in self.violations:
            acks = [(consumer.queue, message) for consumer, message in transaction.acks]
            self.carry_out(transaction.drafts, acks, transaction.size_bytes, lambda: None)
            return
        self._give_up(transaction)

    def _give_up(self, transaction: Transaction) -> None:
        self.take_back([(consumer.queue, message) for consumer, message in transaction.acks])
        transaction.acks.clear()
        transaction.drafts.clear()

    def take_back(self, acks: list[tuple[Queue, Message]]) -> None:
        """Messages that a transaction had received wait again, after a failed delivery."""
        returned: dict[Queue, list[Message]] = {}
        for queue, message in acks:
            returned.setdefault(queue, []).append(message)
        for queue, messages in returned.items():
            self._return(queue, messages, failed=True)

    def confirm(self) -> None:
        """The oldest record in flight is stored."""
        self.journaling.confirm()
        self.dispatch()

    # -- ingress -----------------------------------------------------------------------------------------------------

    def lacks_room(self, sends: list[tuple[Send, bool]]) -> Queue | None:
        """A queue to which one of these goes and that stays full, or None: they are to wait in Kafka, neither refused nor dropped."""
        for send, _ in sends:
            route = self.addresses.route(send.address, Routing(send.routing))
            # Asked for room first: selectors and exclusive diverts cost more, and matter only where there is none.
            if not route.limited or not any(queue.full() for queue in route.queues):
                continue
            for queue in self._to_queues(route, send.body)[0]:
                if queue.settings.when_full == DROP:
                    self._drop_oldest(queue)
                if queue.full():
                    return queue
        return None

    def _to_queues(self, route: Route, body: bytes) -> tuple[tuple[Queue, ...], tuple[str, ...]]:
        """The queues to which a message from Kafka goes, or the exclusive diverts that take it."""
        taken = self._taken_by(tuple(divert for divert in route.exclusive if divert.from_kafka), body)
        queues = () if taken else route.queues
        if route.filtered:
            queues = tuple(queue for queue in queues if queue.wants("", body))
        return queues, taken

    def take_in(self, partition: int, next_offset: int, sends: list[tuple[Send, bool]]) -> None:
        """Records of ``bascule.ingress``: their messages and the position behind them are one journal record.

        Each comes with whether it is kept where nobody is bound to its address (or dropped). What has been taken changes nothing.
        Raises ResourceLimit for more messages than a record can hold.
        """
        if next_offset <= self.ingress_positions.get(partition, 0):
            return
        if len(sends) > MESSAGES_PER_RECORD_MAX:
            raise ResourceLimit(f"{len(sends)} ingress messages before offset {next_offset}; a record holds {MESSAGES_PER_RECORD_MAX}")
        self.ingress_positions[partition] = next_offset
        now_ms = self.clock()
        self.journaling.together(sum(len(send.body) + SEND_OVERHEAD_BYTES for send, _ in sends), len(sends))
        for send, keep in sends:
            self._take_in(send, keep, now_ms)
        self.journaling.add(ingress_entry(partition, next_offset))
        self.journaling.part()
        self.journaling.then(self.confirmed_ingress.__setitem__, partition, next_offset)

    def ingress_is(self, topic_id: str, positions: dict[int, int]) -> None:
        """``bascule.ingress`` is the topic with this id from now on, of which all before these positions has been taken."""
        self.ingress_positions = positions
        self.journaling.add(json_entry(Op.INGRESS_TOPIC, {"id": topic_id, "positions": sorted(positions.items())}))
        self.journaling.then(self._ingress_is, topic_id, dict(positions))

    def _ingress_is(self, topic_id: str, positions: dict[int, int]) -> None:
        self.ingress_topic_id, self.confirmed_ingress = topic_id, positions

    def _take_in(self, send: Send, keep: bool, now_ms: int) -> None:
        routing = Routing(send.routing)
        missing = routing is Routing.ANYCAST and send.address not in self.addresses.anycast
        if missing and keep and not send.address.startswith(TEMPORARY_PREFIX):
            self.recreate(send.address)
        route = self.addresses.route(send.address, routing)
        if not route.queues and not keep:
            return
        group = group_of(send.body) if send.flags & SendFlag.GROUPED else None
        expiry_ms = self.policy.of(send.address).expiry_of(send.expiry_ms, now_ms) if route.expiring else send.expiry_ms
        message = Message(send.body, min(send.priority, PRIORITY_MAX), expiry_ms, group)
        queues, taken = self._to_queues(route, send.body)
        flags = send.flags | SendFlag.FROM_KAFKA | SendFlag.DURABLE | (SendFlag.DIVERTS if taken else 0)
        decided = send._replace(flags=flags, timestamp_ms=now_ms, expiry_ms=expiry_ms, queues=durable_ids(queues), diverts=taken)
        message.mid, message.durable = self.journaling.add_send(send_entry(decided), send.duplicate_ids), True
        for queue in queues:
            queue.expect(message)
        self.counters.messages_in += 1
        self.journaling.then(self.put_in, message, queues, send.delivery_time_ms)
