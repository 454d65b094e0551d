"""Intake of messages from Kafka, which arrive in the topic ``bascule.ingress``. A part of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bascule.broker.addresses import TEMPORARY_PREFIX, Route, durable_ids
from bascule.broker.containment import ErrorKind
from bascule.broker.delivery import Deliveries
from bascule.broker.destinations import Destinations
from bascule.broker.dropping import DroppedMessages
from bascule.broker.errors import ResourceLimit
from bascule.broker.ingress_access import Arrival, IngressAccess
from bascule.broker.journaling import AtomicEntries
from bascule.broker.message import PRIORITY_MAX, BrokerMessage, stored_group
from bascule.broker.planned_sends import Planned, PlannedSends
from bascule.broker.queue import BrokerQueue
from bascule.broker.sending import SEND_OVERHEAD_BYTES, Sending, annotation_steps, taken_by
from bascule.broker.transactions import Draft
from bascule.core.destination import Routing
from bascule.jms.lookup import selector_lookup
from bascule.journal.records import MESSAGES_PER_RECORD_MAX, Op, SendFlag, ingress_entry, json_entry, send_entry

#: Flags that writers of ``bascule.ingress`` may set; the broker sets the others.
_FLAGS_OF_SENDERS = SendFlag.GROUPED | SendFlag.DUPLICATE_ID | SendFlag.SECOND_DUPLICATE_ID | SendFlag.SOURCE


#: Steps of a message, besides those of its route.
TAKE_STEPS = 20
#: Of these, the steps to plan a message.
PLAN_STEPS = 12
#: Bytes of each queue id in the journal entry of a message.
_QUEUE_ID_BYTES = 4

#: The plan of a record with many messages.
IntakePlan = PlannedSends[Arrival]


class Intake:
    """The intake of the ingress topic, each record once. ``positions`` are the next offsets to take, by partition.

    Arrivals come as ``access`` has decided about them.
    """

    def __init__(self, deliveries: Deliveries, destinations: Destinations, sending: Sending, bytes_max: Callable[[], int]) -> None:
        """``bytes_max`` returns the size of the largest message for which the journal has room."""
        self.positions: dict[int, int] = {}
        self.confirmed: dict[int, int] = {}  # positions in confirmed records
        self.topic_id = ""  # the topic that the positions belong to, once it is confirmed
        self.addresses = destinations.addresses
        self.access = IngressAccess(self.addresses, deliveries.clock, bytes_max)
        self.policy = destinations.policy
        self.journaling = deliveries.journaling
        self.counters = deliveries.counters
        self.clock = deliveries.clock
        self._deliveries = deliveries
        self._destinations = destinations
        self._sending = sending

    def lacks_room(self, sends: list[Arrival]) -> BrokerQueue | None:
        """Return a full queue that one of the messages needs, or None.

        Such messages wait in Kafka; they are neither refused nor dropped. Dead letters wait for no room, like those of other queues.
        """
        with self._sending.dropped_messages() as dropped:
            for send, _, _, refusal in sends:
                if refusal is not None:
                    continue
                route = self.addresses.route(send.address, Routing(send.routing))
                # Check for room first: selectors and exclusive diverts cost more, and matter only if a queue is full.
                if not route.limited or not any(queue.full() for queue in route.queues):
                    continue
                full = self._first_full(self._to_queues(route, send.body)[0], dropped)
                if full is not None:
                    return full
        return None

    def plan_lacks_room(self, plan: IntakePlan) -> BrokerQueue | None:
        """Return a full queue that a planned message needs, or None."""
        with self._sending.dropped_messages() as dropped:
            return self._first_full((queue for queue, (messages, _) in plan.incoming.items() if messages), dropped)

    @staticmethod
    def _first_full(queues: Iterable[BrokerQueue], dropped: DroppedMessages) -> BrokerQueue | None:
        """Return the first full queue, or None. Queues that drop messages to make room do so."""
        for queue in queues:
            if queue.full():
                dropped.drop(queue)
                dropped.begin()
                if queue.full():  # still: nobody would wake a caller that waits for a queue with room
                    return queue
        return None

    def cost(self, sends: list[Arrival]) -> tuple[int, int]:
        """Return the most that taking the messages costs: steps, and bytes of a journal record."""
        routes = [self.addresses.route(send.address, Routing(send.routing)) for send, *_ in sends]
        size_bytes = sum(len(send.body) + SEND_OVERHEAD_BYTES for send, *_ in sends)
        queues = sum(len(route.queues) for route in routes)
        annotated = sum(annotation_steps(len(send.body)) for send, _, _, refusal in sends if refusal is not None)
        return annotated + sum(TAKE_STEPS + route.steps for route in routes), size_bytes + _QUEUE_ID_BYTES * queues

    def _to_queues(self, route: Route, body: bytes) -> tuple[tuple[BrokerQueue, ...], tuple[str, ...]]:
        """Return the queues that get a message from Kafka, or the exclusive diverts that take it."""
        taken = taken_by(tuple(divert for divert in route.exclusive if divert.from_kafka), body)
        queues = () if taken else route.queues
        if route.filtered:
            lookup = selector_lookup(body)
            queues = tuple(queue for queue in queues if self._deliveries.wants(queue, "", lookup))
        return queues, taken

    def take_in(self, partition: int, next_offset: int, sends: list[Arrival]) -> None:
        """Take records of ``bascule.ingress``: their messages and the position behind them become one journal record.

        A repetition changes nothing. Raises ResourceLimit if the messages do not fit into one record. Nothing is done if it raises.
        """
        if not self._expects(partition, next_offset, len(sends)):
            return
        now_ms = self.clock()
        with self.journaling.atomic(self.cost(sends)[1], len(sends)) as entries:
            for arrival in sends:
                self._take_in(arrival, now_ms, entries)
            self.journaling.add(ingress_entry(partition, next_offset))
        self._taken_in(partition, next_offset, len(sends))
        self._tell_refused(sends)

    def plan(self, sends: list[Arrival]) -> IntakePlan:
        """Begin to plan the intake of a record. The caller must close the plan."""
        size_bytes = sum([len(send.body) for send, *_ in sends]) + SEND_OVERHEAD_BYTES * len(sends)
        plan = IntakePlan(self._sending, self._plan_one, sends, size_bytes, self.clock(), admits=False, send_steps=PLAN_STEPS)
        plan.begin(self._deliveries.turns)
        return plan

    def take_in_plan(self, partition: int, next_offset: int, plan: IntakePlan) -> None:
        """Take a planned record, as ``take_in`` does. Raises the error that has ended the plan, too."""
        if not self._expects(partition, next_offset, plan.count):
            return
        plan.finish()
        with self.journaling.atomic(plan.size_bytes, plan.messages):
            placed = plan.decide()
            self.journaling.add(ingress_entry(partition, next_offset))
        for piece, _ in placed:
            self._tell_refused(piece.items)
        for piece, first_mid in placed:
            self.journaling.then(piece.put_in, self._deliveries.put_in, first_mid)
        self._taken_in(partition, next_offset, plan.count)

    def _expects(self, partition: int, next_offset: int, messages: int) -> bool:
        """Return False if the records before an offset are taken already. Raises ResourceLimit."""
        if next_offset <= self.positions.get(partition, 0):
            return False
        if messages > MESSAGES_PER_RECORD_MAX:
            raise ResourceLimit(
                f"there are {messages} ingress messages before offset {next_offset}; a record holds at most {MESSAGES_PER_RECORD_MAX}"
            )
        return True

    def _taken_in(self, partition: int, next_offset: int, messages: int) -> None:
        self.positions[partition] = next_offset
        self.counters.messages_in += messages
        self.journaling.then(self._taken, partition, next_offset)

    def _tell_refused(self, sends: list[Arrival]) -> None:
        for arrival in sends:
            if arrival.refusal is not None:
                self.counters.dead_lettered += 1
                self.journaling.errors.run(ErrorKind.INGRESS, self.access.on_refused, arrival.refusal)

    def _taken(self, partition: int, next_offset: int) -> None:
        # ``confirmed`` is looked up only now: the confirmation of a recreated topic replaces it.
        self.confirmed[partition] = next_offset

    def begin_topic(self, topic_id: str, positions: dict[int, int]) -> None:
        """Use the topic with this id as ``bascule.ingress`` from now on, beginning at the given positions."""
        self.journaling.add(json_entry(Op.INGRESS_TOPIC, {"id": topic_id, "positions": sorted(positions.items())}))
        self.positions = positions
        self.journaling.then(self._topic_begun, topic_id, dict(positions))

    def _topic_begun(self, topic_id: str, positions: dict[int, int]) -> None:
        self.topic_id, self.confirmed = topic_id, positions

    def _plan_one(self, arrival: Arrival, now_ms: int) -> Planned:
        """Return a message and its plan; None for the plan if its queue must be created first. Changes nothing."""
        send, keep, *_ = arrival
        routing = Routing(send.routing)
        route = self.addresses.route(send.address, routing)
        expiry_ms = self.policy.of(send.address).expiry_of(send.expiry_ms, now_ms) if route.expiring else send.expiry_ms
        message = BrokerMessage(send.body, min(send.priority, PRIORITY_MAX), expiry_ms, stored_group(send.flags, send.body))
        draft = Draft(message, send.address, routing, send.body, True, "", send.duplicate_ids, send.delivery_time_ms)
        missing = routing is Routing.ANYCAST and send.address not in self.addresses.anycast
        if missing and keep and not send.address.startswith(TEMPORARY_PREFIX):
            return draft, None
        if not route.queues and not keep:
            return draft, (route, (), b"", False)
        queues, taken = self._to_queues(route, send.body)
        flags = send.flags & _FLAGS_OF_SENDERS | SendFlag.FROM_KAFKA | SendFlag.DURABLE | (SendFlag.DIVERTS if taken else 0)
        decided = send._replace(flags=flags, timestamp_ms=now_ms, expiry_ms=expiry_ms, queues=durable_ids(queues), diverts=taken)
        return draft, (route, queues, send_entry(decided), True)

    def _take_in(self, arrival: Arrival, now_ms: int, entries: AtomicEntries) -> None:
        draft, plan = self._plan_one(arrival, now_ms)
        if plan is None:
            self._destinations.recreate(draft.address)
            draft, plan = self._plan_one(arrival, now_ms)
        if plan is None or not plan[2]:
            return
        _, queues, entry, _ = plan
        message = draft.message
        message.mid, message.durable = self.journaling.add_send(entry, draft.duplicate_ids), True
        for queue in queues:
            queue.expect(message)
            entries.undo(queue.unexpect, message)
        self.journaling.then(self._deliveries.put_in, message, queues, draft.delivery_time_ms)
