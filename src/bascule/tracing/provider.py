"""The tracing of a process: switched on and configured by the standard environment variables of OpenTelemetry.

No module of OpenTelemetry is loaded while tracing is off. A fault of tracing is logged, and stops nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from bascule import __version__
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.extras import require
from bascule.core.log import get_log

if TYPE_CHECKING:
    from bascule.tracing.spans import Tracing

log = get_log(__name__)

_EXPORTERS: Final = "OTEL_TRACES_EXPORTER"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
#: The entry point of an exporter, by its protocol. The extra brings the first; the second is a package of its own.
_OTLP: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_GROUP: Final = "opentelemetry_traces_exporter"


def exporters_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the exporters of spans that an environment asks for; empty if tracing is off.

    OpenTelemetry exports by default. Bascule exports only if the environment names an exporter or an endpoint.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ()
    default = "otlp" if any(environment.get(name) for name in _ENDPOINTS) else "none"
    names = (name.strip() for name in (environment.get(_EXPORTERS) or default).split(","))
    return tuple(name for name in names if name and name != "none")


def tracing_of(environment: Mapping[str, str], service: str) -> Tracing | None:
    """Return the tracing that an environment asks for; None if it is off. Raises InvalidInput, MissingExtra.

    ``service`` is the name of the service, if the environment has none. All other variables are read by OpenTelemetry itself.
    """
    names = exporters_of(environment)
    if not names:
        return None
    require("otel", f"or unset {_EXPORTERS} and {_ENDPOINTS[1]}")
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from bascule.tracing.spans import Tracing

    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({"service.version": __version__, **({} if named else {"service.name": service})})
    provider = TracerProvider(resource=resource)
    for name in names:
        provider.add_span_processor(BatchSpanProcessor(_exporter(name, environment)))
    return Tracing(provider)


def _exporter(name: str, environment: Mapping[str, str]) -> Any:
    entry = name
    if name == "otlp":
        protocol = next((environment[each] for each in _PROTOCOLS if environment.get(each)), "http/protobuf")
        if protocol not in _OTLP:
            raise InvalidInput(f"{_PROTOCOLS[1]} is {protocol!r}; Bascule exports spans with {' or '.join(_OTLP)}")
        entry = _OTLP[protocol]
    found = next(iter(entry_points(group=_GROUP, name=entry)), None)
    if found is None:
        known = ", ".join(sorted({"otlp", *(each.name for each in entry_points(group=_GROUP))}))
        raise InvalidInput(f"{_EXPORTERS} names {name!r}, but no installed package has the exporter {entry!r}; installed are {known}")
    return found.load()()


@cache
def process_tracing(service: str) -> Tracing | None:
    """Return the tracing of this process; None if it is off, or cannot begin. Call it after a fork: exporters have threads."""
    try:
        tracing = tracing_of(os.environ, service)
    except (BasculeError, ImportError) as error:
        log.error("tracing is off", reason=error)
        return None
    if tracing is not None:
        log.info("tracing is on", service=tracing.service, exporters=",".join(exporters_of(os.environ)))
    return tracing
