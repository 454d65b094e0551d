"""Local transactions: what each has gathered, and its commit as one journal record. A part of the engine."""

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
from bascule.broker.returns import PIECE_MESSAGES, by_queue
from bascule.broker.sending import SEND_OVERHEAD_BYTES, Sending, Stored
from bascule.broker.transactions import Draft, LocalTransaction
from bascule.core import crash
from bascule.core.errors import BasculeError, TransactionRolledBack, TransactionTimedOut
from bascule.journal.records import MESSAGES_PER_RECORD_MAX

#: Places in queues that messages of a commit take at once: a message on a topic takes one in each subscription.
PIECE_PLACES: Final = 200
#: A commit that takes no more steps is decided at once. One that takes more is planned over several turns first.
PLANNED_STEPS: Final = 2_000


class EngineViolation(enum.StrEnum):
    """Rules of the engine that a test may break."""

    ROLLBACK_COMMITS = "a rolled back transaction is carried out"
    REFUSAL_FORGOTTEN = "a transaction is committed although one of its messages was refused"


class LocalTransactions:
    """The open transactions, by their ids.

    ``bytes_max`` bounds one transaction, which must fit into one journal record; ``ms_max`` is how long one may hold something.
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
        """A new local transaction."""
        transaction = self.open[transaction_id] = LocalTransaction(transaction_id, self.journaling.confirmed_sequence)
        self._charge(transaction, TRANSACTION_BYTES)
        return transaction

    def _charge(self, transaction: LocalTransaction, size_bytes: int) -> None:
        """A transaction holds so much more."""
        transaction.charged_bytes += size_bytes
        self.memory.transactions_bytes += size_bytes

    def _discharge(self, transaction: LocalTransaction) -> None:
        """A transaction holds nothing more."""
        self.memory.transactions_bytes -= transaction.charged_bytes
        transaction.charged_bytes = 0
        if transaction.plan is not None:
            self.drop_plan(transaction)

    def end(self, transaction: LocalTransaction) -> None:
        """It is not open any more: committed, rolled back, or a branch."""
        self.open.pop(transaction.id, None)
        self._discharge(transaction)
        self._discharge_deliveries(transaction)

    def _discharge_deliveries(self, transaction: LocalTransaction) -> None:
        """What a transaction has received is received no more, or settled."""
        self.memory.unsettled -= transaction.charged_deliveries
        transaction.charged_deliveries = 0

    def doom(self, transaction: LocalTransaction, error: BasculeError) -> None:
        """It can only be rolled back, because of ``error``: its sends are forgotten."""
        transaction.doomed = error
        transaction.drafts.clear()
        self._discharge(transaction)

    def message_refused(self, transaction: LocalTransaction, error: BasculeError) -> None:
        """A message of the transaction was not taken: the transaction can only be rolled back, also if the message is sent again.

        Its client may commit without a look at the outcome of the message: Qpid JMS does, for it sends asynchronously in a transaction.
        """
        if transaction.doomed is None and not self._refusal_forgotten:
            self.doom(transaction, TransactionRolledBack(f"a message of the transaction was refused: {error}", cause=error))

    def gather(self, transaction: LocalTransaction, draft: Draft) -> BasculeError | None:
        """Keep a message for the commit. A transaction that grows too large can only be rolled back from then on.

        Returns why the message is refused: the open transactions together hold too much.
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
        """An acknowledgement that counts with the commit."""
        if self._deliveries.settled(consumer, message):
            self._holds_something(transaction)
            transaction.acks.append((consumer, message))
            transaction.queues[consumer.queue] = None
            transaction.charged_deliveries += 1
            self.memory.unsettled += 1
            transaction.size_bytes += 16

    def _holds_something(self, transaction: LocalTransaction) -> None:
        """From now on: a transaction that holds things for ever keeps them from everybody else."""
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
                transaction.since_ms = 0  # what it receives from here on has its own time
                if transaction.doomed is None:
                    transaction.doomed = TransactionTimedOut(
                        f"the transaction has held messages for {limit_ms / 1000:g} s (broker.transaction_timeout_s)"
                    )
        self._due_ms = min((each.since_ms + limit_ms for each in holding if each.since_ms), default=0)
        if self._due_ms:
            self._deliveries.schedule.at(self._due_ms, self._end_old)

    def plan_commit(self, transaction: LocalTransaction) -> bool:
        """Plan the commit of a transaction, if that takes long. Return whether ``commit`` can follow in this turn.

        If not, the caller calls it again in the next turn, and adds nothing to the transaction meanwhile.
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
        """The same for a transaction that is to become a branch."""
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
        """Return the plan of a transaction that becomes a branch now; the transaction closes the plan as it ends."""
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
        """The transaction has ended, or its commit or prepare does not take place now."""
        plan, transaction.plan = transaction.plan, None
        if plan is not None:
            plan.close()

    def commit(self, transaction: LocalTransaction, done: Callable[[BasculeError | None], None], ended: bytes = b"") -> bool:
        """All of it, as one journal record; ``done(None)`` once that is stored, ``done(error)`` when it was rolled back instead (False).

        ``ended`` is an entry to go with it: the name of a branch that is committed in one phase.
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
        """Why a transaction is rolled back that could not be journaled. What is no limit is a fault of the broker, and counted."""
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
        """What a transaction has gathered, as one journal record, with an entry that says so. If it raises, nothing was done."""
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
        """The same by a plan, which is finished."""
        with self.journaling.atomic(size_bytes, len(plan.drafts)):
            if ended:
                self.journaling.add(ended)
            stored = self._sending.decide_all(zip(plan.drafts, plan.sends, strict=True), plan.now_ms)
            self._deliveries.leaving.journal(plan.gone)
        self._then_put_in(stored, plan.acks, plan.held)

    @staticmethod
    def _finished_plan(transaction: LocalTransaction) -> CommitPlan | None:
        """Finish the plan of a commit. Return None if the plan is not of all that the transaction has. Raises what planning has raised."""
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
        """The record of a commit is made: what it has acknowledged leaves, and once the record is stored its messages come."""
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
        """None of it: the sends are forgotten, what was received is delivered again, with its count raised."""
        self.counters.rolled_back += 1
        self.end(transaction)
        if self._rollback_commits:
            acks = [(consumer.queue, message) for consumer, message in transaction.acks]
            self.carry_out(transaction.drafts, acks, transaction.size_bytes)
            return
        self._give_up(transaction)

    def _give_up(self, transaction: LocalTransaction) -> None:
        acks, transaction.acks = transaction.acks, []
        queues, transaction.queues = transaction.queues, {}
        self._take_back(queues, len(acks), ((consumer.queue, message) for consumer, message in acks))
        transaction.drafts.clear()
        self._discharge(transaction)
        self._discharge_deliveries(transaction)

    def take_back(self, acks: list[Ack]) -> None:
        """Messages that a transaction had received wait again, after a failed delivery."""
        self._take_back(dict.fromkeys(map(itemgetter(0), acks)), len(acks), iter(acks))

    def _take_back(self, queues: Iterable[BrokerQueue], count: int, acks: Iterator[Ack]) -> None:
        """The same of ``count`` messages; ``queues`` are those of the messages."""
        if count <= PIECE_MESSAGES:
            for queue, messages in by_queue(acks).items():
                self._deliveries.put_back(queue, messages, failed=True)
        else:
            self._deliveries.put_back_all(queues, acks)


def _pieces(stored: Sequence[Stored]) -> list[list[Stored]]:
    """Divide the messages of a commit, in order, into pieces that take PIECE_PLACES at most, or that have one message."""
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
