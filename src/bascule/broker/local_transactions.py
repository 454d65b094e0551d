"""Local transactions: the messages and acknowledgements of each, and its commit as one journal record. A part of the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final

from bascule.broker.branch_entries import PreparePlan
from bascule.broker.commit_plan import ACKS_PER_STEP, SEND_STEPS, CommitPlan
from bascule.broker.containment import ErrorKind
from bascule.broker.delivery import Deliveries
from bascule.broker.errors import RequestFailed, ResourceLimit
from bascule.broker.leaving import Ack, collect
from bascule.broker.memory import MESSAGE_BYTES, TRANSACTION_BYTES, MemoryLow
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import Policy
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.broker.returns import PIECE_MESSAGES, RangeReturn, by_queue
from bascule.broker.sending import SEND_OVERHEAD_BYTES, Sending, Stored
from bascule.broker.transactions import Draft, LocalTransaction
from bascule.broker.turns import Work
from bascule.core import crash
from bascule.core.errors import BasculeError, TransactionRolledBack, TransactionTimedOut
from bascule.journal.records import MESSAGES_PER_RECORD_MAX

#: Places in queues that one piece of a commit's messages takes: a message on a topic takes one place in each subscription.
PIECE_PLACES: Final = 200
#: A commit with at most this many steps is decided at once. A longer one is first planned over several turns.
PLANNED_STEPS: Final = 2_000
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
        self._due_ms = 0
        self._rollback_commits = EngineViolation.ROLLBACK_COMMITS in violations
        self._refusal_forgotten = EngineViolation.REFUSAL_FORGOTTEN in violations

    def begin(self, transaction_id: bytes) -> LocalTransaction:
        """Begin a local transaction."""
        transaction = self.open[transaction_id] = LocalTransaction(transaction_id, self.journaling.confirmed_sequence)
        self._charge(transaction, TRANSACTION_BYTES)
        return transaction

    def _charge(self, transaction: LocalTransaction, size_bytes: int) -> None:
        """Add bytes to the memory that a transaction is charged for."""
        transaction.charged_bytes += size_bytes
        self.memory.transactions_bytes += size_bytes

    def _discharge(self, transaction: LocalTransaction) -> None:
        """Release all memory that a transaction is charged for, and its plan."""
        self.memory.transactions_bytes -= transaction.charged_bytes
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

    def gather(self, transaction: LocalTransaction, draft: Draft) -> BasculeError | None:
        """Keep a message until the commit. If the transaction grows too large, it can only be rolled back from then on.

        Return the error with which the message is refused, if the open transactions together hold too much memory; else None.
        """
        if transaction.doomed is not None:
            return None
        self._holds_something(transaction)
        drafts = transaction.drafts
        drafts.append(draft)
        address = draft.address
        route = self._sending.addresses.route(address, draft.routing)
        transaction.commit_steps += SEND_STEPS + route.steps
        size_bytes = draft.message.size_bytes + len(route.target.encoded) + SEND_OVERHEAD_BYTES
        transaction.size_bytes += size_bytes
        self._charge(transaction, size_bytes + MESSAGE_BYTES)
        limit, memory = self.bytes_max, self.memory
        if transaction.size_bytes > limit:
            self.doom(transaction, ResourceLimit(f"the transaction is larger than {limit} bytes; commit more often"))
        elif len(drafts) > MESSAGES_PER_RECORD_MAX:
            self.doom(transaction, ResourceLimit(f"the transaction has more than {MESSAGES_PER_RECORD_MAX} messages; commit more often"))
        elif memory.transactions_bytes > memory.transactions_max_bytes:
            held, share = memory.transactions_bytes, memory.transactions_max_bytes
            self.doom(transaction, MemoryLow(f"open transactions hold {held} bytes, more than {share}; commit more often"))
            return transaction.doomed
        return None

    def acknowledge_in(self, transaction: LocalTransaction, consumer: QueueConsumer, message: BrokerMessage) -> None:
        """Keep an acknowledgement until the commit."""
        if self._deliveries.settled(consumer, message):
            self._holds_something(transaction)
            transaction.acks.append((consumer, message))
            transaction.queues[consumer.queue] = None
            transaction.charged_deliveries += 1
            self.memory.unsettled += 1
            transaction.size_bytes += 16

    def _holds_something(self, transaction: LocalTransaction) -> None:
        """Start the time limit of a transaction when it begins to hold messages, since nobody else can get these messages."""
        if transaction.since_ms:
            return
        transaction.since_ms = self.clock()
        if not self._due_ms:
            self._due_ms = transaction.since_ms + self.ms_max
            self._deliveries.schedule.at(self._due_ms, self._end_old)

    def _end_old(self) -> None:
        limit_ms = self.ms_max
        oldest_ms = self.clock() - limit_ms
        holding = [transaction for transaction in self.open.values() if transaction.since_ms]
        for transaction in holding:
            if transaction.since_ms <= oldest_ms:
                self._give_up(transaction)
                transaction.since_ms = 0  # deliveries from now on get a time limit of their own
                if transaction.doomed is None:
                    transaction.doomed = TransactionTimedOut(
                        f"the transaction has held messages for {limit_ms / 1000:g} s (broker.transaction_timeout_s)"
                    )
        self._due_ms = min((each.since_ms + limit_ms for each in holding if each.since_ms), default=0)
        if self._due_ms:
            self._deliveries.schedule.at(self._due_ms, self._end_old)

    def plan_commit(self, transaction: LocalTransaction) -> bool:
        """Plan the commit of a transaction, if it is long. Return True once ``commit`` may be called in this turn.

        If the result is False, the caller calls this function again in the next turn and adds nothing to the transaction before that.
        """
        if transaction.doomed is not None or self._is_short(transaction):
            return True
        plan = transaction.plan
        if not isinstance(plan, CommitPlan):
            self.drop_plan(transaction)
            acks = ((consumer.queue, message) for consumer, message in transaction.acks)
            plan = transaction.plan = self.commit_plan(transaction.drafts, acks, transaction.size_bytes)
        return plan.over

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
        plan = CommitPlan(self._sending, drafts, acks, self.memory, size_bytes, self.clock())
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
            if plan is not None:
                self.carry_out_plan(plan, transaction.size_bytes, ended)
            else:
                acks = [(consumer.queue, message) for consumer, message in transaction.acks]
                self.carry_out(transaction.drafts, acks, transaction.size_bytes, ended)
        except Exception as failure:
            cause = self.cause_of(failure, transaction)
            self.rollback(transaction)
            done(TransactionRolledBack(str(cause), cause=cause))
            return False
        self.end(transaction)
        self.journaling.tell(done, None)
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
            if acks:
                gone: dict[BrokerQueue, list[int]] = {}
                collect(acks, gone)
                self._deliveries.leaving.journal(gone)
        self._then_put_in(stored, acks)

    def carry_out_plan(self, plan: CommitPlan, size_bytes: int, ended: bytes = b"") -> None:
        """Carry out a finished plan, as ``carry_out`` does."""
        with self.journaling.atomic(size_bytes, len(plan.drafts)):
            if ended:
                self.journaling.add(ended)
            stored = self._sending.decide_all(zip(plan.drafts, plan.sends, strict=True), plan.now_ms)
            self._deliveries.leaving.journal(plan.gone)
        self._then_put_in(stored, plan.acks, plan.held)

    @staticmethod
    def _finished_plan(transaction: LocalTransaction) -> CommitPlan | None:
        """Finish the plan of a commit. Return None if the plan does not cover the whole transaction.

        Raises the error of an earlier turn.
        """
        plan = transaction.plan
        if not isinstance(plan, CommitPlan):
            return None
        plan.finish()
        whole = len(plan.drafts) == len(transaction.drafts) and len(plan.acks) == len(transaction.acks)
        return plan if whole else None

    @staticmethod
    def _is_persistent(transaction: LocalTransaction) -> bool:
        return any(draft.durable for draft in transaction.drafts) or any(message.mid >= 0 for _, message in transaction.acks)

    def _then_put_in(self, stored: list[Stored], acks: list[Ack], held: Mapping[BrokerQueue, Sequence[int]] | None = None) -> None:
        """Remove the acknowledged messages of a commit from their queues, and put its messages in once the record is stored."""
        self.counters.acknowledged += len(acks)
        self._deliveries.leaving.forget(acks, held)
        first, *others = _pieces(stored)
        self.journaling.then(self._carried_out, first)
        for piece in others:
            self.journaling.then(self._put_in, piece)

    def _carried_out(self, stored: Sequence[Stored]) -> None:
        self.counters.committed += 1
        self._put_in(stored)

    def _put_in(self, stored: Sequence[Stored]) -> None:
        for message, queues, due_ms in stored:
            self._deliveries.put_in(message, queues, due_ms)

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
        self._deliveries.turns.begin(self._rolling_back(transactions, returned))

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
        self._take_back(queues, len(acks), ((consumer.queue, message) for consumer, message in acks))
        transaction.drafts.clear()
        self._discharge(transaction)
        self._discharge_deliveries(transaction)

    def take_back(self, acks: list[Ack]) -> None:
        """Return the messages that a transaction has received to their queues, as failed deliveries."""
        self._take_back(dict.fromkeys(map(itemgetter(0), acks)), len(acks), iter(acks))

    def _take_back(self, queues: Iterable[BrokerQueue], count: int, acks: Iterator[Ack]) -> None:
        """Return ``count`` messages to their queues, which are ``queues``."""
        if count <= PIECE_MESSAGES:
            for queue, messages in by_queue(acks).items():
                self._deliveries.put_back(queue, messages, failed=True)
        else:
            self._deliveries.put_back_all(queues, acks)


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
