"""The clients of ``bascule bench``: producers and consumers, each a thread with a connection of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

from bascule.cli.load_counts import LoadCounts, LoadEvents
from bascule.cli.load_plan import LoadMark, LoadPlan
from bascule.client import (
    Acknowledge,
    ConnectionFactory,
    ConnectionLost,
    Consumer,
    Context,
    Message,
    Producer,
    Queue,
    Topic,
    TransactionInDoubt,
)
from bascule.core.errors import BasculeError
from bascule.threads.lasting import lasting_thread

#: How long a consumer waits for a message before it looks whether the run is over.
POLL_S: Final = 0.2
#: After the last expected message: a doubled message would come late.
QUIET_S: Final = 1.0
#: Timeout, in seconds, of the last request of a client.
CLOSE_S: Final = 30.0


class Load:
    """One run of a plan."""

    def __init__(self, factory: ConnectionFactory, plan: LoadPlan) -> None:
        """Prepare a run."""
        self._factory, self._plan = factory, plan
        self._destination = (Topic if plan.topic else Queue)(plan.destination_name)
        self._counts = LoadCounts(plan)
        self._lock = threading.Lock()
        self._begin_s = 0.0
        self._producers_stop, self._consumers_stop = threading.Event(), threading.Event()

    def run(self) -> LoadCounts:
        """Run the load, and remove its messages from the broker. Raises BasculeError if a client cannot connect."""
        plan, counts = self._plan, self._counts
        mode = Acknowledge.TRANSACTED if plan.transaction else Acknowledge.AUTO
        try:
            with ExitStack() as opened:
                consuming = [opened.enter_context(self._factory.connect(mode)) for _ in range(plan.consumers)]
                consumers = [(context, context.consumer(self._destination)) for context in consuming]
                producing = [opened.enter_context(self._factory.connect(mode)) for _ in range(plan.producers)]
                counts.sent = [0] * plan.producers
                counts.confirmed = [LoadEvents() for _ in producing]
                counts.received, counts.redelivered = ([LoadEvents() for _ in consumers] for _ in range(2))
                self._run_threads(producing, consumers)
        finally:
            if not plan.topic:
                self._drain()
        return counts

    def _run_threads(self, producing: list[Context], consumers: list[tuple[Context, Consumer]]) -> None:
        cpu_s, self._begin_s = time.process_time(), time.monotonic()
        self._counts.measured_from_s = self._begin_s + self._plan.warm_up_s
        takers = [self._thread(partial(self._consume, number, *each), f"consumer-{number}") for number, each in enumerate(consumers)]
        givers = [self._thread(partial(self._produce, number, each), f"producer-{number}") for number, each in enumerate(producing)]
        try:
            for thread in (*takers, *givers):
                thread.start()
            for thread in givers:
                thread.join()
            self._counts.client_cpu_s = time.process_time() - cpu_s
            self._await_arrivals()
        finally:
            self._producers_stop.set()
            self._consumers_stop.set()
            for thread in (*takers, *givers):
                thread.join(CLOSE_S)

    def _thread(self, target: partial[None], name: str) -> threading.Thread:
        return lasting_thread(target, f"bascule-bench-{name}", on_failure=self._note)

    def _note(self, error: BaseException) -> None:
        with self._lock:
            name = type(error).__name__
            self._counts.errors[name] += 1
            self._counts.examples.setdefault(name, str(error))

    # --- producers ---------------------------------------------------------------------------------------------------------------

    def _produce(self, number: int, context: Context) -> None:
        producer = context.producer(self._destination, persistent=self._plan.persistent)
        batch: list[LoadMark] = []
        for mark in self._marks(number):
            try:
                self._send(producer, mark)
                if self._plan.transaction:
                    batch.append(mark)
                    if len(batch) == self._plan.transaction:
                        self._commit_sends(context, batch)
            except ConnectionLost as error:
                self._note(error)
                return
            except BasculeError as error:
                self._note(error)
                self._roll_back(context, batch)
        try:
            if batch:
                self._commit_sends(context, batch)
            producer.flush(timeout_s=self._plan.arrival_s)
        except BasculeError as error:
            self._note(error)

    def _marks(self, producer: int) -> Iterator[LoadMark]:
        """Yield the messages of a producer, each when it is due. A producer that is late sends the next message at once."""
        plan = self._plan
        end_s = self._begin_s + plan.warm_up_s + plan.seconds
        if not plan.rate:
            number = 0
            while (now_s := time.monotonic()) < end_s and not self._producers_stop.is_set():
                yield LoadMark(producer, number, now_s)
                number += 1
            return
        for number, due_s in enumerate(plan.due_times_s(producer, self._begin_s)):
            now_s = time.monotonic()
            if self._producers_stop.wait(max(0.0, due_s - now_s)) or now_s > end_s + plan.arrival_s:
                with self._lock:
                    self._counts.unsent += 1
                continue
            yield LoadMark(producer, number, due_s)

    def _send(self, producer: Producer, mark: LoadMark) -> None:
        message = Message(self._plan.body(mark))
        self._counts.sent[mark.producer] += 1
        if self._plan.transaction:
            producer.send(message)
        elif self._plan.synchronous:
            producer.send(message)
            self._counts.confirmed[mark.producer].add(mark, time.monotonic())
        else:
            producer.send_async(message, on_done=partial(self._answered, mark))

    def _answered(self, mark: LoadMark, _message: Message, error: BasculeError | None) -> None:
        if error is None:
            self._counts.confirmed[mark.producer].add(mark, time.monotonic())
        else:
            self._note(error)

    def _commit_sends(self, context: Context, batch: list[LoadMark]) -> None:
        """Commit the messages of a batch and empty it. Raises TransactionError, Unavailable."""
        marks = [*batch]
        batch.clear()
        context.commit()
        now_s = time.monotonic()
        for mark in marks:
            self._counts.confirmed[mark.producer].add(mark, now_s)

    def _roll_back(self, context: Context, batch: list[LoadMark]) -> None:
        if batch:
            batch.clear()
            with suppress(BasculeError):  # the error before it is counted
                context.rollback()

    # --- consumers ---------------------------------------------------------------------------------------------------------------

    def _consume(self, number: int, context: Context, consumer: Consumer) -> None:
        batch: list[tuple[LoadMark, bool, float]] = []
        while not self._consumers_stop.is_set():
            try:
                message = consumer.receive(POLL_S)
                if message is not None and (mark := self._plan.mark_of(message.body)) is not None:
                    batch.append((mark, message.redelivered, time.monotonic()))
                if batch and (message is None or len(batch) >= self._plan.transaction):
                    self._end_batch(number, context, batch)
            except ConnectionLost as error:
                self._note(error)
                return
            except BasculeError as error:
                batch.clear()
                self._note(error)

    def _end_batch(self, number: int, context: Context, batch: list[tuple[LoadMark, bool, float]]) -> None:
        """Commit the messages of a batch, if there are transactions, and count the messages. Raises TransactionError, Unavailable."""
        received = [*batch]
        batch.clear()
        if self._plan.transaction:
            try:
                context.commit()
            except TransactionInDoubt:
                with self._lock:
                    for mark, _, at_s in received:
                        self._counts.doubtful.add(mark, at_s)
                raise
        for mark, redelivered, at_s in received:
            (self._counts.redelivered if redelivered else self._counts.received)[number].add(mark, at_s)

    def _await_arrivals(self) -> None:
        """Return when all confirmed messages have arrived, or when none has arrived for the plan's time."""
        plan, counts = self._plan, self._counts
        expected = sum(map(len, counts.confirmed)) * plan.subscriptions
        arrived, last_s = -1, time.monotonic()
        while plan.consumers:
            now_s, now = time.monotonic(), sum(map(len, (*counts.received, *counts.redelivered)))
            if now > arrived:
                arrived, last_s = now, now_s
            if now_s - last_s > (QUIET_S if arrived >= expected else plan.arrival_s):
                return
            self._consumers_stop.wait(POLL_S)

    def _drain(self) -> None:
        """Receive the messages that are left in the queue. The broker deletes the queue after some time without use.

        A confirmed message that has not arrived may still come from a busy broker, so it has the time of the plan.
        """
        missing, _ = self._counts.flaws()
        left, again = LoadEvents(), LoadEvents()
        self._counts.received.append(left)
        self._counts.redelivered.append(again)
        with self._factory.connect() as context, context.consumer(Queue(self._plan.destination_name)) as consumer:
            while (message := consumer.receive(self._plan.arrival_s if len(left) + len(again) < missing else QUIET_S)) is not None:
                if (mark := self._plan.mark_of(message.body)) is not None:
                    (again if message.redelivered else left).add(mark, time.monotonic())
