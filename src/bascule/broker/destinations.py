"""Destinations: which queues exist, who may create them, and when they are deleted. A part of the engine."""

from __future__ import annotations

from collections.abc import Callable

from bascule.broker.addresses import TEMPORARY_PREFIX, AddressBook
from bascule.broker.containment import ErrorKind
from bascule.broker.delivery import Deliveries
from bascule.broker.errors import QueueDeleted, ResourceLimit, UnknownAddress
from bascule.broker.held import Held
from bascule.broker.policy import Policy
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.broker.subscription_use import SubscriptionUse
from bascule.broker.turns import Work
from bascule.core import crash
from bascule.core.destination import ADDRESS_MAX, Routing
from bascule.core.errors import InvalidInput
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.core.user_limits import UserResource
from bascule.journal.records import Op, json_entry, queue_deleted_entry

#: Steps of releasing a message of a deleted queue.
RELEASE_STEPS = 1
#: Messages that are removed from the index of journaled messages in a step.
REMOVED_PER_STEP = 20
#: Changes of a queue, as the audit names them.
CREATED = "create queue"
DELETED = "delete queue"
#: Steps of ending a consumer of a deleted queue, and of cancelling one of its timers.
END_STEPS = 50
CANCEL_STEPS = 5
#: The purpose of the timer of a queue.
_UNUSED = "unused"


