"""Local transactions of a session (AMQP 1.0 part 4)."""

from __future__ import annotations

from functools import partial
from typing import Any

from bascule.amqp.performatives import Accepted, Declared, Discharge, Rejected
from bascule.client.coordinator import Control, CoordinatorState
from bascule.client.errors import IllegalState, Refused, TimedOut, TransactionInDoubt, TransactionRolledBack
from bascule.client.links import ConsumerState, SessionTransaction
from bascule.client.operation import Operation
from bascule.client.session_links import Acknowledge, SessionLinks
from bascule.core.errors import BasculeError


class Block:
    """One block of a transaction, as against those before and after it."""


class Transactions(SessionLinks):
    """Begins transactions, commits them and rolls them back. One at a time."""

    def begin(self) -> Block:
        """A transaction for a block. Raises IllegalState within another."""
        self.check()
        if self.block is not None or (self.transaction is not None and self.transaction.id is not None):
            raise IllegalState("transactions do not nest: this context has one open; another context can have its own")
        block = self.block = Block()
        if self.transaction is None:
            self.transaction = SessionTransaction()
        return block

    def end(self, block: Block, until_s: float, *, failed: bool) -> Operation[None]:
        """The end of a block: commit, or roll back where it failed. Raises TransactionRolledBack, TransactionInDoubt."""
        try:
            if failed:
                yield from self.rollback(until_s)
                return
            try:
                yield from self.commit(until_s, ends_block=True)
            except TimedOut as error:
                yield from self.rollback(self.core.clock() + self.core.settings.timeout_s)
                raise TransactionRolledBack(f"{error}; rolled back", cause=error) from error
        finally:
            self.leave_block(block)

    def leave_block(self, block: Block) -> None:
        """A block is over; what has not been ended is rolled back. A block that another one has followed is over already."""
        if self.block is block:
            self.block = None
            self._abandon()
            self._next_transaction()

    def _abandon(self) -> None:
        """Nobody ends the transaction any more: the end of the link that controls it rolls it back, whenever the broker hears of it."""
        transaction = self.transaction
        if transaction is None or transaction.id is None or transaction.lost:
            return
        self._withdraw(transaction)
        if self.coordinator is not None:
            self.coordinator.close()

    def _withdraw(self, transaction: SessionTransaction) -> None:
        """What of it waits for credit is not sent any more."""
        for sender in self.senders.values():
            for sending in [each for each in sender.queue if each.transaction is transaction]:
                sender.withdraw(sending, _withdrawn())

    def transaction_to_send_in(self, until_s: float) -> Operation[SessionTransaction | None]:
        """The transaction that the next message belongs to; None outside of transactions. One that is being ended is waited for."""
        while (transaction := self.transaction) is not None and transaction.ending:
            yield from self.core.until(partial(self._ended_or_not_ending, transaction), "send", until_s)
        return transaction

    def _ended_or_not_ending(self, transaction: SessionTransaction) -> bool:
        return self.transaction is not transaction or not transaction.ending

    def check_open(self, transaction: SessionTransaction) -> None:
        """Raises TransactionRolledBack where a message cannot be sent in a transaction any more."""
        if transaction is not self.transaction or transaction.ending:
            raise _withdrawn()
        transaction.check()

    def _next_transaction(self) -> None:
        self.transaction = SessionTransaction() if self.block is not None or self.mode is Acknowledge.TRANSACTED else None

    def commit(self, until_s: float, *, ends_block: bool = False) -> Operation[None]:
        """Commit. Raises TransactionRolledBack, TransactionInDoubt; TimedOut where nothing is decided and a rollback is possible.

        After a commit that ``ends_block`` a call of another task is outside of the block: nobody would commit what it does.
        """
        self.check()
        transaction = self._open_transaction()
        yield from self._taken(transaction, "commit", until_s)
        if transaction.id is None and not transaction.lost:
            return
        transaction.ending = True
        try:
            transaction.check()
            control = yield from self._discharge(transaction, until_s, fail=False)
        finally:
            transaction.ending = False
            if transaction.lost:
                self._next_transaction()
        if ends_block:
            self.block = None
        self._next_transaction()
        try:
            yield from self.core.until(lambda: control.done, "commit", until_s)
        except BasculeError as error:
            raise TransactionInDoubt(f"commit without an answer: {error}", cause=error) from error
        if control.lost:
            raise TransactionInDoubt("the connection was lost before the commit was answered")
        if not isinstance(control.outcome, Accepted):
            raise TransactionRolledBack(f"the broker rolled back: {_reason(control.outcome)}")

    def hand_over(self, until_s: float, *, answered: bool) -> Operation[SessionTransaction | None]:
        """Give the transaction to somebody else, who ends it by its id. Return None for an empty one. The next transaction begins.

        ``answered``: the broker has taken all messages of the transaction. Otherwise they are on their way, ahead of whatever is sent next
        on the connection, and ``refusal`` waits for the answers. Raises TransactionRolledBack, TimedOut.
        """
        self.check()
        transaction = self._open_transaction()
        yield from self._taken(transaction, "hand a transaction over", until_s, answered=answered)
        if transaction.id is None and not transaction.lost:
            return None
        self._next_transaction()
        transaction.check()
        self.engine.flush_settled()
        return transaction

    def declare_ahead(self) -> None:
        """Ask for the next transaction, so that its first message need not wait for the answer.

        The caller has handed the last one over, and has sent the request that ends it: a user may have a limited number of transactions.
        """
        if self.coordinator is not None and self.coordinator.usable:
            self.coordinator.declare_ahead()

    def refusal(self, transaction: SessionTransaction, until_s: float) -> Operation[BasculeError | None]:
        """Wait for the answers to all messages of a transaction that was handed over. Return why one was not taken, or None.

        Raises TimedOut.
        """
        yield from self.core.until(lambda: not transaction.unanswered, "hear what became of the messages of a transaction", until_s)
        return transaction.refused

    def _taken(self, transaction: SessionTransaction, what: str, until_s: float, *, answered: bool = True) -> Operation[None]:
        """Return when no task is within a send, and the broker has all messages; with ``answered`` false, when all are on their way.

        Raises TransactionRolledBack, TimedOut; IllegalState if another task ends the transaction meanwhile.
        """

        def taken() -> bool:
            waits = transaction.unanswered if answered else self._held_back(transaction)
            return not (transaction.sending or waits) or transaction.lost

        yield from self.core.until(taken, what, until_s)
        if self._open_transaction() is not transaction:
            raise _ended_by_another()
        if transaction.refused is not None and not transaction.lost:
            yield from self.rollback(until_s)
            refused = transaction.refused
            raise TransactionRolledBack(f"the broker refused a message of the transaction: {refused}", cause=refused) from refused

    def _held_back(self, transaction: SessionTransaction) -> bool:
        """Whether something of a message of the transaction would be written behind what is sent now."""
        return transaction.unanswered > 0 and any(sender.holds_back(transaction) for sender in self.senders.values())

    def set_aside(self, until_s: float) -> Operation[None]:
        """Consumers are sent nothing until they are resumed; what they were sent ahead goes back."""
        yield from self._suspend(list(self.consumers), until_s)

    def resume(self, consumer: ConsumerState) -> None:
        """A consumer is sent messages again."""
        self._resume([consumer])

    def rollback(self, until_s: float) -> Operation[None]:
        """Undo the transaction: its sends are gone, what was received in it comes again."""
        self.check()
        transaction = self._open_transaction()
        self._withdraw(transaction)
        transaction.ending = True
        if transaction.id is None or transaction.lost:
            self._next_transaction()
            return
        consumers = list(self.consumers)
        try:
            yield from self._suspend(consumers, until_s)
            control = yield from self._discharge(transaction, until_s, fail=True)
            yield from self.core.until(lambda: control.done, "rollback", until_s)
        except TransactionRolledBack:
            pass  # by the end of the connection
        except BaseException:
            self._abandon()
            raise
        finally:
            self._next_transaction()
            self._resume(consumers)

    def _open_transaction(self) -> SessionTransaction:
        if self.transaction is None:
            raise IllegalState("no transaction: connect(..., acknowledge=Acknowledge.TRANSACTED), or context.transaction()")
        if self.transaction.ending:
            raise _ended_by_another()
        return self.transaction

    def _declare(self, transaction: SessionTransaction, until_s: float) -> Operation[None]:
        """Make the transaction known to the broker, if it is not, and is not over meanwhile."""
        if transaction.declaring:  # by another task
            yield from self.core.until(lambda: not transaction.declaring, "begin a transaction", until_s)
        if transaction.id is not None:
            transaction.check()
            return
        transaction.declaring = True
        try:
            while transaction.id is None and transaction is self.transaction:
                coordinator = yield from self._coordinator(until_s)
                control = yield from self._declared(coordinator, until_s)
                if isinstance(control.outcome, Declared):
                    if self.coordinator is not coordinator:
                        continue  # it is gone, and with it what it has begun
                    if transaction is self.transaction:
                        transaction.declared(control.outcome.txn_id)
                    else:
                        coordinator.keep(control)
                elif not control.lost:
                    raise Refused(f"no transaction: {_reason(control.outcome)}")
        finally:
            transaction.declaring = False

    def _declared(self, coordinator: CoordinatorState, until_s: float) -> Operation[Control]:
        """Ask for a transaction; return the answer, or one that came too late for whoever had asked."""
        control = coordinator.declare()
        try:
            while not control.done:
                if (earlier := coordinator.take()) is not None:
                    coordinator.keep(control)
                    return earlier
                yield from self.core.until(lambda: control.done or coordinator.kept_one, "begin a transaction", until_s)
        except BaseException:
            coordinator.keep(control)
            raise
        return control

    def _coordinator(self, until_s: float) -> Operation[CoordinatorState]:
        """The link that controls transactions, ready to send."""
        while True:
            current = self.coordinator
            if current is None:
                yield from self.core.until(lambda: self.begun and self.core.opened, "begin a transaction", until_s)
                if self.coordinator is None:
                    self.coordinator = CoordinatorState(self, self.core.link_name("coordinator"))
                    self.coordinator.attach()
            elif current.usable:
                return current
            else:
                yield from self.core.until(partial(self._coordinator_settled, current), "begin a transaction", until_s)
                if current.error is not None:
                    raise current.error

    def _coordinator_settled(self, coordinator: CoordinatorState) -> bool:
        return coordinator.usable or coordinator.error is not None or self.coordinator is not coordinator

    def _discharge(self, transaction: SessionTransaction, until_s: float, *, fail: bool) -> Operation[Control]:
        coordinator = yield from self._coordinator(until_s)
        transaction.check()
        if transaction.id is None:
            raise IllegalState("the transaction was not declared to the broker, so it cannot be committed or rolled back")
        return coordinator.send(Discharge(transaction.id, fail))


def _ended_by_another() -> IllegalState:
    return IllegalState("another task ends this transaction: let one task do so, when the others have sent and received")


def _withdrawn() -> TransactionRolledBack:
    return TransactionRolledBack("its transaction was rolled back before it was sent")


def _reason(outcome: Any) -> str:
    error = outcome.error if isinstance(outcome, Rejected) else None
    return str(error.exception()) if error is not None else type(outcome).__name__.lower()
