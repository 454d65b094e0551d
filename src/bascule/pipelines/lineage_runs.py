"""The runs of pipelines, and their datasets, as OpenLineage names them.

A run lasts as long as a pipeline carries records without a failure.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from string import Template
from typing import Any, Final, NamedTuple

from bascule.core.destination import has_wildcards
from bascule.jms.to_kafka import rest_of
from bascule.writer.control import PipelineReport, PipelineState
from bascule.writer.position import DIVERT

#: States in which a pipeline carries records.
_CARRIES: Final = frozenset({PipelineState.RUNNING, PipelineState.CATCHING_UP})
#: A task between two attempts: whether the run has failed is known by the count of failures.
_BETWEEN: Final = frozenset({PipelineState.RESTARTING})
START, RUNNING, COMPLETE, FAIL, ABORT = "START", "RUNNING", "COMPLETE", "FAIL", "ABORT"


class LineageDataset(NamedTuple):
    """A topic or a JMS destination."""

    namespace: str
    name: str


class LineageEvent(NamedTuple):
    """A change of a run. ``pipeline`` is ``divert:NAME`` or ``ingress:NAME``; ``error`` is the reason of a failure."""

    type: str
    at: datetime
    pipeline: str
    run_id: str
    inputs: tuple[LineageDataset, ...]
    outputs: tuple[LineageDataset, ...]
    error: str = ""


@dataclass(slots=True)
class _Run:
    """A run that has begun, and when its last event was, in seconds of the monotonic clock."""

    id: str
    restarts: int
    told_s: float
    inputs: tuple[LineageDataset, ...]
    outputs: tuple[LineageDataset, ...]


class LineageRuns:
    """Follows the reports of one driver, and tells ``emit`` the changes of the runs."""

    def __init__(
        self, emit: Callable[[LineageEvent], None], kafka: str, jms: str, running_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """``kafka`` and ``jms`` are the namespaces of datasets; ``running_s`` is the interval of events of a run that continues."""
        self._emit = emit
        self._kafka = kafka
        self._jms = jms
        self._running_s = running_s
        self._clock_s = clock_s
        self._runs: dict[str, _Run] = {}

    def follow(self, reports: Mapping[str, PipelineReport]) -> None:
        """Follow the current reports of all pipelines."""
        now_s = self._clock_s()
        for name in self._runs.keys() - reports.keys():
            self._end(name, COMPLETE)
        for name, report in reports.items():
            run = self._runs.get(name)
            if run is not None and (report.restarts > run.restarts or report.state is PipelineState.FAILED):
                self._end(name, FAIL, report.error or "the task has failed")
                run = None
            if report.state in _CARRIES:
                inputs, outputs = self._datasets(name, report)
                if run is None:
                    run = self._runs[name] = _Run(str(uuid.uuid4()), report.restarts, now_s, inputs, outputs)
                    self._tell(START, name, run)
                elif now_s - run.told_s >= self._running_s or (inputs, outputs) != (run.inputs, run.outputs):
                    run.told_s, run.inputs, run.outputs = now_s, inputs, outputs
                    self._tell(RUNNING, name, run)
            elif run is not None and report.state not in _BETWEEN:
                self._end(name, COMPLETE)

    def end(self, *, aborted: bool) -> None:
        """End all runs, because the driver stops. They are ``aborted`` if it was replaced by another one or has failed."""
        for name in list(self._runs):
            self._end(name, ABORT if aborted else COMPLETE)

    def _end(self, name: str, type: str, error: str = "") -> None:
        self._tell(type, name, self._runs.pop(name), error)

    def _tell(self, type: str, name: str, run: _Run, error: str = "") -> None:
        self._emit(LineageEvent(type, datetime.now(UTC), name, run.id, run.inputs, run.outputs, error))

    def _datasets(self, name: str, report: PipelineReport) -> tuple[tuple[LineageDataset, ...], tuple[LineageDataset, ...]]:
        """Return the inputs and outputs of a pipeline."""
        definition = report.definition
        if name.startswith(DIVERT):
            return self._of(self._jms, [definition["from"]]), self._of(self._kafka, [_topic(definition)])
        topics = {*definition.get("topics", ()), *(topic for topic, *_ in report.sources)}
        return self._of(self._kafka, topics), self._of(self._jms, {_address(definition["to"], topic) for topic in topics})

    @staticmethod
    def _of(namespace: str, names: Iterable[str]) -> tuple[LineageDataset, ...]:
        return tuple(LineageDataset(namespace, name) for name in sorted(names))


def _topic(definition: Mapping[str, Any]) -> str:
    """Return the target topic of a divert; its template if the topic depends on the message.

    >>> _topic({"from": "orders.eu", "to": "kafka.${address}"}), _topic({"from": "orders.#", "to": "kafka.${address}"})
    ('kafka.orders.eu', 'kafka.${address}')
    """
    source, target = str(definition["from"]), str(definition["to"])
    return target if has_wildcards(source) else Template(target).safe_substitute(address=source, rest=rest_of(source, source))


def _address(target: str, topic: str) -> str:
    """Return the address of an ingress for a topic; its template if the address depends on the record.

    >>> _address("queue://stock.${topic}", "eu"), _address("stock.${header:region}", "eu")
    ('stock.eu', 'stock.${header:region}')
    """
    _, scheme, name = target.partition("://")
    return (name if scheme else target).replace("${topic}", topic)