class Destinations:
    """All queues of one broker."""

    def __init__(self, deliveries: Deliveries, policy: Policy) -> None:
        self.policy = policy
        self.addresses = AddressBook(policy, deliveries.memory)
        self.next_queue_id = 1
        self.journaling = deliveries.journaling
        self.clock = deliveries.clock
        self._deliveries = deliveries
        self.on_change: Callable[[str, BrokerQueue], None] = lambda _action, _queue: None  # called with CREATED or DELETED
        self.subscription_use = SubscriptionUse(self.journaling, deliveries.schedule, self.clock, self._expire_subscription)

    def window_limits(self, address: str) -> tuple[int, int]:
        """Return how many ids the duplicate window of an address holds, and for how many milliseconds."""
        settings = self.policy.of(address)
        return settings.duplicate_count, settings.duplicate_ms

    def queue(self, name: str, user: str = "") -> BrokerQueue:
        """Return the anycast queue of a name; create it for ``user`` if it does not exist.

        Raises UnknownAddress, InvalidInput, ResourceLimit.
        """
        queue = self.addresses.anycast.get(name)
        if queue is None:
            configured = name in self.policy.queues
            if not configured:
                self._check_creatable(name, Routing.ANYCAST)
            queue = self.create_queue(name, name, Routing.ANYCAST, auto_created=not configured, user="" if configured else user)
        return queue

    def check_topic(self, address: str) -> None:
        """Check that clients may send to a topic, or subscribe to it. Raises UnknownAddress, InvalidInput."""
        if not self.addresses.route(address, Routing.MULTICAST).queues and address not in self.policy.topics:
            self._check_creatable(address, Routing.MULTICAST)

    def _check_creatable(self, name: str, routing: Routing) -> None:
        kind = "queue" if routing is Routing.ANYCAST else "topic"
        if not 0 < len(name) <= ADDRESS_MAX:
            raise InvalidInput(f"the name of a {kind} must have 1 to {ADDRESS_MAX} characters, not {len(name)} ({name[:60]!r})")
        if name == MANAGEMENT_ADDRESS:
            raise InvalidInput(f"{MANAGEMENT_ADDRESS} is the address of the management node; a {kind} cannot have this name")
        if name.startswith(TEMPORARY_PREFIX):
            if name not in self.addresses.temporary:
                raise UnknownAddress(f"there is no temporary {kind} {name!r}: its connection has deleted it, or has ended")
        elif not self.policy.of(name).auto_create:
            raise UnknownAddress(f"there is no {kind} {name!r}, and clients may not create it (auto_create = false)")

    def create_queue(
        self, name: str, address: str, routing: Routing, *,
        durable: bool = True, selector: str = "", no_local: str = "", subscription: str = "", shared: bool = False,
        auto_created: bool = False, user: str = "", replaces: BrokerQueue | None = None,
    ) -> BrokerQueue:  # fmt: skip
        """Create a queue and bind it to its address. A durable queue survives restarts once the open record is stored.

        ``user`` is the creator, "" for the owner of the broker. ``replaces`` is a queue to delete in favour of the new one; it stays if the
        new queue is refused. Raises ResourceLimit.
        """
        if replaces is None or replaces.user != user:
            self._check_limits(name, user, durable_subscription=durable and bool(subscription))
        if selector:
            self._deliveries.memory.selectors.check(selector, user)
        queue = BrokerQueue(self.next_queue_id, name, address, routing, self.policy.of(address), durable=durable)
        queue.select(selector)
        queue.user = user
        queue.no_local_container, queue.subscription = no_local, subscription
        if replaces is None or replaces.user != user:
            self.addresses.check_room(queue)
        self.addresses.check_steps(queue, replaces)
        queue.shared, queue.auto_created = shared, auto_created
        if replaces is not None:
            self.delete_queue(replaces)
        return self._create(queue)

    def _check_limits(self, name: str, user: str, *, durable_subscription: bool) -> None:
        """Check that one more queue of this user is within the limits. Raises ResourceLimit."""
        policy, addresses = self.policy, self.addresses
        limits = [(len(addresses.queues), policy.queues_max, "queues and subscriptions", "broker.max_queues")]
        if user:
            of = f"of user {user!r}"
            most, setting = policy.user_limits.of(user, UserResource.QUEUES)
            limits.append((addresses.queues_of[user], most, f"queues and subscriptions {of}", setting))
            if durable_subscription:
                most, setting = policy.user_limits.of(user, UserResource.DURABLE_SUBSCRIPTIONS)
                limits.append((addresses.durable_subscriptions_of[user], most, f"durable subscriptions {of}", setting))
        for count, most, what, setting in limits:
            if most and count >= most:
                raise ResourceLimit(f"queue {name!r}: the limit of {most} {what} is reached ({setting})")

    def create_configured(self) -> None:
        """Create the queues that the configuration names, and watch unused queues. Called once the state is loaded."""
        for name in self.policy.queues:
            self.queue(name)
        for queue in self.addresses.queues.values():
            self.look_for_use(queue)

    def recreate(self, address: str) -> None:
        """Create the queue of a message that was accepted earlier, even beyond ``broker.max_queues``: the message has its answer.

        The queue counts for this limit, so no other queue can be created. It counts for no user: it was deleted since, and the journal does
        not name the user who had created it.
        """
        queue = BrokerQueue(self.next_queue_id, address, address, Routing.ANYCAST, self.policy.of(address), durable=True)
        queue.auto_created = True
        self._create(queue)

    def _create(self, queue: BrokerQueue) -> BrokerQueue:
        crash.point("queue.create.before")
        entry = json_entry(Op.QUEUE_CREATED, queue.describe()) if queue.durable else b""
        if entry:
            self.journaling.add(entry)
            crash.point("queue.create.after")
        self.next_queue_id += 1
        self.addresses.add(queue)
        if self.journaling.open_entries is not None:
            self.journaling.open_entries.undo(self._undo_create, queue)
        if entry:
            self.journaling.then(self._created, queue)
        self.on_change(CREATED, queue)
        return queue

    def _undo_create(self, queue: BrokerQueue) -> None:
        queue.deleted = True
        self.addresses.remove(queue)
        self.on_change(DELETED, queue)

    def _created(self, queue: BrokerQueue) -> None:
        queue.confirmed = True

    def give_subscription(self, queue: BrokerQueue, user: str) -> None:
        """Let a durable subscription belong to another user, whatever the limits of this user are."""
        self.addresses.change_user(queue, user)
        self.subscription_use.give(queue, user)

    def delete_queue(self, queue: BrokerQueue) -> None:
        """Delete a queue with all its messages, including those that its consumers have not settled."""
        if queue.deleted:
            return
        if queue.durable:
            self.journaling.add(queue_deleted_entry(queue.id))
            crash.point("queue.delete.after")
        queue.deleted = True
        self.addresses.remove(queue)
        self.on_change(DELETED, queue)
        consumers, queue.consumers = queue.consumers, {}  # from now on they hold nothing: see Deliveries.settled
        self._deliveries.turns.begin_decided(self._ended(queue, consumers))
        self._deliveries.turns.begin_decided(self._released(queue))
        self._deliveries.go_on(queue)

    def _ended(self, queue: BrokerQueue, consumers: dict[QueueConsumer, None]) -> Work:
        """Release what the consumers of a deleted queue have not settled, and tell them that the queue is gone. Yields steps."""
        memory = self._deliveries.memory
        while consumers:
            consumer = consumers.popitem()[0]
            held, consumer.unacked = consumer.unacked, {}
            memory.unsettled -= len(held)
            memory.selectors.add(-consumer.selector_chars, consumer.user)
            self.journaling.errors.run(ErrorKind.LINK, consumer.port.ended, QueueDeleted(f"queue {queue.name!r} has been deleted"))
            yield END_STEPS
            while held:
                self._deliveries.release(held.popitem()[1])
                yield RELEASE_STEPS

    def _released(self, queue: BrokerQueue) -> Work:
        """Release the messages of a deleted queue. Yields steps. One journal entry covers the whole queue."""
        journaled, queue.held = queue.held, Held()  # no snapshot reads the messages any more
        for count in journaled.emptied():
            yield count // REMOVED_PER_STEP
        while queue.timer_for:  # a timer keeps the queue and its messages in memory until the timer is due
            queue.timer_for.popitem()[1].cancel()
            yield CANCEL_STEPS
        groups = queue.groups
        while messages := queue.delayed.pop_some() or queue.ready.pop_some() or (groups is not None and groups.pop_some()):
            for message in messages:
                self._deliveries.release(message)
            yield len(messages) * RELEASE_STEPS

    def create_temporary(self, name: str, routing: Routing, user: str = "") -> None:
        """Create a temporary destination, which lives as long as its link. Raises ResourceLimit."""
        if routing is Routing.ANYCAST:
            self.create_queue(name, name, routing, durable=False, user=user)
        self.addresses.temporary.add(name)

    def delete_temporary(self, name: str) -> None:
        """Delete a temporary destination with its messages."""
        self.addresses.temporary.discard(name)
        queue = self.addresses.anycast.get(name)
        if queue is not None:
            self.delete_queue(queue)

    def attach_producer(self, address: str, routing: Routing, user: str = "") -> None:
        """Count a link that sends to an address; create the queue if needed. Raises UnknownAddress, InvalidInput, ResourceLimit."""
        if routing is Routing.ANYCAST:
            self.queue(address, user)
        else:
            self.check_topic(address)
        self.addresses.producers[address, routing] += 1

    def detach_producer(self, address: str, routing: Routing) -> None:
        """Note that a link that sent to an address has ended."""
        producers = self.addresses.producers
        producers[address, routing] -= 1
        if not producers[address, routing]:
            del producers[address, routing]
            queue = self.addresses.anycast.get(address)
            if routing is Routing.ANYCAST and queue is not None:
                self.look_for_use(queue)

    def _expire_subscription(self, queue: BrokerQueue) -> None:
        self._deliveries.counters.expired_subscriptions += 1
        self.delete_queue(queue)

    def look_for_use(self, queue: BrokerQueue) -> None:
        """Watch a queue for deletion: an empty, unused auto-created queue, or a durable subscription without a consumer."""
        if queue.durable and queue.routing is Routing.MULTICAST and not queue.consumers and not queue.deleted:
            self.subscription_use.end(queue)
        if self._unused(queue):
            watched, queue.idle_since_ms = queue.idle_since_ms, self.clock()
            if not watched:
                self._look_later(queue, queue.idle_since_ms + queue.settings.auto_delete_ms)

    def _unused(self, queue: BrokerQueue) -> bool:
        return (
            queue.auto_created and queue.settings.auto_delete and not queue.deleted
            and not (queue.consumers or queue.held_messages or queue.incoming or self.addresses.producers[queue.address, queue.routing])
        )  # fmt: skip

    def _delete_unused(self, queue: BrokerQueue) -> None:
        due_ms = queue.idle_since_ms + queue.settings.auto_delete_ms
        if not self._unused(queue):
            queue.idle_since_ms = 0
        elif due_ms <= self.clock():
            self.delete_queue(queue)
        else:
            self._look_later(queue, due_ms)

    def _look_later(self, queue: BrokerQueue, due_ms: int) -> None:
        queue.keep_timer(_UNUSED, self._deliveries.schedule.cancellable(due_ms, self._delete_unused, queue))
