"""The transactional writer: output and position in one Kafka transaction, as a compare-and-set on the position.

A transaction has its own incarnation, unless each request of the last one is answered (``bascule.writer.incarnation``). The position is
known only after ``init_transactions``, which ends the open transactions of earlier incarnations. Then *epoch continuity* proves the
position if nobody else initialised the id since this writer's last transaction; otherwise the writer reads the position behind a barrier
record. An incarnation that is kept knows the position that it has written: if another one moves it, the kept one is fenced. If the outcome
of a commit is in doubt, the position that the next incarnation finds shows the outcome.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from bascule.core.errors import Unavailable
from bascule.writer.errors import PositionMoved, TransactionFault, Unwritable, WriteDenied
from bascule.writer.incarnation import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Attempt,
    ClientEffects,
    Identity,
    Incarnation,
    IncarnationEvent,
    Incarnations,
    IncarnationState,
)
from bascule.writer.reading import TableEffects, read_behind_barrier, read_latest

P = TypeVar("P")
O = TypeVar("O")  # noqa: E741 - an output
V = TypeVar("V")
ProducerT = TypeVar("ProducerT")
OutputT_contra = TypeVar("OutputT_contra", contravariant=True)
ValueT = TypeVar("ValueT")

#: A write is retried with new incarnations for this time, in seconds, before it fails.
WRITE_DEADLINE_S: Final = 120.0


#: Raises an error if a transaction must not be committed, although its records are on their way to Kafka.
Confirm = Callable[[], Awaitable[None]]


class WriterViolation(enum.StrEnum):
    """Rules of the transactional writer that the simulation breaks on purpose."""

    READ_BEFORE_INIT = "the position is read before init_transactions"
    CONTINUITY_ASSUMED = "the position of the last transaction counts as current whatever the epoch"
    KEPT_UNSETTLED = "an incarnation has a further transaction although a request of it may be late"
    NO_LOOK_AFTER_DOUBT = "a transaction in doubt is written again without reading the position"
    NOT_COMPARED = "the position found is not compared with the expected position"


class WriterEffects(ClientEffects[ProducerT], TableEffects[Mapping[str, ValueT]], Protocol[ProducerT, OutputT_contra, ValueT]):
    """The operations that the writer needs: the transaction of the client, and the table of positions."""

    async def begin(self, producer: ProducerT) -> None:
        """Begin the transaction. Raises TransactionFault."""
        ...

    async def hand_over(self, producer: ProducerT, outputs: Sequence[OutputT_contra], start: int, *, careful: bool) -> None:
        """Give the client the outputs from place ``start`` on. ``careful``: a refused record is named. Raises TransactionFault."""
        ...

    async def commit(
        self, producer: ProducerT, positions: Mapping[str, ValueT | None], *, careful: bool, confirm: Confirm | None = None
    ) -> None:
        """Add the positions (None deletes) and commit. Raises TransactionFault: the outcome is then in doubt.

        Before the end of the transaction is requested, ``confirm`` is awaited. An error of it leaves the transaction open.
        """
        ...

    async def abort(self, producer: ProducerT) -> None:
        """Abort the transaction. Raises TransactionFault: the next ``init`` then aborts it."""
        ...


class _Prepared(Incarnation[P], Generic[P, V]):
    """An incarnation that knows the position, and how many outputs of its transaction the client has."""

    def __init__(self, producer: P, identity: Identity | None) -> None:
        super().__init__(producer, identity)
        self.position: V | None = None
        self.handed_over = 0
        self.fault: TransactionFault | None = None  # an error of outputs that were handed over in advance


class _Last(NamedTuple, Generic[V]):
    """The last incarnation that is known to have left the position as it is."""

    identity: Identity
    position: V | None


class Writer(Generic[P, O, V]):
    """Writes records and moves one position, each time in one transaction. Not thread-safe.

    Another transactional id may move the position only after it has taken the position under this writer's id (with a new owner): otherwise
    epoch continuity would not prove the position.
    """

    def __init__(
        self,
        effects: WriterEffects[P, O, V],
        key: str,
        *,
        deadline_s: float = WRITE_DEADLINE_S,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``deadline_s`` is how long failures are retried."""
        self.key = key
        self._effects = effects
        self._deadline_s = deadline_s
        self._violations = violations
        self._attempt = Attempt()
        self._last: _Last[V] | None = None
        self._incarnations: Incarnations[_Prepared[P, V]] = Incarnations(effects, self._incarnate)

    async def current(self) -> V | None:
        """Return the position, read by an incarnation that began after the position was written. Raises Unavailable.

        For an incarnation that is made now, the position is proven or read behind a barrier. An incarnation that was prepared earlier may
        be fenced by now. It could then commit nothing wrong, but a read behind a barrier shows this before the caller uses the position.
        """
        await self.abandon()
        deadline_s = self._effects.now_s() + self._deadline_s
        while True:
            prepared = self._incarnations.coming is not None
            known = (await self._incarnations.get(deadline_s)).position
            if not prepared or (await read_behind_barrier(self._effects, violations=self._violations)).get(self.key) == known:
                return known
            self._drop()
            self._last = None  # another writer has written since

    def prepare(self) -> None:
        """Start the next incarnation in the background unless there is one, for a writer that will write again.

        It fences other writers of the id.
        """
        self._incarnations.prepare()

    async def ahead(self, outputs: Sequence[O], before: V | None) -> None:
        """Begin the transaction that ``write`` will complete, if an incarnation is ready, so that the client sends while records are made.

        ``outputs`` are the first of those that ``write`` will get, and may grow from call to call. An error here is raised by ``write``.
        """
        incarnation = None if self._attempt.careful else self._incarnations.ready()
        if incarnation is not None and incarnation.position == before and incarnation.fault is None:
            with suppress(TransactionFault):
                await self._hand_over(incarnation, outputs)

    async def write(
        self, outputs: Sequence[O], before: V | None, after: V | None, others: Mapping[str, V | None] | None = None,
        confirm: Confirm | None = None,
    ) -> None:  # fmt: skip
        """Write ``outputs`` and move the position from ``before`` to ``after``, both or neither, whatever fails on the way.

        ``others`` are further positions (by key; None deletes) that move in the same transaction. ``confirm`` is awaited while Kafka
        stores the records; an error of it aborts the transaction and is raised. Raises PositionMoved if the position is
        neither ``before`` nor ``after``, Unwritable if Kafka refuses a record, WriteDenied if it refuses a topic, and Unavailable if Kafka
        does not recover in time.
        """
        effects = self._effects
        deadline_s = effects.now_s() + self._deadline_s
        pause_s, tried = FIRST_PAUSE_S, False
        while True:
            incarnation = await self._incarnations.get(deadline_s)
            found = incarnation.position
            if tried and WriterViolation.NO_LOOK_AFTER_DOUBT in self._violations:
                found = before
            if tried and found == after:
                break
            if found != before and WriterViolation.NOT_COMPARED not in self._violations:
                self._drop()
                raise PositionMoved(found)
            try:
                await self._transact(incarnation, outputs, {self.key: after, **(others or {})}, confirm)
            except TransactionFault as fault:
                await self._refuse(fault)
                self._last = None
                self._drop()
                if effects.now_s() + pause_s > deadline_s:
                    raise Unavailable(f"Kafka did not commit for {self._deadline_s:.0f} s: {fault}") from fault
                tried = True
                self._attempt = Attempt(careful=self._attempt.careful or not fault.fenced, long=True)
                # Two writers that fence each other must not retry in step for ever.
                await effects.sleep(pause_s * (effects.random() if fault.fenced else 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._know(incarnation, after)
                if await self._keep(incarnation, after):
                    return
                break
        self._attempt = Attempt()
        self._drop()

    async def abandon(self) -> None:
        """Abort the transaction that was begun in advance, if any. It will not be completed."""
        incarnation = self._incarnations.ready()
        if incarnation is None or incarnation.state is not IncarnationState.IN_TRANSACTION:
            return
        try:
            await self._effects.abort(incarnation.producer)
            incarnation.move(IncarnationEvent.ABORT)
            self._know(incarnation, incarnation.position)
        except TransactionFault:  # the next incarnation aborts it
            incarnation.move(IncarnationEvent.FAIL)
            self._last = None
        self._drop()

    def close(self) -> None:
        """Give up the incarnation. An open transaction ends when the next incarnation starts, or by its timeout."""
        self._drop()

    async def _refuse(self, fault: TransactionFault) -> None:
        """Raise an error that no retry can mend. The transaction is aborted first, because others wait for its end."""
        if not fault.refused and not fault.denied:
            return
        await self.abandon()
        self._last = None
        self._drop()
        self._attempt = Attempt()
        if fault.refused:
            raise Unwritable(fault.refused) from fault
        raise WriteDenied(f"write to a topic of the transaction denied by Kafka: {fault}") from fault

    async def _transact(
        self, incarnation: _Prepared[P, V], outputs: Sequence[O], positions: Mapping[str, V | None], confirm: Confirm | None
    ) -> None:
        if incarnation.fault is not None:
            raise incarnation.fault
        await self._hand_over(incarnation, outputs)
        try:
            await self._effects.commit(incarnation.producer, positions, careful=self._attempt.careful, confirm=confirm)
        except TransactionFault:
            raise
        except Exception:  # of ``confirm``: the positions are in the transaction, so nothing else may complete it
            await self.abandon()
            raise
        incarnation.move(IncarnationEvent.COMMIT)
        incarnation.committed += 1

    async def _keep(self, incarnation: _Prepared[P, V], position: V | None) -> bool:
        """Keep an incarnation after a commit, if no request of it can be late. An incarnation of a retry is not kept: it is slower."""
        settled = WriterViolation.KEPT_UNSETTLED in self._violations
        if self._attempt != Attempt() or not (settled or await self._effects.settled(incarnation.producer, incarnation.committed)):
            return False
        incarnation.move(IncarnationEvent.KEEP)
        incarnation.position, incarnation.handed_over = position, 0
        incarnation.move(IncarnationEvent.PROVE)
        return True

    async def _hand_over(self, incarnation: _Prepared[P, V], outputs: Sequence[O]) -> None:
        """Give the client the outputs that it does not have yet."""
        effects, start = self._effects, incarnation.handed_over
        try:
            if incarnation.state is not IncarnationState.IN_TRANSACTION:
                incarnation.move(IncarnationEvent.BEGIN)
                await effects.begin(incarnation.producer)
            await effects.hand_over(incarnation.producer, outputs, start, careful=self._attempt.careful)
        except TransactionFault as fault:
            incarnation.fault = fault
            raise
        incarnation.handed_over = len(outputs)

    async def _incarnate(self) -> _Prepared[P, V]:
        effects, violations, last = self._effects, self._violations, self._last
        early = await read_latest(effects) if WriterViolation.READ_BEFORE_INIT in violations else None
        producer = await effects.init(self._attempt)
        incarnation: _Prepared[P, V] = _Prepared(producer, await effects.identity(producer))
        incarnation.move(IncarnationEvent.INIT)
        identity = incarnation.identity
        continuous = last is not None and identity is not None and identity.follows(last.identity)
        if last is not None and (continuous or WriterViolation.CONTINUITY_ASSUMED in violations):
            incarnation.position = last.position
            incarnation.move(IncarnationEvent.PROVE)
        else:
            positions = await read_behind_barrier(effects, violations=violations) if early is None else early
            incarnation.position = positions.get(self.key)
            incarnation.move(IncarnationEvent.READ)
        return incarnation

    def _know(self, incarnation: _Prepared[P, V], position: V | None) -> None:
        """Remember the position that an incarnation has left."""
        self._last = None if incarnation.identity is None else _Last(incarnation.identity, position)

    def _drop(self) -> None:
        """End the current incarnation."""
        incarnation = self._incarnations.drop()
        if incarnation is None:
            return
        if incarnation.state is IncarnationState.POSITIONED:
            self._know(incarnation, incarnation.position)
            incarnation.move(IncarnationEvent.DROP)
        elif incarnation.state is IncarnationState.IN_TRANSACTION:
            incarnation.move(IncarnationEvent.FAIL)
        self._effects.discard(incarnation.producer)
