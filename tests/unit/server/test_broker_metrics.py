"""A broker exports the metrics that its admin port shows to a collector of OpenTelemetry."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.collector import Collector
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import called, kafka, serving, until
from tests.unit.server.served import run_async

__all__ = ["kafka"]


@run_async
async def test_broker_exports_what_its_admin_port_shows(kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        for name, value in collector.metrics_environment.items():
            monkeypatch.setenv(name, value)
        async with serving(kafka, tmp_path) as broker:
            await broker.send("orders", "1", "2")

            def counted() -> bool:
                found = {metric.name: metric.points for metric in list(collector.metrics)}
                return any(point.as_double == 2 for _, point in found.get("bascule_messages_in_total", ()))

            await until(counted, "the collector has the count of messages")
            assert broker.node.admin is not None
            url = f"http://127.0.0.1:{broker.node.admin.port}/metrics"
            with await called(urllib.request.urlopen, url) as answer:
                text = (await called(answer.read)).decode()
    assert "bascule_send_acknowledgement_seconds_count 2.0" in text
    families = [family for family in text_string_to_metric_families(text) if family.samples]
    shown = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    assert shown <= {metric.name for metric in collector.metrics}
    assert {"bascule_build_info", "process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"} <= shown
    assert {metric.service for metric in collector.metrics} == {"bascule-broker"}
