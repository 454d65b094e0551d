"""Control of the pipelines of one driver: it follows what administrators want, and reports what the pipelines do."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from bascule.core.errors import BasculeError, Unavailable
from bascule.core.kafka_records import Place
from bascule.core.log import get_log
from bascule.kafka.control import ControlTopics
from bascule.kafka.history import StableEnds
from bascule.kafka.record_sizes import RecordSizes
from bascule.pipelines.defined_positions import DefinedPositions
from bascule.pipelines.definitions import DefinedPipelines
from bascule.pipelines.holds import NOTES, Holds
from bascule.pipelines.lag import lag_bytes_of, waiting_in
from bascule.pipelines.latency import IntervalLatencies
from bascule.pipelines.positions import IDLE_TIMEOUT_S
from bascule.pipelines.queries import Query, RestartCounts
from bascule.pipelines.redrive import RedriveJobs
from bascule.pipelines.spec import DivertSpec, IngressSpec, PipelinesSpec, user_of, user_of_definition
from bascule.threads.background import in_background
from bascule.writer.control import DRIVER_KEY, DriverReport, PipelineReport, PipelineState, Steering, Wish, Wishes
from bascule.writer.definitions import DefinitionSteps
from bascule.writer.position import DIVERT, INGRESS, Position
from bascule.writer.reading import READ_TIMEOUT_S
from bascule.writer.redrive import RedriveJob

if TYPE_CHECKING:
    from bascule.pipelines.lineage_sender import PipelineLineage
    from bascule.pipelines.metrics import PipelineMetrics

log = get_log(__name__)

#: Interval, in seconds, at which a driver looks for new wishes.
LOOK_S: Final = 1.0
#: Pause, in seconds, after a step that was not complete: an attempt to pause a divert stops the task of its group.
RETRY_S: Final = 5.0
#: How long, in seconds, a driver follows definitions before it looks after its pipelines again. It may have hundreds to start.
DEFINITIONS_S: Final = 5.0
#: Interval, in seconds, of reports of positions. A change of a state is reported at once.
REPORT_S: Final = 5.0
#: Interval, in seconds, at which a driver writes all reports again: a driver that was replaced may have overwritten one of them.
WHOLE_REPORT_S: Final = 60.0
#: How long the driver waits for Kafka before it looks again, in seconds. Its queries wait meanwhile.
TIMEOUT_S: Final = 2.0
#: Source partitions in one report: an ingress may read thousands, and a report is one record of Kafka.
SOURCES_MAX: Final = 500
#: How long a driver that stops waits until its last report is stored, in seconds.
LAST_REPORT_S: Final = 5.0


class DriverControl:
    """Follows ``PREFIX.control`` and writes ``PREFIX.pipelines`` for one driver, on the thread of the driver."""

    def __init__(
        self, pipelines: PipelinesSpec, holds: Holds, queries: Mapping[str, Query], positions: DefinedPositions,
        group_of: Callable[[str], str], keys_of: Callable[[str], Sequence[str]], defined: DefinedPipelines,
        metrics: PipelineMetrics | None = None, lineage: PipelineLineage | None = None,
    ) -> None:  # fmt: skip
        """``keys_of`` returns the keys of the positions of a query, and ``group_of`` the pipeline of a divert's group.

        ``defined`` starts what is defined at run time. ``metrics`` show what is reported, too, and ``lineage`` follows it.
        """
        self._specs: dict[str, DivertSpec | IngressSpec] = {f"{DIVERT}{each.name}": each for each in pipelines.diverts}
        self._specs |= {f"{INGRESS}{each.name}": each for each in pipelines.ingresses}
        self._file_users = {name: user_of(spec) if spec.enabled else None for name, spec in self._specs.items()}
        self._holds = holds
        self._queries = queries
        self._positions = positions
        self._group_of = group_of
        self._keys_of = keys_of
        self._topics = ControlTopics(pipelines.kafka, pipelines.topics)
        self._control_topic = pipelines.topics.control
        self._ends = StableEnds(pipelines.kafka)
        self._sizes = RecordSizes(pipelines.kafka)
        self._steering = Steering([name for name, spec in self._specs.items() if spec.enabled])
        self._in_file = frozenset(name.partition(":")[2] for name in self._specs)
        self._definitions = DefinitionSteps(self._in_file)
        self._ignored: frozenset[str] = frozenset()
        self._refused: Mapping[str, str] = {}
        #: Why pipelines are held whose records cannot be read.
        self._unreadable: Mapping[str, str] = {}
        self._defined = defined
        defined.steering, defined.specs = self._steering, self._specs
        self._driver = f"{socket.gethostname()}-{os.getpid()}"
        self._begun = False
        #: Whether the steps of all definitions were tried: until then, there are pipelines that this driver has not started.
        self.all_tried = False
        self._look_due_s = self._step_due_s = self._report_due_s = self._whole_report_due_s = 0.0
        self._trouble = self._unreported = ""
        #: Queries that were stopped and have not ended.
        self._ending: set[str] = set()
        self._states: dict[str, PipelineState] = {}
        self._restart_counts = RestartCounts()
        self._restarts: dict[str, int] = {}
        self._moved: dict[str, str] = {}
        self._told_refused: Mapping[str, str] = {}
        #: The wanted states and the refusals as of the last look.
        self._decided: tuple[Mapping[str, Wish], Mapping[str, str]] = {}, {}
        self._reported: dict[str, PipelineReport] = {}
        #: Pipelines with a report that is to be deleted once they are.
        self._stale: set[str] = set()
        self._deleted: set[str] = set()
        self._counted: dict[str, tuple[int, float, str]] = {}
        self._latencies = IntervalLatencies()
        self._writing: list[Future[int]] = []
        self._metrics = metrics
        self._lineage = lineage
        self._redrives = RedriveJobs(pipelines)
        self._jobs: Mapping[str, RedriveJob] = {}

    def begin(self) -> None:
        """Learn which pipelines this driver must not start. Raises Unavailable."""
        wishes = self._topics.wishes(READ_TIMEOUT_S, decides=True)
        begun = self._positions.definitions()
        wishes = self._usable(wishes, begun)
        self._holds.held |= self._steering.begin(wishes, self._holds.moves.handled() if wishes.offsets else {})
        self._definitions.begin(self._defined.usable(wishes, begun), begun, wishes.undefined)
        self._note_unreadable(wishes)
        self.all_tried = not any(self._definitions.due)
        reported = self._topics.reported(READ_TIMEOUT_S)
        # Of the ingresses that begin again, only this driver knows the states.
        self._stale = (reported & self._definitions.pipelines) - wishes.definitions.keys() - wishes.undefined
        reported -= self._definitions.unreadable  # the only place with the ids of their definitions, if they have not begun
        self._topics.report(dict.fromkeys(reported - self._specs.keys() - self._stale))
        self._begun = True

    @property
    def defined(self) -> frozenset[str]:
        """The pipelines that are defined at run time, or were until their positions are deleted."""
        return self._definitions.pipelines

    @property
    def defined_ingresses(self) -> set[str]:
        """The names of the ingresses that are defined at run time, or were until their positions are deleted."""
        return {name.removeprefix(INGRESS) for name in self._definitions.pipelines if name.startswith(INGRESS)}

    def poll(self) -> None:
        """Follow new wishes, and report. Raises PositionTaken if another driver has taken over."""
        now_s = time.monotonic()
        if now_s >= self._look_due_s:
            self._look_due_s = now_s + LOOK_S
            try:
                # After an error, the reader is new: a former leader could answer with wishes from before those that it has followed.
                unsure = bool(self._trouble)
                wishes = self._topics.wishes(IDLE_TIMEOUT_S if unsure else TIMEOUT_S, decides=unsure)
                wishes = self._usable(wishes, self._definitions.begun)
                self._follow(wishes)
                self._jobs = wishes.redrives
            except BasculeError as error:
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    log.warning("could not follow the control of pipelines, will retry", error=self._trouble)
                self._look_due_s = time.monotonic() + REPORT_S
                return
            self._trouble = ""
        if any(not query.ending for name, query in self._queries.items() if name in self._ending):  # a step may have waited for its end
            self._step_due_s = 0.0
        if now_s >= self._step_due_s:
            # first: a pipeline that is deleted must not be resumed
            self.all_tried = self._definitions.step(self._defined, lambda: time.monotonic() - now_s < DEFINITIONS_S)
            self._steering.step(self._holds)
            failed = self.all_tried and any((*self._definitions.due, *self._steering.due))
            self._step_due_s = now_s + RETRY_S if failed else 0.0
        self._ending = {name for name, query in self._queries.items() if query.ending}  # also those that a step has just stopped
        if self.all_tried:  # a redrive leaves the dead letters of pipelines that are not started yet
            self._redrives.follow(self._jobs, [self._if_allowed(name) for name in self._specs])
        states = {name: self._state_of(name) for name in self._specs}
        tasks = {name: self._query_of(name) for name in states}
        states |= dict.fromkeys(self._unstarted, PipelineState.FAILED)
        tasks |= {name: name for name in self._unstarted}
        self._restarts = self._restart_counts.look(tasks, self._queries)
        if self._metrics is not None:
            self._metrics.redriven(self._redrives.outcomes)
            if self._lineage is not None:
                self._metrics.lineage(self._lineage.sender.outcomes)
            self._metrics.show(states, tasks, self._queries, self._restarts)
        moved = {name: self._steering.moved(name) for name in self._specs}
        if ((states, moved, self._refused) != (self._states, self._moved, self._told_refused) or now_s >= self._report_due_s) and all(
            future.done() for future in self._writing
        ):
            self._states, self._moved, self._told_refused, self._report_due_s = states, moved, self._refused, now_s + REPORT_S
            self._report()

    def _usable(self, wishes: Wishes, begun: Collection[str]) -> Wishes:
        """Return the wishes as they count for this driver. ``begun`` are the pipelines with positions of a definition."""
        return self._refusing(wishes.losing(begun, self._control_topic).beside_file(self._in_file))

    def _follow(self, wishes: Wishes) -> None:
        begun = {pipeline: self._definitions.id_of(pipeline) for pipeline in wishes.definitions}
        self._definitions.follow(self._defined.usable(wishes, begun), wishes.undefined)
        self._note_unreadable(wishes)
        for name in self._definitions.ignored - self._ignored:
            log.warning("definition ignored, the configuration file has a pipeline of this name", pipeline=name)
        self._ignored = self._definitions.ignored
        self._steering.follow(wishes)
        if (decided := (wishes.states, wishes.refused)) != self._decided:  # not after the pause that follows a failed step
            self._decided, self._step_due_s = decided, 0.0

    def _if_allowed(self, name: str) -> DivertSpec | IngressSpec:
        """Return a pipeline, disabled if it may not run."""
        return replace(self._specs[name], enabled=False) if name in self._refused else self._specs[name]

    def _refusing(self, wishes: Wishes) -> Wishes:
        """Return the wishes, with the diverts whose users may not consume."""
        named = {pipeline: user_of_definition(pipeline, each.settings) for pipeline, each in wishes.definitions.items()} | self._file_users
        # Until a divert can be changed, it would run with its old settings, for which its old user needs the permission.
        old = [(pipeline, user_of(self._specs[pipeline])) for pipeline in named.keys() & self._specs.keys()]
        refusing = wishes.refusing((pipeline, user) for pipeline, user in (*old, *named.items()) if user is not None)
        for pipeline, reason in refusing.refused.items():
            if self._refused.get(pipeline) != reason:
                log.warning("divert stopped, its user may not consume", pipeline=pipeline, reason=reason)
        for pipeline in self._refused.keys() - refusing.refused.keys():
            log.info("divert may continue", pipeline=pipeline)
        self._refused = self._redrives.refused = refusing.refused  # a running redrive does not wait for the next steps
        return refusing

    def _note_unreadable(self, wishes: Wishes) -> None:
        """Log once which pipelines damaged records hold."""
        found = {pipeline: reason for pipeline in wishes.unreadable if (reason := wishes.trouble(pipeline))}
        for pipeline, reason in found.items():
            if self._unreadable.get(pipeline) != reason:
                log.error("pipeline held, a record of its control cannot be read", pipeline=pipeline, error=reason)
        for pipeline in self._unreadable.keys() - found.keys():
            log.info("pipeline control record replaced", pipeline=pipeline)
        self._unreadable = found

    @property
    def _unstarted(self) -> frozenset[str]:
        """The pipelines whose definitions cannot be read or are lost, and that this driver has not started."""
        return self._definitions.unreadable - self._specs.keys()

    def note(self, query: str) -> str:
        """Return why the broker keeps the journal for a query that is held; "" if it is not held."""
        if reason := self._refused.get(query):
            return reason
        state = self._steering.held(query) if query.startswith(DIVERT) else None
        if state is PipelineState.FAILED:
            return self._steering.trouble(query)
        return "" if state is None else NOTES[state].format(name=query.removeprefix(DIVERT))

    def moved(self, query: str) -> str:
        """Return the id of the last request that moved the positions of a query, or was refused; "" if there was none."""
        return self._steering.moved(query)

    def end(self) -> None:
        """Report that the driver has stopped, and free the clients. A driver that was replaced reports nothing."""
        replaced = any(query.superseded for query in self._queries.values())
        if self._lineage is not None:
            self._lineage.runs.end(aborted=replaced)
        if self._begun and not replaced:
            with suppress(Unavailable, TimeoutError):
                for future in self._topics.report({DRIVER_KEY: DriverReport(self._driver, _now_ms(), running=False)}):
                    future.result(LAST_REPORT_S)
        with suppress(TimeoutError):
            self._redrives.stop(LAST_REPORT_S)
        with suppress(TimeoutError):  # without Kafka, the client would wait for the records in flight
            in_background(self._topics.close, "control-close").result(LAST_REPORT_S)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Write what has changed, and that the driver lives. Reports that Kafka has not stored are written again."""
        if any(future.exception() is not None for future in self._writing):
            self._reported.clear()
        else:
            self._stale -= self._deleted
        try:
            stored = self._positions.stored(TIMEOUT_S) if any(spec.enabled for spec in self._specs.values()) else {}
            held = {name: [stored[key] for key in self._keys_of(self._query_of(name)) if key in stored] for name in self._specs}
            ends = self._ends.of({(at.topic, at.partition) for positions in held.values() for at in positions}, TIMEOUT_S)
        except BasculeError as error:
            if str(error) != self._unreported:
                self._unreported = str(error)
                log.warning("could not report the states of pipelines, will retry", error=self._unreported)
            return
        self._unreported = ""
        if (now_s := time.monotonic()) >= self._whole_report_due_s:
            self._whole_report_due_s = now_s + WHOLE_REPORT_S
            self._reported.clear()
        now_ms = _now_ms()
        sizes = self._sizes.look(waiting_in((at for positions in held.values() for at in positions), ends))
        reports = {name: self._report_of(name, positions, ends, sizes, now_ms) for name, positions in held.items()}
        reports |= {name: self._report_of_unstarted(name, now_ms) for name in self._unstarted}
        if self._metrics is not None:
            self._metrics.measure(reports, stored, ends, self._queries)
        if self._lineage is not None:
            self._lineage.runs.follow(reports)
        changed = {name: report for name, report in reports.items() if _lasting(report) != _lasting(self._reported.get(name))}
        self._stale |= self._reported.keys() | changed.keys()
        self._deleted = self._stale - reports.keys() - self._definitions.pipelines
        deletions = dict.fromkeys(self._deleted)
        self._writing = self._topics.report(
            {**changed, **deletions, DRIVER_KEY: DriverReport(self._driver, now_ms, redrives=self._redrives.errors)}
        )
        self._reported = {name: report for name, report in {**self._reported, **changed}.items() if name not in deletions}

    def _report_of(
        self, name: str, positions: list[Position], ends: Mapping[Place, int], sizes: Mapping[Place, float], now_ms: int
    ) -> PipelineReport:
        query = self._queries.get(self._query_of(name))
        sources = tuple((at.topic, at.partition, at.offset, ends.get((at.topic, at.partition))) for at in positions)
        known = all(end is not None for *_, end in sources)
        latency = self._latencies.since_last(name, self._query_of(name), positions)
        refused = self._refused.get(name, "")
        return PipelineReport(
            self._states[name], self._driver, now_ms, definition_of(self._specs[name]),
            group=spec.group if isinstance(spec := self._specs[name], DivertSpec) else "",
            sources=sources[:SOURCES_MAX],
            partitions=len(sources),
            lag=sum(max(0, end - offset) for _, _, offset, end in sources if end is not None) if known else None,
            lag_bytes=lag_bytes_of(positions, ends, sizes),
            records_per_s=self._rate(name, positions),
            restarts=self._restarts[name],
            error=self._steering.trouble(name) or refused or ("" if query is None else query.stopped or query.last_error),
            error_at_ms=0 if query is None or refused else int(query.last_error_s * 1000),
            offsets_request=self._moved[name],
            offsets_error=self._holds.moves.refusal(name, self._moved[name]),
            revision=self._definitions.revision(name),
            definition_id=self._definitions.id_of(name),
            latency_p50_s=latency.p50_s, latency_p99_s=latency.p99_s,
        )  # fmt: skip

    def _report_of_unstarted(self, name: str, now_ms: int) -> PipelineReport:
        """Return the report about a pipeline whose definition cannot be read. The revision is not known: any but 0 is at run time."""
        return PipelineReport(
            PipelineState.FAILED, self._driver, now_ms, error=self._steering.trouble(name),
            revision=max(1, self._definitions.revision(name)), definition_id=self._definitions.id_of(name),
        )  # fmt: skip

    def _rate(self, name: str, positions: list[Position]) -> float | None:
        """Return the records of the sources for each second since the last report; None if this is the first, or the first after a move."""
        count, now_s = sum(at.offset for at in positions), time.monotonic()
        before, since_s, moved = self._counted.get(name, (count, now_s, ""))
        self._counted[name] = count, now_s, self._moved[name]
        if moved != self._moved[name]:  # nothing was carried between the two positions
            return None
        return round(max(0, count - before) / (now_s - since_s), 1) if now_s > since_s else None

    def _query_of(self, name: str) -> str:
        """Return the query that carries a pipeline: its own, or that of the divert's group."""
        if name in self._queries or name.startswith(INGRESS):
            return name
        return self._group_of(name.removeprefix(DIVERT))

    def _state_of(self, name: str) -> PipelineState:
        if not self._specs[name].enabled:
            return PipelineState.DISABLED
        if (held := self._steering.held(name)) is not None:
            return held
        query = self._queries.get(self._query_of(name))
        if query is None:
            return PipelineState.RESTARTING
        if query.stopped is not None:
            return PipelineState.FAILED
        if query.running is not None:
            alone = query.name == name and name.startswith(DIVERT) and name.removeprefix(DIVERT) not in self._defined.diverts
            return PipelineState.CATCHING_UP if alone else PipelineState.RUNNING
        return PipelineState.WAITING if query.idle and name.startswith(INGRESS) else PipelineState.RESTARTING


def definition_of(spec: DivertSpec | IngressSpec) -> dict[str, Any]:
    """Return the settings of a pipeline under the names of the configuration."""
    said = asdict(spec)
    del said["name"]
    start = said.pop("start")
    renamed = {"from": said.pop("source")} if isinstance(spec, DivertSpec) else {"routing": spec.routing.name.lower()}
    target, function = said.pop("target"), said.pop("function", None)
    if function is not None:
        renamed["python"] = function
    return {**said, **renamed, "to": target, "start": start["timestamp_ms"] if start["at"] == "timestamp" else start["at"]}


def _lasting(report: PipelineReport | None) -> PipelineReport | None:
    """Return a report without the time at which it was made."""
    return None if report is None else replace(report, at_ms=0)


def _now_ms() -> int:
    return int(time.time() * 1000)
