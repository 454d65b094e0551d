"""Redrive of dead letters by the driver (docs/adr/0025-redrive.md).

A Kafka transaction has what the dead letters become, the mark that they are done, the report of the job, and a position. The position is
compared, so it does not matter how many drivers try, and what has become of a transaction in doubt is known. The marks are read after the
position was taken, so a dead letter that any driver has handled is not handled again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from bascule.core import crash
from bascule.core.errors import BadRecord, BasculeError, Denied, Scope, TopicMissing
from bascule.core.kafka_records import Output
from bascule.core.log import get_log
from bascule.kafka.errors import INVALID_TIMESTAMP
from bascule.kafka.redriving import RedriveTopics
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines.carry import Targets
from bascule.pipelines.redrive_engine import LetterLeft, RedriveEngine, RedrivenLetter
from bascule.pipelines.spec import DivertSpec, IngressSpec, PipelinesSpec
from bascule.threads.background import in_background
from bascule.writer.dead_letters import PipelineDeadLetter
from bascule.writer.errors import Unwritable, WriteDenied
from bascule.writer.position import Position
from bascule.writer.redrive import (
    POSITION_KEY,
    REPORT_KEY,
    DoneLetters,
    MarksLost,
    RedriveAction,
    RedriveJob,
    RedriveReport,
    RedriveState,
    encoded_mark,
    mark_key,
)

log = get_log(__name__)

#: Dead letters in one transaction.
LETTERS_MAX: Final = 500
#: A transaction takes no further dead letter beyond this size in bytes.
LETTERS_BYTES_MAX: Final = 16 << 20
#: What may become of a dead letter: the fields of a report that count them.
OUTCOMES: Final = ("redriven", "failed", "discarded", "left")
#: Characters of an error in a report.
ERROR_CHARACTERS_MAX: Final = 1_000
#: Why a job fails whose dead letters are gone.
RECREATED: Final = "the dead-letter topic was deleted or recreated since the request"
#: Pause, in seconds, after an attempt that has failed. Other jobs are tried first.
RETRY_S: Final = 5.0
#: Minimum age, in ms, of a report that is deleted. Brokers forget finished jobs after a week.
REPORTS_KEPT_MS: Final = 14 * 24 * 3600 * 1000
#: How long failures of one transaction are retried, in seconds, before the attempt fails.
WRITE_DEADLINE_S: Final = 30.0


class RedriveRefused(BasculeError):
    """A job cannot be carried out, now or later."""

    retriable = False
    scope = Scope.OPERATION


@dataclass(slots=True)
class _Redriven:
    """A dead letter in a transaction: what it becomes (None: it is discarded), or why it is left."""

    letter: PipelineDeadLetter
    made: RedrivenLetter | None = None
    output: Output | None = None
    left: str = ""


class RedriveRun:
    """One attempt of a driver to carry out a job: takes over the position, and writes transactions until the job is done."""

    def __init__(
        self, pipelines: PipelinesSpec, topics: RedriveTopics, job: RedriveJob, stopped: Callable[[], bool],
        refused: Callable[[], Mapping[str, str]] = dict,
    ) -> None:  # fmt: skip
        """Prepare an attempt. ``stopped`` is asked before each transaction and after each record.

        ``refused`` has the pipelines that may not run now, with the reasons, and is asked for each transaction.
        """
        self._pipelines = pipelines
        self._topics = topics
        self._job = job
        self._stopped = stopped
        self._refused = refused
        self._engine = RedriveEngine(pipelines)
        self._targets = Targets(pipelines)
        self._at: Position | None = None
        self._marks_id = ""
        self._report = RedriveReport()

    def carry_out(self) -> RedriveReport:
        """Return the report when the job is done, or as it is when the run was stopped.

        A job that cannot be carried out ends with a report that says why. Raises PositionMoved if another driver has taken over,
        Unavailable, and WriteDenied if not even the report can be stored. What was committed stays.
        """
        pipelines = self._pipelines
        writer = TransactionalWriter(
            pipelines.kafka, pipelines.transactional_id(POSITION_KEY), pipelines.topics.positions, POSITION_KEY,
            deadline_s=WRITE_DEADLINE_S,
        )  # fmt: skip
        with closing(writer):
            lost = self._take_over(writer)
            try:
                self._carry_all(writer, lost)
            except Exception as error:
                if not _is_final(error):
                    raise
                said = str(error) if isinstance(error, RedriveRefused | MarksLost) else f"{type(error).__name__}: {error}"
                self._write(writer, [], replace(self._report, state=RedriveState.FAILED, error=said[:ERROR_CHARACTERS_MAX]))
        return self._report

    def _carry_all(self, writer: TransactionalWriter, lost: MarksLost | None) -> None:
        """Write transactions until the job is done, or the run is stopped. Raises as ``carry_out``, and why the job cannot be done."""
        table = self._topics.table(decides=True)
        self._report = table.reports.get(self._job.id, self._report)
        if self._report.state is not RedriveState.PENDING:
            return
        if lost is not None:
            raise lost
        self._report = replace(self._report, left=0, error="")
        for batch in self._batches(table.of(self._job.topic_id)):
            if self._stopped():
                return
            self._carry(writer, batch)
        if not self._stopped():
            self._write(writer, [], replace(self._report, state=RedriveState.DONE))

    def _take_over(self, writer: TransactionalWriter) -> MarksLost | None:
        """Write a name of this run alone into the position: an earlier run can then commit nothing more. Return whether marks are lost.

        The position has the id of the topic of the marks. The id stays if marks are lost, until a job accepts this.
        """
        found, topic = writer.current(), self._pipelines.topics.redrive
        self._marks_id, lost = self._topics.marks_topic_id(), None
        try:
            self._topics.check_marks_of(found, self._marks_id)
        except MarksLost as error:
            lost = None if self._job.accept_lost_marks else error
        at = replace(found or Position("", "", 0, 0), owner=uuid.uuid4().hex)
        self._at = at if lost else replace(at, topic=topic, topic_id=self._marks_id)
        writer.write([], found, self._at)
        crash.point("redrive.taken")
        return lost

    def _batches(self, done: DoneLetters) -> Iterator[list[PipelineDeadLetter]]:
        """Yield the dead letters of the job that are not done, those of a transaction together. Raises RedriveRefused.

        The id of the topic is checked after each read: the topic may be recreated during a run, and the marks would not cover its records.
        """
        topic = self._topics.letter_topic()
        if topic is None or topic.topic_id != self._job.topic_id:
            raise RedriveRefused(RECREATED)
        bounds = {each: (first, min(self._job.ends.get(each, 0), topic.ends[each])) for each, first in topic.firsts.items()}
        batch: list[PipelineDeadLetter] = []
        size_bytes = 0
        # A filter may match nothing in millions of records, and a driver that stops does not wait for them.
        for letter in self._topics.letters(bounds, done, self._job.filter, self._pipelines.bridge_id, lambda *_: self._stopped()):
            batch.append(letter)
            size_bytes += letter.size_bytes
            if len(batch) >= LETTERS_MAX or size_bytes >= LETTERS_BYTES_MAX:
                self._check_topic()
                yield batch
                batch, size_bytes = [], 0
        self._check_topic()
        if batch:
            yield batch

    def _check_topic(self) -> None:
        if self._topics.letter_topic_id() != self._job.topic_id:
            raise RedriveRefused(RECREATED)
        if self._topics.marks_topic_id() != self._marks_id:  # the table that was read is another one
            raise MarksLost(self._pipelines.topics.redrive)

    def _carry(self, writer: TransactionalWriter, batch: Sequence[PipelineDeadLetter]) -> None:
        """Write one transaction. Dead letters that cannot be redriven now are left out. Raises as ``carry_out``."""
        refused = self._refused()
        redriven = [self._redriven(letter, refused.get(letter.pipeline, "")) for letter in batch]
        while True:
            meant = [each for each in redriven if not each.left]
            report = self._counted(redriven)
            try:
                self._write(writer, meant, report)
                return
            except Unwritable as refused:
                self._replace(meant, refused)
            except WriteDenied:
                before = [each.output for each in redriven]
                self._targets.look_again()
                for each in meant:
                    self._place(each)
                if before == [each.output for each in redriven]:
                    raise

    def _redriven(self, letter: PipelineDeadLetter, refusal: str) -> _Redriven:
        """Return the output for a dead letter. If there is a ``refusal`` of its pipeline, the letter stays a dead letter."""
        found = _Redriven(letter)
        if self._job.action is RedriveAction.REDRIVE and refusal:
            found.left = f"{letter.pipeline} may not run: {refusal}"
        elif self._job.action is RedriveAction.REDRIVE:
            try:
                found.made = self._engine.redriven(letter)
                found.output = found.made.output
            except LetterLeft as left:
                found.left = str(left)
            else:
                self._place(found)
        return found

    def _place(self, redriven: _Redriven) -> None:
        """Check the topic of a record. A record for an unwritable topic becomes a dead letter again, or is left."""
        if redriven.made is None or redriven.output is None:
            return
        try:
            try:
                self._targets.ensure(redriven.output.topic)
            except (BadRecord, Denied, TopicMissing) as error:
                redriven.output = redriven.made.fallback(error)
                self._targets.ensure(redriven.output.topic)
            redriven.output = self._targets.timestamps.fitting(redriven.output)
        except (LetterLeft, BadRecord, Denied, TopicMissing) as error:
            redriven.output, redriven.left = None, str(error)

    def _replace(self, meant: Sequence[_Redriven], refused: Unwritable) -> None:
        """Replace records that Kafka refuses by dead letters. A refused dead letter is left, so the old one stays."""
        written = [each for each in meant if each.output is not None]
        for place, fault in refused.faults.items():
            if place >= len(written):
                raise refused  # the marks
            each = written[place]
            if each.made is None or each.output is None:
                continue
            if fault.code() == INVALID_TIMESTAMP and each.output.timestamp_ms:
                each.output = self._targets.timestamps.refused(each.output)
            elif each.output.topic == self._pipelines.topics.dead_letters:
                each.output, each.left = None, f"the dead-letter topic refuses the record: {fault.str()}"
            else:
                try:
                    each.output = each.made.fallback(BadRecord(fault.str()))
                    self._place(each)
                except LetterLeft as left:
                    each.output, each.left = None, str(left)

    def _counted(self, redriven: Sequence[_Redriven]) -> RedriveReport:
        """Return the report after a transaction."""
        dead = self._pipelines.topics.dead_letters
        report = self._report
        outputs = [each.output for each in redriven if each.output is not None]
        failed = sum(output.topic == dead for output in outputs)
        left = [each.left for each in redriven if each.left]
        return replace(
            report,
            redriven=report.redriven + len(outputs) - failed,
            failed=report.failed + failed,
            discarded=report.discarded + sum(each.made is None and not each.left for each in redriven),
            left=report.left + len(left),
            error=left[-1] if left else report.error,
        )

    def _write(self, writer: TransactionalWriter, meant: Sequence[_Redriven], report: RedriveReport) -> None:
        topic, job, before = self._pipelines.topics.redrive, self._job, self._at
        if before is None:
            raise RedriveRefused("the position was not taken over")
        outputs = [each.output for each in meant if each.output is not None]
        for partition, offsets in _by_partition(meant).items():
            key = mark_key(job.topic_id, partition, offsets[0])
            outputs.append(Output(topic, key.encode(), encoded_mark(job.id, offsets), []))
        report = replace(report, at_ms=int(time.time() * 1000))
        outputs.append(Output(topic, f"{REPORT_KEY}{job.id}".encode(), report.encode(), []))
        after = replace(before, offset=before.offset + 1)
        crash.point("redrive.before")
        writer.write(outputs, before, after)
        crash.point("redrive.after")
        self._at, self._report = after, report


def _by_partition(meant: Sequence[_Redriven]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for each in meant:
        found.setdefault(each.letter.partition, []).append(each.letter.offset)
    return {partition: sorted(offsets) for partition, offsets in found.items()}


def _is_final(error: Exception) -> bool:
    """Return whether a repetition of the attempt would fail in the same way, until somebody changes something."""
    return not getattr(error, "retriable", False) or isinstance(error, Denied | WriteDenied)


class _Attempt(NamedTuple):
    """The jobs that were finished before an attempt, and the report of the job, None if it was one of them."""

    finished: frozenset[str]
    report: RedriveReport | None = None


class RedriveJobs:
    """The jobs of one driver: one runs at a time, in a thread, so pipelines do not wait for it. Used by the thread of the driver."""

    def __init__(self, pipelines: PipelinesSpec) -> None:
        self._pipelines = pipelines
        self._topics = RedriveTopics(pipelines.kafka, pipelines.topics)
        self._finished: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        self._running: tuple[RedriveJob, Future[_Attempt]] | None = None
        #: Why pipelines may not run now, by pipeline; replaced as a whole. A running job leaves their dead letters from then on.
        self.refused: Mapping[str, str] = {}
        #: Why the last attempts of jobs have failed that are tried again.
        self.errors: dict[str, str] = {}
        self._stopping = False
        #: The number of dead letters of the jobs that this driver has finished.
        self.outcomes = dict.fromkeys(OUTCOMES, 0)

    def follow(self, jobs: Mapping[str, RedriveJob], specs: Iterable[DivertSpec | IngressSpec]) -> None:
        """Look at the job that runs, and start the next one. A job that has failed comes after the others.

        ``specs`` are the pipelines that the driver has now, also those that were defined at run time.
        """
        if self._running is not None:
            job, future = self._running
            if not future.done():
                return
            self._running = None
            self._ended(job, future)
        now_s = time.monotonic()
        self._finished &= jobs.keys()
        self.errors = {each: error for each, error in self.errors.items() if each in jobs and each not in self._finished}
        waiting = [job for job in jobs.values() if job.id not in self._finished and now_s >= self._due_s.get(job.id, 0.0)]
        if waiting and not self._stopping:
            job = min(waiting, key=lambda job: (self._attempts.get(job.id, 0), job.at_ms, job.id))
            now = tuple(specs)
            pipelines = replace(
                self._pipelines,
                diverts=tuple(each for each in now if isinstance(each, DivertSpec)),
                ingresses=tuple(each for each in now if isinstance(each, IngressSpec)),
            )
            self._running = job, in_background(partial(self._run, pipelines, job, frozenset(jobs)), "redrive")

    def stop(self, timeout_s: float) -> None:
        """Let the job that runs end after its transaction, and free the clients. The next driver continues where the marks end."""
        self._stopping = True
        if self._running is not None:
            self._running[1].exception(timeout_s)
        self._topics.close()

    def _run(self, pipelines: PipelinesSpec, job: RedriveJob, jobs: Collection[str]) -> _Attempt:
        # A finished job stays finished, so any node may say so. Most starts of a driver find nothing else, and take no position.
        reports = self._topics.table().reports
        finished = frozenset(each for each, report in reports.items() if report.state is not RedriveState.PENDING)
        if job.id in finished:
            return _Attempt(finished)
        report = RedriveRun(pipelines, self._topics, job, lambda: self._stopping, lambda: self.refused).carry_out()
        try:
            self._topics.clean(jobs, int(time.time() * 1000) - REPORTS_KEPT_MS)
        except BasculeError as error:
            log.warning("could not delete old marks of redrives, will retry", error=str(error))
        return _Attempt(finished, report)

    def _ended(self, job: RedriveJob, future: Future[_Attempt]) -> None:
        error = future.exception()
        if error is not None:
            self._attempts[job.id] = self._attempts.get(job.id, 0) + 1
            self._due_s[job.id] = time.monotonic() + RETRY_S
            self.errors[job.id] = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
            log.warning("redrive failed, will retry", job=job.id, error=self.errors[job.id])
            return
        finished, report = future.result()
        self._finished |= finished
        if report is None or report.state is RedriveState.PENDING:
            return
        self._finished.add(job.id)
        for outcome in OUTCOMES:
            self.outcomes[outcome] += getattr(report, outcome)
        for known in (self._attempts, self._due_s, self.errors):
            known.pop(job.id, None)
        log.info(
            "redrive finished", job=job.id, who=job.by, action=job.action, state=report.state, redriven=report.redriven,
            failed=report.failed, discarded=report.discarded, left=report.left, error=report.error,
        )  # fmt: skip
