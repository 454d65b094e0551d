"""Local transactions: the messages and acknowledgements of each, and its commit as one journal record. A part of the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final

from bascule.broker.addresses import Route
from bascule.broker.branch_entries import PreparePlan
from bascule.broker.commit_plan import ACKS_PER_STEP, CommitPlan
from bascule.broker.containment import ErrorKind
from bascule.broker.delivery import Deliveries
from bascule.broker.errors import RequestFailed, ResourceLimit
from bascule.broker.leaving import Ack, collect
from bascule.broker.memory import MESSAGE_BYTES, TRANSACTION_BYTES
from bascule.broker.message import BrokerMessage
from bascule.broker.planned_sends import PIECE_PLACES, SEND_STEPS, Placed, decision_steps
from bascule.broker.policy import Policy
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.broker.returns import PIECE_MESSAGES, RangeReturn, by_queue
from bascule.broker.schedule import ScheduledAction
from bascule.broker.sending import SEND_OVERHEAD_BYTES, Sending, Stored
from bascule.broker.transactions import Draft, LocalTransaction
from bascule.broker.turns import Work
from bascule.core import crash
from bascule.core.errors import BasculeError, TransactionRolledBack, TransactionTimedOut
from bascule.journal.records import MESSAGES_PER_RECORD_MAX

#: A commit with at most this many steps is decided at once. A longer one is first planned over several turns.
PLANNED_STEPS = 2_000
#: Acknowledgements among which a repeated one is recognised, the newest of its transaction. A client that repeats an older one can only
#: roll back. A transaction may have 640,000 acknowledgements, and a client can repeat thousands of them in one frame.
REPEATED_MAX = 10_000
#: Transactions that are rolled back in one turn, and the steps of each, beside those of its messages.
ROLLED_BACK_AT_ONCE: Final = 20
ROLLBACK_STEPS: Final = 5


class EngineViolation(enum.StrEnum):
    """Rules of the engine that a test can break."""

    ROLLBACK_COMMITS = "a rolled-back transaction is applied"
    REFUSAL_FORGOTTEN = "a transaction is committed although one of its messages was refused"


class LocalTransactions:
    """The open transactions, by id.

    ``bytes_max`` limits one transaction, which must fit into one journal record. ``ms_max`` is how long a transaction may hold messages.
    """

    def __init__(self, deliveries: Deliveries, sending: Sending, policy: Policy, violations: Collection[enum.StrEnum]) -> None:
        self.open: dict[bytes, LocalTransaction] = {}
        self.bytes_max = policy.transaction_bytes_max
        self.ms_max = policy.transaction_ms_max
        self.journaling = deliveries.journaling
        self.counters = deliveries.counters
        self.memory = deliveries.memory
        self.clock = deliveries.clock
        self._deliveries = deliveries
        self._sending = sending
        sending.transactions = self
        self._due_ms = 0  # of ``_timer``
        self._timer: ScheduledAction | None = None  # looks for old transactions
        self._rollback_commits = EngineViolation.ROLLBACK_COMMITS in violations
        self._refusal_forgotten = EngineViolation.REFUSAL_FORGOTTEN in violations

    def begin(self, transaction_id: bytes, user: str = "") -> LocalTransaction:
        """Begin a local transaction of a user."""
        transaction = self.open[transaction_id] = LocalTransaction(transaction_id, self.journaling.confirmed_sequence, user)
        self._charge(transaction, TRANSACTION_BYTES)
        return transaction

    def _charge(self, transaction: LocalTransaction, size_bytes: int) -> None:
        """Add bytes to the memory that a transaction is charged for."""
        transaction.charged_bytes += size_bytes
        self.memory.charge_transaction(transaction.user, size_bytes)

    def _discharge(self, transaction: LocalTransaction) -> None:
        """Release all memory that a transaction is charged for, and its plan."""
        self.memory.charge_transaction(transaction.user, -transaction.charged_bytes)
        transaction.charged_bytes = 0
        if transaction.plan is not None:
            self.drop_plan(transaction)

    def end(self, transaction: LocalTransaction) -> None:
        """Remove a transaction from the open ones: it is committed, rolled back, or has become a branch."""
        self.open.pop(transaction.id, None)
        self._discharge(transaction)
        self._discharge_deliveries(transaction)

    def _discharge_deliveries(self, transaction: LocalTransaction) -> None:
        """Release the charge for the deliveries that a transaction has received."""
        self.memory.unsettled -= transaction.charged_deliveries
        transaction.charged_deliveries = 0

    def doom(self, transaction: LocalTransaction, error: BasculeError) -> None:
        """Allow only a rollback of a transaction, because of ``error``. Its sends are dropped."""
        transaction.doomed = error
        transaction.drafts.clear()
        self._discharge(transaction)

    def message_refused(self, transaction: LocalTransaction, error: BasculeError) -> None:
        """Allow only a rollback of a transaction whose message was refused, even if the message is sent again.

        The client may commit without looking at the outcome of the message. Qpid JMS does so, because it sends asynchronously in
        transactions.
        """
        if transaction.doomed is None and not self._refusal_forgotten:
            self.doom(transaction, TransactionRolledBack(f"a message of the transaction was refused: {error}", cause=error))

    def gather(self, transaction: LocalTransaction, draft: Draft, route: Route) -> BasculeError | None:
        """Keep a message on its route until the commit. If the transaction grows too large, it can only be rolled back from then on.

        Return the error with which the message is refused, if the open transactions together hold too much memory; else None.
        """
        if transaction.doomed is not None:
            return None
        if not transaction.since_ms:
            self._begin_to_hold(transaction)
        drafts = transaction.drafts
        if not drafts:
            transaction.routed_at = self._sending.addresses.forgotten
        drafts.append(draft)
        transaction.commit_steps += SEND_STEPS + decision_steps(draft, route)
        size_bytes = draft.message.size_bytes + len(route.target.encoded) + SEND_OVERHEAD_BYTES
        transaction.size_bytes += size_bytes
        self._charge(transaction, size_bytes + MESSAGE_BYTES)
        limit, memory = self.bytes_max, self.memory
        if transaction.size_bytes > limit:
            self.doom(transaction, ResourceLimit(f"the transaction is larger than {limit} bytes; commit more often"))
        elif len(drafts) > MESSAGES_PER_RECORD_MAX:
            self.doom(transaction, ResourceLimit(f"the transaction has more than {MESSAGES_PER_RECORD_MAX} messages; commit more often"))
        elif memory.transactions_bytes > memory.transactions_scarce_bytes:
            error = memory.transactions_refusal(transaction.user)
            if error is not None:
                self.doom(transaction, error)
            return error
        return None

    def acknowledge_in(self, transaction: LocalTransaction, consumer: QueueConsumer, message: BrokerMessage) -> None:
        """Keep an acknowledgement until the commit. If the consumer does not hold the message, allow only a rollback."""
        if self._deliveries.settled(consumer, message):
            if not transaction.since_ms:
                self._begin_to_hold(transaction)
            transaction.acks.append((consumer, message))
            transaction.queues[consumer.queue] = None
            transaction.charged_deliveries += 1
            self.memory.unsettled += 1
            transaction.size_bytes += 16
        elif transaction.doomed is None:
            recent = islice(reversed(transaction.acks), REPEATED_MAX)
            if not any(acked is message and holder is consumer for holder, acked in recent):  # else the client repeats itself
                self.acknowledgement_lost(transaction)

    def acknowledgement_lost(self, transaction: LocalTransaction) -> None:
        """Allow only a rollback of a transaction that acknowledges a message which its consumer no longer holds.

        A commit applies the outcome of each delivery (AMQP 1.0 part 4, section 4.4.2). Others may get, or have got, this message.
        """
        if transaction.doomed is None:
            self.doom(
                transaction,
                TransactionRolledBack(
                    "the transaction acknowledges a message that its consumer no longer holds; the message is redelivered, unless its "
                    "queue was deleted"
                ),
            )

    def join(self, transaction: LocalTransaction, other: LocalTransaction) -> None:
        """Move the work of another transaction behind the work of a transaction. ``other`` ends, with the outcome of ``transaction``."""
        if transaction.doomed is None and other.doomed is not None:
            self.doom(transaction, other.doomed)
        elif transaction.doomed is None:
            if other.drafts and transaction.routed_at != other.routed_at:
                transaction.routed_at = -1 if transaction.drafts else other.routed_at
            transaction.drafts += other.drafts
        transaction.acks += other.acks
        transaction.queues |= other.queues
        transaction.size_bytes += other.size_bytes
        transaction.commit_steps += other.commit_steps
        transaction.since_ms = min(transaction.since_ms or other.since_ms, other.since_ms or transaction.since_ms)
        transaction.begun_at = min(transaction.begun_at, other.begun_at)
        transaction.charged_deliveries += other.charged_deliveries
        if transaction.doomed is None:
            self._charge(transaction, other.charged_bytes)
        other.charged_deliveries = 0
        other.drafts, other.acks, other.queues = [], [], {}
        transaction.joined.append(other)
        self.end(other)
        if transaction.doomed is None and (transaction.size_bytes > self.bytes_max or len(transaction.drafts) > MESSAGES_PER_RECORD_MAX):
            limits = f"{self.bytes_max} bytes or {MESSAGES_PER_RECORD_MAX} messages"
            self.doom(transaction, ResourceLimit(f"the joined transactions are larger than {limits}; commit more often"))

    def _begin_to_hold(self, transaction: LocalTransaction) -> None:
        """Start the time limit of a transaction when it begins to hold messages, since nobody else can get these messages."""
        transaction.since_ms = self.clock()
        self._look_again(transaction.since_ms + self.ms_max)

    def _look_again(self, due_ms: int) -> None:
        """Look for transactions that have held messages for too long, at this time or at the planned time, whichever is earlier."""
        if self._timer is not None:
            if self._due_ms <= due_ms:
                return
            self._timer.cancel()
        self._due_ms, self._timer = due_ms, self._deliveries.schedule.cancellable(due_ms, self._end_old)

    def _end_old(self) -> None:
        self._timer = None
        self._deliveries.turns.begin(self._ending_old())

    def _ending_old(self) -> Work:
        limit_ms = self.ms_max
        oldest_ms = self.clock() - limit_ms
        for transaction in list(self.open.values()):
            if transaction.id not in self.open or not transaction.since_ms:
                continue  # it has ended in another turn
            if transaction.since_ms <= oldest_ms:
                self.journaling.errors.run(ErrorKind.COMMIT, self._time_out, transaction)
            else:
                self.journaling.errors.run(ErrorKind.COMMIT, self._look_again, transaction.since_ms + limit_ms)
            yield ROLLBACK_STEPS

    def _time_out(self, transaction: LocalTransaction) -> None:
        """Return the messages of a transaction that has held them for too long. Only a rollback is allowed from then on."""
        transaction.since_ms = 0  # deliveries from now on get a time limit of their own
        if transaction.doomed is None:
            limit_s = self.ms_max / 1000
            transaction.doomed = TransactionTimedOut(f"the transaction has held messages for {limit_s:g} s (broker.transaction_timeout_s)")
        self._give_up(transaction)

    def plan_commit(self, transaction: LocalTransaction) -> bool:
        """Plan the commit of a transaction, if it is long. Return True once ``commit`` may be called in this turn.

        If the result is False, the caller calls this function again in the next turn and adds nothing to the transaction before that.
        """
        if transaction.doomed is not None or (self._is_short(transaction) and self._routes_are_known(transaction)):
            return True
        plan = transaction.plan
        if not isinstance(plan, CommitPlan):
            self.drop_plan(transaction)
            plan = transaction.plan = self.commit_plan(transaction.drafts, _with_queues(transaction.acks), transaction.size_bytes)
        return plan.ready()

    def plan_prepare(self, transaction: LocalTransaction) -> bool:
        """Plan the prepare of a transaction, as ``plan_commit`` does."""
        if transaction.doomed is not None or self._is_short(transaction):
            return True
        plan = transaction.plan
        if not isinstance(plan, PreparePlan):
            self.drop_plan(transaction)
            plan = transaction.plan = PreparePlan(transaction, self.memory)
            plan.begin(self._deliveries.turns)
        return plan.over

    def _routes_are_known(self, transaction: LocalTransaction) -> bool:
        """Return False if the routes of the messages are to be found again: subscriptions with any selectors may have come since."""
        return not transaction.drafts or transaction.routed_at == self._sending.addresses.forgotten

    @staticmethod
    def _is_short(transaction: LocalTransaction) -> bool:
        return transaction.commit_steps + len(transaction.acks) // ACKS_PER_STEP <= PLANNED_STEPS

    def prepare_plan(self, transaction: LocalTransaction) -> PreparePlan:
        """Return the complete plan of a transaction that becomes a branch now. The end of the transaction closes the plan."""
        plan = transaction.plan
        if not isinstance(plan, PreparePlan) or not plan.whole(transaction):
            self.drop_plan(transaction)
            plan = transaction.plan = PreparePlan(transaction, self.memory)
        return plan

    def commit_plan(self, drafts: Iterable[Draft], acks: Iterable[Ack], size_bytes: int) -> CommitPlan:
        """Begin to plan a commit of ``size_bytes``. The caller must close the plan."""
        plan = CommitPlan(self._sending, drafts, acks, size_bytes, self.clock())
        plan.begin(self._deliveries.turns)
        return plan

    def drop_plan(self, transaction: LocalTransaction) -> None:
        """Drop the plan of a transaction that has ended, or that is not committed or prepared now."""
        plan, transaction.plan = transaction.plan, None
        if plan is not None:
            plan.close()

    def commit(self, transaction: LocalTransaction, done: Callable[[BasculeError | None], None], ended: bytes = b"") -> bool:
        """Commit a transaction as one journal record. Call ``done(None)`` once the record is stored.

        If the transaction is rolled back instead, call ``done(error)`` and return False. ``ended`` is an entry to store with the commit:
        the outcome of a branch that is committed in one phase.
        """
        error = transaction.doomed
        if error is None and self._sending.stalled is not None and self._is_persistent(transaction):
            error = self._sending.stalled
        if error is not None:
            self.rollback(transaction)
            done(TransactionRolledBack(str(error), cause=error))
            return False
        crash.point("transaction.commit.before")
        try:
            plan = None if transaction.plan is None else self._finished_plan(transaction)
            placed = None if plan is None else self._decide_plan(plan, ended)
            if placed is None:
                acks = [(consumer.queue, message) for consumer, message in transaction.acks]
                self.carry_out(transaction.drafts, acks, transaction.size_bytes, ended)
        except Exception as failure:
            cause = self.cause_of(failure, transaction)
            self.rollback(transaction)
            done(TransactionRolledBack(str(cause), cause=cause))
            return False
        self.end(transaction)
        self._put_in_and_tell(placed or [], partial(done, None))
        crash.point("transaction.commit.after")
        return True

    def cause_of(self, failure: Exception, transaction: LocalTransaction) -> BasculeError:
        """Return why a transaction that could not be journaled is rolled back.

        An error that is not a limit is a fault of the broker, and is counted.
        """
        if isinstance(failure, ResourceLimit):
            return failure
        self.journaling.errors.contain(ErrorKind.COMMIT, failure, transaction=transaction.id.hex())
        return failure if isinstance(failure, BasculeError) else RequestFailed("the broker failed to commit; see the broker's log")

    def carry_out(
        self,
        drafts: list[Draft],
        acks: list[Ack],
        size_bytes: int,
        ended: bytes = b"",
    ) -> None:
        """Carry out messages and acknowledgements as one journal record, with the entry ``ended``. Nothing was done if it raises."""
        now_ms = self.clock()
        stored: list[Stored] = []
        with self.journaling.atomic(size_bytes, len(drafts)):
            if ended:
                self.journaling.add(ended)
            for draft in drafts:
                queues = self._sending.decide(draft, now_ms)
                if queues is not None:
                    stored.append((draft.message, queues, draft.delivery_time_ms))
            gone: dict[BrokerQueue, list[int]] = {}
            collect(acks, gone)
            self._deliveries.leaving.journal(gone)
        self.counters.acknowledged += len(acks)
        self._deliveries.leaving.forget(acks, gone)
        first, *others = _pieces(stored)
        self.journaling.then(self._carried_out, first)
        for piece in others:
            self.journaling.then(self._put_in, piece)

    def carry_out_plan(self, plan: CommitPlan, ended: bytes) -> None:
        """Carry out a finished plan, as ``carry_out`` does, with the entry ``ended`` of a branch."""
        self._put_in_and_tell(self._decide_plan(plan, ended), _nothing)

    def _decide_plan(self, plan: CommitPlan, ended: bytes) -> list[Placed]:
        """Write the decisions of a finished plan into one journal record. Nothing was done if it raises."""
        with self.journaling.atomic(plan.size_bytes, plan.messages):
            if ended:
                self.journaling.add(ended)
            placed = plan.decide()
            self._deliveries.leaving.journal(plan.gone)
        self.counters.acknowledged += len(plan.acks)
        self._deliveries.leaving.forget(plan.acks, plan.gone, plan.held)
        self.journaling.then(self._carried_out, ())
        return placed

    def _put_in_and_tell(self, placed: Sequence[Placed], done: Callable[[], None]) -> None:
        """Put the messages of a plan into their queues once the record is stored, and call the answer ``done`` after that.

        If the plan has put nothing into the journal, and no earlier decision is to be stored, no stored record divides this work.
        """
        if len(placed) > 1 and not self.journaling.defers:
            self._deliveries.turns.begin_decided(self._putting_in(placed, done))
            return
        for piece, first_mid in placed:
            self.journaling.then(piece.put_in, self._deliveries.put_in, first_mid)
        self.journaling.tell(done)

    def _putting_in(self, placed: Sequence[Placed], done: Callable[[], None]) -> Work:
        for piece, first_mid in placed:
            piece.put_in(self._deliveries.put_in, first_mid)
            yield PIECE_PLACES
        self.journaling.tell(done)

    @staticmethod
    def _finished_plan(transaction: LocalTransaction) -> CommitPlan | None:
        """Finish the plan of a commit. Return None if the plan does not cover the whole transaction.

        Raises the error of an earlier turn.
        """
        plan = transaction.plan
        if not isinstance(plan, CommitPlan):
            return None
        plan.finish()
        whole = plan.count == len(transaction.drafts) and len(plan.acks) == len(transaction.acks)
        return plan if whole else None

    @staticmethod
    def _is_persistent(transaction: LocalTransaction) -> bool:
        return any(draft.durable for draft in transaction.drafts) or any(message.mid >= 0 for _, message in transaction.acks)

    def _carried_out(self, stored: Sequence[Stored]) -> Work | None:
        self.counters.committed += 1
        return self._put_in(stored)

    def _put_in(self, stored: Sequence[Stored]) -> Work | None:
        rest: Work | None = None  # a message that leaves some is alone: see _pieces
        for message, queues, due_ms in stored:
            rest = self._deliveries.put_in(message, queues, due_ms)
        return rest

    def rollback(self, transaction: LocalTransaction) -> None:
        """Roll back a transaction: drop its sends, and return the received messages as failed deliveries."""
        self.counters.rolled_back += 1
        self.end(transaction)
        if self._rollback_commits:
            acks = [(consumer.queue, message) for consumer, message in transaction.acks]
            self.carry_out(transaction.drafts, acks, transaction.size_bytes)
            return
        self._give_up(transaction)

    def rollback_all(self, transactions: Sequence[LocalTransaction]) -> None:
        """Roll back transactions of one client, over several turns if they are many. An error of one concerns no other.

        Until all messages are back, their queues deliver none: one would overtake others.
        """
        if len(transactions) <= ROLLED_BACK_AT_ONCE:
            for transaction in transactions:
                self.journaling.errors.run(ErrorKind.COMMIT, self.rollback, transaction)
            return
        returned = self._deliveries.returns.begin_range()
        for transaction in transactions:
            for queue in transaction.queues:
                returned.hold(queue)
        self._deliveries.turns.begin_decided(self._rolling_back(transactions, returned))

    def _rolling_back(self, transactions: Sequence[LocalTransaction], returned: RangeReturn) -> Work:
        try:
            for transaction in transactions:
                self.journaling.errors.run(ErrorKind.COMMIT, self.rollback, transaction)
                yield ROLLBACK_STEPS
        finally:
            returned.end()

    def _give_up(self, transaction: LocalTransaction) -> None:
        acks, transaction.acks = transaction.acks, []
        queues, transaction.queues = transaction.queues, {}
        self._take_back(queues, len(acks), _with_queues(acks))
        transaction.drafts.clear()
        self._discharge(transaction)
        self._discharge_deliveries(transaction)

    def take_back(self, queues: Iterable[BrokerQueue], acks: list[Ack]) -> None:
        """Return the messages that a branch has received from ``queues`` to their queues, as failed deliveries."""
        self._take_back(queues, len(acks), iter(acks))

    def _take_back(self, queues: Iterable[BrokerQueue], count: int, acks: Iterator[Ack]) -> None:
        """Return ``count`` messages to their queues, which are ``queues``."""
        if count <= PIECE_MESSAGES:
            for queue, messages in by_queue(acks).items():
                self._deliveries.put_back(queue, messages, failed=True)
        else:
            self._deliveries.put_back_all(queues, acks)


def _nothing() -> None:
    """Answer nothing: the caller does."""


def _with_queues(acks: Iterable[tuple[QueueConsumer, BrokerMessage]]) -> Iterator[Ack]:
    for consumer, message in acks:
        yield consumer.queue, message


def _pieces(stored: Sequence[Stored]) -> list[list[Stored]]:
    """Divide the messages of a commit, in order, into pieces of at most PIECE_PLACES places or of one message."""
    piece: list[Stored] = []
    pieces, places = [piece], 0
    for each in stored:
        wanted = max(1, len(each[1]))
        if piece and places + wanted > PIECE_PLACES:
            piece, places = [], 0
            pieces.append(piece)
        piece.append(each)
        places += wanted
    return pieces
