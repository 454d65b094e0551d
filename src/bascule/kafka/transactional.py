"""The exactly-once writer on Kafka: drives ``bascule.writer.transactional`` with librdkafka, in the caller's thread.

The next incarnation is prepared in a thread of its own, so that its cost is off the path of a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from bascule.core import crash
from bascule.core.effects import run_blocking
from bascule.core.kafka_records import Output
from bascule.core.log import ClientLog, get_log
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka import clients
from bascule.kafka.compacted import TableReading, TableReads
from bascule.kafka.errors import Verdict, codes_of
from bascule.kafka.guards import TRANSACTION_STATE
from bascule.kafka.history import PROMPT
from bascule.kafka.incarnation import COORDINATOR_TIMEOUT_S, KafkaProducer, TransactionalClients, client_errors, fault_of
from bascule.kafka.log import introduce, patient
from bascule.kafka.pacing import BeginPause
from bascule.kafka.positions import PositionReader, PositionReaders, headers_of
from bascule.writer.errors import TransactionFault
from bascule.writer.incarnation import Attempt
from bascule.writer.position import INGRESS, Position, position_partition
from bascule.writer.redrive import POSITION_KEY as REDRIVE_KEY
from bascule.writer.transactional import WRITE_DEADLINE_S, Confirm, Writer

#: The coordinator aborts the transaction of a dead writer after this time; readers of its topics wait no longer.
TRANSACTION_TIMEOUT_MS: Final = 30_000
#: The timeout after a failed attempt: enough for hundreds of MiB, or for 100,000 records one by one at 10 ms each way.
LONG_TRANSACTION_TIMEOUT_MS: Final = 300_000
#: The same for an ingress or a redrive: while its transaction is open, the broker takes no message of other ingresses after it. A full
#: transaction (``pipelines.transaction_records``), one record per batch at 10 ms each way, takes a third of it.
INGRESS_TRANSACTION_TIMEOUT_MS: Final = 60_000
#: A transaction with at most this number of unsent records sends them with its positions: they are stored in milliseconds.
SMALL_RECORDS: Final = 500
#: Interval, in seconds, at which a wait for Kafka to accept records checks whether it has accepted any.
PROGRESS_S = 0.5
#: The report that names a refused record may be in flight when the client refuses the next one.
REPORT_S = 1.0
#: Timeout to abort a transaction, in seconds: more than a running Kafka needs. After that the transaction times out.
END_TIMEOUT_S = 5.0
ENDED_AT_ONCE = 8
#: Time, in seconds, to abort all remaining transactions: a stopping process is killed after half a minute.
ENDED_WITHIN_S = 10.0
#: Fencing is no fault here, so the client's messages about it are logged at debug level only.
_log = get_log("bascule.kafka.transactional")

#: Delivery failures caused by the record, not by Kafka's state: a retry cannot help. If Kafka refuses a batch because of one record, the
#: others are not at fault.
_RECORD_FAULTS: Final = codes_of(Verdict.RECORD) - {KafkaError._INVALID_DIFFERENT_RECORD}
#: Reported before anything is committed, and for every retry until the permission is granted.
_DENIALS: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED})


class TransactionalWriter:
    """Writes records and moves one position, each time in one transaction. Not thread-safe."""

    def __init__(
        self, kafka: Mapping[str, Any], transactional_id: str, positions_topic: str, key: str, *, deadline_s: float = WRITE_DEADLINE_S,
        readers: PositionReaders | None = None,
    ) -> None:  # fmt: skip
        """``deadline_s`` is how long failures are retried, in seconds. ``readers`` lend a reader of the positions."""
        self.key = key
        self._readers = readers
        partitions = [position_partition(key)]
        self._reader = PositionReader(kafka, positions_topic, partitions) if readers is None else readers.take(partitions)
        to_broker = key.startswith(INGRESS) or key == REDRIVE_KEY
        long_timeout_ms = INGRESS_TRANSACTION_TIMEOUT_MS if to_broker else LONG_TRANSACTION_TIMEOUT_MS
        self._effects = _PositionedClients(kafka, transactional_id, positions_topic, self._reader, long_timeout_ms)
        #: The protocol. Its effects block the thread.
        self.protocol: Writer[KafkaProducer, Output, Position] = Writer(self._effects, key, deadline_s=deadline_s)

    def current(self) -> Position | None:
        """Return the position. See ``Writer.current``. Raises Unavailable."""
        return run_blocking(self.protocol.current())

    def prepare(self) -> None:
        """Start the next incarnation in the background. See ``Writer.prepare``."""
        self.protocol.prepare()

    def ahead(self, outputs: Sequence[Output], before: Position | None) -> None:
        """Begin the transaction that ``write`` will complete. See ``Writer.ahead``."""
        run_blocking(self.protocol.ahead(outputs, before))

    def begins_in_s(self) -> float:
        """Return how long the caller may gather further outputs: Kafka would refuse a transaction that begins earlier."""
        return self._effects.pause.left_s(time.monotonic())

    def write(
        self,
        outputs: Sequence[Output],
        before: Position | None,
        after: Position | None,
        others: Mapping[str, Position | None] | None = None,
        confirm: Confirm | None = None,
    ) -> None:
        """Write ``outputs`` and move the position from ``before`` to ``after``, both or neither. See ``Writer.write``.

        Raises PositionMoved, Unwritable, WriteDenied, Unavailable.
        """
        run_blocking(self.protocol.write(outputs, before, after, others, confirm))

    def abandon(self) -> None:
        """Abort the transaction that was begun ahead, if any."""
        run_blocking(self.protocol.abandon())

    def close(self) -> None:
        """Give up the incarnation. An open transaction ends when the next incarnation starts."""
        self.protocol.close()
        self._effects.close()
        if self._readers is None:
            self._reader.close()
        else:
            self._readers.give_back(self._reader)


class _PositionedClients(TransactionalClients, TableReading):
    """The effects of ``bascule.writer.transactional``."""

    def __init__(
        self, kafka: Mapping[str, Any], transactional_id: str, positions_topic: str, reader: PositionReader, long_timeout_ms: int
    ) -> None:
        settings = {
            # Keyed records go to the same partition as with a Java producer.
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
        super().__init__(kafka, settings, positions_topic, _log, "bascule-incarnation")
        self._positions_topic = positions_topic
        self._reader = reader
        self._reads = TableReads(reader.table)
        self._long_timeout_ms = long_timeout_ms
        self._faults: dict[int, KafkaError] = {}  # of the current transaction
        self.pause = BeginPause()

    def settings(self, attempt: Attempt) -> dict[str, Any]:
        """Return the settings of a client. A careful client sends one record per batch, so that no record fails with its neighbours."""
        timeout_ms = self._long_timeout_ms if attempt.long else TRANSACTION_TIMEOUT_MS
        return {**self._settings, "transaction.timeout.ms": timeout_ms, **({"batch.num.messages": 1} if attempt.careful else {})}

    async def init(self, attempt: Attempt) -> KafkaProducer:
        """Make a client and initialise its transactions."""
        crash.point("writer.init.before")
        producer = await super().init(attempt)
        crash.point("writer.init.after")
        return producer

    async def read_to(self, ends: Mapping[int, int]) -> Mapping[str, Position]:
        """Return the positions before these offsets. Raises PositionLost for a record that is no position."""
        found = await self._reads.read_to(ends)
        self._reader.rest()
        return self._reader.decoded(found)

    async def begin(self, producer: KafkaProducer) -> None:
        """Begin the transaction."""
        crash.point("writer.position.read")
        self._faults = {}
        time.sleep(self.pause.left_s(time.monotonic()))
        try:
            producer.client.begin_transaction()
        except KafkaException as error:
            raise fault_of(error) from error
        crash.point("writer.begin.after")

    async def hand_over(self, producer: KafkaProducer, outputs: Sequence[Output], start: int, *, careful: bool) -> None:
        """Produce the outputs from ``start`` on."""
        produce = patient(producer.client)
        place = start
        try:
            with client_errors():  # callbacks run if the client has no room
                for place in range(start, len(outputs)):
                    topic, key, value, headers, timestamp_ms = outputs[place]
                    # Delivery reports cost time for each record: they are requested only after a first failure.
                    report = _reporter(place, self._faults) if careful else None
                    produce(topic, value, key, headers=headers, timestamp=timestamp_ms, on_delivery=report)
        except KafkaException as error:
            if careful:
                _note(self._faults, place, error.args[0])
            raise self._fault(producer.client, error, careful=careful) from error

    async def commit(
        self, producer: KafkaProducer, positions: Mapping[str, Position | None], *, careful: bool, confirm: Confirm | None = None
    ) -> None:
        """Produce the positions and commit, for as long as Kafka accepts records."""
        client = producer.client
        try:
            crash.point("writer.produce.after")
            with client_errors():
                # Before the positions: readers of their partition wait while they are in an open transaction. A small transaction is
                # stored in one round trip.
                left = len(client)
                while left > SMALL_RECORDS and (now := client.flush(PROGRESS_S)) < left:
                    left = now
                produce = patient(client)
                for name, position in positions.items():
                    value, headers = position.encode() if position else None, headers_of(position)
                    produce(self._positions_topic, value, name.encode(), position_partition(name), headers=headers)
            if confirm is not None:
                await confirm()  # meanwhile the client adds the partitions to the transaction
            with client_errors():
                crash.point("writer.commit.before", client.flush)
                _commit(client)
        except KafkaException as error:
            raise self._fault(client, error, careful=careful) from error
        self.pause.committed(time.monotonic())
        crash.point("writer.commit.after")

    async def settled(self, producer: KafkaProducer, transactions: int) -> bool:
        """Return True if each request that the client has sent is answered. The lines of its log are read now."""
        settled = await super().settled(producer, transactions)
        self.pause.learn(producer.log.take_refusals())
        return settled

    async def abort(self, producer: KafkaProducer) -> None:
        """Abort the transaction."""
        try:
            with client_errors():
                producer.client.abort_transaction(END_TIMEOUT_S)
        except KafkaException as error:
            raise fault_of(error) from error

    def _fault(self, client: Producer, error: KafkaException, *, careful: bool) -> TransactionFault:
        deadline = time.monotonic() + REPORT_S
        while careful and not self._faults and time.monotonic() < deadline:
            with suppress(KafkaException), client_errors():
                client.poll(REPORT_S)
        return fault_of(_cause(client, error), self._faults, _DENIALS)


def end_open_transactions(kafka: Mapping[str, Any], transactional_ids: Iterable[str]) -> None:
    """Abort the transactions that dead writers have left open under these ids, for which a reader would wait until they time out.

    Transactions that cannot be aborted in time will time out.
    """
    deadline = time.monotonic() + ENDED_WITHIN_S

    def end(transactional_id: str) -> None:
        left_s = deadline - time.monotonic()
        if left_s > 0:
            with suppress(KafkaException), client_errors():
                producer = clients.producer({**PROMPT, **kafka, "transactional.id": transactional_id}, logger=ClientLog(_log))
                introduce(producer, TRANSACTION_STATE, min(END_TIMEOUT_S, left_s))
                producer.init_transactions(min(END_TIMEOUT_S, left_s))

    with ThreadPoolExecutor(ENDED_AT_ONCE) as pool:
        list(pool.map(end, transactional_ids))


def _commit(producer: Producer) -> None:
    """Commit, for as long as Kafka accepts records. Raises KafkaException."""
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
    """Return why there is nothing to commit: the client reports a failed state for the next record, and the reason only for a commit."""
    if error.args[0].code() == KafkaError._STATE:
        try:
            with client_errors():
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
