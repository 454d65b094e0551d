"""Incarnations of a transactional producer: prepared in advance, kept while no request can be late, replaced otherwise.

In Kafka's transaction protocol v1, the client may repeat an EndTxn request internally, and a late repeat can end the next transaction of
the same producer epoch. Therefore an incarnation has a further transaction only if its client is *settled*: each request that it has sent
is answered, so none of them can still reach Kafka. Otherwise the next transaction has its own incarnation: ``init_transactions`` raises the
epoch, and Kafka refuses the late request.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from bascule.core.errors import Unavailable
from bascule.core.states import Transitions
from bascule.writer.errors import TransactionFault, TransitionMissing

P = TypeVar("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
ProducerT = TypeVar("ProducerT")

#: The pause before the first retry, in seconds. It is doubled for each further retry up to LONGEST_PAUSE_S.
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0


class IncarnationState(enum.Enum):
    """The state of one incarnation."""

    NEW = "new"
    INITIALISED = "initialised"
    POSITIONED = "positioned"
    IN_TRANSACTION = "in transaction"
    COMMITTED = "committed"
    ABORTED = "aborted"
    IN_DOUBT = "in doubt"
    GIVEN_UP = "abandoned"


class IncarnationEvent(enum.Enum):
    """An event of an incarnation."""

    INIT = "init_transactions returned"
    PROVE = "epoch continuity proved the position"
    READ = "position read behind a barrier"
    BEGIN = "transaction began"
    COMMIT = "commit confirmed"
    KEEP = "each request is answered"
    ABORT = "abort confirmed, no commit was sent"
    FAIL = "a request of the transaction failed"
    DROP = "dropped unused"


#: The state machine of an incarnation. The position that the next incarnation finds shows the outcome of an incarnation IN_DOUBT.
TRANSITIONS: Final = Transitions(
    "transactional writer",
    {
        (IncarnationState.NEW, IncarnationEvent.INIT): IncarnationState.INITIALISED,
        (IncarnationState.INITIALISED, IncarnationEvent.PROVE): IncarnationState.POSITIONED,
        (IncarnationState.INITIALISED, IncarnationEvent.READ): IncarnationState.POSITIONED,
        (IncarnationState.POSITIONED, IncarnationEvent.BEGIN): IncarnationState.IN_TRANSACTION,
        (IncarnationState.COMMITTED, IncarnationEvent.KEEP): IncarnationState.INITIALISED,
        (IncarnationState.POSITIONED, IncarnationEvent.DROP): IncarnationState.GIVEN_UP,
        (IncarnationState.IN_TRANSACTION, IncarnationEvent.COMMIT): IncarnationState.COMMITTED,
        (IncarnationState.IN_TRANSACTION, IncarnationEvent.ABORT): IncarnationState.ABORTED,
        (IncarnationState.IN_TRANSACTION, IncarnationEvent.FAIL): IncarnationState.IN_DOUBT,
    },
)


class Identity(NamedTuple):
    """The producer id that Kafka gave an incarnation, and the epoch that ``init_transactions`` set."""

    producer_id: int
    epoch: int

    def follows(self, last: Identity) -> bool:
        """Return True if nobody else initialised the transactional id between ``last`` and this identity.

        The coordinator raises the epoch by one for each init, in its replicated log. Three things raise it once more: an init or a timeout
        that aborts a transaction, an init that the client repeats, and an init of another process. An exhausted epoch gives a new producer
        id.
        """
        return self.producer_id == last.producer_id and self.epoch == last.epoch + 1


class Attempt(NamedTuple):
    """How to make the client of an incarnation.

    ``careful``: each record is sent by itself, so that Kafka's refusal names it. ``long``: the transaction may take minutes.
    """

    careful: bool = False
    long: bool = False


class Incarnation(Generic[P]):
    """A producer and its state. ``identity`` is None if the client does not report it."""

    def __init__(self, producer: P, identity: Identity | None = None) -> None:
        self.producer = producer
        self.identity = identity
        self.state = IncarnationState.NEW
        self.committed = 0  # transactions

    def move(self, event: IncarnationEvent) -> None:
        """Change the state. Raises TransitionMissing."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise TransitionMissing(f"event {event.name} is not allowed in state {self.state.name} of a transactional writer")
        self.state = after


