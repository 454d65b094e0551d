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
    """One block of a transaction; its identity distinguishes it from earlier and later blocks."""


class Transactions(SessionLinks):
    """Begins transactions, commits them and rolls them back, one at a time."""

    def begin(self) -> Block:
        """Begin a transaction for a block. Raises IllegalState within another transaction."""
        self.check()
        if self.block is not None or (self.transaction is not None and self.transaction.id is not None):
            raise IllegalState("the context already has an open transaction; commit it first or use another context")
        block = self.block = Block()
        if self.transaction is None:
            self.transaction = SessionTransaction()
        return block

    def end(self, block: Block, until_s: float, *, failed: bool) -> Operation[None]:
        """End a block: commit, or roll back if ``failed``. Raises TransactionRolledBack, TransactionInDoubt."""
        try:
            if failed:
                yield from self.rollback(until_s)
                return
            try:
                yield from self.commit(until_s, ends_block=True)
            except TimedOut as error:
                yield from self.rollback(self.core.clock() + self.core.settings.timeout_s)
                raise TransactionRolledBack(f"{error}; the transaction was rolled back", cause=error) from error
        finally:
            self.leave_block(block)

    def leave_block(self, block: Block) -> None:
        """Leave a block and roll back its open transaction. A block that was followed by another has already ended."""
        if self.block is block:
            self.block = None
            self._abandon()
            self._next_transaction()

    def _abandon(self) -> None:
        """Abandon the transaction: detaching the coordinator link makes the broker roll it back."""
        transaction = self.transaction
        if transaction is None or transaction.id is None or transaction.lost:
            return
        self._withdraw(transaction)
        if self.coordinator is not None:
            self.coordinator.close()

    def _withdraw(self, transaction: SessionTransaction) -> None:
        """Withdraw the messages of the transaction that wait for credit."""
        for sender in self.senders.values():
            for sending in [each for each in sender.queue if each.transaction is transaction]:
                sender.withdraw(sending, _withdrawn())

    def transaction_to_send_in(self, until_s: float) -> Operation[SessionTransaction | None]:
        """Return the transaction of the next message, None outside of transactions. Waits for a transaction that is ending."""
        while (transaction := self.transaction) is not None and transaction.ending:
            yield from self.core.until(partial(self._ended_or_not_ending, transaction), "send", until_s)
        return transaction

    def _ended_or_not_ending(self, transaction: SessionTransaction) -> bool:
        return self.transaction is not transaction or not transaction.ending

    def check_open(self, transaction: SessionTransaction) -> None:
        """Raise TransactionRolledBack if a message can no longer be sent in the transaction."""
        if transaction is not self.transaction or transaction.ending:
            raise _withdrawn()
        transaction.check()

    def _next_transaction(self) -> None:
        self.transaction = SessionTransaction() if self.block is not None or self.mode is Acknowledge.TRANSACTED else None

    def commit(self, until_s: float, *, ends_block: bool = False) -> Operation[None]:
        """Commit. Raises TransactionRolledBack, TransactionInDoubt, and TimedOut if nothing is decided and a rollback is possible.

        After a commit with ``ends_block``, calls of other tasks are outside of the block, because no one would commit their work.
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
            raise TransactionInDoubt(f"the broker did not answer the commit: {error}", cause=error) from error
        if control.lost:
            raise TransactionInDoubt("the connection was lost before the commit was answered")
        if not isinstance(control.outcome, Accepted):
            raise TransactionRolledBack(f"the broker rolled the transaction back: {_reason(control.outcome)}")

    def hand_over(self, until_s: float, *, answered: bool) -> Operation[SessionTransaction | None]:
        """Pass the transaction to another party, which ends it by its id. Return None for an empty one. The next transaction begins.

        ``answered``: the broker has accepted all messages of the transaction. Otherwise they are in flight, ahead of whatever is sent next
        on the connection, and ``refusal`` waits for the answers. Raises TransactionRolledBack, TimedOut.
        """
        self.check()
        transaction = self._open_transaction()
        yield from self._taken(transaction, "send the messages of a transaction", until_s, answered=answered)
        if transaction.id is None and not transaction.lost:
            return None
        self._next_transaction()
        transaction.check()
        self.engine.flush_settled()
        return transaction

    def declare_ahead(self) -> None:
        """Ask for the next transaction, so that its first message need not wait for the answer.

        The caller has handed over the last one and sent the request that ends it, because a user may have a limited number of transactions.
        """
        if self.coordinator is not None and self.coordinator.usable:
            self.coordinator.declare_ahead()

    def refusal(self, transaction: SessionTransaction, until_s: float) -> Operation[BasculeError | None]:
        """Wait for the answers to all messages of a transaction that was handed over. Return why one was refused, or None.

        Raises TimedOut.
        """
        yield from self.core.until(lambda: not transaction.unanswered, "wait for the outcomes of the messages of a transaction", until_s)
        return transaction.refused

    def _taken(self, transaction: SessionTransaction, what: str, until_s: float, *, answered: bool = True) -> Operation[None]:
        """Return when no task is within a send, and the broker has all messages; with ``answered`` false, when all are in flight.

        Raises TransactionRolledBack, TimedOut, and IllegalState if another task ends the transaction meanwhile.
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
        """Return True if a part of a message of the transaction would be written after the data that is sent now."""
        return transaction.unanswered > 0 and any(sender.holds_back(transaction) for sender in self.senders.values())

    def set_aside(self, until_s: float) -> Operation[None]:
        """Stop the delivery to all consumers until they are resumed; prefetched messages are released."""
        yield from self._suspend(list(self.consumers), until_s)

    def resume(self, consumer: ConsumerState) -> None:
        """Resume the delivery to a consumer."""
        self._resume([consumer])

    def rollback(self, until_s: float) -> Operation[None]:
        """Roll back the transaction: its sends are discarded, and its received messages are redelivered."""
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
            pass  # the end of the connection rolled it back
        except BaseException:
            self._abandon()
            raise
        finally:
            self._next_transaction()
            self._resume(consumers)

    def _open_transaction(self) -> SessionTransaction:
        if self.transaction is None:
            raise IllegalState("no transaction; use connect(..., acknowledge=Acknowledge.TRANSACTED) or context.transaction()")
        if self.transaction.ending:
            raise _ended_by_another()
        return self.transaction

    def _declare(self, transaction: SessionTransaction, until_s: float) -> Operation[None]:
        """Declare the transaction to the broker if needed, unless the transaction ends meanwhile."""
        if transaction.declaring:  # another task declares it
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
                        continue  # the coordinator link was lost, and its transactions with it
                    if transaction is self.transaction:
                        transaction.declared(control.outcome.txn_id)
                    else:
                        coordinator.keep(control)
                elif not control.lost:
                    raise Refused(f"the broker refused to begin a transaction: {_reason(control.outcome)}")
        finally:
            transaction.declaring = False

    def _declared(self, coordinator: CoordinatorState, until_s: float) -> Operation[Control]:
        """Declare a transaction; return the answer, or the answer to an earlier declare whose caller has given up."""
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
        """Return the coordinator link, ready to send."""
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
            raise IllegalState("cannot commit or roll back the transaction: it was not declared to the broker")
        return coordinator.send(Discharge(transaction.id, fail))


def _ended_by_another() -> IllegalState:
    return IllegalState("another task is ending the transaction; only one task may end it, after the others have sent and received")


def _withdrawn() -> TransactionRolledBack:
    return TransactionRolledBack("the message was not sent: its transaction was rolled back")


def _reason(outcome: Any) -> str:
    error = outcome.error if isinstance(outcome, Rejected) else None
    return str(error.exception()) if error is not None else type(outcome).__name__.lower()
