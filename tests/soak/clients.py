"""Python clients that keep working while their brokers die, each on its own thread, and record what they observe."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bascule.client import (
    Consumer,
    Context,
    Message,
    Queue,
    Refused,
    Topic,
    TransactionRolledBack,
    connect,
)
from bascule.core.errors import BasculeError
from tests.soak.plan import EXPIRED, MOUNTED, NEWS, NUMBERS, PARTS, QUOTES, REGIONAL, TIMED, Plan
from tests.support.operations import Facts, Outcome

#: Duration of one call during which a broker is suspended and another takes over.
CALL_S = 180.0
RECEIVE_S = 0.2
#: Pause after a failed operation: the broker may be unavailable for a while.
PAUSE_S = 0.05
DELAY_MAX_S = 3.0
TIME_TO_LIVE_S = (0.5, 8.0)
#: The property that has a message's id, also in Storm.java.
ID = "storm_id"


def now_ms() -> float:
    """Return the time on the clock of the history."""
    return time.time_ns() / 1e6


class Recorder:
    """Writes operations of any thread to a file of history."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._out = file.open("a", buffering=1)
        self._lock = threading.Lock()

    def write(self, **fields: Any) -> None:
        """Write one line, without the fields that are None."""
        line = json.dumps({name: value for name, value in fields.items() if value is not None})
        with self._lock:
            self._out.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        self._out.close()


class Made(NamedTuple):
    """A message to send, and the facts that its promises depend on."""

    message: Message
    facts: Facts


def numbered(chance: random.Random, id: str) -> Made:
    """Return a message for selectors."""
    properties = {ID: id, "n": chance.randrange(NUMBERS), "region": chance.choice(("EU", "US"))}
    return Made(Message(id, properties=properties), Facts(properties=properties))


def timed(chance: random.Random, id: str) -> Made:
    """Return a message that is delayed, or expires, or neither."""
    message, facts = numbered(chance, id)
    kind = chance.randrange(3)
    if kind == 0:
        message.delivery_delay_s = chance.random() * DELAY_MAX_S
        return Made(message, facts._replace(due_ms=now_ms() + message.delivery_delay_s * 1000))
    if kind == 1:
        message.time_to_live_s = chance.uniform(*TIME_TO_LIVE_S)
        return Made(message, facts._replace(expiry_ms=now_ms() + message.time_to_live_s * 1000))
    return Made(message, facts)


def destination(name: str) -> Queue | Topic:
    """Return the name of a destination in the history."""
    return Topic(name.removeprefix("topic:")) if name.startswith("topic:") else Queue(name)


class Guarded(threading.Thread):
    """A thread that keeps its error for its owner."""

    failure: str | None = None

    def run(self) -> None:
        """Do the work of the thread."""
        try:
            super().run()
        except Exception:
            self.failure = traceback.format_exc()


def failures_of(threads: Iterable[Guarded]) -> list[str]:
    """Return the errors of threads by name."""
    return [f"{thread.name}: {thread.failure}" for thread in threads if thread.failure]


class Client(Guarded):
    """A client with one connection. ``stop`` ends its work."""

    sends: ClassVar[bool] = False
    #: Whether it begins when there is already traffic.
    late = False

    def __init__(self, name: str, url: str, recorder: Recorder, quiet_s: float) -> None:
        super().__init__(name=name, target=self._with_connection, daemon=True)
        self._url = url
        self._recorder = recorder
        self._quiet_s = quiet_s
        self._stopping = threading.Event()
        self.open = threading.Event()

    def stop(self) -> None:
        """Senders end immediately, the others when no more messages arrive."""
        self._stopping.set()

    def run(self) -> None:
        """Work while there is work."""
        super().run()
        if self.failure is not None:
            self.event("failed", self.failure)
        self.open.set()

    def _with_connection(self) -> None:
        with connect(self._url, client_id=self.name, timeout_s=CALL_S) as context:
            self.work(context)

    def work(self, context: Context) -> None:
        """Do the work of the client."""
        raise NotImplementedError

    def event(self, event: str, error: object = None) -> None:
        """Print a line."""
        self._recorder.write(t=now_ms(), client=self.name, event=event, error=None if error is None else str(error))

    def operation(self, op: str, ids: Sequence[str], outcome: Outcome, begun_ms: float, error: object = None, **fields: Any) -> None:
        """Write a line of the history. ``source`` stands for "from"."""
        source = fields.pop("source", None)
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._recorder.write(
            t=now_ms(), client=self.name, op=op, ids=list(ids), outcome=outcome, begun=begun_ms, error=said, **{"from": source}, **fields
        )


