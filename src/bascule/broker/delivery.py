"""Delivery of messages to consumers, and the handling of messages that no consumer takes. A part of the engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from bascule.broker import expiry
from bascule.broker.containment import ErrorKind
from bascule.broker.counters import Counters
from bascule.broker.errors import BodyUnavailable, RequestFailed
from bascule.broker.fan_out import FanOut
from bascule.broker.journaling import Journaling
from bascule.broker.leaving import LeavingMessages
from bascule.broker.matching import Matching
from bascule.broker.message import Bodies, BrokerMessage
from bascule.broker.ports import ConsumerPort, DeliveryHooks
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.broker.reservations import Reservations
from bascule.broker.returns import Returns
from bascule.broker.schedule import Schedule
from bascule.broker.turns import Allowance, Turns, Work
from bascule.jms.selector import Selector
from bascule.journal.records import count_entry

#: Steps of a delivery, and of a check of a consumer.
DELIVERY_STEPS, LOOK_STEPS = 10, 1
DELIVERED_BYTES_PER_STEP = 4_096
#: Steps of a look at a queue that delivers nothing: a client may have changed thousands of queues that are empty.
QUEUE_STEPS = 5
#: Steps of telling a consumer that the queue has delivered all that it can, and of resuming a sender that waited for room.
ASKING_STEPS, GO_ON_STEPS = 3, 20
#: Steps of putting a message into one queue, and of ending the delay of a message in one queue.
ARRIVAL_STEPS, DUE_STEPS = 2, 4
#: Scheduled actions of one turn, so that the turn stays short.
DUE_MAX = 1_000
#: Delivery counts in one journal entry: a consumer may return any number of messages, and the size of a record is limited.
COUNTS_MAX = 10_000
#: Pause before the next try for a message that could not be moved, or whose body could not be read.
FAILED_RETRY_MS = 60_000
#: Why a message was moved to another address.
ATTEMPTS, REJECTED, EXPIRED = "delivery-attempts", "rejected", "expired"


class Deliveries:
    """Queues with their consumers. ``clock`` returns milliseconds since the epoch."""

    def __init__(self, journaling: Journaling, bodies: Bodies, clock: Callable[[], int], hooks: DeliveryHooks) -> None:
        self._hooks = hooks
        self.journaling = journaling
        self.errors = journaling.errors
        self.bodies = bodies
        self.memory = bodies.account
        self.clock = clock
        self.schedule = Schedule(self.errors)
        self.turns = Turns(when_stored=journaling.then, errors=journaling.errors)
        journaling.turns = self.turns
        self.watch_expiry = expiry.Expiry(self.turns, self.schedule, clock, self._expire, self.errors).watch
        self.counters = Counters()
        self.next_position = 1
        matching = Matching(bodies, self.errors)
        self.matches, self.wants = matching.matches, matching.wants
        self._search = Allowance()  # of the queue that is being served
        self.dirty: OrderedDict[BrokerQueue, None] = OrderedDict()  # queues that may have messages to deliver; see BrokerQueue.takers
        self.returns = Returns(self.turns, self.dirty)
        self._reservations = Reservations(journaling, self.dirty)
        self.leaving = LeavingMessages(journaling, self.turns, self.forget)
        self.fan_out = FanOut(self)  # the engine replaces it by one that breaks rules, if a test asks for it

    def tick(self) -> None:
        """Run the scheduled actions that are due. If the turn is too short for all of them, the next ones are due at once."""
        self.turns.left = max(self.turns.left, self.turns.steps // 2)
        self.schedule.run(self.clock(), DUE_MAX, self.turns)

    # -- arrival -----------------------------------------------------------------------------------------------------

    def put_in(self, message: BrokerMessage, queues: Collection[BrokerQueue], due_ms: int = 0) -> Work | None:
        """Put a message into its queues, or begin its delay if ``due_ms`` is in the future. Return the rest of the work: see FanOut."""
        if len(queues) > self.fan_out.many or (message.mid < 0 and self.fan_out.waiting and self.fan_out.meets(queues)):
            return self.fan_out.begin(message, queues, due_ms)
        self.turns.left -= ARRIVAL_STEPS * len(queues)
        message.position = self.next_position
        self.next_position += 1
        if due_ms and due_ms > self.clock():
            there = [queue for queue in queues if not queue.deleted]
            for queue in there:
                queue.hold(message, expected=True)
            self.delay(message, there, due_ms)
        else:
            for queue in queues:
                if not queue.deleted:
                    queue.take_in(message)
                    self.dirty[queue] = None
                    if message.expiry_ms:
                        self.watch_expiry(queue, message.expiry_ms)
        if message.references:
            much = self.memory.bodies_bytes > self.memory.first_bodies_max_bytes
            self.bodies.hold(message, for_long=much and self.bodies.roomy and self._behind_many(queues))
        return None

    def _behind_many(self, queues: Collection[BrokerQueue]) -> bool:
        """Return True if the last message is behind many bytes of other messages in each of its queues."""
        return all(queue.ready.size_bytes > self.memory.first_bodies_max_bytes for queue in queues)

    def delay(self, message: BrokerMessage, queues: list[BrokerQueue], due_ms: int) -> None:
        """Delay a message in its queues until ``due_ms`` (Jakarta Messaging 3.1, section 7.9)."""
        for queue in queues:
            queue.delayed.put(message, due_ms)
        if queues:
            message.keep_timer(self.schedule.cancellable(due_ms, self.arrive, message, queues))

    def arrive(self, message: BrokerMessage, queues: list[BrokerQueue]) -> None:
        """End the delay of a message: put it behind the messages that arrived before."""
        if len(queues) > self.fan_out.many or self.fan_out.ended_delays:
            self.fan_out.end_delay(message, queues)
            return
        self.turns.left -= DUE_STEPS * len(queues)
        there = [queue for queue in queues if queue.delayed.remove(message)]
        message.position = self.next_position
        self.next_position += 1
        self.fan_out.arrive_late(message, there)

    # -- consumers ---------------------------------------------------------------------------------------------------

    def attach(self, queue: BrokerQueue, port: ConsumerPort, selector: Selector | None = None, user: str = "") -> QueueConsumer:
        """Attach a consumer of a user to a queue, with a selector of its own. Raises ResourceLimit."""
        consumer = QueueConsumer(queue, port, user=user)
        if selector is not None:
            chars = self.memory.selectors.check(selector.text, user)
            consumer.view = queue.ready.view(selector.text, partial(self.matches, selector), user)
            self.memory.selectors.add(chars, user)
            consumer.selector_text, consumer.selector_chars = selector.text, chars
        queue.consumers[consumer] = queue.takers[consumer] = None
        if queue.unused_since_ms:
            self._hooks.begin_use(queue)
        return consumer

    def detach(self, consumer: QueueConsumer, *, failed: bool = True, seen: bool = True) -> None:
        """Detach a consumer and return its unsettled messages to the queue, with ``failed`` as failed deliveries.

        Other deliveries do not count as failed attempts, since most were only prefetched. They are marked as possibly delivered, unless
        ``seen`` is false: the application has certainly not seen them.
        """
        queue = consumer.queue
        if consumer not in queue.consumers:
            return
        for consumers in (queue.consumers, queue.takers, queue.starved, queue.asking):
            consumers.pop(consumer, None)
        if queue.groups is not None:
            self.returns.begin(queue, queue.groups.leave(consumer))
        if consumer.view is not None:
            queue.ready.leave(consumer.selector_text)
        self.memory.selectors.add(-consumer.selector_chars, consumer.user)
        unacked = list(consumer.unacked.values())
        consumer.unacked.clear()
        self.memory.unsettled -= len(unacked)
        if not failed and seen:
            self.returns.in_pieces(queue, unacked, self._put_back_seen)
        else:
            self.returns.in_pieces(queue, unacked, partial(self._put_back, failed=failed))
        if queue.settings.exclusive and queue.consumers:
            queue.takers[next(iter(queue.consumers))] = None
        if queue.starved:
            queue.feed()
        self.dirty[queue] = None
        if not queue.consumers:
            self._hooks.look_for_use(queue)
        if queue.durable and not queue.consumers:
            self._reservations.end(queue)

    def acknowledge(self, consumer: QueueConsumer, message: BrokerMessage) -> None:
        """Remove a message that its consumer has acknowledged, and journal the acknowledgement. A repetition does nothing."""
        unacked, queue = consumer.unacked, consumer.queue
        if message.position not in unacked or queue.deleted:
            return
        if queue.durable and message.mid >= 0:  # as journal_gone and settled do; each call costs more
            self.journaling.add_ack(queue, message.mid)
        del unacked[message.position]
        self.memory.unsettled -= 1
        if queue.settings.prefetch_max:
            queue.takers[consumer] = self.dirty[queue] = None
        self.counters.acknowledged += 1
        self.forget(queue, message)

    def settled(self, consumer: QueueConsumer, message: BrokerMessage) -> bool:
        """End the hold of a consumer on a message. Return False if there was none: consumers of a deleted queue hold nothing."""
        queue = consumer.queue
        if queue.deleted or consumer.unacked.pop(message.position, None) is None:
            return False
        self.memory.unsettled -= 1
        if queue.settings.prefetch_max:
            queue.takers[consumer] = self.dirty[queue] = None
        return True

    def gone(self, queue: BrokerQueue, message: BrokerMessage) -> None:
        """Remove an unheld message and journal its acknowledgement."""
        self.journal_gone(queue, message)
        self.forget(queue, message)

    def journal_gone(self, queue: BrokerQueue, message: BrokerMessage) -> None:
        """Journal the acknowledgement of a message; the caller then calls ``forget``."""
        if queue.durable and message.mid >= 0 and not queue.deleted:
            self.journaling.add_ack(queue, message.mid)

    def forget(self, queue: BrokerQueue, message: BrokerMessage, *, counted: bool = True) -> None:
        """Remove an unheld message whose acknowledgement is in the open record. For ``counted`` see BrokerQueue.drop. Raises nothing."""
        queue.drop(message, counted=counted)
        self.release(message)
        if queue.blocked and not queue.full():
            self.go_on(queue)
        if not queue.held_messages and queue.auto_created and not queue.consumers:
            self._hooks.look_for_use(queue)

    def go_on(self, queue: BrokerQueue) -> None:
        """Resume the senders that wait for room in a queue."""
        waiting, queue.blocked = queue.blocked, {}
        if waiting:
            self.turns.begin(self._going_on(waiting))

    def _going_on(self, waiting: dict[object, Callable[[], object]]) -> Work:
        for go_on in waiting.values():
            self.errors.run(ErrorKind.LINK, go_on)
            yield GO_ON_STEPS

    def release(self, message: BrokerMessage) -> None:
        """Count down the references of a message that a queue no longer holds. The last one releases the body."""
        message.references -= 1
        self.memory.entries -= 1
        if not message.references:
            try:
                self.bodies.release(message)
            except Exception as error:
                self.errors.contain(ErrorKind.BODY, error)

    def give_back(self, consumer: QueueConsumer, message: BrokerMessage, *, failed: bool) -> None:
        """Return a message that its consumer released, or modified with a failed delivery, to its place in the queue."""
        if self.settled(consumer, message):
            self.put_back(consumer.queue, [message], failed=failed)

    def reject(self, consumer: QueueConsumer, message: BrokerMessage) -> None:
        """Move a message that its consumer rejected to the dead-letter address, or to the expiry address if the message has expired."""
        if self.settled(consumer, message):
            if message.expiry_ms and message.expiry_ms <= self.clock():
                self._expire(consumer.queue, message)  # JMS clients reject expired messages (Jakarta Messaging 3.1, section 3.4.9)
            else:
                self._dead_letter(consumer.queue, message, REJECTED)

    def put_back(self, queue: BrokerQueue, messages: list[BrokerMessage], *, failed: bool) -> None:
        """Return messages to their queue. ``failed`` raises their delivery counts; at the limit they go to the dead-letter address."""
        self.returns.in_pieces(queue, messages, partial(self._put_back, failed=failed))

    def put_back_all(self, queues: Iterable[BrokerQueue], messages: Iterator[tuple[BrokerQueue, BrokerMessage]]) -> None:
        """Return many messages to several queues, each as a failed delivery."""
        self.returns.of_several(queues, messages, partial(self._put_back, failed=True))

    def _put_back_seen(self, queue: BrokerQueue, messages: list[BrokerMessage]) -> None:
        """Return messages that an application may have seen, and whose delivery did not fail."""
        self._count(queue, {message: 1 for message in messages if not queue.delivery_count(message)})
        self._put_back(queue, messages, failed=False)

    def _put_back(self, queue: BrokerQueue, messages: list[BrokerMessage], *, failed: bool) -> None:
        if queue.deleted:
            for message in messages:
                self.release(message)
            return
        dead: list[BrokerMessage] = []
        if failed:
            counts = {message: queue.delivery_count(message) + 1 for message in messages}
            self._count(queue, counts)
            deliveries_max = queue.settings.deliveries_max
            dead = [message for message, count in counts.items() if count >= deliveries_max]
            messages = [message for message, count in counts.items() if count < deliveries_max]
            if queue.settings.redelivery_delay_ms:
                self._postpone(queue, messages, counts)
                messages = []
        if messages:
            queue.put_back(messages)
            self.dirty[queue] = None
            for message in messages:
                if queue.starved:
                    queue.feed()
                if message.expiry_ms:
                    self.watch_expiry(queue, message.expiry_ms)
        if dead:
            self.returns.begin(queue, self._dead_lettering(queue, dead))

    def _dead_lettering(self, queue: BrokerQueue, dead: list[BrokerMessage]) -> Work:
        for message in dead:
            self._dead_letter(queue, message, ATTEMPTS)
            yield expiry.EXPIRE_STEPS

    def _postpone(self, queue: BrokerQueue, messages: list[BrokerMessage], counts: dict[BrokerMessage, int]) -> None:
        """Delay messages whose delivery failed. The delay is not journaled: after a restart the messages may be delivered at once."""
        by_pause: dict[int, list[BrokerMessage]] = {}
        for message in messages:
            by_pause.setdefault(queue.settings.redelivery_pause_ms(counts[message]), []).append(message)
        for pause_ms, postponed in by_pause.items():
            self._postpone_by(queue, postponed, pause_ms)

    def _postpone_by(self, queue: BrokerQueue, messages: list[BrokerMessage], pause_ms: int) -> None:
        due_ms = self.clock() + pause_ms
        for message in messages:
            queue.delayed.put(message, due_ms)
        purpose = object()
        queue.keep_timer(purpose, self.schedule.cancellable(due_ms, self._try_again, queue, purpose, messages))

    def _try_again(self, queue: BrokerQueue, purpose: object, messages: list[BrokerMessage]) -> None:
        queue.timer_for.pop(purpose, None)
        self.turns.left -= DUE_STEPS * len(messages)
        self.put_back(queue, [message for message in messages if queue.delayed.remove(message)], failed=False)

    def _count(self, queue: BrokerQueue, counts: dict[BrokerMessage, int]) -> None:
        journaled = queue.set_counts(counts)
        if queue.durable:
            try:
                for first in range(0, len(journaled), COUNTS_MAX):
                    self.journaling.add(count_entry(queue.id, journaled[first : first + COUNTS_MAX]))
            except Exception as error:  # a restart forgets these counts; the messages return to the queue all the same
                self.errors.contain(ErrorKind.DELIVERY, error, queue=queue.name)

    # -- messages that nobody takes ----------------------------------------------------------------------------------

    def _dead_letter(self, queue: BrokerQueue, message: BrokerMessage, reason: str) -> None:
        try:
            moved = self._hooks.move(queue, message, queue.settings.dead_letter_address, reason)
        except Exception as error:
            self._set_aside(queue, message, ErrorKind.MOVE, error)
            return
        if moved:
            self.counters.dead_lettered += 1
        else:
            self.put_back(queue, [message], failed=False)  # the queue is the dead-letter queue itself

    def _expire(self, queue: BrokerQueue, message: BrokerMessage) -> None:
        """Move an unheld message to the expiry address, or remove it if there is none."""
        try:
            if not self._hooks.move(queue, message, queue.settings.expiry_address, EXPIRED):
                self.gone(queue, message)
        except Exception as error:
            self._set_aside(queue, message, ErrorKind.MOVE, error)
            return
        self.counters.expired += 1

    def _set_aside(self, queue: BrokerQueue, message: BrokerMessage, kind: ErrorKind, error: Exception) -> None:
        """Keep an unheld message in its queue, undeliverable until the next try in ``FAILED_RETRY_MS``."""
        self.errors.contain(kind, error, queue=queue.name, mid=message.mid)
        self._postpone_by(queue, [message], FAILED_RETRY_MS)

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def wake(self, queue: BrokerQueue, consumer: QueueConsumer | None = None) -> None:
        """Note that a consumer of the queue has credit, or can receive again. None stands for all consumers."""
        if consumer is None:
            queue.takers.update(queue.consumers)
            queue.asking.update(queue.consumers)
            queue.starved.clear()
        else:
            queue.starved.pop(consumer, None)
            queue.takers[consumer] = queue.asking[consumer] = None
        self.dirty[queue] = None

    @property
    def pending(self) -> bool:
        """Return whether another turn has to dispatch messages."""
        return bool(self.dirty)

    def dispatch(self) -> None:
        """Deliver waiting messages in all changed queues, at the end of each turn. If no steps are left, the next turn continues."""
        turns, dirty = self.turns, self.dirty
        while dirty:
            if turns.left <= 0:
                turns.on_backlog()
                return
            queue = next(iter(dirty))
            del dirty[queue]
            if queue.deleted or queue.returning:
                continue
            others_left = turns.left - min(turns.slice_steps_max, turns.left)
            turns.left -= others_left
            try:
                if not self._dispatch(queue):
                    dirty[queue] = None  # behind the other queues
            except Exception as error:
                self.errors.contain(ErrorKind.DELIVERY, error, queue=queue.name)
            turns.left += others_left

    def _dispatch(self, queue: BrokerQueue) -> bool:
        """Deliver messages of one queue. Return False if the queue's share of the turn is spent before all possible deliveries are made."""
        turns, before = self.turns, self.counters.messages_out
        turns.left -= LOOK_STEPS
        if queue.blocked and queue.oldest_volatile() is not None:  # the callers that wait let the queue drop messages
            self.go_on(queue)
        done, spent = self._hand_out(queue), turns.left <= 0
        if self.counters.messages_out == before:
            turns.left -= QUEUE_STEPS - LOOK_STEPS  # charged after the look, so that a small share of a turn is enough for one delivery
        if not done:
            return not spent
        # Reserve ahead only if a message was delivered: reservations of many idle queues would otherwise cause one another without end.
        if queue.durable and not queue.ready.count and self.counters.messages_out > before:
            self._reservations.reserve_ahead(queue)
        while queue.asking:
            turns.left -= ASKING_STEPS
            self.errors.run(ErrorKind.LINK, queue.asking.popitem()[0].port.dispatched)
            if turns.left <= 0:  # after one at least, so that a small share of a turn is enough
                return not queue.asking
        return True

    def _hand_out(self, queue: BrokerQueue) -> bool:
        """Deliver to the consumers in rotation, until none can take another message. Return False if delivery continues later:

        the next message needs a reservation, many messages have expired, or the queue's share of the turn is spent.
        """
        takers, starved, turns, ready = queue.takers, queue.starved, self.turns, queue.ready
        credited: QueueConsumer | None = None  # the only taker, after a delivery that has left it credit
        searching: dict[QueueConsumer, None] = {}  # consumers whose search has not ended; consumers that need no search come first
        search, expired_bytes = self._search, 0
        search.left = max(1, turns.left // 2)
        while (queue.fed and queue.feed_some(turns)) or takers or searching:
            if turns.left <= 0:
                takers.update(searching)
                return False
            if not takers:
                takers.update(searching)
                searching.clear()
                search.left = turns.left
            consumer = next(iter(takers))
            if consumer is not credited and not queue.may_serve(consumer):
                del takers[consumer]
                turns.left -= LOOK_STEPS
                if starved:
                    queue.feed()  # another consumer may take the messages that this one cannot take
                continue
            if consumer.view is None and queue.groups is None:
                message = ready.peek() if ready.count else None
            else:
                turns.left -= search.left
                message = queue.next_for(consumer, search)
                turns.left += search.left
            if message is None:
                del takers[consumer]
                (starved if search.left > 0 else searching)[consumer] = None
                turns.left -= LOOK_STEPS
                continue
            if message.expiry_ms and message.expiry_ms <= self.clock():
                if expired_bytes > expiry.EXPIRED_BYTES:
                    takers.update(searching)
                    self.journaling.then(self.schedule.at, self.clock(), self.dirty.setdefault, queue)
                    return False
                queue.take_out(message)
                self._expire(queue, message)
                expired_bytes += message.size_bytes + expiry.EXPIRED_OVERHEAD_BYTES
                turns.left -= expiry.EXPIRE_STEPS + ready.take_steps
                continue
            if queue.durable and message.mid > queue.reserved_mid:
                takers.update(searching)
                if message.mid > queue.reserving_mid:
                    self._reservations.reserve(queue, queue.next_reservation(message, self.journaling.sequence + 1))
                return False
            turns.left -= self.bodies.read_steps(message) if message.body is None else 0
            credit = self._give(queue, consumer, message)
            turns.left -= DELIVERY_STEPS + ready.take_steps + message.size_bytes // DELIVERED_BYTES_PER_STEP
            # A delivery to another consumer of the same client may use up the client's credit.
            credited = consumer if credit > 0 and len(takers) == 1 and not queue.fed and not queue.settings.prefetch_max else None
            if (queue.fed or len(takers) > 1) and consumer in takers:
                queue.rotate(consumer)
        return True

    def _give(self, queue: BrokerQueue, consumer: QueueConsumer, message: BrokerMessage) -> int:
        """Deliver a waiting message. Return the credit that is left to the consumer, 0 if the delivery failed."""
        if queue.groups is None:
            (queue.ready.take if queue.ready.views else queue.ready.remove)(message)
        else:
            queue.groups.take(consumer, message)
        if queue.volatile is not None and not message.durable:
            queue.volatile.remove(message)
        consumer.unacked[message.position] = message
        self.memory.unsettled += 1
        count = queue.delivery_count(message) if queue.counts or message.mid <= queue.recovered_mid else 0
        self.counters.messages_out += 1
        if count:
            self.counters.redelivered += 1
        try:
            return consumer.port.deliver(message, count)
        except Exception as error:
            self._not_delivered(consumer, message, error)
            return 0

    def _not_delivered(self, consumer: QueueConsumer, message: BrokerMessage, error: Exception) -> None:
        """Handle a failed delivery: an unreadable body delays the message, any other error detaches the consumer and counts."""
        queue = consumer.queue
        if isinstance(error, BodyUnavailable):
            if self.settled(consumer, message):
                self._set_aside(queue, message, ErrorKind.BODY, error)
            return
        self.errors.contain(ErrorKind.DELIVERY, error, queue=queue.name, mid=message.mid)
        self.give_back(consumer, message, failed=True)
        self.detach(consumer, failed=False)
        failed = RequestFailed(f"the broker failed to deliver a message of {queue.name!r}; see the broker's log")
        self.errors.run(ErrorKind.LINK, consumer.port.ended, failed)
