"""The broker engine: destinations, messages and consumers, without sockets, clocks or threads.

Commands are methods; effects go out through the ports: the log's ``append``, links, and the body store. Every decision about persistent
things is an entry of a journal record, and is carried out when that record is confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bascule.broker.addresses import AddressBook, ExclusiveDivert, durable_ids
from bascule.broker.duplicates import DuplicateWindows, digest_of
from bascule.broker.errors import JournalUnavailable, ResourceLimit, TransactionRolledBack
from bascule.broker.journaling import Journaling
from bascule.broker.matching import wants
from bascule.broker.message import PRIORITY_MAX, Bodies, Message
from bascule.broker.ports import ConsumerPort, Policy, SendPort
from bascule.broker.queue import RESERVE_SEQUENCES, Consumer, Queue
from bascule.broker.transactions import Draft, Transaction
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.jms.sections import Scan, application_property
from bascule.jms.selector import Selector
from bascule.journal.records import (
    INDEX_MAX,
    MESSAGES_PER_RECORD_MAX,
    Op,
    Send,
    SendFlag,
    Target,
    count_entry,
    encode_diverts,
    ingress_entry,
    json_entry,
    mid_of,
    queue_deleted_entry,
    reserve_entry,
    routed_send_entry,
    send_entry,
)

#: Queues a broker holds; each costs memory for good, and a peer can ask for any name. A SEND entry counts its queues in 16 bits.
QUEUES_MAX = 65_535
#: What a SEND entry takes at most beside body, address and queues: fixed fields, two digests, and some names of diverts.
SEND_OVERHEAD_BYTES = 256
DUPLICATE_ID_PROPERTY = "_AMQ_DUPL_ID"
_DUPLICATE_ID_BYTES = DUPLICATE_ID_PROPERTY.encode()
_FLAGS_OF_DIGESTS = (0, SendFlag.DUPLICATE_ID, SendFlag.DUPLICATE_ID | SendFlag.SECOND_DUPLICATE_ID)


class Engine:
    """All state of one broker and the commands on it. ``clock`` gives milliseconds since the epoch."""

    def __init__(self, journaling: Journaling, bodies: Bodies, clock: Callable[[], int], policy: Policy | None = None) -> None:
        self.journaling = journaling
        self.policy = policy or Policy()
        self.bodies = bodies
        self.clock = clock
        self.addresses = AddressBook()
        self.windows = DuplicateWindows(self.policy.duplicate_count, self.policy.duplicate_ms)
        self.ingress_positions: dict[int, int] = {}
        self.confirmed_ingress: dict[int, int] = {}  # as ingress_positions, of confirmed records
        self.transactions: dict[bytes, Transaction] = {}
        self.stalled: JournalUnavailable | None = None
        self._dirty: dict[Queue, None] = {}
        self.next_queue_id = 1
        self.next_position = 1

    # -- destinations ------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        """The anycast queue of a name; made when it is not there. Raises ResourceLimit."""
        queue = self.addresses.anycast.get(name)
        return self.create_queue(name, name, Routing.ANYCAST) if queue is None else queue

    def create_queue(
        self, name: str, address: str, routing: Routing, *,
        durable: bool = True, selector: str = "", no_local: str = "", subscription: str = "",
    ) -> Queue:  # fmt: skip
        """A new queue, bound to its address. A durable one is there for good once the open record is stored. Raises ResourceLimit."""
        if len(self.addresses.queues) >= QUEUES_MAX:
            raise ResourceLimit(f"queue {name!r}: the broker holds {QUEUES_MAX} queues already")
        queue = Queue(self.next_queue_id, name, address, routing, durable=durable)
        queue.selector_text, queue.no_local_container, queue.subscription = selector, no_local, subscription
        return self._create(queue)

    def _create(self, queue: Queue) -> Queue:
        """Without a look at the limit: for a message that has been accepted already."""
        self.next_queue_id += 1
        self.addresses.add(queue)
        if queue.durable:
            self.journaling.add(json_entry(Op.QUEUE_CREATED, queue.describe()))
            self.journaling.then(self._created, queue)
        return queue

    def _created(self, queue: Queue) -> None:
        queue.confirmed = True

    def delete_queue(self, queue: Queue) -> None:
        """The queue and what it holds are gone, with its consumers' unsettled messages."""
        if queue.deleted:
            return
        queue.deleted = True
        self.addresses.remove(queue)
        for message in (*queue.ready, *queue.unacked()):
            self.release(message)
        for consumer in queue.consumers:
            consumer.unacked.clear()
        queue.consumers.clear()
        if queue.durable:
            self.journaling.add(queue_deleted_entry(queue.id))

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(
        self, address: str, routing: Routing, body: bytes, scan: Scan, container: str, port: SendPort, token: Any,
        transaction: Transaction | None = None,
    ) -> None:  # fmt: skip
        """Take a message. ``port`` is answered when it is stored; in a transaction at once, and stored with the commit."""
        try:
            if routing is Routing.ANYCAST:
                self.queue(address)
            if scan.durable and self.stalled is not None and transaction is None:
                raise self.stalled
            duplicate_ids = self._duplicate_ids(address, body, scan, container, in_transaction=transaction is not None)
        except BasculeError as error:
            port.refused(token, error)
            return
        now_ms = self.clock()
        expiry_ms = scan.absolute_expiry_ms or (now_ms + scan.ttl_ms if scan.ttl_ms else 0)
        message = Message(body, min(scan.priority, PRIORITY_MAX), expiry_ms)
        draft = Draft(message, address, routing, body, scan.durable, container, duplicate_ids, scan.delivery_time_ms)
        if transaction is not None:
            self._gather(transaction, draft)
            port.accepted(token)
            return
        if self._put(draft, now_ms):
            self.journaling.then(port.accepted, token)
            self.journaling.close_if_full()
        else:
            port.accepted(token)

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
            self.journaling.then(self._stored, draft.message, queues)
            return True
        self._stored(draft.message, queues)
        return False

    def _decide(self, draft: Draft, now_ms: int) -> tuple[Queue, ...] | None:
        """Which queues take a message, None for a repeat; what must survive a crash of it goes into the open record."""
        message, address, routing = draft.message, draft.address, draft.routing
        if draft.duplicate_ids and not self.windows.window(address).admit(draft.duplicate_ids, now_ms):
            return None
        if routing is Routing.ANYCAST and address not in self.addresses.anycast:
            self._create(Queue(self.next_queue_id, address, address, routing, durable=True))  # deleted since it was asked for
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
        entry = routed_send_entry(
            flags, draft.routing, message.priority, now_ms, message.expiry_ms, draft.delivery_time_ms, target, options, draft.body
        )
        return self.journaling.add_send(entry, draft.duplicate_ids)

    def _stored(self, message: Message, queues: tuple[Queue, ...]) -> None:
        """A message is in its queues: the moment from which consumers may have it."""
        message.position = self.next_position
        self.next_position += 1
        for queue in queues:
            if not queue.deleted:
                queue.ready.append(message)
                message.references += 1
                self._dirty[queue] = None
        if message.references:
            self.bodies.hold(message)

    # -- consuming ---------------------------------------------------------------------------------------------------

    def attach(self, queue: Queue, port: ConsumerPort, selector: Selector | None = None) -> Consumer:
        """A consumer of a queue, with a selector of its own."""
        consumer = Consumer(queue, port)
        if selector is not None:
            consumer.selector_text = selector.text
            consumer.view = queue.ready.view(selector.text, partial(self.matches, selector))
        queue.consumers.append(consumer)
        return consumer

    def matches(self, selector: Selector, message: Message) -> bool:
        """Whether a selector wants a message."""
        return wants(selector, self.bodies.read(message))

    def detach(self, consumer: Consumer, *, failed: bool = True) -> None:
        """A consumer is gone: what it had not settled is the queue's again.

        ``failed`` counts that as a failed delivery. Without, it is marked as maybe delivered and gets no nearer to its dead letter:
        most of it was prefetched and never seen.
        """
        queue = consumer.queue
        if consumer not in queue.consumers:
            return
        queue.consumers.remove(consumer)
        if consumer.view is not None:
            queue.ready.leave(consumer.selector_text)
        unacked = list(consumer.unacked.values())
        consumer.unacked.clear()
        if not failed:
            self._count(queue, {message: 1 for message in unacked if not queue.delivery_count(message)})
        self._return(queue, unacked, failed=failed)
        if queue.durable and not queue.consumers:
            # Nothing goes out any more: what arrives from here on cannot have been delivered.
            handed_out = mid_of(self.journaling.sequence, INDEX_MAX)
            if queue.reserving_mid > handed_out:
                self._reserve(queue, handed_out)

    def acknowledge(self, consumer: Consumer, message: Message) -> None:
        """The consumer has it: it leaves the queue. Repeats do nothing."""
        if consumer.unacked.pop(message.position, None) is not None:
            self._gone(consumer.queue, message)

    def _gone(self, queue: Queue, message: Message) -> None:
        if queue.counts:
            queue.counts.pop(message.position, None)
        if queue.durable and message.mid >= 0 and not queue.deleted:
            self.journaling.add_ack(queue, message.mid)
        self.release(message)

    def release(self, message: Message) -> None:
        """A queue holds the message no more."""
        message.references -= 1
        if not message.references:
            self.bodies.release(message)

    def give_back(self, consumer: Consumer, message: Message, *, failed: bool) -> None:
        """Released, or modified with a failed delivery: it waits again, in its place."""
        if consumer.unacked.pop(message.position, None) is not None:
            self._return(consumer.queue, [message], failed=failed)

    def reject(self, consumer: Consumer, message: Message) -> None:
        """The consumer will never take it: it goes to the dead-letter address."""
        if consumer.unacked.pop(message.position, None) is not None:
            self._dead_letter(consumer.queue, message)

    def _return(self, queue: Queue, messages: list[Message], *, failed: bool) -> None:
        """Messages wait again, each in its place; ``failed`` raises their counts, and at the limit they go to the dead-letter address."""
        if queue.deleted:
            for message in messages:
                self.release(message)
            return
        dead: list[Message] = []
        if failed:
            counts = {message: queue.delivery_count(message) + 1 for message in messages}
            self._count(queue, counts)
            dead = [message for message, count in counts.items() if count >= self.policy.deliveries_max]
            if dead:
                messages = [message for message, count in counts.items() if count < self.policy.deliveries_max]
        if messages:
            queue.ready.put_back(messages)
            self._dirty[queue] = None
        for message in dead:
            self._dead_letter(queue, message)

    def _count(self, queue: Queue, counts: dict[Message, int]) -> None:
        for message, count in counts.items():
            queue.counts[message.position] = count
        journaled = [(message.mid, count) for message, count in counts.items() if message.mid >= 0]
        if journaled and queue.durable:
            self.journaling.add(count_entry(queue.id, journaled))

    def _dead_letter(self, queue: Queue, message: Message) -> None:
        """Move it: its copy in the dead-letter queue and its end in this one are one record."""
        address = self.policy.dead_letter_address
        if queue.deleted or queue is self.addresses.anycast.get(address):
            self._return(queue, [message], failed=False)
            return
        body = self.bodies.read(message)
        draft = Draft(Message(body, message.priority), address, Routing.ANYCAST, body, message.journaled, "", (), 0)
        self.journaling.together(message.size_bytes)
        self._put(draft, self.clock())
        self._gone(queue, message)
        self.journaling.part()

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin(self, transaction_id: bytes) -> Transaction:
        """A new local transaction."""
        transaction = self.transactions[transaction_id] = Transaction(transaction_id)
        return transaction

    def acknowledge_in(self, transaction: Transaction, consumer: Consumer, message: Message) -> None:
        """An acknowledgement that counts with the commit."""
        if consumer.unacked.pop(message.position, None) is not None:
            transaction.acks.append((consumer, message))
            transaction.size_bytes += 16

    def commit(self, transaction: Transaction, done: Callable[[BasculeError | None], None]) -> None:
        """All of it, as one journal record; ``done(None)`` once that is stored, ``done(error)`` when it was rolled back instead."""
        persistent = any(draft.durable for draft in transaction.drafts) or any(message.mid >= 0 for _, message in transaction.acks)
        error = transaction.doomed or (self.stalled if persistent else None)
        if error is not None:
            self.rollback(transaction)
            done(TransactionRolledBack(str(error)))
            return
        self.transactions.pop(transaction.id, None)
        now_ms = self.clock()
        stored: list[tuple[Message, tuple[Queue, ...]]] = []
        self.journaling.together(transaction.size_bytes, len(transaction.drafts))
        for draft in transaction.drafts:
            queues = self._decide(draft, now_ms)
            if queues is not None:
                stored.append((draft.message, queues))
        for consumer, message in transaction.acks:
            self._gone(consumer.queue, message)
        self.journaling.part()
        self.journaling.then(self._committed, stored, done)
        self.journaling.close_if_full()

    def _committed(self, stored: list[tuple[Message, tuple[Queue, ...]]], done: Callable[[BasculeError | None], None]) -> None:
        for message, queues in stored:
            self._stored(message, queues)
        done(None)

    def rollback(self, transaction: Transaction) -> None:
        """None of it: the sends are forgotten, what was received is delivered again, with its count raised."""
        self.transactions.pop(transaction.id, None)
        returned: dict[Queue, list[Message]] = {}
        for consumer, message in transaction.acks:
            returned.setdefault(consumer.queue, []).append(message)
        for queue, messages in returned.items():
            self._return(queue, messages, failed=True)
        transaction.acks.clear()
        transaction.drafts.clear()

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def wake(self, queue: Queue) -> None:
        """A consumer of the queue has credit, or came back to life."""
        self._dirty[queue] = None

    def dispatch(self) -> None:
        """Give waiting messages to consumers with credit, in all queues where something changed: the end of each turn of the shell."""
        while self._dirty:
            queue, _ = self._dirty.popitem()
            if not queue.deleted:
                self._dispatch(queue)

    def _dispatch(self, queue: Queue) -> None:
        ready, consumers = queue.ready, queue.consumers
        idle = 0
        while idle < len(consumers):
            consumer = consumers[queue.turn % len(consumers)]
            queue.turn += 1
            if not ready.count or consumer.port.credit <= 0:
                idle += 1
                continue
            message = ready.peek() if consumer.view is None else consumer.view.peek()
            if message is None:
                idle += 1
                continue
            if message.expiry_ms and message.expiry_ms <= self.clock():
                ready.take(message)
                self._gone(queue, message)
                idle = 0
                continue
            if queue.durable and message.mid > queue.reserved_mid:
                if message.mid > queue.reserving_mid:
                    self._reserve(queue, queue.next_reservation(message, self.journaling.sequence + 1))
                return
            ready.take(message)
            consumer.unacked[message.position] = message
            consumer.port.deliver(message, queue.delivery_count(message))
            idle = 0
        if queue.durable and consumers and not ready.count:
            sequence = self.journaling.sequence
            if 0 <= queue.reserving_mid < mid_of(sequence + RESERVE_SEQUENCES // 2, 0):
                self._reserve(queue, mid_of(sequence + RESERVE_SEQUENCES, INDEX_MAX))
        for consumer in consumers:
            consumer.port.dispatched()

    def _reserve(self, queue: Queue, mid: int) -> None:
        queue.reserving_mid = mid
        self.journaling.add(reserve_entry(queue.id, mid))
        self.journaling.then(self._reserved, queue, mid)

    def _reserved(self, queue: Queue, mid: int) -> None:
        queue.reserved_mid = mid
        self._dirty[queue] = None

    def confirm(self) -> None:
        """The oldest record in flight is stored."""
        self.journaling.confirm()
        self.dispatch()

    # -- ingress -----------------------------------------------------------------------------------------------------

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

    def _take_in(self, send: Send, keep: bool, now_ms: int) -> None:
        routing = Routing(send.routing)
        if routing is Routing.ANYCAST and keep and send.address not in self.addresses.anycast:
            self._create(Queue(self.next_queue_id, send.address, send.address, routing, durable=True))
        route = self.addresses.route(send.address, routing)
        if not route.queues and not keep:
            return
        message = Message(send.body, min(send.priority, PRIORITY_MAX), send.expiry_ms)
        draft = Draft(message, send.address, routing, send.body, True, "", (), send.delivery_time_ms)
        taken = self._taken_by(tuple(divert for divert in route.exclusive if divert.from_kafka), send.body)
        queues = () if taken else route.queues
        if route.filtered:
            queues = tuple(queue for queue in queues if queue.wants(draft.container, draft.body))
        flags = send.flags | SendFlag.FROM_KAFKA | SendFlag.DURABLE | (SendFlag.DIVERTS if taken else 0)
        decided = send._replace(flags=flags, timestamp_ms=now_ms, queues=durable_ids(queues), diverts=taken)
        message.mid = self.journaling.add_send(send_entry(decided), send.duplicate_ids)
        self.journaling.then(self._stored, message, queues)
