"""The Spark driver: runs all diverts and ingresses of one bridge in one process."""

from __future__ import annotations

from bascule.core.extras import require

require("pipelines")

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pyspark import SparkContext
from pyspark.sql import SparkSession

from bascule.core import crash
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import get_log
from bascule.core.signals import StopSignals
from bascule.embedded.service_manager import NO_SERVICE_MANAGER, ServiceManager
from bascule.journal.errors import DamagedRecord, NewerRecord
from bascule.kafka.transactional import end_open_transactions
from bascule.pipelines.control import DriverControl
from bascule.pipelines.defined_positions import DefinedPositions
from bascule.pipelines.definitions import DefinedPipelines
from bascule.pipelines.failures import crossing_batch
from bascule.pipelines.holds import Holds
from bascule.pipelines.ingresses import DriverIngresses
from bascule.pipelines.jobs import RESIDENT, Resident, ResidentJob, ResidentTasks, Running, Startable, StopFlag, carry_up_to
from bascule.pipelines.joining import JOIN_PAUSE_S, DivertJoins
from bascule.pipelines.lag_mirrors import MIRROR_S, LagMirrors
from bascule.pipelines.lineage_sender import lineage_of
from bascule.pipelines.planning import TransformationChecks
from bascule.pipelines.pools import WorkerPools
from bascule.pipelines.positions import IDLE_TIMEOUT_S
from bascule.pipelines.queries import ENDING_S, MicroBatches, PipelineStopped, Query
from bascule.pipelines.serving import metrics_of
from bascule.pipelines.session import StartingSpark
from bascule.pipelines.slots import SlotWatch, waiting_stages
from bascule.pipelines.spark import cloned_session, cores, journal_rows, kafka_range, kafka_stream, runs_locally, spark_context, sql_session
from bascule.pipelines.spec import PipelinesSpec, StartPosition, from_settings
from bascule.pipelines.standby import DriverTurn
from bascule.pipelines.tasks import DivertTask, KnownDiverts
from bascule.pipelines.transforming import TransformingBatch
from bascule.pipelines.transforming_job import TransformingJob
from bascule.pipelines.waiting_choice import WaitingChoice
from bascule.writer.position import COMMON, DIVERT, EARLIEST, ENDED, INGRESS, Position, PositionLost, group_pipeline

if TYPE_CHECKING:
    from bascule.config.settings import Settings
    from bascule.pipelines.lineage_sender import PipelineLineage
    from bascule.pipelines.metrics import PipelineMetrics

log = get_log(__name__)

POLL_S = 0.25
#: Interval, in seconds, at which the driver looks for new topics and partitions of an ingress.
REFRESH_S = 10.0
#: How long the pipelines wait for the broker to create the journal when both start together.
JOURNAL_TIMEOUT_S = 120.0
#: A divert that catches up joins its group within this distance. The divert and its group stop meanwhile, and one of them reads the rest.
JOIN_RECORDS = 20_000
#: Interval, in seconds, at which the driver looks whether a divert that is far behind has come near.
JOIN_LOOK_S = 1.0


