"""What the standard environment variables of OpenTelemetry ask for, separately for spans and for metrics.

No module of OpenTelemetry is loaded unless an exporter is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bascule import __version__
from bascule.core.errors import InvalidInput
from bascule.core.extras import require

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
#: The entry point of an exporter, by its protocol. The extra brings the first; the second is a package of its own.
_OTLP: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class Signal(NamedTuple):
    """A kind of data that OpenTelemetry exports: its name in the variables, and what it is called in errors."""

    name: str
    text: str

    @property
    def exporters(self) -> str:
        """Return the variable that names the exporters."""
        return f"OTEL_{self.name}_EXPORTER"

    @property
    def endpoint(self) -> str:
        """Return the variable with the URL of the collector for this signal alone."""
        return f"OTEL_EXPORTER_OTLP_{self.name}_ENDPOINT"


TRACES: Final = Signal("TRACES", "spans")
METRICS: Final = Signal("METRICS", "metrics")


def exporters_of(environment: Mapping[str, str], signal: Signal) -> tuple[str, ...]:
    """Return the names of the exporters that an environment asks for; empty if the signal is off.

    OpenTelemetry exports by default. Bascule exports only if the environment names an exporter or an endpoint.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ()
    default = "otlp" if environment.get(signal.endpoint) or environment.get(_ENDPOINT) else "none"
    names = (name.strip() for name in (environment.get(signal.exporters) or default).split(","))
    return tuple(name for name in names if name and name != "none")


def new_exporters(environment: Mapping[str, str], signal: Signal) -> list[Any]:
    """Return new exporters; none if the signal is off. They read all other variables themselves. Raises InvalidInput, MissingExtra."""
    names = exporters_of(environment, signal)
    if names:
        require("otel", f"or unset {signal.exporters} and {_ENDPOINT}")
    return [_exporter(name, environment, signal) for name in names]


def _exporter(name: str, environment: Mapping[str, str], signal: Signal) -> Any:
    entry, group = name, f"opentelemetry_{signal.name.lower()}_exporter"
    if name == "otlp":
        variables = f"OTEL_EXPORTER_OTLP_{signal.name}_PROTOCOL", _PROTOCOL
        protocol = next((environment[each] for each in variables if environment.get(each)), "http/protobuf")
        if protocol not in _OTLP:
            raise InvalidInput(f"{_PROTOCOL} is {protocol!r}; Bascule exports {signal.text} with {' or '.join(_OTLP)}")
        entry = _OTLP[protocol]
    found = next(iter(entry_points(group=group, name=entry)), None)
    if found is None:
        known = ", ".join(sorted({"otlp", *(each.name for each in entry_points(group=group))}))
        raise InvalidInput(f"{signal.exporters} names {name!r}, but no installed package has the exporter {entry!r}; installed are {known}")
    try:
        return found.load()()
    except ImportError:
        raise
    except Exception as error:  # exporters read variables of their own, and may raise anything for a wrong value
        raise InvalidInput(f"the exporter {entry!r} of {signal.text} cannot begin: {error!r}") from error


def resource_of(environment: Mapping[str, str], service: str) -> Resource:
    """Return the description of this process. The environment takes precedence over the name of the ``service``."""
    from opentelemetry.sdk.resources import Resource

    attributes = {"service.version": __version__}
    if "OTEL_SERVICE_NAME" not in environment and "service.name=" not in environment.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes["service.name"] = service
    return Resource.create(attributes)
