"""Transactional producers of librdkafka for the protocols of ``bascule.writer``; the effects block the thread."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from confluent_kafka import KafkaException, Producer

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.log import ClientLog, EventLog
from bascule.kafka import clients
from bascule.kafka.errors import FENCED_PRODUCER
from bascule.kafka.guards import no_transaction
from bascule.kafka.log import introduce
from bascule.kafka.waiting import WaitingClients
from bascule.threads.background import in_background
from bascule.writer.errors import Refusal, TransactionFault
from bascule.writer.incarnation import Attempt, Identity, Pending

T = TypeVar("T")

#: Timeout, in seconds, of a request to the coordinator, or of a wait for Kafka to accept records. After it the incarnation is abandoned.
COORDINATOR_TIMEOUT_S: Final = 20.0
#: The coordinator still writes the markers of the last commit; if asked too early, it makes the client wait for 500 ms.
SETTLE_S: Final = 0.02
#: The level of a client's debug lines.
_DEBUG: Final = 10
#: Debug contexts of the client whose lines a ProducerLog reads.
_CONTEXTS: Final = ("eos", "protocol")
#: The line of the context ``eos`` when InitProducerId is answered.
_ACQUIRED: Final = re.compile(r"Acquired PID\{Id:(\d+),Epoch:(\d+)\}")
#: The lines of the context ``protocol`` for each request and for each answer, by their first word.
_MOVED: Final = re.compile(r": (Sent|Received) (\w+)(?:Request|Response) ")
_TRAFFIC: Final = frozenset({"SEND", "RECV"})
#: The context ``eos`` of the answer to AddPartitionsToTxn, and the error of a transaction that begins before the last one has its markers.
_ADDING: Final = "ADDPARTS"
_TOO_EARLY: Final = "another concurrent operation on the same transaction"
#: The request that a late repeat makes dangerous.
_END: Final = "EndTxn"
#: The requests that change something in Kafka. A late request of another kind does no harm.
_CHANGES: Final = frozenset({"InitProducerId", "AddPartitionsToTxn", "Produce", _END})


class ProducerLog(ClientLog):
    """The log of one client. It reads the client's identity and its requests from debug lines, and logs all other lines.

    librdkafka also reports them in its statistics. These come at intervals, cost 0.6 % of a core and 240 KB/s for a client that waits
    (25 ms apart), and must be collected. Debug lines come when something happens. If their text changes, the identity is unknown and no
    request counts: each position is read behind a barrier (docs/adr/0013-reads-that-decide.md), and each transaction has its own
    incarnation (docs/adr/0017-producers-that-stay.md).
    """

    __slots__ = ("_counting", "_debugging", "_refusals", "identity", "received", "sent")

    def __init__(self, log: EventLog, *, debugging: bool = False) -> None:
        """``debugging``: the user has asked for debug lines, so they are logged as well."""
        super().__init__(log)
        self._debugging = debugging
        self.identity: Identity | None = None
        #: The number of requests of each kind that were sent, and that were answered on the connection on which they were sent. Only
        #: requests that change something count.
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._refusals = 0
        self._counting = threading.Lock()  # also the thread that reads the lines of waiting clients counts

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Handle a log line of the client."""
        if level > _DEBUG or self._debugging:
            super().log(level, text, *arguments)
        if level > _DEBUG:
            return
        if arguments and arguments[0] in _TRAFFIC:
            self._count(str(arguments[-1]))
        elif arguments and arguments[0] == _ADDING and _TOO_EARLY in str(arguments[-1]):
            with self._counting:
                self._refusals += 1
        elif self.identity is None and (found := _ACQUIRED.search(text % arguments if arguments else text)):
            self.identity = Identity(int(found[1]), int(found[2]))

    def _count(self, line: str) -> None:
        found = _MOVED.search(line)
        if found is not None and found[2] in _CHANGES:
            with self._counting:
                (self.sent if found[1] == "Sent" else self.received)[found[2]] += 1

    def take_refusals(self) -> int:
        """Return how often since the last call Kafka refused to begin a transaction because the last one had no markers yet."""
        with self._counting:
            refusals, self._refusals = self._refusals, 0
        return refusals

    def settled(self, transactions: int) -> bool:
        """Return True if the client has sent one EndTxn for each transaction, and each of its requests is answered."""
        return self.sent[_END] == transactions and self.sent == self.received


@dataclass(frozen=True, eq=False)
class KafkaProducer:
    """A client whose transactions are initialised."""

    client: Producer
    log: ProducerLog
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def read_lines(self) -> None:
        """Handle the lines of the log that have come. Raises the client's error as KafkaException.

        On return, no thread holds a line that it has not handled, except a thread that calls the client for another reason.
        """
        with self._reading, client_errors():
            self.client.poll(0)


