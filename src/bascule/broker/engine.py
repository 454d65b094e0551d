"""The broker engine: destinations, messages and consumers, without sockets, clocks or threads.

Commands are methods. Effects go out through ports: the ``append`` of the journal, links, and the body store. Every decision about
persistent state is an entry of a journal record, and is carried out when that record is confirmed.

The parts do the work: Destinations (which queues exist), Deliveries (which consumer gets which message), Sending (where a message goes),
LocalTransactions, Branches and Intake (messages from Kafka).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from functools import partial

from bascule.broker.branches import Branches
from bascule.broker.containment import ErrorKind
from bascule.broker.delivery import Deliveries
from bascule.broker.destinations import Destinations
from bascule.broker.duplicates import DuplicateWindows
from bascule.broker.errors import JournalUnavailable
from bascule.broker.fan_out import FanOut
from bascule.broker.intake import Intake
from bascule.broker.journaling import Journaling
from bascule.broker.local_transactions import LocalTransactions
from bascule.broker.memory import MemoryAccount
from bascule.broker.message import Bodies
from bascule.broker.policy import Policy
from bascule.broker.room import SendersRoom
from bascule.broker.sending import Sending
from bascule.broker.transactions import LocalTransaction


class Engine:
    """The state of one broker and the commands on it. ``clock`` returns milliseconds since the epoch.

    The shell calls :meth:`tick` when a scheduled action is due, and :meth:`dispatch` at the end of each turn.
    """

    def __init__(
        self,
        journaling: Journaling,
        bodies: Bodies,
        clock: Callable[[], int],
        policy: Policy | None = None,
        *,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """Create an engine without state. ``violations`` are rules that the engine, its parts and its loader break, for tests only."""
        policy = policy or Policy()
        self.journaling = journaling
        self.clock = clock
        self.violations = violations
        self.branches = Branches(violations=violations)
        self.deliveries = deliveries = Deliveries(journaling, bodies, clock, self)
        if violations:
            deliveries.fan_out = FanOut(deliveries, violations)
        self.destinations = destinations = Destinations(deliveries, policy)
        self.windows = DuplicateWindows(destinations.window_limits, deliveries.schedule, clock, violations=violations)
        self.sending = sending = Sending(deliveries, destinations, self.windows)
        self.local_transactions = local = LocalTransactions(deliveries, sending, policy, violations)
        self.intake = intake = Intake(deliveries, destinations, sending, lambda: local.bytes_max)
        self.bodies = bodies
        self.memory: MemoryAccount = bodies.account
        self.memory.run = partial(deliveries.errors.run, ErrorKind.LINK)
        self.memory.begin = deliveries.turns.begin
        self.counters = deliveries.counters
        self.schedule, self.turns = deliveries.schedule, deliveries.turns
        self.addresses = destinations.addresses
        # The commands are methods of the parts, without a further call between.
        self.send, self.refuse = sending.send, sending.refuse
        self.room = SendersRoom(deliveries, destinations)
        self.share_of_room, self.when_room, self.forget_waiting = self.room.share, self.room.wait, self.room.forget
        self.move, self.pass_on, self.put_into = sending.move, sending.pass_on, sending.put_into
        self.begin, self.acknowledge_in, self.take_back = local.begin, local.acknowledge_in, local.take_back
        self.acknowledgement_lost = local.acknowledgement_lost
        self.plan_commit, self.plan_prepare, self.drop_plan = local.plan_commit, local.plan_prepare, local.drop_plan
        self.commit, self.rollback, self.commit_plan = local.commit, local.rollback, local.commit_plan
        self.rollback_all, self.message_refused = local.rollback_all, local.message_refused
        self.carry_out, self.carry_out_plan = local.carry_out, local.carry_out_plan
        self.lacks_room, self.take_in, self.ingress_is = intake.lacks_room, intake.take_in, intake.begin_topic
        self.intake_cost, self.plan_intake = intake.cost, intake.plan
        self.take_in_plan, self.plan_lacks_room = intake.take_in_plan, intake.plan_lacks_room
        self.queue, self.create_queue, self.delete_queue = destinations.queue, destinations.create_queue, destinations.delete_queue
        self.check_topic, self.create_configured = destinations.check_topic, destinations.create_configured
        self.create_temporary, self.delete_temporary = destinations.create_temporary, destinations.delete_temporary
        self.attach_producer, self.detach_producer = destinations.attach_producer, destinations.detach_producer
        self.look_for_use = destinations.look_for_use
        self.begin_use = destinations.subscription_use.begin
        self.attach, self.detach, self.matches = deliveries.attach, deliveries.detach, deliveries.matches
        self.acknowledge, self.give_back, self.reject = deliveries.acknowledge, deliveries.give_back, deliveries.reject
        self.return_range = deliveries.returns.begin_range
        self.put_in, self.delay, self.watch_expiry = deliveries.put_in, deliveries.delay, deliveries.watch_expiry
        self.gone, self.release = deliveries.gone, deliveries.release
        self.wake, self.tick = deliveries.wake, deliveries.tick
        self._dirty = deliveries.dirty

    def dispatch(self) -> None:
        """End a turn: deliver waiting messages to consumers with credit, and stop or resume producers as memory requires."""
        if self._dirty:
            self.deliveries.dispatch()
        self.memory.look()

    def confirm(self) -> None:
        """Note that the oldest record in flight is stored, and carry out its decisions."""
        self.journaling.confirm()
        if self.journaling.pending:
            self.turns.on_backlog()
        self.dispatch()

    def go_on(self) -> None:
        """Continue, in another turn of the event loop, the work that the last turn had no steps left for.

        Each kind of work has its share.
        """
        turns = self.turns
        turns.begin_turn()
        self.journaling.carry_out()
        turns.left = max(turns.left, turns.steps // 2)
        turns.go_on()
        turns.left = max(turns.left, turns.steps // 2)
        self.dispatch()
        if self.pending:
            turns.on_backlog()

    @property
    def pending(self) -> bool:
        """Return True if there is work for another turn."""
        return self.journaling.pending or self.turns.pending or self.deliveries.pending

    # -- state of the parts ------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Return the owner's settings."""
        return self.destinations.policy

    @property
    def transactions(self) -> dict[bytes, LocalTransaction]:
        """Return the open local transactions by id."""
        return self.local_transactions.open

    @property
    def stalled(self) -> JournalUnavailable | None:
        """Return why persistent messages are not accepted; None while the journal accepts appends."""
        return self.sending.stalled

    @stalled.setter
    def stalled(self, error: JournalUnavailable | None) -> None:
        self.sending.stalled = error

    @property
    def next_position(self) -> int:
        """Return the position of the next message among all messages."""
        return self.deliveries.next_position

    @next_position.setter
    def next_position(self, position: int) -> None:
        self.deliveries.next_position = position

    @property
    def next_queue_id(self) -> int:
        """Return the id of the next queue."""
        return self.destinations.next_queue_id

    @next_queue_id.setter
    def next_queue_id(self, queue_id: int) -> None:
        self.destinations.next_queue_id = queue_id

    @property
    def ingress_positions(self) -> dict[int, int]:
        """Return the next offset of the ingress topic to take in, by partition."""
        return self.intake.positions

    @ingress_positions.setter
    def ingress_positions(self, positions: dict[int, int]) -> None:
        self.intake.positions = positions

    @property
    def confirmed_ingress(self) -> dict[int, int]:
        """Return the next offset of the ingress topic by partition, counting only confirmed records."""
        return self.intake.confirmed

    @confirmed_ingress.setter
    def confirmed_ingress(self, positions: dict[int, int]) -> None:
        self.intake.confirmed = positions

    @property
    def ingress_topic_id(self) -> str:
        """Return the id of the topic that the positions belong to, once that id is confirmed."""
        return self.intake.topic_id

    @ingress_topic_id.setter
    def ingress_topic_id(self, topic_id: str) -> None:
        self.intake.topic_id = topic_id
