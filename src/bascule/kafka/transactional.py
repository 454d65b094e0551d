"""The exactly-once writer: output and position in one Kafka transaction, as a compare-and-set on the position.

Every transaction has a producer incarnation of its own. With Kafka's transaction protocol v1, the only one that librdkafka speaks, a late
EndTxn that the client repeated inside itself can end the next transaction of the same incarnation; a new one bumps the producer epoch, and
the late request is refused. The next incarnation is prepared in the background, so that its cost is off the path of a message.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from bascule.core import crash
from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.core.kafka_records import Output
from bascule.core.log import ClientLog, get_log
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka.guards import TRANSACTION_STATE, no_transaction
from bascule.kafka.history import PROMPT
from bascule.kafka.log import introduce, patient
from bascule.kafka.positions import PositionReader
from bascule.threads.background import in_background
from bascule.writer.position import Position, position_partition

#: The coordinator aborts a dead writer's transaction after this time; readers of its topics wait no longer for it.
TRANSACTION_TIMEOUT_MS = 30_000
#: The same where a first try has failed: time for hundreds of MiB, or for 100,000 records one by one at 10 ms each way.
LONG_TRANSACTION_TIMEOUT_MS = 300_000
#: How long one request to the coordinator may take, or Kafka take no record, before the incarnation is given up.
COORDINATOR_TIMEOUT_S = 20.0
#: How long a wait for records to be taken lasts before a look whether any were.
PROGRESS_S = 0.5
#: The report that names a refused record may be on its way when the client refuses the next one.
REPORT_S = 1.0
#: To abort a transaction: longer than a Kafka that works needs; after that it is left to time out.
END_TIMEOUT_S = 5.0
ENDED_AT_ONCE = 8
#: And to abort all that are left, however many: who ends is killed after half a minute.
ENDED_WITHIN_S = 10.0
#: A write is tried again with a new incarnation for this long, then reported.
WRITE_DEADLINE_S = 120.0
#: To be fenced is no fault here, so what the client says of it goes to debugging alone.
_log = get_log("bascule.kafka.transactional")
_FIRST_PAUSE_S = 0.1
_SETTLE_S = 0.02
_LONGEST_PAUSE_S = 5.0

#: Delivery failures that lie in the record, not in Kafka's state: trying again cannot help.
_RECORD_FAULTS = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
        KafkaError.INVALID_TIMESTAMP,
    }
)
#: Another incarnation came after this one.
_FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})


class PositionMoved(BasculeError):
    """Another writer moved the position: what was to be written may have been written by it."""

    retriable = True
    scope = Scope.PIPELINE

    def __init__(self, found: Position | None) -> None:
        super().__init__(f"the position is at {found}")
        self.found = found


class Unwritable(BasculeError):
    """Kafka refuses records for good (too large, for one); ``faults`` says which, by their place among the outputs, and why.

    ``what`` names them, and what would be right, where that is known.
    """

    retriable = False
    scope = Scope.PIPELINE

    def __init__(self, faults: Mapping[int, KafkaError], what: str = "") -> None:
        super().__init__(what or "; ".join(f"record {place}: {fault.str()}" for place, fault in list(faults.items())[:3]))
        self.faults = dict(faults)


class WriteDenied(Unavailable):
    """Kafka's ACLs do not allow a record's topic to be written; of a transaction Kafka does not say which."""


class _Incarnation(NamedTuple):
    """A producer after init_transactions, and the positions read after that."""

    producer: Producer
    positions: dict[str, Position]


class TransactionalWriter:
    """Writes records and moves one position, each time in one transaction. Not for several threads at once."""

    def __init__(
        self, kafka: Mapping[str, Any], transactional_id: str, positions_topic: str, key: str, *, deadline_s: float = WRITE_DEADLINE_S
    ) -> None:
        """``deadline_s`` is how long what fails is tried again."""
        self.key = key
        self._kafka = dict(kafka)
        self._deadline_s = deadline_s
        self._topic = positions_topic
        self._producer_settings = {
            # Keyed records go where a Java producer would put them.
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
            "message.max.bytes": RECORD_BYTES_MAX,
            **PROMPT,
            **kafka,
            "transactional.id": transactional_id,
            "enable.idempotence": True,
            "acks": "all",
        }
        self._reader = PositionReader(kafka, positions_topic, [position_partition(key)])
        self._next: Future[_Incarnation] | None = None
        self._spent: Producer | None = None
        self._careful = False
        self._timeout_ms = TRANSACTION_TIMEOUT_MS
        #: How many outputs of the transaction at hand the present incarnation has taken; None before it has begun.
        self._taken: int | None = None

    def current(self) -> Position | None:
        """The position as of now, in the hands of an incarnation that came after it. Raises Unavailable.

        The incarnation may have been prepared long ago, and another process may have written since: then a new one is made.
        """
        self.abandon()
        deadline = time.monotonic() + self._deadline_s
        while True:
            known = self._incarnation(deadline).positions.get(self.key)
            if self._reader.read().get(self.key) == known:
                return known
            self._drop()

    def prepare(self) -> None:
        """Starts the next incarnation in the background; a no-op when there is one.

        For who will write again: it ends what any other writer under the same id has begun.
        """
        if self._next is not None:
            return
        self._next = in_background(self._incarnate, "bascule-incarnation")

    def ahead(self, outputs: Sequence[Output], before: Position | None) -> None:
        """Begins the transaction that ``write`` will complete, if an incarnation is ready: Kafka takes records while more are made.

        ``outputs`` are the first of those that ``write`` will be given, and may grow from call to call. What fails here fails there.
        """
        if self._careful or self._next is None or not self._next.done() or self._next.exception() is not None:
            return
        incarnation = self._next.result()
        if incarnation.positions.get(self.key) == before:
            with suppress(KafkaException):
                self._hand_over(incarnation.producer, outputs, None)

    def write(
        self,
        outputs: Sequence[Output],
        before: Position | None,
        after: Position | None,
        others: Mapping[str, Position | None] | None = None,
    ) -> None:
        """Writes ``outputs`` and moves the position from ``before`` to ``after``, both or neither, whatever fails on the way.

        ``others`` are further positions (by key; None deletes) that move in the same transaction. When the outcome of a commit is in
        doubt, the position read by a new incarnation tells it. Raises PositionMoved when the position is neither ``before`` nor
        ``after``, Unwritable when Kafka refuses a record, WriteDenied when it refuses a topic, Unavailable when Kafka does not come back
        in time.
        """
        deadline = time.monotonic() + self._deadline_s
        pause_s = _FIRST_PAUSE_S
        positions = {self.key: after, **(others or {})}
        tried = False
        while True:
            incarnation = self._incarnation(deadline)
            found = incarnation.positions.get(self.key)
            if tried and found == after:
                break
            if found != before:
                self._drop()
                raise PositionMoved(found)
            faults: dict[int, KafkaError] = {}
            try:
                self._transact(incarnation.producer, outputs, positions, faults if self._careful else None)
                break
            except KafkaException as error:
                if faults:
                    self._give_up()
                    raise Unwritable(faults) from error
                if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    # Said before anything is committed, and to all tries alike until somebody gives the right.
                    self._give_up()
                    raise WriteDenied(f"Kafka does not allow a topic to be written: {error}") from error
                self._drop()
                if time.monotonic() + pause_s > deadline:
                    raise Unavailable(f"Kafka did not commit for {self._deadline_s:.0f} s: {error}") from error
                tried = True
                self._timeout_ms = LONG_TRANSACTION_TIMEOUT_MS
                if error.args[0].code() in _FENCED:
                    # Two that contend must not fence each other in step for ever.
                    time.sleep(random.uniform(0, pause_s))
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                self._careful = True
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._at_ease()
        self._drop()

    def abandon(self) -> None:
        """Aborts the transaction that was begun ahead, if any: it will not be completed."""
        if self._taken is not None:
            assert self._next is not None
            with suppress(KafkaException):  # then the next incarnation does it
                self._next.result().producer.abort_transaction(END_TIMEOUT_S)
            self._drop()

    def close(self) -> None:
        """Gives up the incarnation; an open transaction ends with the next one's start."""
        if self._next is not None and self._next.done():
            self._next = None
        self._spent = None
        self._reader.close()

    def _transact(
        self,
        producer: Producer,
        outputs: Sequence[Output],
        positions: Mapping[str, Position | None],
        faults: dict[int, KafkaError] | None,
    ) -> None:
        crash.point("writer.position.read")
        try:
            self._hand_over(producer, outputs, faults)
            crash.point("writer.produce.after")
            # Before the positions: who reads those beside them waits while they are in an open transaction.
            left = len(producer)
            while 0 < (now := producer.flush(PROGRESS_S)) < left:
                left = now
            produce = patient(producer)
            for name, position in positions.items():
                produce(self._topic, position.encode() if position else None, name.encode(), position_partition(name))
            crash.point("writer.commit.before")
            _commit(producer)
        except KafkaException as error:
            deadline = time.monotonic() + REPORT_S
            while faults is not None and not faults and time.monotonic() < deadline:
                producer.poll(REPORT_S)
            raise _cause(producer, error) from error
        crash.point("writer.commit.after")

    def _hand_over(self, producer: Producer, outputs: Sequence[Output], faults: dict[int, KafkaError] | None) -> None:
        """Those of the outputs that the incarnation has not taken yet."""
        if self._taken is None:
            producer.begin_transaction()
            crash.point("writer.begin.after")
            self._taken = 0
        produce = patient(producer)
        for place in range(self._taken, len(outputs)):
            topic, key, value, headers, timestamp_ms = outputs[place]
            # Delivery reports cost time for each record: they are asked for only after a first failure.
            report = _reporter(place, faults) if faults is not None else None
            try:
                produce(topic, value, key, headers=headers, timestamp=timestamp_ms, on_delivery=report)
            except KafkaException as error:
                if faults is not None:
                    _note(faults, place, error.args[0])
                raise
            self._taken = place + 1

    def _incarnation(self, deadline: float) -> _Incarnation:
        pause_s = _FIRST_PAUSE_S
        while True:
            self.prepare()
            assert self._next is not None
            try:
                return self._next.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise no_transaction(self._kafka, "Kafka does not answer in time") from None
            except (KafkaException, Unavailable) as error:
                self._next = None
                if time.monotonic() + pause_s > deadline:
                    raise no_transaction(self._kafka, str(error)) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _incarnate(self) -> _Incarnation:
        if self._spent is not None:
            self._spent = None
            # The coordinator still writes the markers of the last commit; asked too early it makes the client wait for 500 ms.
            time.sleep(_SETTLE_S)
        # One record to a batch when the last try failed: then Kafka's refusal names the record, and none suffers with its neighbours.
        settings = {**self._producer_settings, "transaction.timeout.ms": self._timeout_ms}
        producer = Producer({**settings, **({"batch.num.messages": 1} if self._careful else {})}, logger=ClientLog(_log))
        introduce(producer, self._topic, COORDINATOR_TIMEOUT_S)
        crash.point("writer.init.before")
        producer.init_transactions(COORDINATOR_TIMEOUT_S)
        crash.point("writer.init.after")
        # Only now: what an earlier incarnation had open is aborted, what it had committed is there to read.
        return _Incarnation(producer, self._reader.read())

    def _give_up(self) -> None:
        """What was begun is aborted: the next try, if there is one, may write something else, and others wait for the end of this."""
        self.abandon()
        self._drop()
        self._at_ease()

    def _at_ease(self) -> None:
        self._careful = False
        self._timeout_ms = TRANSACTION_TIMEOUT_MS

    def _drop(self) -> None:
        """Ends the present incarnation; its client is closed by the thread that prepares the next one."""
        if self._next is not None and self._next.done() and self._next.exception() is None:
            self._spent = self._next.result().producer
            self._spent.purge()
        self._next = None
        self._taken = None


