"""The Spark driver: all diverts and ingresses of one bridge in one process."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from bascule.core import crash
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import get_log
from bascule.core.signals import StopSignals
from bascule.journal.records import DamagedRecord, NewerRecord
from bascule.kafka.history import LagMirror
from bascule.kafka.transactional import end_open_transactions
from bascule.pipelines.failures import crossing, crossing_batch, described
from bascule.pipelines.positions import IDLE_TIMEOUT_S, Positions
from bascule.pipelines.queries import PipelineStopped, Query
from bascule.pipelines.registry import joined
from bascule.pipelines.spark import ingress_rows, journal_rows, kafka_range, kafka_stream, spark_session
from bascule.pipelines.spec import EARLIEST, IngressSpec, PipelinesSpec, StartPosition, from_settings
from bascule.pipelines.standby import DriverTurn
from bascule.pipelines.tasks import REPORT_SCHEMA, DivertTask, IngressTask, KnownDiverts
from bascule.pipelines.transformation import check
from bascule.pipelines.transforming import TransformingBatch
from bascule.writer.claims import Claim
from bascule.writer.position import COMMON, DIVERT, ENDED, INGRESS, Position, PositionLost, position_key

if TYPE_CHECKING:
    from bascule.config.settings import Settings

log = get_log(__name__)

POLL_S = 0.25
#: New topics and partitions of an ingress are looked for this often.
REFRESH_S = 10.0
MIRROR_S = 5.0
#: A source is idle whose batches end where they ended so long ago.
IDLE_S = 1.0
#: The broker creates the journal; when both start together, the pipelines wait for it.
JOURNAL_TIMEOUT_S = 120.0
#: A divert that catches up joins the others when it is so near: they stand still while it takes the rest.
JOIN_RECORDS = 20_000


class Driver:
    """Runs the pipelines until it is stopped. ``start``, then ``poll`` often, then ``stop``; from one thread."""

    def __init__(self, pipelines: PipelinesSpec) -> None:
        self.pipelines = pipelines
        self.owner = uuid.uuid4().hex
        self.queries: dict[str, Query] = {}
        self._positions = Positions(pipelines, self.owner)
        self._scratch = Path(tempfile.mkdtemp(prefix="bascule-", dir=_scratch_base(pipelines)))
        self._session: SparkSession | None = None
        self._separate: set[str] = set()
        self._in_doubt: set[str] = set()
        self._known = KnownDiverts()
        self._diverts = {divert.name: divert for divert in pipelines.diverts}
        self._ingresses = {ingress.name: ingress for ingress in pipelines.ingresses if ingress.enabled}
        self._sources: dict[str, dict[tuple[str, int], str]] = {}
        self._claims: dict[str, tuple[Claim, ...]] = {}
        self._ended: dict[Claim, int | None] = {}
        self._passed: dict[str, int | None] = {}
        self._mirrors: dict[str, LagMirror] = {}
        self._told: set[str] = set()
        self._refresh_due_s = 0.0
        self._mirror_due_s = 0.0
        self._idle_due_s = 0.0

    def start(self, turn: Callable[[], bool] = lambda: True) -> bool:
        """Waits for its ``turn``, takes all positions over and starts the queries. Raises BasculeError.

        Returns False when the turn never comes, since the driver is told to stop.
        """
        with ThreadPoolExecutor(1) as background:
            # The session takes seconds; Kafka's side is looked at meanwhile. A driver that stands by has one.
            session = background.submit(spark_session, self.pipelines)
            self._positions.prepare_topics()
            if not turn():
                self._session = session.result()
                return False
            self._positions.end_transactions()
            crash.point("driver.topics.after")
            # Without diverts there may be something left that earlier ones took.
            journal_id = self._journal_id() if self._diverts or self._positions.know_diverts() else ""
            self._session = session.result()
        for divert in self._diverts.values():
            if divert.transformed and divert.enabled:
                check(divert, self._session)
        if journal_id:
            self._start_diverts(journal_id)
        for pipeline in self._positions.removed_ingresses({ingress.name for ingress in self.pipelines.ingresses}):
            self._positions.take_sources(pipeline, {}, StartPosition(EARLIEST), lambda _: False)
        for name, ingress in self._ingresses.items():
            self._add(f"{INGRESS}{name}", lambda ingress=ingress: self._ingress_frame(ingress))  # type: ignore[misc]
        self._positions.look_at_transactions()
        self._refresh_due_s = time.monotonic() + REFRESH_S
        return True

    def poll(self) -> None:
        """Looks after the queries, joins what has caught up, finds new topics, shows the lag."""
        for query in list(self.queries.values()):
            query.check()
        self._join_those_near()
        now = time.monotonic()
        if now >= self._refresh_due_s:
            self._refresh_due_s = now + REFRESH_S
            try:
                self._refresh_ingresses()
            except Unavailable as error:
                # The queries live through that; so does what looks after them.
                log.warning("could not look for new topics of ingresses, will retry", error=str(error))
        if now >= self._mirror_due_s:
            self._mirror_due_s = now + MIRROR_S
            self._mirror()
            stopped = {name: query.stopped for name, query in self.queries.items() if query.stopped is not None}
            self._tell({name: why for name, why in stopped.items() if name not in self._told})
        if now >= self._idle_due_s:
            self._idle_due_s = now + IDLE_S
            before, self._ended = self._ended, self._ends()
            self._pass_over({claim: end for claim, end in self._ended.items() if end is not None and before.get(claim) == end})

    def stop(self) -> None:
        """Stops everything in order; no transaction stays open."""
        crash.point("driver.stop.before")
        self._mirror()
        ends = self._ends()
        for query in self.queries.values():
            query.stop()
        self._pass_over(ends)
        self._tell({name: query.stopped or ENDED for name, query in self.queries.items()})
        crash.point("driver.stop.after")
        for mirror in self._mirrors.values():
            mirror.close()
        if self._session is not None:
            self._session.stop()
        # With the session the workers are gone, some of them in the middle of a transaction.
        end_open_transactions(self.pipelines.kafka, map(self.pipelines.transactional_id, self._held_keys()))
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _held_keys(self) -> list[str]:
        """The positions that this run's queries move."""
        separate = [name.removeprefix(DIVERT) for name in self.queries if name.startswith(DIVERT)]
        diverts = [self._positions.common_key, *map(self._positions.own_key, separate)] if COMMON in self.queries else []
        taken = self._sources.items()
        return diverts + [position_key(f"{INGRESS}{name}", topic, partition) for name, sources in taken for topic, partition in sources]

    # --- diverts ---

    def _journal_id(self) -> str:
        topic = self.pipelines.topics.journal
        deadline = time.monotonic() + JOURNAL_TIMEOUT_S
        while True:
            found = self._positions.topics.ids([topic]).get(topic)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise Unavailable(f"topic {topic!r} does not exist; start the broker on this Kafka with this prefix first")
            time.sleep(POLL_S)

    def _start_diverts(self, journal_id: str) -> None:
        try:
            plan = self._positions.take_diverts(self.pipelines.diverts, journal_id)
        except (PositionLost, DamagedRecord, NewerRecord) as error:
            self._add(COMMON, partial(_stopped, error))
            return
        if plan is None:
            return
        self._separate, self._known = set(plan.separate), KnownDiverts(frozenset(plan.parked), plan.removed, plan.end)
        self._add(COMMON, lambda: self._divert_frame(COMMON, self._positions.common_key))
        for name in plan.separate:
            self._add(f"{DIVERT}{name}", lambda name=name: self._separate_frame(name))  # type: ignore[misc]
        for name, loss in plan.lost.items():
            self._add(f"{DIVERT}{name}", partial(_stopped, loss))

    def _separate_frame(self, name: str) -> DataStreamWriter | None:
        self._settle_doubts()
        return self._divert_frame(f"{DIVERT}{name}", self._positions.own_key(name)) if name in self._separate else None

    def _divert_frame(self, pool: str, key: str) -> DataStreamWriter | None:
        position = self._positions.read(key)
        if key == self._positions.common_key:
            self._settle_doubts()
            if self._diverts and not (position.members or self._separate or self._known.removed):
                return None  # all are disabled
        start = {(position.topic, position.partition): position.offset}
        journal = journal_rows(kafka_stream(self._spark, self.pipelines, start, committed=False))
        task = self._divert_task(key, position)
        if any(divert.transformed for divert in task.diverts):
            return journal.writeStream.foreachBatch(crossing_batch(TransformingBatch(task, pool, self._set_pool)))
        return self._pooled(pool, journal, task).writeStream.format("noop")

    def _divert_task(self, key: str, position: Position) -> DivertTask:
        members = tuple(self._diverts[name] for name in position.members if name in self._diverts)
        known = replace(self._known, elsewhere=self._known.elsewhere | self._separate)
        return DivertTask(self.pipelines, self._positions.claim(key, position), members, known)

    def _join_those_near(self) -> None:
        for name in sorted(self._separate):
            # Of a query that does not run, be it stopped or about to start again, nothing is known.
            journal = (self.pipelines.topics.journal, self.pipelines.topics.partition)
            behind, ahead = (self.queries[query].reached().get(journal) for query in (f"{DIVERT}{name}", COMMON))
            if behind is not None and ahead is not None and abs(ahead - behind) <= JOIN_RECORDS:
                self._join(name)

    def _join(self, name: str) -> None:
        """Stops the divert and the others, brings whoever is behind to the same offset, and makes them one, in one transaction."""
        query, common = self.queries[f"{DIVERT}{name}"], self.queries[COMMON]
        query.stop()
        common.stop()
        key, common_key = self._positions.own_key(name), self._positions.common_key
        try:
            crash.point("join.before")
            own, shared = self._positions.read(key), self._positions.read(common_key)
            if own.offset < shared.offset:
                own = self._catch_up(query.name, key, own, shared.offset)
            elif shared.offset < own.offset:
                shared = self._catch_up(COMMON, common_key, shared, own.offset)
            # From here on the common position answers for one that is not configured any more.
            after = joined(shared, own if name in self._diverts else replace(own, members=()))
            crash.point("join.caught_up")
            self._in_doubt.add(name)
            self._positions.move(common_key, shared, after, {key: None})
            crash.point("join.after")
            self._has_joined(name)
        except (BasculeError, PySparkException) as error:
            log.warning("could not join divert, will retry", divert=name, error=described(error))
        finally:
            common.restart()

    def _settle_doubts(self) -> None:
        """A join whose transaction failed may be committed: then the divert has no position of its own any more. Raises Unavailable."""
        if self._in_doubt:
            stored = self._positions.stored(decides=True)
            for name in tuple(self._in_doubt):
                if self._positions.own_key(name) not in stored:
                    self._has_joined(name)
            self._in_doubt.clear()

    def _has_joined(self, name: str) -> None:
        del self.queries[f"{DIVERT}{name}"]
        self._separate.remove(name)
        self._in_doubt.discard(name)
        log.info("divert joined", divert=name)

    def _catch_up(self, pool: str, key: str, position: Position, end: int) -> Position:
        journal = journal_rows(kafka_range(self._spark, self.pipelines, position.topic, position.partition, position.offset, end))
        TransformingBatch(self._divert_task(key, position), pool, self._set_pool)(journal)
        found = self._positions.read(key)
        if found.offset != end:
            raise Unavailable(f"position {key!r} reached offset {found.offset}, expected {end}")
        return found

    # --- ingresses ---

    def _ingress_frame(self, ingress: IngressSpec) -> DataStreamWriter | None:
        pipeline = f"{INGRESS}{ingress.name}"
        sources = self._matching(ingress)
        self._sources[ingress.name] = sources
        # Without a topic, too: from now on it is known, and what it finds later counts from the first record on.
        positions = self._positions.take_sources(pipeline, sources, ingress.start, ingress.names)
        claims = tuple(self._positions.claim(position_key(pipeline, at.topic, at.partition), at) for at in positions)
        self._claims[pipeline] = claims
        if not sources:
            log.warning("ingress has no topic yet", ingress=ingress.name, topics=ingress.topics or ingress.pattern)
            return None
        offsets = {(at.topic, at.partition): at.offset for at in positions}
        frame = kafka_stream(self._spark, self.pipelines, offsets, committed=True)
        return self._pooled(pipeline, ingress_rows(frame), IngressTask(self.pipelines, claims, ingress)).writeStream.format("noop")

    def _ends(self) -> dict[Claim, int | None]:
        """Where the last finished batch of each source partition has ended."""
        reached = {name: self.queries[name].reached() for name in self._claims}
        return {claim: reached[name].get((claim.topic, claim.partition)) for name, claims in self._claims.items() for claim in claims}

    def _pass_over(self, ends: Mapping[Claim, int | None]) -> None:
        """For idle sources, once for each end of their batches: Spark passes the ends of transactions, and tells no task."""
        new = {claim: end for claim, end in ends.items() if end is None or self._passed.get(claim.key) != end}
        if not new:
            return
        try:
            self._passed |= {claim.key: new[claim] for claim in self._positions.pass_over(new)}
        except Unavailable as error:
            log.warning("could not advance positions of idle sources, will retry", error=str(error))

    def _matching(self, ingress: IngressSpec) -> dict[tuple[str, int], str]:
        """Its source partitions, each with its topic's id: a topic deleted and created again is another one."""
        there = self._positions.topics.partitions()
        wanted = [topic for topic in there if ingress.names(topic)]
        if ingress.pattern is not None:
            wanted = [topic for topic in wanted if not topic.startswith("__") and topic not in self.pipelines.topics.reserved]
        ids = self._positions.topics.ids(wanted)
        return {(topic, partition): topic_id for topic, topic_id in ids.items() for partition in range(there[topic])}

    def _refresh_ingresses(self) -> None:
        for name, ingress in self._ingresses.items():
            query = self.queries[f"{INGRESS}{name}"]
            if query.stopped is None and self._matching(ingress) != self._sources.get(name):
                log.info("topics of ingress changed", ingress=name)
                query.restart()

    # --- all ---

    @property
    def _spark(self) -> SparkSession:
        if self._session is None:
            raise Unavailable("the driver has no Spark session: the driver is not started, or has ended")
        return self._session

    def _add(self, name: str, build: Callable[[], DataStreamWriter | None]) -> None:
        query = Query(name, build, self._scratch, self.pipelines.trigger_interval_ms)
        self.queries[name] = query
        query.start()

    def _set_pool(self, pool: str) -> None:
        # Worker processes with another environment are other processes: each query keeps its own, with its prepared incarnations.
        self._spark.sparkContext.environment["BASCULE_PIPELINE"] = pool

    def _pooled(self, pool: str, frame: DataFrame, task: DivertTask | IngressTask) -> DataFrame:
        self._set_pool(pool)
        return frame.mapInArrow(crossing(task), REPORT_SCHEMA)

    def _mirror(self) -> None:
        for name, query in self.queries.items():
            offsets = query.reached()
            # Of one that has stopped there are none any more; but what was told of it may still wait for an answer, or for another try.
            if offsets or name in self._mirrors:
                self._mirror_of(name).show(offsets)

    def _mirror_of(self, name: str) -> LagMirror:
        if name not in self._mirrors:
            self._mirrors[name] = LagMirror(self.pipelines.kafka, self._positions.group(name))
        return self._mirrors[name]

    def _tell(self, reasons: Mapping[str, str]) -> None:
        """Why queries of diverts do not run, by name: the broker shows it with what it keeps of the journal for them."""
        own = {name: self._positions.own_key(name.removeprefix(DIVERT)) for name in reasons if name.startswith(DIVERT)}
        keys = own | ({COMMON: self._positions.common_key} if COMMON in reasons else {})
        # Of what a successor holds it is the successor who knows.
        if not keys or any(query.superseded for query in self.queries.values()):
            return
        try:
            stored = self._positions.stored(IDLE_TIMEOUT_S)
        except Unavailable as error:
            log.warning("could not publish the reason why a pipeline stopped", error=str(error))
            return
        for name, key in keys.items():
            self._told.add(name)
            if (at := stored.get(key)) is not None:
                self._mirror_of(name).show({(at.topic, at.partition): at.offset}, reasons[name])


