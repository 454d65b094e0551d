"""Several drivers of one bridge: Kafka elects the one that runs the pipelines, and the others stand by.

The election decides only which driver tries. The owner in a position keeps two drivers from both moving it (``bascule.writer.claims``).
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Final

from bascule.core.errors import BasculeError
from bascule.core.log import get_log
from bascule.core.signals import StopSignals
from bascule.embedded.service_manager import NO_SERVICE_MANAGER, ServiceManager
from bascule.kafka.election import Election
from bascule.pipelines.queries import PipelineStopped
from bascule.pipelines.spec import PipelinesSpec

log = get_log(__name__)

#: A driver that is not elected for this time reports that it stands by. A single driver is elected sooner.
STANDBY_AFTER_S: Final = 4.0
_LOOK_S: Final = 0.05


class DriverTurn:
    """The turn of this driver to run the pipelines. Use it from one thread, as a context manager: at its end the turn is handed over."""

    def __init__(
        self, pipelines: PipelinesSpec, stop: StopSignals, on_standby: Callable[[], None],
        service_manager: ServiceManager = NO_SERVICE_MANAGER,
    ) -> None:  # fmt: skip
        self._pipelines = pipelines
        self._stop = stop
        self._on_standby = on_standby
        self._service_manager = service_manager
        self._elected = threading.Event()
        self._lost = threading.Event()
        self._error: BasculeError | None = None
        self._election: Election | None = None

    def __enter__(self) -> DriverTurn:
        """Do nothing: ``wait`` stands for election."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Let another driver have its turn at once."""
        if self._election is not None:
            self._election.close(resign=True)

    def wait(self) -> bool:
        """Stand for election. Return True when elected, False when told to stop. The topic of the ingresses must exist.

        Raises BasculeError if Kafka does not let this driver stand.
        """
        self._election = self._stand()
        standby_s = time.monotonic() + STANDBY_AFTER_S
        told = False
        while not self._elected.wait(_LOOK_S):
            self.check()
            self._service_manager.alive()
            if self._stop.is_set():
                return False
            if not told and time.monotonic() > standby_s:
                told = True
                self._stop.listen()  # Spark's gateway may have installed its own handlers
                log.info("standing by, another driver is running", bridge=self._pipelines.bridge_id)
                self._on_standby()
        return True

    def check(self) -> None:
        """Raise BasculeError if the turn is over."""
        if self._error is not None:
            raise self._error
        if self._lost.is_set():
            raise PipelineStopped("Kafka elected another driver of this bridge. Restart this driver to use it as a standby")

    def _stand(self) -> Election:
        pipelines = self._pipelines
        # Without a name of its own, a restarted driver is another member: Kafka elects it, or a standby, when the session of the killed
        # driver ends.
        instance = pipelines.instance or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        topics = pipelines.topics
        return Election(
            pipelines.kafka, topics.drivers(pipelines.bridge_id), topics.ingress, instance, pipelines.session_timeout_s,
            on_change=self._changed, on_error=self._failed,
        )  # fmt: skip

    def _changed(self, elected: bool) -> None:
        (self._elected if elected else self._lost).set()

    def _failed(self, error: BasculeError) -> None:
        self._error = error