def end_open_transactions(kafka: Mapping[str, Any], transactional_ids: Iterable[str]) -> None:
    """Aborts what writers that are gone have left open under these ids; a reader would wait for it until it times out.

    What cannot be aborted in time does.
    """
    deadline = time.monotonic() + ENDED_WITHIN_S

    def end(transactional_id: str) -> None:
        left_s = deadline - time.monotonic()
        if left_s > 0:
            with suppress(KafkaException):
                producer = Producer({**PROMPT, **kafka, "transactional.id": transactional_id}, logger=ClientLog(_log))
                introduce(producer, TRANSACTION_STATE, min(END_TIMEOUT_S, left_s))
                producer.init_transactions(min(END_TIMEOUT_S, left_s))

    with ThreadPoolExecutor(ENDED_AT_ONCE) as pool:
        list(pool.map(end, transactional_ids))


def _commit(producer: Producer) -> None:
    """Commits, for as long as Kafka goes on taking what is still to be delivered. Raises KafkaException."""
    left, since = len(producer), time.monotonic()
    while True:
        try:
            producer.commit_transaction(PROGRESS_S)
            return
        except KafkaException as error:
            now = len(producer)
            if now < left:
                left, since = now, time.monotonic()
            if not error.args[0].retriable() or time.monotonic() - since > COORDINATOR_TIMEOUT_S:
                raise


def _cause(producer: Producer, error: KafkaException) -> KafkaException:
    """Why there is nothing to commit any more: a client says so of the next record, and only to a commit why."""
    if error.args[0].code() == KafkaError._STATE:
        try:
            producer.commit_transaction(PROGRESS_S)
        except KafkaException as cause:
            return cause
    return error


def _note(faults: dict[int, KafkaError], place: int, error: KafkaError) -> None:
    if error.code() in _RECORD_FAULTS:
        faults[place] = error


def _reporter(place: int, faults: dict[int, KafkaError]) -> Callable[[KafkaError | None, object], None]:
    def report(error: KafkaError | None, _message: object) -> None:
        if error is not None:
            _note(faults, place, error)

    return report
