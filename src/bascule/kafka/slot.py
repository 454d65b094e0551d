"""Kafka transactions that check a table before they write: runs ``bascule.writer.table`` with librdkafka in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from bascule.core import crash
from bascule.core.effects import run_blocking
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka.appender import hand_over
from bascule.kafka.compacted import Stored, TableReader, TableReading, TableReads
from bascule.kafka.errors import Verdict, codes_of, words
from bascule.kafka.history import PROMPT
from bascule.kafka.incarnation import COORDINATOR_TIMEOUT_S, KafkaProducer, TransactionalClients, client_errors, fault_of
from bascule.kafka.log import patient
from bascule.threads.joint import JointTry
from bascule.writer.incarnation import Attempt
from bascule.writer.table import TRANSACT_DEADLINE_S, TableTransactions

#: The coordinator aborts the transaction of a dead client after this time, for which readers wait. Most transactions last milliseconds.
TRANSACTION_TIMEOUT_MS: Final = 15_000
#: The timeout for the retry of a failed transaction: 256 MiB over a slow line may have been too much for the first attempt.
LONG_TRANSACTION_TIMEOUT_MS: Final = 300_000
#: Delivery failures that a retry cannot mend, because of the record or of permissions. The client has searched for an unknown topic for
#: half a minute before it reports this error.
_REFUSED: Final = codes_of(Verdict.RECORD, Verdict.DENIED) - {KafkaError._INVALID_DIFFERENT_RECORD} | {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}

_log = get_log("bascule.kafka.slot")


class Slot:
    """A transactional id, and the partition of a table to which all its transactions write.

    A later client under the same id ends the open transaction and fences earlier clients. After that, only one client can remove a
    record that the table contains: ``transact`` is a compare-and-set over all processes.
    """

    def __init__(
        self,
        kafka: Mapping[str, Any],
        transactional_id: str,
        topic: str,
        partition: int,
        *,
        ahead: bool = True,
        held_up: Callable[[Mapping[bytes, Stored]], None] | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """``ahead`` prepares each next incarnation in the background; for ``held_up`` see ``TableReader.read``.

        ``deadline_s`` is the time for retries (default: ``TRANSACT_DEADLINE_S``).
        """
        self._reader = TableReader(kafka, topic, [partition])
        self._effects = _SlotClients(kafka, transactional_id, topic, TableReads(self._reader, held_up=held_up))
        self._turn = threading.Lock()
        self._reaching = JointTry(self._turn)
        self._transactions: TableTransactions[KafkaProducer, Outgoing, Mapping[bytes, Stored]] = TableTransactions(
            self._effects, ahead=ahead, deadline_s=TRANSACT_DEADLINE_S if deadline_s is None else deadline_s, turn=threading.Lock()
        )

    def transact(self, make: Callable[[Mapping[bytes, Stored]], Sequence[Outgoing]]) -> None:
        """Write what ``make`` returns for the current table. See ``TableTransactions.transact``. Raises RecordRefused, Unavailable."""
        with self._turn:
            run_blocking(self._transactions.transact(make))

    def prepare(self) -> None:
        """Start the next incarnation in the background, unless one exists."""
        self._transactions.prepare()

    def reach(self) -> None:
        """Return if a transaction can be started, as far as is known; wait only if no transaction could be started before.

        Threads that wait at the same time share one attempt. Raises Unavailable with the reason in Kafka.
        """
        if not self._transactions.reachable:
            self._reaching(lambda: run_blocking(self._transactions.reach()))

    def close(self) -> None:
        """Close the clients. An open transaction ends with the next incarnation, or by its timeout."""
        with self._turn:
            try:
                run_blocking(self._transactions.close())
            finally:
                self._effects.close()
                self._reader.close()


class _SlotClients(TransactionalClients, TableReading):
    """The effects of ``bascule.writer.table``."""

    def __init__(self, kafka: Mapping[str, Any], transactional_id: str, topic: str, reads: TableReads) -> None:
        settings = {
            "partitioner": "murmur2_random",
            "linger.ms": 0,
            "message.max.bytes": RECORD_BYTES_MAX,
            **PROMPT,
            "socket.nagle.disable": True,
            **kafka,
            "transactional.id": transactional_id,
            "enable.idempotence": True,
            "acks": "all",
        }
        super().__init__(kafka, settings, topic, _log, "bascule-slot")
        self._reads = reads

    def settings(self, attempt: Attempt) -> dict[str, Any]:
        """Return the settings of a client."""
        return {**self._settings, "transaction.timeout.ms": LONG_TRANSACTION_TIMEOUT_MS if attempt.long else TRANSACTION_TIMEOUT_MS}

    async def init(self, attempt: Attempt) -> KafkaProducer:
        """Make a client and initialise its transactions."""
        producer = await super().init(attempt)
        crash.point("slot.init.after")
        return producer

    async def read_to(self, ends: Mapping[int, int]) -> Mapping[bytes, Stored]:
        """Return the table before these offsets."""
        return await self._reads.read_to(ends)

    async def write(self, producer: KafkaProducer, records: Sequence[Outgoing]) -> None:
        """Begin a transaction, produce the records, commit."""
        refused: dict[int, KafkaError] = {}

        def report(error: KafkaError | None, _message: object) -> None:
            if error is not None and error.code() in _REFUSED:
                refused.setdefault(len(refused), error)

        try:
            with client_errors():
                producer.client.begin_transaction()
                produce = patient(producer.client)
                for record in records:
                    try:
                        hand_over(produce, record, report)
                    except KafkaException as error:
                        report(error.args[0], None)
                        raise
                crash.point("slot.commit.before", producer.client.flush)
                producer.client.commit_transaction(COORDINATOR_TIMEOUT_S)
                crash.point("slot.commit.after")
        except KafkaException as error:
            _log.debug("transaction failed", transactional_id=self._settings["transactional.id"], error=words(error))
            raise fault_of(error, refused) from error
