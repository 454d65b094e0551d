"""Transactions that check a table before they write: read, make, write and commit.

All transactions under one transactional id write to one partition of a table. A later incarnation ends open transactions and fences the
earlier incarnations, so only one of them can remove a record that it finds after ``init_transactions``: a compare-and-set for all
processes. Other writers add records to the table outside of these transactions, so epoch continuity proves nothing about the table: each
read is behind a barrier record.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Generic, Protocol, TypeVar

from bascule.core.errors import Unavailable
from bascule.writer.errors import RecordRefused, TransactionFault
from bascule.writer.incarnation import FIRST_PAUSE_S, LONGEST_PAUSE_S, Attempt, ClientEffects, Incarnation, IncarnationEvent, Incarnations
from bascule.writer.reading import TableEffects, read_behind_barrier

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")
ProducerT = TypeVar("ProducerT")
RecordT_contra = TypeVar("RecordT_contra", contravariant=True)
TableT_co = TypeVar("TableT_co", covariant=True)

#: A transaction is retried with new incarnations for this time, in seconds, before it fails.
TRANSACT_DEADLINE_S: Final = 20.0


class TableViolation(enum.StrEnum):
    """Rules of transactions that check a table, which a test may break."""

    READ_BEFORE_INIT = "the table is read before init_transactions"
    TIME_NOT_EXTENDED = "a failed transaction gets no more time when it is retried"
    NOT_MADE_AGAIN = "after a commit in doubt the same records are written again without reading the table"


class SlotEffects(ClientEffects[ProducerT], TableEffects[TableT_co], Protocol[ProducerT, RecordT_contra, TableT_co]):
    """The operations that the protocol needs: the transaction of a client, and a partition of the table."""

    async def write(self, producer: ProducerT, records: Sequence[RecordT_contra]) -> None:
        """Begin, hand over, commit. Raises TransactionFault: the outcome is then in doubt, unless records were refused."""
        ...


class TableTransactions(Generic[P, R, T]):
    """The transactions of one transactional id. Call ``transact`` from one thread at a time, ``prepare`` from any thread."""

    def __init__(
        self,
        effects: SlotEffects[P, R, T],
        *,
        ahead: bool = True,
        deadline_s: float = TRANSACT_DEADLINE_S,
        turn: AbstractContextManager[Any] | None = None,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``ahead`` prepares the next incarnation in advance. ``turn`` is a lock for ``prepare``."""
        self._effects = effects
        self._ahead = ahead
        self._deadline_s = deadline_s
        self._violations = violations
        self._long = False  # the last transaction has failed, perhaps because Kafka's time limit was too short for it
        self._works = False  # the last incarnation that was awaited was made
        self._incarnations: Incarnations[Incarnation[P]] = Incarnations(effects, self._incarnate, turn)

    async def transact(self, make: Callable[[T], Sequence[R]]) -> None:
        """Write the records that ``make`` returns for the current table, all or none. Write nothing if it returns none.

        After a failure, or a commit whose outcome is in doubt, ``make`` is called again with the table as it is then. Raises RecordRefused,
        Unavailable if Kafka does not recover in time, and the errors of ``make``.
        """
        effects = self._effects
        deadline_s, pause_s = effects.now_s() + self._deadline_s, FIRST_PAUSE_S
        made: Sequence[R] | None = None
        while True:
            early = await self._read() if TableViolation.READ_BEFORE_INIT in self._violations else None
            incarnation = await self._get(deadline_s)
            if made is None or TableViolation.NOT_MADE_AGAIN not in self._violations:
                made = make(await self._read() if early is None else early)
            if not made:
                return
            incarnation.move(IncarnationEvent.READ)
            incarnation.move(IncarnationEvent.BEGIN)
            try:
                await effects.write(incarnation.producer, made)
            except TransactionFault as fault:
                incarnation.move(IncarnationEvent.FAIL)
                self._drop()
                self._long = TableViolation.TIME_NOT_EXTENDED not in self._violations
                if fault.refused:
                    reason = next(iter(fault.refused.values())).str()
                    raise RecordRefused(f"Kafka refused a record: {reason}; nothing was written") from fault
                if effects.now_s() + pause_s > deadline_s:
                    raise Unavailable(f"Kafka did not commit for {self._deadline_s:.0f} s: {fault}") from fault
                await effects.sleep(pause_s * (effects.random() if fault.fenced else 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                incarnation.move(IncarnationEvent.COMMIT)
                incarnation.committed += 1
                if not self._long and await effects.settled(incarnation.producer, incarnation.committed):
                    incarnation.move(IncarnationEvent.KEEP)
                    return
                self._drop()
                self._long = False
                if self._ahead:
                    self.prepare()
                return

    def prepare(self) -> None:
        """Start the next incarnation in the background, unless there is one."""
        self._incarnations.prepare()

    @property
    def reachable(self) -> bool:
        """Return True if a transaction can be started, as far as is known without waiting."""
        coming = self._incarnations.coming
        return self._works and (coming is None or not coming.ended or coming.ready)

    async def reach(self) -> None:
        """Wait until a transaction can be started. Raises Unavailable with the reason."""
        await self._get(self._effects.now_s() + self._deadline_s)

    async def close(self) -> None:
        """Wait for an incarnation that is being made, and drop it. An open transaction ends by its timeout."""
        if (coming := self._incarnations.coming) is not None:
            with suppress(TransactionFault, Unavailable, TimeoutError):
                await coming.wait(self._deadline_s)
            self._drop()

    async def _read(self) -> T:
        return await read_behind_barrier(self._effects, violations=self._violations)

    async def _get(self, deadline_s: float) -> Incarnation[P]:
        self._works = False
        incarnation = await self._incarnations.get(deadline_s)
        self._works = True
        return incarnation

    async def _incarnate(self) -> Incarnation[P]:
        incarnation = Incarnation(await self._effects.init(Attempt(long=self._long)))
        incarnation.move(IncarnationEvent.INIT)
        return incarnation

    def _drop(self) -> None:
        incarnation = self._incarnations.drop()
        if incarnation is not None:
            self._effects.discard(incarnation.producer)