class Driver:
    """Runs the pipelines until it is stopped: ``start``, then ``poll`` often, then ``stop``, all from one thread."""

    def __init__(self, pipelines: PipelinesSpec, metrics: PipelineMetrics | None = None, lineage: PipelineLineage | None = None) -> None:
        self.pipelines = pipelines
        self.owner = uuid.uuid4().hex
        self.queries: dict[str, Query] = {}
        self._positions = DefinedPositions(pipelines, self.owner)
        self._scratch = Path(tempfile.mkdtemp(prefix="bascule-", dir=_scratch_base(pipelines)))
        self._starting = StartingSpark(lambda: spark_context(pipelines))
        self._separate: set[str] = set()
        self._holds = Holds(self._positions, self.queries, self._separate, self._group_of, self._start_separate)
        self._ingresses = DriverIngresses(
            self._positions, pipelines.ingresses, self._holds.held, lambda: cores(self._starting.context, pipelines),
            partial(self._resident, committed=True),
        )  # fmt: skip
        self._defined = DefinedPipelines(
            self._positions, self._holds, self._ingresses, self._start_defined, self._drop, lambda: self._known.removed
        )
        self._control = DriverControl(
            pipelines, self._holds, self.queries, self._positions, self._group_of, self._keys_of, self._defined, metrics, lineage
        )
        self.held = self._holds.held
        self._join_due_s: dict[str, float] = {}
        self._checks = TransformationChecks(lambda: cloned_session(self._sql))
        self._choice = WaitingChoice(pipelines, lambda: cloned_session(self._sql), self._has_stopped)
        self._pools = WorkerPools(lambda: self._spark)
        self._known = KnownDiverts()
        self._diverts = {divert.name: divert for divert in pipelines.diverts}
        self._joins = DivertJoins(
            self._positions, self.queries, self._group_of, self._divert_task, lambda: self._spark, lambda *what: self._catch_up(*what),
            self._diverts, self._has_joined,
        )  # fmt: skip
        self._mirrors = LagMirrors(self._positions, self._keys_of, self._control.moved)
        self._slots = SlotWatch()
        self._refresh_due_s = 0.0
        self._mirror_due_s = 0.0

    def start(self, turn: Callable[[], bool] = lambda: True) -> bool:
        """Wait for this driver's ``turn``, take over all positions, and start the queries. Raises BasculeError.

        Returns False if the driver was told to stop before its turn.
        """
        if self._ingresses.specs or any(divert.enabled for divert in self._diverts.values()):
            self._starting.start()  # takes seconds, and needs no turn: a standby driver keeps Spark ready
        self._positions.prepare_topics()
        if not turn():
            return False
        self._positions.end_transactions()
        self._control.begin()
        crash.point("driver.topics.after")
        # Even without diverts, messages that earlier exclusive diverts took may be left.
        journal_id = self._journal_id() if self._diverts or self._positions.know_diverts() else ""
        if journal_id:
            self._start_diverts(journal_id)
        known = {ingress.name for ingress in self.pipelines.ingresses} | self._control.defined_ingresses
        for pipeline in self._positions.removed_ingresses(known):
            self._positions.take_sources(pipeline, {}, StartPosition(EARLIEST), lambda _: False)
        for name in self._ingresses.specs:
            self._add_ingress(name)
        self._positions.look_at_transactions()
        if self._starting.started:
            self._starting.context()
        for query in self.queries.values():
            query.check()
        if not self._starting.started:
            log.info("no divert or ingress is enabled, Spark is not started", bridge=self.pipelines.bridge_id)
        self._refresh_due_s = time.monotonic() + REFRESH_S
        return True

    def poll(self) -> None:
        """Check Spark and the queries, join diverts that have caught up, look for new topics and tasks without a slot, publish the lag.

        Raises SparkEnded.
        """
        self._starting.check()
        for query in list(self.queries.values()):
            query.check()
        self._control.poll()
        self._join_those_near()
        now = time.monotonic()
        if now >= self._refresh_due_s:
            self._refresh_due_s = now + REFRESH_S
            running = {query.running.job_group: name for name, query in self.queries.items() if query.running is not None}
            self._slots.look(waiting_stages(self._spark, running) if running else [], now)  # without queries, perhaps without Spark
            try:
                self._ingresses.refresh(self.queries)
            except Unavailable as error:
                # The queries survive a pause of Kafka, and so does this driver.
                log.warning("could not look for new topics of ingresses, will retry", error=str(error))
        if now >= self._mirror_due_s:
            self._mirror_due_s = now + MIRROR_S
            self._mirrors.show(self.queries, self._running())
            reasons = {name: query.stopped or self._control.note(name) for name, query in self.queries.items()}
            self._tell(self._mirrors.untold(reasons))

    @property
    def all_tried(self) -> bool:
        """Return True if the driver has tried to start all pipelines, also those that were defined at run time."""
        return self._control.all_tried

    @property
    def amendable(self) -> bool:
        """Return True if an administrator has defined pipelines at run time: a change of a definition may mend what no restart can."""
        return bool(self._control.defined)

    def watched(self) -> AbstractContextManager[None]:
        """Return a context that raises SparkEnded if a call to Spark fails because its JVM has ended."""
        return self._starting.watched()

    def stop(self) -> None:
        """Stop everything in order. No transaction stays open, unless Spark has ended: then the next driver ends them, as after a kill."""
        crash.point("driver.stop.before")
        if self._starting.has_ended:
            shutil.rmtree(self._scratch, ignore_errors=True)
            return
        self._mirrors.show(self.queries, self._running())
        for query in self.queries.values():
            query.stop(0.0)
        for query in self.queries.values():
            query.has_ended(ENDING_S)  # of all of them: the time began above
        self._ingresses.pass_over()
        self._tell({name: query.stopped or self._control.note(name) or ENDED for name, query in self.queries.items()})
        self._control.end()
        crash.point("driver.stop.after")
        self._mirrors.close()
        self._positions.close()
        self._starting.stop()
        # The workers end with the session, some of them in the middle of a transaction.
        end_open_transactions(self.pipelines.kafka, map(self.pipelines.transactional_id, self._held_keys()))
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _held_keys(self) -> list[str]:
        """Return the keys of the positions that the queries of this run move."""
        return [key for name in self.queries for key in self._keys_of(name)]

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
        plan = self._holds.parted(plan)
        self._separate.update(plan.separate)
        self._known = KnownDiverts(plan.covered_elsewhere(self._diverts), plan.removed, plan.end)
        if plan.common_lost is not None:
            self._add(COMMON, partial(_stopped, plan.common_lost))
        elif not plan.vacant:
            self._add(COMMON, lambda: self._divert_query(COMMON))
        for pipeline in map(group_pipeline, plan.groups):
            self._add(pipeline, lambda pipeline=pipeline: self._divert_query(pipeline))  # type: ignore[misc]
        for name in plan.separate:
            self._start_separate(name)
        for name, loss in plan.lost.items():
            self._add(f"{DIVERT}{name}", partial(_stopped, loss))

    def _start_separate(self, name: str) -> None:
        self._join_due_s.pop(name, None)
        self._add(f"{DIVERT}{name}", lambda: self._separate_query(name))

    def _separate_query(self, name: str) -> Startable | None:
        self._settle_doubts()
        return self._divert_query(f"{DIVERT}{name}") if name in self._separate else None

    def _divert_query(self, pipeline: str) -> Startable | None:
        key = self._positions.key_of(pipeline)
        position = self._positions.read(key)
        if not pipeline.startswith(DIVERT):
            self._settle_doubts()
        joining = any(self._group_of(name) == pipeline and f"{DIVERT}{name}" not in self._holds.held for name in self._separate)
        removed = pipeline == COMMON and bool(self._known.removed or not self._diverts)
        self._choice.drop(pipeline)
        if pipeline in self._holds.held or not (position.members or joining or removed):
            return None  # all diverts are disabled or held
        task = self._divert_task(key, position)
        if not any(divert.transformed for divert in task.diverts):
            return self._resident(pipeline, [task], committed=False)
        for divert in task.diverts:
            self._checks.require(divert)
        if self._choice.allows(pipeline, task):
            pools, give_up = (self._resident_pool(pipeline), f"{pipeline} rows"), partial(self._choice.give_up, pipeline)
            return lambda name, _: TransformingJob(self._sql, name, task, pools, self._pools.using, give_up)
        journal = journal_rows(kafka_stream(self._sql, self.pipelines, {(position.topic, position.partition): position.offset}))
        over = StopFlag()
        writer = journal.writeStream.foreachBatch(crossing_batch(TransformingBatch(task, pipeline, self._pools.using, over.look)))
        return lambda name, checkpoint: MicroBatches(writer, name, checkpoint, self.pipelines.trigger_interval_ms, over.set)

    def _resident(self, pool: str, tasks: Sequence[Resident], *, committed: bool) -> Startable:
        def start(name: str, _checkpoint: str) -> Running:
            self._starting.start()  # no pipeline may be enabled, although removed diverts have left messages
            with self._pools.using(self._resident_pool(pool)):
                return ResidentJob(self._spark, name, ResidentTasks(tasks, self.pipelines.kafka, committed))

        return start

    def _divert_task(self, key: str, position: Position) -> DivertTask:
        there = {**self._diverts, **self._defined.diverts}
        members = tuple(there[name] for name in position.members if name in there)
        known = replace(self._known, separate=self._known.separate.union(self._separate, self._defined.diverts))
        return DivertTask(self.pipelines, self._positions.claim(key, position), members, known, leader_epoch=position.leader_epoch)

    def _join_those_near(self) -> None:
        if (ended := self._joins.finish()) is not None:
            self._join_due_s[ended] = time.monotonic() + JOIN_PAUSE_S
        if self._joins.busy:
            return  # one after the other
        now = time.monotonic()
        running = self._running()
        due = sorted(name for name in self._separate if now >= self._join_due_s.get(name, 0.0) and f"{DIVERT}{name}" in running)
        due = [name for name in due if self._group_of(name) in running]
        if not due:
            return
        try:
            stored = self._positions.stored(IDLE_TIMEOUT_S)
        except Unavailable as error:
            log.warning("could not read positions of diverts, will retry", error=str(error))
            return
        for name in due:
            behind, ahead = (stored.get(self._positions.key_of(pipeline)) for pipeline in (f"{DIVERT}{name}", self._group_of(name)))
            if behind is not None and ahead is not None and abs(ahead.offset - behind.offset) <= self._joins.distance(name, JOIN_RECORDS):
                self._joins.begin(name)
                self._join_due_s[name] = time.monotonic() + JOIN_PAUSE_S
                if self._joins.busy:
                    return
            else:
                self._join_due_s[name] = now + JOIN_LOOK_S

    def _has_stopped(self, name: str) -> bool:
        return (query := self.queries.get(name)) is not None and query.stopped is not None

    def _running(self) -> set[str]:
        return {name for name, query in self.queries.items() if query.running is not None}

    def _group_of(self, name: str) -> str:
        """Return the pipeline that a divert with its own position joins. The default group answers for diverts that were removed.

        A divert that is defined at run time joins nobody.
        """
        if name in self._defined.diverts:
            return f"{DIVERT}{name}"
        divert = self._diverts.get(name)
        return COMMON if divert is None else group_pipeline(divert.group)

    def _settle_doubts(self) -> None:
        """Find out whether a join whose transaction failed was committed: then the divert has no position of its own.

        Raises Unavailable.
        """
        if self._joins.in_doubt:
            stored = self._positions.stored(decides=True)
            for name in tuple(self._joins.in_doubt):
                if self._positions.own_key(name) not in stored:
                    self._has_joined(name)
            self._joins.in_doubt.clear()

    def _has_joined(self, name: str) -> None:
        del self.queries[f"{DIVERT}{name}"]
        self._choice.drop(f"{DIVERT}{name}")
        self._separate.remove(name)
        self._joins.in_doubt.discard(name)
        log.info("divert joined", divert=name)

    def _catch_up(self, pool: str, task: DivertTask, position: Position, end: int, look: Callable[[], None]) -> None:
        """Carry the records of a task before the offset ``end``. Blocks. ``look`` raises an error once the catch-up is told to stop."""
        if any(divert.transformed for divert in task.diverts):
            session = cloned_session(self._sql)
            journal = journal_rows(kafka_range(session, self.pipelines, position.topic, position.partition, position.offset, end))
            TransformingBatch(replace(task, start=position.offset, leader_epoch=None), pool, self._pools.using, look)(journal)
        else:  # without Spark SQL, which would load its planner and compile code first
            carry_up_to(self._spark, task, self.pipelines.kafka, end, self._pools.using(self._resident_pool(pool)))

    # --- all ---

    def _add_ingress(self, name: str) -> None:
        self._add(f"{INGRESS}{name}", partial(self._ingresses.query, name))

    def _start_defined(self, pipeline: str) -> None:
        if pipeline.startswith(DIVERT):
            self._add(pipeline, lambda: self._divert_query(pipeline))
        else:
            self._add_ingress(pipeline.removeprefix(INGRESS))

    def _drop(self, name: str) -> None:
        """Stop a query for good, and publish its positions no more."""
        if (query := self.queries.pop(name, None)) is not None:
            query.stop()
        self._choice.drop(name)
        self._mirrors.drop(name)

    @property
    def _spark(self) -> SparkContext:
        return self._starting.context()

    @property
    def _sql(self) -> SparkSession:
        return sql_session(self._spark)

    def _add(self, name: str, build: Callable[[], Startable | None]) -> None:
        query = Query(name, build, self._scratch)
        self.queries[name] = query
        query.prepare()

    def _resident_pool(self, pipeline: str) -> str:
        """Return the pool of the workers of a pipeline's resident tasks.

        The worker of a resident task ends with its task, so a pool for each pipeline would keep nothing: one process forks the workers of
        all of them. On a cluster, where a pipeline can run on several machines, the environment of a worker names its pipeline.
        """
        return RESIDENT if runs_locally(self.pipelines) else pipeline

    def _tell(self, reasons: Mapping[str, str]) -> None:
        """Publish why queries do not run, by name. A successor that holds the positions reports them."""
        if not any(query.superseded for query in self.queries.values()):
            self._mirrors.tell(reasons)

    def _keys_of(self, name: str) -> list[str]:
        """Return the keys of the positions of a query."""
        if name.startswith(INGRESS):
            return self._ingresses.keys(name.removeprefix(INGRESS))
        return [self._positions.key_of(name)]


