"""Tracing is off by default, and configured by the environment variables of OpenTelemetry."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bascule.core.errors import InvalidInput
from bascule.tracing.environment import METRICS, TRACES, exporters_of, resource_of
from bascule.tracing.provider import tracing_of

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ()),
        (ENDPOINT, ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ("console", "otlp")),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, ()),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, ()),
    ],
)
def test_environment_names_the_exporters(environment: dict[str, str], expected: tuple[str, ...]) -> None:
    assert exporters_of(environment, TRACES) == expected


def test_each_signal_has_variables_of_its_own() -> None:
    environment = {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}
    assert (exporters_of(environment, TRACES), exporters_of(environment, METRICS)) == ((), ("otlp",))
    environment = {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:9/v1/metrics"}
    assert (exporters_of(environment, TRACES), exporters_of(environment, METRICS)) == ((), ("otlp",))


def test_service_of_the_environment_precedes_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = resource_of({}, "bascule-broker").attributes
    assert attributes["service.name"] == "bascule-broker"
    assert attributes["service.instance.id"], "a collector keeps the metrics of two brokers apart by it"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=shop,service.instance.id=a")
    attributes = resource_of(os.environ, "bascule-broker").attributes
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("shop", "a")


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "no installed package has the exporter 'zipkin'; installed are .*otlp"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "no installed package has the exporter 'otlp_proto_grpc'"),
    ],
)
def test_exporter_that_is_not_installed_is_refused_by_name(environment: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        tracing_of(environment, "bascule-broker")


def test_broker_and_pipelines_load_nothing_of_opentelemetry_while_tracing_is_off() -> None:
    program = (
        "import sys, bascule.server.node, bascule.pipelines.tasks, bascule.tracing.provider as provider\n"
        "assert provider.process_tracing('bascule-broker') is None\n"
        "import bascule.tracing.metrics as metrics\n"
        "assert metrics.process_metrics_export('bascule-broker', list, since_ns=0) is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_fault_of_tracing_is_logged_and_stops_nothing() -> None:
    program = (
        "import bascule.tracing.provider as provider; from bascule.core.log import configure; configure()\n"
        "assert provider.process_tracing('bascule-broker') is None"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "OTEL_TRACES_EXPORTER": "zipkin", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "tracing is off" in done.stderr
    assert "zipkin" in done.stderr