class Pending(Protocol[T_co]):
    """Work that runs in the background."""

    @property
    def ready(self) -> bool:
        """Return True if the work has ended without an error."""
        ...

    @property
    def ended(self) -> bool:
        """Return True if the work has ended."""
        ...

    def result(self) -> T_co:
        """Return the result of work that has ended. Raises the error of the work."""
        ...

    async def wait(self, timeout_s: float) -> T_co:
        """Return the result. Raises the error of the work, and TimeoutError if the work does not end in time."""
        ...


class ClientEffects(Protocol[ProducerT]):
    """The operations of Kafka's client and of the clock that both protocols of this package need."""

    def now_s(self) -> float:
        """Return a monotonic time in seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def random(self) -> float:
        """Return a number from 0 to 1."""
        ...

    def start(self, work: Coroutine[Any, Any, T]) -> Pending[T]:
        """Run ``work`` in the background."""
        ...

    async def init(self, attempt: Attempt) -> ProducerT:
        """Make a client and initialise its transactions. Raises TransactionFault, Unavailable."""
        ...

    async def identity(self, producer: ProducerT) -> Identity | None:
        """Return the producer id and epoch that the last ``init`` gave, or None if the client does not report them."""
        ...

    async def settled(self, producer: ProducerT, transactions: int) -> bool:
        """Return True if each request that the producer has sent is answered, as far as the client shows it.

        ``transactions`` is the number of transactions that the producer has committed.
        """
        ...

    def discard(self, producer: ProducerT) -> None:
        """Forget a producer. The next ``init`` ends a transaction that it has open."""
        ...

    async def explain(self, reason: str) -> Unavailable:
        """Return the error of a transaction that cannot be started, with what can be found out about Kafka."""
        ...


class Incarnations(Generic[P]):
    """The next incarnation: prepared in the background, awaited, dropped."""

    def __init__(
        self,
        effects: ClientEffects[Any],
        make: Callable[[], Coroutine[Any, Any, P]],
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        """``turn`` is a lock for several threads that prepare: of two incarnations made at once, the later one would fence the other."""
        self._effects = effects
        self._make = make
        self._turn = nullcontext() if turn is None else turn
        self._next: Pending[P] | None = None

    def prepare(self) -> Pending[P]:
        """Start the next incarnation unless there is one. It aborts the open transaction of any other writer of the id."""
        with self._turn:
            if self._next is None:
                self._next = self._effects.start(self._make())
            return self._next

    @property
    def coming(self) -> Pending[P] | None:
        """Return the next incarnation, or None if it was not started."""
        return self._next

    def ready(self) -> P | None:
        """Return the next incarnation if it is ready, or None while it is being made and if that failed."""
        return self._next.result() if self._next is not None and self._next.ready else None

    async def get(self, deadline_s: float) -> P:
        """Return the next incarnation, and retry one that fails. Raises Unavailable after ``deadline_s`` (monotonic time)."""
        effects, pause_s = self._effects, FIRST_PAUSE_S
        while True:
            try:
                return await self.prepare().wait(max(0.0, deadline_s - effects.now_s()))
            except TimeoutError:
                raise await effects.explain("Kafka does not answer in time") from None
            except (TransactionFault, Unavailable) as error:
                self._next = None
                if effects.now_s() + pause_s > deadline_s:
                    raise await effects.explain(str(error)) from error
                await effects.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except Exception:
                self._next = None  # the next call makes a new one, because the cause may have been mended
                raise

    def drop(self) -> P | None:
        """Forget the next incarnation, and return it if it is ready. An incarnation that is still being made is abandoned."""
        dropped = self.ready()
        self._next = None
        return dropped