def run(
    settings: Settings, *, on_ready: Callable[[], None], on_standby: Callable[[], None] = lambda: None,
    bootstrap_servers: str | None = None, service_manager: ServiceManager = NO_SERVICE_MANAGER,
) -> None:  # fmt: skip
    """Run all pipelines of a configuration until SIGTERM or SIGINT. ``on_ready`` is called when they run.

    ``on_standby`` is called before that, while another driver runs the pipelines. Raises BasculeError if they cannot start, and
    PipelineStopped if another driver has taken over, or if none of them can continue and all are in the configuration file.
    """
    servers = bootstrap_servers or settings.kafka.bootstrap_servers
    if servers is None:
        raise Unavailable("no Kafka configured; set kafka.bootstrap_servers (`bascule up` sets it for the embedded Kafka)")
    own = settings.pipelines
    with (
        metrics_of(own.metrics_port, own.metrics_host, service_manager) as metrics,
        lineage_of(own.openlineage, settings.bridge.id, servers) as lineage,
    ):
        run_pipelines(
            from_settings(settings, servers), on_ready=on_ready, on_standby=on_standby, service_manager=service_manager,
            metrics=metrics, lineage=lineage,
        )  # fmt: skip


def run_pipelines(
    pipelines: PipelinesSpec, *, on_ready: Callable[[], None], on_standby: Callable[[], None] = lambda: None,
    service_manager: ServiceManager = NO_SERVICE_MANAGER, metrics: PipelineMetrics | None = None,
    lineage: PipelineLineage | None = None,
) -> None:  # fmt: skip
    """Do the same as ``run``, for a PipelinesSpec. The caller serves ``metrics`` and closes ``lineage``."""
    with StopSignals() as stop, DriverTurn(pipelines, stop, on_standby, service_manager) as turn:
        driver = Driver(pipelines, metrics, lineage)
        try:
            with driver.watched():
                if not driver.start(turn.wait):
                    return
                stop.listen()  # Spark's gateway has installed its own handlers
                on_ready()
                while not stop.wait(POLL_S):
                    service_manager.alive()
                    turn.check()
                    driver.poll()
                    queries = driver.queries
                    stopped = {name: query.stopped for name, query in queries.items() if query.stopped is not None}
                    # A held pipeline may wait for a move. An idle query notices a successor late: one that has noticed it ends the driver.
                    ends = driver.all_tried and not driver.amendable and len(stopped.keys() - driver.held) == len(queries)
                    if queries and (ends or any(query.superseded for query in queries.values())):
                        raise PipelineStopped("; ".join(f"{name}: {reason}" for name, reason in stopped.items()))
        finally:
            service_manager.stopping()
            with suppress(Exception):
                driver.stop()


def _scratch_base(pipelines: PipelinesSpec) -> str | None:
    if pipelines.checkpoint_dir is not None:
        os.makedirs(pipelines.checkpoint_dir, exist_ok=True)
        return pipelines.checkpoint_dir
    # Checkpoint files are written for each batch and never read again, so memory is enough.
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _stopped(error: BasculeError) -> NoReturn:
    """Raise the reason why a pipeline cannot start. The pipeline is listed as stopped, and the others run."""
    raise error