class Sender(Client):
    """Sends one message at a time."""

    sends = True

    def __init__(
        self, name: str, url: str, recorder: Recorder, plan: Plan, to: str, make: Callable[[random.Random, str], Made] = numbered
    ) -> None:
        super().__init__(name, url, recorder, plan.quiet_s)
        self._to = to
        self._make = make
        self._rate = plan.rate
        self._random = random.Random(f"{plan.seed}/{name}")

    def work(self, context: Context) -> None:
        """Send at the given rate."""
        producer = context.producer(destination(self._to))
        self.open.set()
        due_s = time.monotonic()
        for number in itertools.count():
            due_s = max(due_s + 1 / self._rate, time.monotonic() - 1)  # missed messages are not sent later
            if self._stopping.wait(max(0.0, due_s - time.monotonic())):
                return
            id, begun_ms = f"{self.name}-{number}", now_ms()
            message, facts = self._make(self._random, id)
            outcome: Outcome = "ok"
            error: BasculeError | None = None
            try:
                producer.send(message)
            except BasculeError as caught:
                outcome, error = "fail" if isinstance(caught, Refused) else "indeterminate", caught
            told = {"properties": dict(facts.properties), "expiry": facts.expiry_ms, "due": facts.due_ms}
            self.operation("send", [id], outcome, begun_ms, error, to=self._to, facts={id: told})


class Taker(Client):
    """Receives in transactions. With ``to``, it forwards the received messages."""

    def __init__(
        self, name: str, url: str, recorder: Recorder, plan: Plan, source: str,
        *, to: str | None = None, selector: str = "", late: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name, url, recorder, plan.quiet_s)
        self.late = late
        self._batch = plan.batch
        self._source = source
        self._to = to
        self._selector = selector
        self._durable = "durable" if source.startswith("topic:") else None
        self._subscription = f"{name}.{self._durable}" if self._durable else None

    def work(self, context: Context) -> None:
        """Receive until no more messages arrive."""
        from_, to = destination(self._source), destination(self._to) if self._to else None
        if self._durable and isinstance(from_, Topic):
            begun_ms = now_ms()
            consumer = context.durable_consumer(from_, self._durable, selector=self._selector)
            # the history has no start of messages that come from Kafka
            if self._source != QUOTES:
                self._done("subscribe", [], [], "ok", begun_ms, None)
        else:
            consumer = context.consumer(from_, selector=self._selector)
        self.open.set()
        worked_s = time.monotonic()
        while not self._stopping.is_set() or time.monotonic() - worked_s < self._quiet_s:
            if self._take(context, consumer, to) or not context.connected:
                worked_s = time.monotonic()

    def _take(self, context: Context, consumer: Consumer, to: Queue | Topic | None) -> bool:
        ids: list[str] = []
        redelivered: list[str] = []
        begun_ms = now_ms()
        outcome: Outcome = "ok"
        error: BasculeError | None = None
        try:
            with context.transaction():
                while len(ids) < self._batch and (message := consumer.receive(RECEIVE_S)) is not None:
                    id = message.properties[ID]
                    ids.append(id)
                    if message.redelivered:
                        redelivered.append(id)
                    if to is not None:
                        context.send(to, Message(id, properties={ID: id}))
        except BasculeError as caught:
            outcome, error = "fail" if isinstance(caught, TransactionRolledBack) else "indeterminate", caught
            self._stopping.wait(PAUSE_S)
        if ids:
            self._done("move" if to else "receive", ids, redelivered, outcome, begun_ms, error)
        elif error is not None:
            self.event("error", error)
        return bool(ids) or error is not None

    def _done(
        self, op: str, ids: Sequence[str], redelivered: Sequence[str], outcome: Outcome, begun_ms: float, error: BasculeError | None
    ) -> None:
        self.operation(
            op, ids, outcome, begun_ms, error, source=self._source, to=self._to, redelivered=list(redelivered),
            subscription=self._subscription, selector=self._selector or None,
        )  # fmt: skip


def python_clients(plan: Plan, url: str, recorder: Recorder) -> Mapping[str, Client]:
    """Return the Python clients of the load by name, receivers first."""
    clients: list[Client] = [
        Taker("python-news", url, recorder, plan, NEWS, selector="n > 5"),
        Taker("python-news-all", url, recorder, plan, NEWS, late=True),
        Taker("python-quotes", url, recorder, plan, QUOTES),
        Taker("python-parts", url, recorder, plan, PARTS, to=MOUNTED),
        Taker("python-mounted", url, recorder, plan, MOUNTED),
        Taker("python-regional", url, recorder, plan, REGIONAL),
        Taker("python-timed", url, recorder, plan, TIMED),
        Taker("python-expired", url, recorder, plan, EXPIRED),
        Sender("python-send-parts", url, recorder, plan, PARTS),
        Sender("python-send-regional", url, recorder, plan, REGIONAL),
        Sender("python-send-news", url, recorder, plan, NEWS),
        Sender("python-send-timed", url, recorder, plan, TIMED, timed),
    ]
    return {client.name: client for client in clients}
