"""The resource adapter of a program: its endpoints, from the start of the program to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from bascule.adapter.inbound.activation import HAND_OVER_S, Activation, ActivationStatus
from bascule.adapter.inbound.endpoint import Endpoint
from bascule.adapter.inbound.lag import EndpointLags
from bascule.adapter.inbound.spec import ActivationSpec
from bascule.adapter.inbound.worker_pool import WorkerPool
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.signals import StopSignals
from bascule.threads.background import in_background

#: Interval, in seconds, at which ``run`` checks whether an endpoint has stopped.
LOOK_S = 1.0
EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])


class ResourceAdapter:
    """The endpoints for one Kafka cluster. It opens nothing before ``start``, ``run`` or ``with``, so a module can hold one."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        """``kafka`` are librdkafka settings: ``bootstrap.servers``, security, ``session.timeout.ms``."""
        self._kafka = dict(kafka)
        self._activations: list[Activation] = []
        self._started = False

    def endpoint(self, spec: ActivationSpec) -> Callable[[EndpointT], EndpointT]:
        """Decorate a function of a record, or a class with ``on_record(record)``. The endpoint is active from the start of the adapter."""

        def decorate(endpoint: EndpointT) -> EndpointT:
            self.activate(spec, endpoint)
            return endpoint

        return decorate

    def activate(self, spec: ActivationSpec, endpoint: Endpoint) -> Activation:
        """Activate an endpoint, now or when the adapter starts.

        Raises InvalidInput and, if the endpoint starts now, the errors of ``start``.
        """
        if any(each.spec.group == spec.group for each in self._activations):
            raise InvalidInput(f"group {spec.group!r} already has an endpoint; use another group for each endpoint")
        if spec.pool is not None and any(each.name == spec.pool.name and each is not spec.pool for each in self.pools()):
            raise InvalidInput(
                f"another worker pool has the name {spec.pool.name!r}; give each pool its own name: WorkerPool(threads, name)"
            )
        activation = Activation(self._kafka, spec, endpoint)
        if self._started:
            activation.start()
        self._activations.append(activation)
        return activation

    def deactivate(self, activation: Activation, drain_s: float = HAND_OVER_S) -> list[str]:
        """Stop an endpoint. See ``Activation.stop``."""
        self._activations.remove(activation)
        return activation.stop(drain_s) if self._started else []

    def start(self) -> None:
        """Start all endpoints, also after a ``stop``. Raises the errors of ``Activation.start``; then no endpoint runs.

        The endpoints join their worker pools before the first of them takes a record, so that each gets a thread.
        """
        with ExitStack() as undo:
            activations = tuple(self._activations)
            for activation in activations:
                activation.prepare()
                undo.callback(activation.stop, 0.0)
            for activation in activations:
                activation.consume()
            undo.pop_all()
        self._started = True

    def stop(self, drain_s: float = HAND_OVER_S) -> list[str]:
        """Stop all endpoints at once, and wait for records in progress. Return the names of workers that did not end."""
        stops = [in_background(partial(each.stop, drain_s), f"bascule-stop-{each.spec.group}") for each in self._activations]
        wait(stops)
        self._started = False
        return [name for stop in stops for name in stop.result()]

    def run(self, drain_s: float = HAND_OVER_S) -> None:
        """Start, and return when SIGTERM or SIGINT has arrived and the records in progress are done. Call this from the main thread.

        Raises Unavailable if an endpoint stops for good: it is better to restart the program than to let it seem to run.
        """
        with StopSignals() as stop:
            self.start()
            broken: list[ActivationStatus] = []
            while not broken and not stop.wait(LOOK_S):
                broken = [status for status in self.status() if not status.running]
            self.stop(drain_s)
            if broken:
                raise Unavailable(f"endpoint of group {broken[0].group!r} {broken[0].trouble}")

    def status(self) -> list[ActivationStatus]:
        """Return the status of each endpoint."""
        return [activation.status() for activation in self._activations]

    def lags(self) -> EndpointLags:
        """Return what asks for the lag of the endpoints."""
        return EndpointLags(self._kafka)

    def pools(self) -> list[WorkerPool]:
        """Return the worker pools of the endpoints, each once."""
        return list(dict.fromkeys(each.spec.pool for each in self._activations if each.spec.pool is not None))

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        self.stop()
