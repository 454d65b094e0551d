"""Kafka transactions that check a table before they write: each with a producer incarnation of its own (see ``transactional``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from bascule.core import crash
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.log import ClientLog, get_log
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka.compacted import Stored, TableReader, hand_over
from bascule.kafka.guards import no_transaction
from bascule.kafka.history import PROMPT
from bascule.kafka.log import introduce, patient
from bascule.threads.background import in_background

#: The coordinator aborts a dead one's transaction after this time. Ours last milliseconds.
TRANSACTION_TIMEOUT_MS = 15_000
COORDINATOR_TIMEOUT_S = 20.0
#: A transaction is tried again with a new incarnation for this long, then reported.
TRANSACT_DEADLINE_S = 20.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
#: The coordinator still writes the markers of the last commit; asked too early it makes the client wait for 500 ms.
SETTLE_S = 0.02
#: Delivery failures that lie in the record, or in what is allowed: trying again cannot help.
_REFUSED = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)

_log = get_log("bascule.kafka.slot")


class RecordRefused(Unavailable):
    """Kafka does not take a record of the transaction; nothing of it was written."""

    retriable = False


class Slot:
    """A transactional id, and the partition of a table that all transactions under it write to.

    Whoever comes later under the same id ends what is open and fences who came before. So a record of the table that is found after that
    can be taken away by one of them only: ``transact`` is a compare-and-set for all processes.
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
    ) -> None:
        """``ahead`` gets each next incarnation ready while nobody waits for it; for ``held_up`` see ``TableReader.read``."""
        self._ahead = ahead
        self._kafka = dict(kafka)
        self._topic = topic
        self._settings = {
            "partitioner": "murmur2_random",
            "linger.ms": 0,
            "message.max.bytes": RECORD_BYTES_MAX,
            **PROMPT,
            "socket.nagle.disable": True,
            **kafka,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "enable.idempotence": True,
            "acks": "all",
        }
        self._held_up = held_up
        self._reader = TableReader(kafka, topic, [partition])
        self._next: Future[Producer] | None = None
        self._spent: Producer | None = None
        self._works = False  # the last incarnation that was waited for has come
        self._turn = threading.Lock()
        self._preparing = threading.Lock()

    def transact(self, make: Callable[[Mapping[bytes, Stored]], Sequence[Outgoing]]) -> None:
        """Writes what ``make`` gives for the table as it is, all or nothing; nothing at all where it gives nothing.

        After a failure, or a commit whose outcome is in doubt, ``make`` is asked again with the table as it is then.
        Raises RecordRefused, or Unavailable when Kafka does not come back in time.
        """
        deadline = time.monotonic() + TRANSACT_DEADLINE_S
        pause_s = FIRST_PAUSE_S
        with self._turn:
            while True:
                producer = self._incarnation(deadline)
                outgoing = make(self._reader.read(held_up=self._held_up))
                if not outgoing:
                    return
                refused: list[KafkaError] = []
                try:
                    self._write(producer, outgoing, refused)
                except KafkaException as error:
                    self._drop()
                    if refused:
                        raise RecordRefused(f"a record was refused: {refused[0].str()}") from error
                    if time.monotonic() + pause_s > deadline:
                        raise Unavailable(f"Kafka did not commit for {TRANSACT_DEADLINE_S:.0f} s: {error}") from error
                    _log.debug("tried again: %s", error)
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                else:
                    self._drop()
                    if self._ahead:
                        self.prepare()
                    return

    def prepare(self) -> None:
        """Starts the next incarnation in the background; a no-op when there is one."""
        with self._preparing:  # of two that were made at once the later would fence the one that is used
            if self._next is None:
                self._next = in_background(self._incarnate, "bascule-slot")

    def reach(self) -> None:
        """Whether a transaction can be started, as far as that is known; waits only where none could be before.

        Raises Unavailable, with what is wrong with Kafka.
        """
        coming = self._next
        failed = coming is not None and coming.done() and coming.exception() is not None
        if failed or not self._works:
            with self._turn:
                self._incarnation(time.monotonic() + TRANSACT_DEADLINE_S)

    def close(self) -> None:
        """Frees the clients. A transaction that is open ends with the next incarnation, or by time."""
        with self._turn:
            try:
                if self._next is not None:
                    with suppress(KafkaException, Unavailable, TimeoutError):  # in the last case it ends by itself
                        self._next.result(COORDINATOR_TIMEOUT_S)
            finally:
                self._next = self._spent = None
                self._reader.close()

    def _write(self, producer: Producer, outgoing: Sequence[Outgoing], refused: list[KafkaError]) -> None:
        def report(error: KafkaError | None, _message: object) -> None:
            if error is not None and error.code() in _REFUSED:
                refused.append(error)

        producer.begin_transaction()
        produce = patient(producer)
        for record in outgoing:
            try:
                hand_over(produce, record, report)
            except KafkaException as error:
                report(error.args[0], None)
                raise
        crash.point("slot.commit.before")
        producer.commit_transaction(COORDINATOR_TIMEOUT_S)
        crash.point("slot.commit.after")

    def _incarnation(self, deadline: float) -> Producer:
        pause_s = FIRST_PAUSE_S
        while True:
            self.prepare()
            assert self._next is not None
            try:
                producer = self._next.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:  # it may come yet, for the next who asks
                self._works = False
                raise no_transaction(self._kafka, "Kafka does not answer in time") from None
            except (KafkaException, Unavailable) as error:
                self._next = None
                self._works = False
                if time.monotonic() + pause_s > deadline:
                    raise no_transaction(self._kafka, str(error)) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._works = True
                return producer

    def _incarnate(self) -> Producer:
        if self._spent is not None:
            self._spent = None
            time.sleep(SETTLE_S)
        producer = Producer(self._settings, logger=ClientLog(_log))
        introduce(producer, self._topic, COORDINATOR_TIMEOUT_S)
        producer.init_transactions(COORDINATOR_TIMEOUT_S)
        crash.point("slot.init.after")
        return producer

    def _drop(self) -> None:
        """Ends the present incarnation; its client is freed by the thread that makes the next one."""
        if self._next is not None and self._next.done() and self._next.exception() is None:
            self._spent = self._next.result()
            self._spent.purge()
        self._next = None
