"""The way of decisions into the journal: decide, append, confirm, and only then carry out.

Decisions of one turn share one record (group commit). Many appends are in flight at once, and the actions that wait for them run in order
as Kafka confirms the records.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final

from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.errors import BrokerFault, RecordTooLarge
from bascule.broker.queue import BrokerQueue
from bascule.broker.send_times import RESOLUTION_S, SendTimes
from bascule.broker.turns import Allowance, Work
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.journal.records import (
    ACK_BYTES,
    ACK_ENTRY_BYTES,
    HEADER_SIZE,
    INDEX_BITS,
    KEY_OF_KIND,
    MESSAGES_PER_RECORD_MAX,
    Kind,
    ack_entry,
    encode_record,
)

#: A record is closed at this size: large enough to amortise an append, small enough not to delay the first of its actions, and with room
#: for one more entry as large as the largest message.
RECORD_BYTES_SOFT = 256 * 1024

#: From this size on, another thread makes and appends a record: checksum and copies of 64 MiB take 100 ms.
LARGE_RECORD_BYTES: Final = 1 << 20
#: Steps of an action that waits for a record, for example an answer to a client.
ACTION_STEPS = 3
#: An action that waits for a record: a function, its arguments, and whether it is an answer, whose error concerns only its receiver. A
#: function that is no answer may return work; the following actions wait until the work is done.
Action = tuple[Callable[..., Work | None], tuple[Any, ...], bool]
#: Bytes of a record that are reserved for what Kafka counts besides the value.
FRAME_BYTES = 1024


class JournalingViolation(enum.StrEnum):
    """Rules of journaling that a test can break."""

    ANSWER_BEFORE_STORED = "actions run before the record that they wait for is stored"
    TRANSACTION_IN_SEVERAL_RECORDS = "the entries of one transaction are spread over several records"
    ACKNOWLEDGEMENTS_IN_NEXT_RECORD = "the acknowledgements of a transaction are in the record after the one with its messages"


class Batch:
    """The open record: its entries, and the actions that run once it is stored."""

    __slots__ = (
        "acks",
        "actions",
        "digests",
        "done",
        "first_mid",
        "messages",
        "parts",
        "sends",
        "sends_since_s",
        "sends_until_s",
        "sequence",
        "size_bytes",
    )

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.first_mid = sequence << INDEX_BITS
        self.parts: list[bytes] = []
        self.size_bytes = 0
        self.messages = 0
        self.acks: dict[BrokerQueue, list[int]] = {}
        self.actions: list[Action] = []
        self.done = 0  # number of actions that have run
        self.digests: list[bytes] = []
        self.sends_since_s: list[float] = []  # when messages were decided whose senders wait, and how many at each time
        self.sends: list[int] = []
        self.sends_until_s = -1.0  # end of the time that counts as the last one

    @property
    def empty(self) -> bool:
        """Return True if there is nothing to append."""
        return not self.parts and not self.acks


class AtomicEntries:
    """A context whose entries go into one record. If the body of the context raises, all its entries are removed again."""

    __slots__ = ("_batch", "_journaling", "_sizes", "_undo", "acks")

    def __init__(self, journaling: Journaling) -> None:
        batch = self._batch = journaling.batch
        self._journaling = journaling
        self._sizes = (len(batch.parts), batch.size_bytes, batch.messages, len(batch.actions), len(batch.digests))
        self.acks: list[tuple[BrokerQueue, int]] = []  # queues, and how many acknowledgements each got
        self._undo: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def undo(self, action: Callable[..., None], *arguments: Any) -> None:
        """Register an action that reverts a change in memory if the body of the context raises."""
        self._undo.append((action, arguments))

    def __enter__(self) -> AtomicEntries:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            self._take_back()
            return
        try:
            self._journaling.check_size()
        except RecordTooLarge:
            self._take_back()
            raise
        self._journaling.end_atomic()

    def _take_back(self) -> None:
        batch = self._batch
        for queue, count in self.acks:
            del batch.acks[queue][-count:]
            if not batch.acks[queue]:
                del batch.acks[queue]
        parts, batch.size_bytes, batch.messages, actions, digests = self._sizes
        del batch.parts[parts:], batch.actions[actions:], batch.digests[digests:]
        self._journaling.taken_back()
        for action, arguments in self._undo[::-1]:
            action(*arguments)


class Journaling:
    """The open record and the records in flight.

    ``append(key, value)`` sends a record, and ``append_large(key, make)`` one whose value ``make`` returns, possibly in another thread.
    Each append must be confirmed in order, by :meth:`confirm`, or the epoch must end.
    """

    def __init__(
        self,
        append: Callable[[bytes, bytes], None],
        *,
        append_large: Callable[[bytes, Callable[[], bytes]], None] | None = None,
        on_work: Callable[[bool], None] = lambda _: None,
        errors: ErrorContainment | None = None,
        send_times: SendTimes | None = None,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """Create the journaling of one epoch. ``errors`` contains the errors of answers, ``send_times`` counts answers to senders."""
        self.errors = errors or ErrorContainment()
        self._send_times = send_times or SendTimes()
        self._clock_s = self._send_times.clock_s
        self.record_bytes_max = RECORD_BYTES_MAX  # of a record's value; the journal's topic may accept less
        self._hasty = JournalingViolation.ANSWER_BEFORE_STORED in violations
        self._in_pieces = JournalingViolation.TRANSACTION_IN_SEVERAL_RECORDS in violations
        self._acks_late = JournalingViolation.ACKNOWLEDGEMENTS_IN_NEXT_RECORD in violations
        self._append = append
        self._append_large = append_large or (lambda key, make: append(key, make()))
        self._on_work = on_work  # called once when there is something to append, and with True when an action waits for it
        self.epoch = -1
        self.sequence = 0  # of the last closed record
        self.confirmed_sequence = 0
        self.batch = Batch(1)
        self.in_flight: deque[Batch] = deque()
        self.in_flight_bytes = 0
        self._stored: deque[Batch] = deque()  # stored records whose actions have not all run
        self._rest: Work | None = None  # of the last action that has begun
        self._between: list[Callable[[], None]] = []  # actions that wait until no stored record is partly carried out
        self.turns = Allowance()
        self._woken = False
        self._urgent = False  # an action waits for the open record
        self.open_entries: AtomicEntries | None = None  # the context that is being written, whose entries must stay in one record

    def begin(self, epoch: int, last_sequence: int) -> None:
        """Begin an epoch behind the last valid record."""
        self.epoch = epoch
        self.sequence = self.confirmed_sequence = last_sequence
        self.batch = Batch(last_sequence + 1)

    def add(self, entry: bytes) -> None:
        """Add an entry to the open record."""
        batch = self.batch
        batch.parts.append(entry)
        batch.size_bytes += len(entry)
        if not self._woken:
            self._wake()
        self.close_if_full()

    def atomic(self, size_bytes: int, messages: int = 1) -> AtomicEntries:
        """Return a context whose entries go into one record, or into none if its body raises. ``size_bytes`` is their approximate size.

        ``messages`` is the highest number of messages, which one record must be able to number. The exit of the context raises
        RecordTooLarge.
        """
        self._check_whole()
        batch = self.batch
        if batch.size_bytes + size_bytes > RECORD_BYTES_SOFT or batch.messages + messages > MESSAGES_PER_RECORD_MAX:
            self.flush()
        entries = AtomicEntries(self)
        if not self._in_pieces:
            self.open_entries = entries
        return entries

    def check_size(self) -> None:
        """Check that Kafka accepts the open record. Raises RecordTooLarge."""
        size_bytes, limit = self.batch.size_bytes, self.record_bytes_max - FRAME_BYTES
        if size_bytes > limit:
            raise RecordTooLarge(f"a journal record has {size_bytes} bytes; the journal has room for {limit}")

    def end_atomic(self) -> None:
        """Allow the open record to be closed again."""
        self.open_entries = None
        self.close_if_full()

    def taken_back(self) -> None:
        """Continue after the entries of a context were removed from the open record."""
        self._urgent = bool(self.batch.actions)
        self.end_atomic()

    def add_send(self, entry: bytes, duplicate_ids: tuple[bytes, ...]) -> int:
        """Add a message to the open record, as its SEND entry. Return its mid."""
        if self._in_pieces:
            self.flush()
        batch = self.batch
        if batch.messages >= MESSAGES_PER_RECORD_MAX:
            self.flush()
            batch = self.batch
        mid = batch.first_mid + batch.messages
        batch.messages += 1
        batch.digests += duplicate_ids
        batch.parts.append(entry)
        batch.size_bytes += len(entry)
        if not self._woken:
            self._wake()
        return mid

    def add_sends(self, entries: bytes, messages: int, digests: Sequence[bytes]) -> int:
        """Add the SEND entries of several messages with their duplicate ids, within ``atomic``. Return the mid of the first message.

        The mids are consecutive, since the context has numbers for all of its messages.
        """
        if self._in_pieces:
            self.flush()
        batch = self.batch
        first = batch.first_mid + batch.messages
        if messages:
            batch.messages += messages
            batch.parts.append(entries)
            batch.size_bytes += len(entries)
            batch.digests += digests
            if not self._woken:
                self._wake()
        return first

    def add_ack(self, queue: BrokerQueue, mid: int) -> None:
        """Add the acknowledgement of a message to the open record."""
        batch = self.batch
        mids = batch.acks.get(queue)
        if mids is None:
            batch.acks[queue] = [mid]
            size = batch.size_bytes + ACK_ENTRY_BYTES
            if not self._woken:
                self._wake()
        else:
            mids.append(mid)
            size = batch.size_bytes + ACK_BYTES
        batch.size_bytes = size
        if self.open_entries is not None:
            self.open_entries.acks.append((queue, 1))
        elif size > RECORD_BYTES_SOFT:  # checked inline for each message: a call would cost as much as the rest
            self.close_if_full()

    def add_acks(self, queue: BrokerQueue, mids: list[int]) -> None:
        """Add the acknowledgements of at least one message, as ``add_ack`` does."""
        entries = self.open_entries
        if entries is None:
            for mid in mids:
                self.add_ack(queue, mid)
            return
        self.add_ack(queue, mids[0])
        if rest := mids[1:]:
            self.batch.acks[queue] += rest
            self.batch.size_bytes += ACK_BYTES * len(rest)
            entries.acks.append((queue, len(rest)))

    def then(self, action: Callable[..., Work | None], *arguments: Any) -> None:
        """Call an action once all decisions so far are stored; at once if they are stored already.

        The action applies what is stored, so an error in it ends the epoch. Use ``tell`` for an answer. An action may return work, whose
        pieces are done as the steps of each turn allow. Later actions wait for the end of the work.
        """
        if self._urgent:
            self.batch.actions.append((action, arguments, False))
        elif not self._deferred((action, arguments, False)):
            _do_all(action(*arguments))

    def tell(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call an answer as ``then`` does. An error in it concerns only the receiver of the answer, and is contained."""
        if self._urgent:
            self.batch.actions.append((action, arguments, True))
        elif not self._deferred((action, arguments, True)):
            self.errors.run(ErrorKind.ANSWER, action, *arguments)

    def then_tell(self, action: Callable[..., Work | None], arguments: tuple[Any, ...], answer: Callable[..., None], token: object) -> None:
        """Call an action as ``then`` does, and then its answer to a sender as ``tell`` does: once for each message."""
        batch, now_s = self.batch, self._clock_s()
        if now_s < batch.sends_until_s:
            batch.sends[-1] += 1
        else:
            batch.sends_since_s.append(now_s)
            batch.sends_until_s = now_s + RESOLUTION_S
            batch.sends.append(1)
        actions = ((action, arguments, False), (answer, (token,), True))
        if self._urgent:
            batch.actions += actions
        elif not self._deferred(*actions):
            _do_all(action(*arguments))
            self.errors.run(ErrorKind.ANSWER, answer, token)

    @property
    def actions(self) -> int:
        """Return the number of actions and answers that wait for records to be stored, or for a turn after that."""
        left = sum([len(batch.actions) - batch.done for batch in self._stored])
        return left + sum([len(batch.actions) for batch in self.in_flight]) + len(self.batch.actions)

    @property
    def defers(self) -> bool:
        """Return True if there are decisions that are not stored, so that ``then`` and ``tell`` do not call their action at once."""
        batch = self.batch
        return not self._hasty and bool(batch.parts or batch.acks or self.in_flight or self._stored)

    def _deferred(self, *actions: Action) -> bool:
        """Queue actions behind the last record that has decisions. Return False if there is no such record."""
        if self._hasty:
            return False
        batch = self.batch
        if batch.parts or batch.acks:
            batch.actions += actions
            if not self._urgent:
                self._urgent = True
                self._on_work(True)
        elif self.in_flight:
            self.in_flight[-1].actions += actions
        elif self._stored:
            self._stored[-1].actions += actions
        else:
            return False
        return True

    def after_barrier(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call an answer once a record made after this call is stored. A fenced broker never gets there."""
        self.add(b"")
        self.tell(action, *arguments)

    def close_if_full(self) -> None:
        """Append the open record if it is large, unless a context is being written."""
        if self.batch.size_bytes > RECORD_BYTES_SOFT and self.open_entries is None:
            self.flush()

    def _wake(self) -> None:
        self._woken = True
        self._on_work(False)

    def flush(self) -> None:
        """Append the open record. Raises BrokerFault if a context was left half-written: part of it must not be stored."""
        if self.open_entries is not None:
            self._check_whole()
        self._woken = self._urgent = False
        batch = self.batch
        if not batch.parts and not batch.acks:
            return
        acks_late: dict[BrokerQueue, list[int]] = {}
        if self._acks_late and batch.messages:
            acks_late, batch.acks = batch.acks, {}
        for queue, mids in batch.acks.items():
            batch.parts.append(ack_entry(queue.id, mids))
        kind = Kind.DATA if batch.messages else Kind.STATE
        make = partial(encode_record, kind, self.epoch, batch.sequence, *batch.parts)
        size_bytes = HEADER_SIZE + sum(map(len, batch.parts))
        value = make() if size_bytes < LARGE_RECORD_BYTES else None
        batch.parts.clear()
        batch.size_bytes = size_bytes
        self.in_flight.append(batch)
        self.in_flight_bytes += size_bytes
        self.sequence = batch.sequence
        self.batch = Batch(batch.sequence + 1)
        if acks_late:
            self.batch.acks = acks_late
            self._wake()
        if value is None:
            self._append_large(KEY_OF_KIND[kind], make)
        else:
            self._append(KEY_OF_KIND[kind], value)

    def _check_whole(self) -> None:
        if self.open_entries is not None:
            raise BrokerFault("an action stopped before its end")

    def confirm(self) -> None:
        """Note that the oldest record in flight is stored, and run its actions as far as the steps of this turn allow."""
        self._stored.append(self.in_flight.popleft())
        self.carry_out()

    @property
    def pending(self) -> bool:
        """Return True if actions of a stored record have still to run."""
        return bool(self._stored)

    def carry_out(self) -> None:
        """Run the actions of stored records, in order, as far as the steps of this turn allow.

        A record is confirmed after its last action.
        """
        turns = self.turns
        while self._stored:
            batch = self._stored[0]
            actions = batch.actions
            while (done := batch.done) < len(actions) or self._rest is not None:
                if turns.left <= 0:
                    return
                if self._rest is not None:
                    self._do_some(self._rest)
                    continue
                turns.left -= ACTION_STEPS
                action, arguments, answers = actions[done]
                batch.done = done + 1
                try:
                    rest = action(*arguments)
                except Exception as error:
                    if not answers:
                        raise
                    self.errors.contain(ErrorKind.ANSWER, error)
                else:
                    if rest is not None and not answers:
                        self._rest = rest
            if batch.sends:
                self._send_times.answered(batch.sends_since_s, batch.sends)
            self.in_flight_bytes -= batch.size_bytes
            self.confirmed_sequence = batch.sequence
            self._stored.popleft()
            if self._between:
                self._look_between()

    def _do_some(self, rest: Work) -> None:
        """Do a piece of the work of an action."""
        steps = next(rest, None)
        if steps is None:
            self._rest = None
        else:
            self.turns.left -= steps

    def between_records(self, action: Callable[[], None]) -> None:
        """Call an action when no stored record is partly carried out: the state is then that of the confirmed sequence.

        It must not raise.
        """
        self._between.append(action)
        if not (self._stored and self._stored[0].done):
            self._look_between()

    def _look_between(self) -> None:
        while self._between:
            self._between.pop(0)()

    @property
    def _unconfirmed(self) -> Iterator[Batch]:
        """Yield the records behind the confirmed sequence. Some actions of the first may have run: see ``between_records``."""
        yield from self._stored
        yield from self.in_flight
        yield self.batch

    def unconfirmed_acks(self) -> Iterator[tuple[BrokerQueue, list[int]]]:
        """Yield the mids of acknowledgements behind the confirmed sequence. A snapshot still contains these messages."""
        for batch in self._unconfirmed:
            yield from batch.acks.items()

    def unconfirmed_digests(self) -> Iterator[bytes]:
        """Yield the ids of sends behind the confirmed sequence. A snapshot must not contain them."""
        for batch in self._unconfirmed:
            yield from batch.digests


def _do_all(rest: Work | None) -> None:
    """Do the work of an action that waits for no record."""
    for _ in rest or ():
        pass