def run(
    settings: Settings, *, on_ready: Callable[[], None], on_standby: Callable[[], None] = lambda: None,
    bootstrap_servers: str | None = None,
) -> None:  # fmt: skip
    """Runs all pipelines of a configuration until SIGTERM or SIGINT. ``on_ready`` is called when they run.

    ``on_standby`` is called before that while another driver of the bridge runs them. Raises BasculeError when they cannot start,
    PipelineStopped when none of them can go on, or another driver has taken over.
    """
    servers = bootstrap_servers or settings.kafka.bootstrap_servers
    if servers is None:
        raise Unavailable("no Kafka configured; set kafka.bootstrap_servers (`bascule up` sets it for the embedded Kafka)")
    run_pipelines(from_settings(settings, servers), on_ready=on_ready, on_standby=on_standby)


def run_pipelines(pipelines: PipelinesSpec, *, on_ready: Callable[[], None], on_standby: Callable[[], None] = lambda: None) -> None:
    """``run`` for plain values."""
    with StopSignals() as stop, DriverTurn(pipelines, stop, on_standby) as turn:
        driver = Driver(pipelines)
        try:
            if not driver.start(turn.wait):
                return
            stop.listen()  # the gateway to Spark has set handlers of its own
            on_ready()
            while not stop.wait(POLL_S):
                turn.check()
                driver.poll()
                queries = driver.queries
                stopped = {name: query.stopped for name, query in queries.items() if query.stopped is not None}
                # What is idle finds its successor late: all of a driver stops where one has found it.
                if queries and (len(stopped) == len(queries) or any(query.superseded for query in queries.values())):
                    raise PipelineStopped("; ".join(f"{name}: {reason}" for name, reason in stopped.items()))
        finally:
            with suppress(Exception):
                driver.stop()


def _scratch_base(pipelines: PipelinesSpec) -> str | None:
    if pipelines.checkpoint_dir is not None:
        os.makedirs(pipelines.checkpoint_dir, exist_ok=True)
        return pipelines.checkpoint_dir
    # Written for each batch and never read again: memory will do.
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _stopped(error: BasculeError) -> NoReturn:
    """Of a pipeline that cannot start: it is shown among the others, and they go on."""
    raise error
