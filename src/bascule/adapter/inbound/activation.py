"""An active endpoint: a member of a consumer group that takes over partitions, schedules records, and commits offsets at once.

    poll -> inbound log: in flight -> inbound log: read -> commit the group's offsets -> scheduler -> workers -> inbound log: done

The inbound log first says that a record is in flight, then that the partition was read up to it; after that the record is delivered. So,
whatever dies, the record is either read again or found in flight by the next owner of its partition.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bascule.adapter.inbound.dead_letters import DeadLetters
from bascule.adapter.inbound.deliveries import RecordDelivery
from bascule.adapter.inbound.delivering import AtLeastOnce, Deliverer, InTransaction, Mode
from bascule.adapter.inbound.endpoint import Endpoint, check, name_of
from bascule.adapter.inbound.log import InboundLog
from bascule.adapter.inbound.performing import BlockingReading, BlockingTakeover, delivery_of
from bascule.adapter.inbound.record import Record
from bascule.adapter.inbound.spec import ActivationSpec
from bascule.adapter.inbound.state import Flights, Place, Ref
from bascule.adapter.inbound.taking_over import ClaimOfOthers, PartitionEvent, Run, pass_on, take_over
from bascule.adapter.inbound.topics import missing, set_up
from bascule.adapter.inbound.workers import END_S, NO_LATENCY, NOTHING_HANDLED, Counts, Workers, left_behind
from bascule.core import crash
from bascule.core.durations import Durations
from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import GroupOffset, KafkaRecord
from bascule.core.log import get_log
from bascule.kafka.consumer import GroupConsumer, read_again
from bascule.threads.background import in_background
from bascule.threads.lasting import lasting_thread

POLL_S = 0.1
#: A partition goes to another member when the work on its records is done, or after this time. The log has the remaining records.
HAND_OVER_S = 30.0
#: Reading pauses while this many batches are ready. Reading of a partition pauses while this many of its batches wait behind a record that
#: fails or hangs.
BATCHES_WAITING = 2
#: If as many records wait as for this many full partitions, all reading pauses, to bound the memory.
PARTITIONS_FULL_MAX = 16
#: If this many records wait for their next try, reading pauses for sources that could add to them: the retry topic or, with an order, all.
DELAYED_MAX = 10_000
HOUSEKEEP_S = 10.0
#: Dead letters are counted, and missing sources looked for, every this many turns of housekeeping.
LOOK_TURNS = 3
TAKE_AGAIN_S = 0.5
#: Enough that partitions that wait for the outcome of a transaction do not delay others.
TAKERS = 32

_log = get_log("bascule.adapter")


@dataclass(frozen=True, slots=True)
class ActivationStatus:
    """The status of an activation. ``partitions`` has ``ready`` for each partition, or the reason why it waits.

    ``blocked`` are partitions that wait for a transaction that this endpoint cannot finish. ``handler`` has the durations of its calls,
    and ``latency`` the times from the timestamp of a record until the record was handled. ``positions`` has the next offset to read of each
    source partition that is ready.
    """

    group: str
    endpoint: str
    running: bool
    partitions: dict[str, str]
    waiting: int
    delayed: int
    at_work: int
    hanging: tuple[str, ...]
    blocked: tuple[str, ...]
    dead_letters: int
    counts: dict[str, int]
    trouble: str
    handler: Durations = NOTHING_HANDLED
    latency: Durations = NO_LATENCY
    positions: Mapping[Place, int] = field(default_factory=dict)


class Activation:
    """One endpoint and its threads. ``ResourceAdapter`` makes activations; they can be used alone."""

    def __init__(self, kafka: Mapping[str, Any], spec: ActivationSpec, endpoint: Endpoint) -> None:
        check(endpoint)
        self.spec = spec
        self.counts = Counts()
        self.name = name_of(endpoint)
        self._kafka = dict(kafka)
        self._endpoint = endpoint
        self._log = spec.transacted.log if spec.transacted is not None else InboundLog("inbound", kafka, group=spec.group)
        self._dead_letters = DeadLetters(kafka, spec.group, spec.dead_letter_topic)
        self._dead = 0
        self._missing: list[str] = []
        self._reset()

    def _reset(self) -> None:
        """Reset the state that belongs to one run, from a start to a stop."""
        spec, xa = self.spec, self.spec.transacted
        mode: Mode = InTransaction(xa, spec.delivery_timeout_s, lambda: workers.stopping) if xa is not None else AtLeastOnce(self._log)
        deliverer = self._deliverer = Deliverer(spec, self._log, mode, self.counts)

        def handle(delivery: RecordDelivery, call: Callable[[Record], None]) -> float | None:
            return deliverer.handle(workers, delivery, call)

        workers = Workers(spec, self._endpoint, handle, self.counts, self._fail)
        self._workers = workers
        self._runs: dict[Place, Run[RecordDelivery]] = {}
        self._flowing: set[Place] = set()
        self._full = False
        self._full_places: set[Place] = set()
        #: Partitions of which records before the group's offset were read.
        self._behind: set[Place] = set()
        #: Partitions that this member has taken over again: its client has read further than the group.
        self._to_take_over_again: set[Place] = set()
        self._asked: queue.SimpleQueue[tuple[Run[RecordDelivery], Future[GroupOffset]]] = queue.SimpleQueue()
        self._taken: queue.SimpleQueue[tuple[Run[RecordDelivery], list[RecordDelivery]]] = queue.SimpleQueue()
        self._to_take: queue.SimpleQueue[Run[RecordDelivery] | None] = queue.SimpleQueue()
        self._takers: list[threading.Thread] = []
        #: Records that were read, and are not yet both in the log and committed.
        self._unscheduled: list[RecordDelivery] = []
        self._offsets: dict[Place, int] = {}
        #: Offset up to which the log says that the partition was read.
        self._advanced: dict[Place, int] = {}
        self._trouble = ""
        self._failure = ""
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Prepare and consume. A start may follow a ``stop``; the counts continue. Raises the errors of ``prepare`` and ``consume``."""
        self.prepare()
        try:
            self.consume()
        except BaseException:
            self.stop(0.0)
            raise

    def prepare(self) -> None:
        """Read the inbound log, and join the worker pool. No record is taken before ``consume``. The caller must call ``stop``.

        Endpoints that share a pool must all have joined it before the first of them consumes: an endpoint that is alone in a pool may have
        all of its threads.

        Raises Unavailable (also while threads of an earlier run still read from Kafka), InvalidInput (also if the worker pool has no thread
        for the endpoint), UnsafeTopic (the group's own topics), ResourceFailed and LogUnreadable (the inbound log), and OutOfOrder (the
        transaction manager is not open). If it raises, there is nothing to stop.
        """
        if self._stopping.is_set():
            if left := [each.name for each in self._threads if each.is_alive()]:
                raise Unavailable(f"endpoint of group {self.spec.group!r} cannot start: threads {', '.join(left)} are still running")
            for run in self._runs.values():
                run.on(PartitionEvent.LEFT)
            self._reset()
        if self.spec.transacted is not None:
            self.spec.transacted.manager.begin().rollback()
        set_up(self._kafka, self.spec)
        self._look_for_sources()
        self._log.recover()
        self._workers.start()

    def consume(self) -> None:
        """Take records. Return when the group was asked for partitions. Call it once, after ``prepare``. Raises Unavailable."""
        consumer = GroupConsumer(
            self._kafka, self.spec.group, [*self.spec.topics, self.spec.retry_topic], start=self.spec.start,
            # Records that failed before anybody read the retry topic are in it.
            whole=(self.spec.retry_topic,), on_assigned=self._assigned, on_revoked=self._revoked, on_lost=self._leave,
        )  # fmt: skip
        for name, target in (("inbound", partial(self._poll, consumer)), ("housekeeping", self._housekeep)):
            self._threads.append(lasting_thread(target, f"bascule-{name}-{self.spec.group}", on_failure=self._fail))
            self._threads[-1].start()

    def stop(self, drain_s: float = HAND_OVER_S) -> list[str]:
        """Stop the endpoint. Wait for records in progress; waiting records stay in flight for the next start.

        Returns the names of workers whose endpoint has not returned after ``drain_s`` seconds. Their records stay in flight. A worker that
        returns later may still commit, while the transaction manager is open and no other member has taken over its partition; nothing is
        done twice. The result also names internal threads that hang for some more seconds without Kafka or a database; they end by
        themselves.
        """
        left = self._workers.stop(drain_s)
        self._stopping.set()
        for _ in self._takers:
            self._to_take.put(None)
        left += left_behind([*self._threads, *self._takers], END_S)
        if self.spec.transacted is None:
            name = f"bascule-close-{self.spec.group}"
            try:
                in_background(self._log.close, name).result(END_S)
            except TimeoutError:
                left.append(name)
        if left:
            _log.warning("threads still running after stop", group=self.spec.group, threads=", ".join(left))
        return left

    def status(self) -> ActivationStatus:
        """Return the current status."""
        with self._workers.changed:
            scheduler = self._workers.scheduler
            waiting, delayed, at_work = scheduler.waiting, scheduler.delayed, len(scheduler.running())
        counts = self.counts.by_name()
        runs = list(self._runs.values())
        partitions = {str(run.place): "ready" if run.ready else run.trouble or "taking over" for run in runs}
        tokens = {run.token for run in runs}
        unburied = next((why for ref, why in list(self._deliverer.unburied.items()) if ref.token in tokens), "")
        running = bool(self._threads) and self._threads[0].is_alive() and not self._failure
        hanging = tuple(self._workers.hanging)
        blocked = tuple(str(run.place) for run in runs if run.blocked and not run.gone)
        stopped = next((f"{run.place} {run.trouble}" for run in runs if run.blocked and not run.gone), "") or unburied
        trouble = self._failure or self._trouble or (f"topics do not exist: {', '.join(self._missing)}" if self._missing else stopped)
        return ActivationStatus(
            self.spec.group, self.name, running, partitions, waiting, delayed, at_work, hanging, blocked, self._dead, counts, trouble,
            self.counts.handler, self.counts.latency,
            {run.place: run.next_offset for run in runs if run.ready and not run.gone and run.place.topic != self.spec.retry_topic},
        )  # fmt: skip

    def _fail(self, error: BaseException) -> None:
        """Stop taking records after a thread has failed, and give up the partitions. ``status`` then has the reason."""
        self._failure = f"stopped: {error}"

    # -- the polling thread

    def _poll(self, consumer: GroupConsumer) -> None:
        try:
            while not (self._stopping.is_set() or self._failure):
                try:
                    self._turn(consumer)
                    self._trouble = ""
                except Unavailable as error:
                    if str(error) != self._trouble:
                        _log.warning("Kafka does not answer", group=self.spec.group, error=error)
                    self._trouble = str(error)
        finally:
            consumer.close()

    def _turn(self, consumer: GroupConsumer) -> None:
        self._regulate(consumer)
        for received in consumer.poll(self.spec.batch, POLL_S):
            self._receive(received)
        while self._behind:
            self._move(consumer, self._behind.pop())
        while not self._taken.empty():
            self._begin(consumer, *self._taken.get())
        if self._offsets:
            self._schedule(consumer)
        self._answer(consumer)

    def _answer(self, consumer: GroupConsumer) -> None:
        """Tell the takers that their partitions still belong to this member, and where the group continues to read."""
        asked = [self._asked.get() for _ in range(self._asked.qsize())]
        if not (asked := [each for each in asked if not each[0].gone]):
            return
        try:
            held = consumer.hold([run.place for run, _ in asked])
        except Unavailable:
            for each in asked:
                self._asked.put(each)
            raise
        for run, answer in asked:
            answer.set_result(held[run.place])

    def _begin(self, consumer: GroupConsumer, run: Run[RecordDelivery], deliveries: list[RecordDelivery]) -> None:
        if run.gone:
            return
        if run.place in self._to_take_over_again:
            try:
                self._move(consumer, run.place)
            except Unavailable:
                self._taken.put((run, deliveries))
                raise
            self._to_take_over_again.discard(run.place)
        self._workers.add(run.adopt(deliveries))

    def _regulate(self, consumer: GroupConsumer) -> None:
        with self._workers.changed:
            scheduler = self._workers.scheduler
            delayed, ready = scheduler.delayed, scheduler.ready
            behind = {run.place: scheduler.behind(run.token) for run in self._runs.values()}
        high = BATCHES_WAITING * self.spec.batch
        # Half of it must be done before more is read: pausing and resuming discards fetched records.
        limit = high // 2 if self._full else high
        self._full = ready >= limit or sum(behind.values()) >= PARTITIONS_FULL_MAX * limit
        self._full_places = {place for place, count in behind.items() if count >= (high // 2 if place in self._full_places else high)}
        flowing = set() if self._full or self._unscheduled else {run.place for run in self._runs.values() if run.ready}
        flowing -= self._full_places
        if delayed >= DELAYED_MAX:
            flowing = set() if self.spec.in_place else {place for place in flowing if place.topic != self.spec.retry_topic}
        if flowing != self._flowing:
            consumer.pause(self._flowing - flowing)
            consumer.resume(flowing - self._flowing)
            self._flowing = flowing

    def _receive(self, received: KafkaRecord) -> None:
        place = Place(received.topic, received.partition)
        run = self._runs.get(place)
        if run is None or not run.ready:
            return  # the partition is not ours, and its owner gets the record
        found = run.receive(received.offset, lambda: delivery_of(self.spec, Ref(place, run.token, received.offset), received))
        if found is None:
            self._behind.add(place)
            return
        self._offsets[place] = run.next_offset
        self._unscheduled += found

    def _move(self, consumer: GroupConsumer, place: Place) -> None:
        run = self._runs[place]
        if (offset := consumer.read_on(place, run.next_offset)) < run.next_offset:
            _log.error(
                "partition ends before its position, reading from the start offset", place=place, position=run.next_offset, start=offset
            )
            run.next_offset = offset

    def _schedule(self, consumer: GroupConsumer) -> None:
        """Log, commit and deliver the records that were read (``pass_on``). Retried until the partition has another owner."""
        ends = [Ref(place, self._runs[place].token, offset) for place, offset in self._offsets.items()]
        run_blocking(
            pass_on(BlockingReading(self._log, consumer, self._workers, self._unscheduled, ends, self._advanced, self._take_over_again))
        )
        self._unscheduled, self._offsets = [], {}

    def _take_over_again(self, places: Collection[Place]) -> None:
        """Take partitions over again after a failed append: the entries may be stored or not, so another token is needed.

        The client continues to read at the group's offset.
        """
        _log.warning(
            "append to inbound log failed, taking over partitions again", group=self.spec.group, places=", ".join(map(str, places))
        )
        self._leave(list(places), HAND_OVER_S)
        self._to_take_over_again.update(places)
        self._assigned(list(places))

    def _assigned(self, places: list[tuple[str, int]]) -> None:
        for topic, partition in places:
            run = self._runs[Place(topic, partition)] = Run(Place(topic, partition))
            self._to_take.put(run)
            if len(self._takers) < TAKERS:
                # The threads of an executor would delay the end of the process while one of them hangs.
                name = f"bascule-take-{self.spec.group}"
                self._takers.append(lasting_thread(partial(self._take_each, self._to_take), name, on_failure=self._fail))
                self._takers[-1].start()

    def _revoked(self, places: list[tuple[str, int]]) -> None:
        self._leave(places, 0.0 if self._stopping.is_set() else HAND_OVER_S)

    def _leave(self, places: list[tuple[str, int]], drain_s: float = 0.0) -> None:
        runs = [run for topic, partition in places if (run := self._runs.pop(Place(topic, partition), None)) is not None]
        for run in runs:
            run.on(PartitionEvent.LEFT)
            self._flowing.discard(run.place)
            self._offsets.pop(run.place, None)
            self._advanced.pop(run.place, None)
            self._behind.discard(run.place)
            self._to_take_over_again.discard(run.place)
        gone = {run.place for run in runs}
        self._unscheduled = [delivery for delivery in self._unscheduled if delivery.ref.place not in gone]
        for run in runs:
            self._workers.drop(run.token)
        deadline_s = time.monotonic() + drain_s
        for run in runs:
            if drain_s and not self._workers.drop(run.token, max(0.001, deadline_s - time.monotonic())):
                _log.warning("partition handed over with running endpoints", group=self.spec.group, place=run.place)

    # -- taking over

    def _take_each(self, runs: queue.SimpleQueue[Run[RecordDelivery] | None]) -> None:
        while (run := runs.get()) is not None:
            self._take(run)

    def _take(self, run: Run[RecordDelivery]) -> None:
        told = ""
        while not run.gone and not self._stopping.is_set():
            try:
                if (flights := run_blocking(take_over(run, BlockingTakeover(self.spec, self._log, run, self._held)))) is not None:
                    self._taken.put((run, self._adopt(run, flights)))
                    return
            except ClaimOfOthers as error:
                if str(error) != told:
                    _log.error("partition blocked by another transaction manager", group=self.spec.group, place=run.place, error=error)
                told = run.trouble = str(error)
            except Exception as error:  # nothing checks whether this thread ends, and the partition would be stuck
                run.trouble = str(error)
                _log.warning("could not take over partition, will retry", group=self.spec.group, place=run.place, error=error)
            self._stopping.wait(TAKE_AGAIN_S)

    def _held(self, run: Run[RecordDelivery]) -> GroupOffset | None:
        """Return the group's offset if the partition belongs to this member, otherwise None.

        The answer must come from the group after this call began: a process that was suspended has an outdated assignment until then.
        """
        answer: Future[GroupOffset] = Future()
        self._asked.put((run, answer))
        while not run.gone and not self._stopping.is_set():
            with suppress(TimeoutError):
                offset = answer.result(TAKE_AGAIN_S)
                return None if run.gone else offset
        return None

    def _adopt(self, run: Run[RecordDelivery], flights: Flights) -> list[RecordDelivery]:
        """Return deliveries for the records of the partition that were in flight, by offset."""
        found = read_again(self._kafka, run.place.topic, run.place.partition, flights.keys)
        deliveries = []
        for offset, keys in sorted(flights.keys.items()):
            if offset in found:
                ref, failures = Ref(run.place, run.token, offset), flights.failures[offset]
                deliveries.append(delivery_of(self.spec, ref, found[offset], keys, failures=failures, redelivered=True))
                continue
            _log.error("record in flight was deleted from its topic", place=run.place, offset=offset)
            self.counts.add("vanished")
            self._log.done(run.place, keys)
        self.counts.add("redelivered", len(deliveries))
        crash.point("inbound.take.after")
        return deliveries

    def _housekeep(self) -> None:
        for turn in itertools.count():
            try:
                if turn % LOOK_TURNS == 0:
                    self._look_for_sources()
                    self._watch_dead_letters()
                if self._stopping.wait(HOUSEKEEP_S):
                    return
                self._log.housekeep()
            except Exception as error:  # nobody waits for this thread
                _log.warning("inbound log housekeeping failed, will retry", topic=self._log.topic, error=error)

    def _look_for_sources(self) -> None:
        before, self._missing = self._missing, missing(self._kafka, self.spec)
        if self._missing and self._missing != before:
            _log.warning("source topics missing", group=self.spec.group, topics=", ".join(self._missing))

    def _watch_dead_letters(self) -> None:
        before, self._dead = self._dead, self._dead_letters.count()
        if self._dead > before:
            _log.warning(
                "new dead letters", group=self.spec.group, count=self._dead,
                command=f"bascule adapter dead-letters list --group {self.spec.group}",
            )  # fmt: skip
