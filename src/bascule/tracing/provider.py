"""The tracing of a process: switched on and configured by the standard environment variables of OpenTelemetry.

No module of OpenTelemetry is loaded while tracing is off. A fault of tracing is logged, and stops nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from bascule.core.errors import BasculeError
from bascule.core.log import get_log
from bascule.tracing.environment import TRACES, exporters_of, new_exporters, resource_of

if TYPE_CHECKING:
    from bascule.tracing.spans import Tracing

log = get_log(__name__)


def tracing_of(environment: Mapping[str, str], service: str) -> Tracing | None:
    """Return the tracing that an environment asks for; None if it is off. Raises InvalidInput, MissingExtra.

    ``service`` is the name of the service, if the environment has none. All other variables are read by OpenTelemetry itself.
    """
    exporters = new_exporters(environment, TRACES)
    if not exporters:
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from bascule.tracing.spans import Tracing

    provider = TracerProvider(resource=resource_of(environment, service))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


@cache
def process_tracing(service: str) -> Tracing | None:
    """Return the tracing of this process; None if it is off, or cannot begin. Call it after a fork: exporters have threads."""
    try:
        tracing = tracing_of(os.environ, service)
    except (BasculeError, ImportError) as error:
        log.error("tracing is off", reason=error)
        return None
    if tracing is not None:
        log.info("tracing is on", service=tracing.service, exporters=",".join(exporters_of(os.environ, TRACES)))
    return tracing