#: Clients prepared or kept, which may wait for days.
_waiting: Final = WaitingClients()


class Background(Generic[T]):
    """Work in a thread of its own, as ``bascule.writer.incarnation.Pending``."""

    def __init__(self, future: Future[T]) -> None:
        self.future = future

    @property
    def ended(self) -> bool:
        """Return True if the work has ended."""
        return self.future.done()

    @property
    def ready(self) -> bool:
        """Return True if the work has ended without an error."""
        return self.future.done() and self.future.exception() is None

    def result(self) -> T:
        """Return the result of work that has ended."""
        return self.future.result(0)

    async def wait(self, timeout_s: float) -> T:
        """Block the thread until the work has ended."""
        return self.future.result(timeout_s)


class TransactionalClients:
    """Makes the producers of one transactional id (``bascule.writer.incarnation.ClientEffects``)."""

    def __init__(self, kafka: Mapping[str, Any], settings: Mapping[str, Any], topic: str, log: EventLog, name: str) -> None:
        """Make producers with ``settings``. ``topic`` is one of their topics, and ``name`` is the name of the threads."""
        self._kafka = dict(kafka)
        contexts = [str(each) for each in (settings.get("debug"),) if each]
        self._debugging = bool(contexts)
        self._settings = {**settings, "debug": ",".join([*contexts, *_CONTEXTS])}
        self._topic = topic
        self._log = log
        self._name = name
        self._spent: Producer | None = None

    def now_s(self) -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Block the thread."""
        time.sleep(seconds)

    def random(self) -> float:
        """Return a number from 0 to 1."""
        return random.random()

    def start(self, work: Coroutine[Any, Any, T]) -> Pending[T]:
        """Run ``work`` in a thread."""
        return Background(in_background(lambda: run_blocking(work), self._name))

    def settings(self, attempt: Attempt) -> dict[str, Any]:
        """Return the settings of a client."""
        del attempt
        return self._settings

    async def init(self, attempt: Attempt) -> KafkaProducer:
        """Make a client and initialise its transactions. Raises TransactionFault."""
        if self._spent is not None:
            spent, self._spent = [self._spent], None
            in_background(partial(_end, spent), f"{self._name}-end")
            time.sleep(SETTLE_S)
        log = ProducerLog(self._log, debugging=self._debugging)
        try:
            client = clients.producer(self.settings(attempt), logger=log)
            introduce(client, self._topic, COORDINATOR_TIMEOUT_S)
            with client_errors():
                client.init_transactions(COORDINATOR_TIMEOUT_S)
                client.poll(0)  # this delivers the lines of its log
        except KafkaException as error:
            raise fault_of(error) from error
        producer = KafkaProducer(client, log)
        _waiting.add(producer)
        return producer

    async def identity(self, producer: KafkaProducer) -> Identity | None:
        """Return the producer id and epoch that Kafka gave the client."""
        return producer.log.identity

    async def settled(self, producer: KafkaProducer, transactions: int) -> bool:
        """Return True if each request that the client has sent is answered."""
        try:
            producer.read_lines()
        except KafkaException:
            return False
        return producer.log.settled(transactions)

    def discard(self, producer: KafkaProducer) -> None:
        """End a client."""
        _waiting.remove(producer)
        producer.client.purge()
        self._spent = producer.client

    def close(self) -> None:
        """Free the last client."""
        self._spent = None

    async def explain(self, reason: str) -> Unavailable:
        """Return why no transaction can be started."""
        return no_transaction(self._kafka, reason)


def _end(client: list[Producer]) -> None:
    """Free a client after its user has dropped it. This takes a while; if it hangs, nobody waits for it."""
    time.sleep(SETTLE_S)
    client.clear()


@contextmanager
def client_errors() -> Iterator[None]:
    """Raise the client's own error if it arrives as a SystemError.

    A call that serves callbacks can raise a fatal error, such as fencing. If a log line follows in the same call, Python reports that
    the logger "returned a result with an exception set", and raises a SystemError with the fatal error as its cause.
    """
    try:
        yield
    except SystemError as error:
        cause = error.__cause__
        while isinstance(cause, SystemError):  # each log line adds one
            cause = cause.__cause__
        if isinstance(cause, KafkaException):
            raise cause from None
        raise


def fault_of(error: KafkaException, refused: Mapping[int, Refusal] | None = None, denied: Collection[int] = ()) -> TransactionFault:
    """Return the fault for an error of the client. ``denied`` are the codes that mean that a topic may not be written."""
    code = error.args[0].code()
    return TransactionFault(str(error), fenced=code in FENCED_PRODUCER, denied=code in denied, refused=refused)
