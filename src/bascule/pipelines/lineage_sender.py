"""The sender of OpenLineage events: a bounded queue and a thread of its own, so that a receiver delays no pipeline.

Needs the extra ``openlineage``, if a receiver is configured.
"""

from __future__ import annotations

import os
import queue
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from bascule.core.environment import is_of_lineage
from bascule.core.extras import require
from bascule.core.log import get_log
from bascule.pipelines.lineage_runs import LineageEvent, LineageRuns
from bascule.threads.lasting import lasting_thread

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

    from bascule.config.openlineage import OpenLineage

log = get_log(__name__)

#: Events that wait for the receiver. Further ones are dropped, and counted.
EVENTS_MAX: Final = 1_000
#: How long a driver that stops waits for the receiver, in seconds.
LAST_EVENTS_S: Final = 2.0
#: How long the receiver may take for one event, in seconds, and how often the client tries again.
TIMEOUT_S: Final = 5.0
RETRIES: Final = 2
SENT, FAILED, DROPPED = "sent", "failed", "dropped"
_PRODUCER: Final = "https://bascule.example"


class LineageSender:
    """Sends events in order. An event that the receiver does not take is counted, and not sent again."""

    def __init__(self, url: str, namespace: str) -> None:
        """Begin to send to the receiver at ``url``. ``namespace`` is that of the jobs. Raises MissingExtra, ValueError.

        The client reads the variables ``OPENLINEAGE__...`` of the environment, too: for a key of the receiver, or certificates.
        """
        require("openlineage", "or unset pipelines.openlineage.url")
        from openlineage.client import OpenLineageClient

        transport: dict[str, Any] = {"type": "http", "url": url, "timeout": TIMEOUT_S, "retry": {"total": RETRIES}}
        # The client would look for a git repository around the working directory.
        config: Any = {"transport": transport, "facets": {"source_code_location": {"disabled": True}}}
        self._client = OpenLineageClient(config=config)
        self._namespace = namespace
        self._outcomes: Counter[str] = Counter()
        self._trouble = ""
        self._waiting: queue.Queue[LineageEvent | None] = queue.Queue(EVENTS_MAX)
        self._closing = False
        self._thread = lasting_thread(self._run, "openlineage", on_failure=self._failed)
        self._thread.start()

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Return the number of events by outcome: sent, failed or dropped."""
        return {name: self._outcomes[name] for name in (SENT, FAILED, DROPPED)}

    def emit(self, event: LineageEvent) -> None:
        """Send an event soon; drop it if too many wait."""
        try:
            if self._closing:
                raise queue.Full
            self._waiting.put_nowait(event)
        except queue.Full:
            self._outcomes[DROPPED] += 1

    def close(self) -> None:
        """Send the events that wait, for LAST_EVENTS_S at most, and drop the rest. A request that has begun ends by itself."""
        self._closing = True
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(LAST_EVENTS_S)
        left = 0
        with suppress(queue.Empty):
            while True:
                left += self._waiting.get_nowait() is not None
        self._waiting.put_nowait(None)
        if left:
            self._outcomes[DROPPED] += left
            log.warning("lineage events lost, the receiver is too slow", events=left)

    def _failed(self, error: BaseException) -> None:
        self._closing = True
        log.error("lineage events are off", reason=error)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._client.emit(run_event(event, self._namespace))
            except Exception as error:
                self._outcomes[FAILED] += 1
                if (trouble := type(error).__name__) != self._trouble:
                    self._trouble = trouble
                    log.warning("lineage events not taken by the receiver", reason=error)
            else:
                self._outcomes[SENT] += 1
                self._trouble = ""


def run_event(event: LineageEvent, namespace: str) -> RunEvent:
    """Return an event as the client sends it."""
    from openlineage.client import event_v2 as openlineage
    from openlineage.client.facet_v2 import error_message_run, job_type_job, processing_engine_run

    from bascule import __version__

    kind, _, name = event.pipeline.partition(":")
    run_facets: dict[str, Any] = {
        "processing_engine": processing_engine_run.ProcessingEngineRunFacet(__version__, name="bascule", producer=_PRODUCER)
    }
    if event.error:
        run_facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(event.error, "PYTHON", producer=_PRODUCER)
    job_facets: dict[str, Any] = {"jobType": job_type_job.JobTypeJobFacet("STREAMING", "BASCULE", kind.upper(), producer=_PRODUCER)}
    return openlineage.RunEvent(
        eventType=getattr(openlineage.RunState, event.type), eventTime=event.at.isoformat(), producer=_PRODUCER,
        run=openlineage.Run(event.run_id, run_facets), job=openlineage.Job(namespace, f"{kind}.{name}", job_facets),
        inputs=[openlineage.InputDataset(each.namespace, each.name) for each in event.inputs],
        outputs=[openlineage.OutputDataset(each.namespace, each.name) for each in event.outputs],
    )  # fmt: skip


class PipelineLineage:
    """The runs of one driver's pipelines, and the sender of their events."""

    def __init__(self, settings: OpenLineage, url: str, bridge_id: str, bootstrap_servers: str) -> None:
        """Begin to send to ``url``. Raises MissingExtra, ValueError."""
        first = bootstrap_servers.partition(",")[0].strip().rpartition("://")[2]
        self.sender = LineageSender(url, settings.namespace or f"bascule.{bridge_id}")
        self.runs = LineageRuns(
            self.sender.emit, settings.kafka_namespace or f"kafka://{first}", settings.jms_namespace or f"jms://{bridge_id}",
            settings.running_s,
        )  # fmt: skip


@contextmanager
def lineage_of(settings: OpenLineage, bridge_id: str, bootstrap_servers: str) -> Iterator[PipelineLineage | None]:
    """Yield the lineage of a driver; None without a receiver, or if its client cannot begin, which stops no pipeline.

    The variables of the client leave the environment: it has read them, and transformations would inherit a key of the receiver.
    """
    lineage = None
    if settings.url is not None:
        try:
            lineage = PipelineLineage(settings, settings.url, bridge_id, bootstrap_servers)
        except Exception as error:  # the client reads variables of the environment, and may raise anything for their values
            log.error("lineage events are off", reason=error)
        else:
            log.info("lineage events are on", url=settings.url)
    for name in list(filter(is_of_lineage, os.environ)):
        del os.environ[name]
    try:
        yield lineage
    finally:
        if lineage is not None:
            lineage.runs.end(aborted=True)  # those that the driver has left: its Spark has ended, or its stop has failed
            lineage.sender.close()
