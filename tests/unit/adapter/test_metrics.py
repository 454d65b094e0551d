"""The metrics of endpoints."""

from __future__ import annotations

import socket
from dataclasses import fields
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

from bascule.adapter.inbound import ActivationSpec, ActivationStatus, ResourceAdapter, WorkerPool, lag
from bascule.adapter.inbound.metrics import COUNTERS, AdapterCollector, serve_metrics
from bascule.adapter.inbound.state import Place
from bascule.adapter.inbound.workers import HANDLER_BOUNDS_S, NO_LATENCY, Counts
from bascule.core.durations import Durations
from bascule.core.errors import InvalidInput, Unavailable

HANDLED = Durations.none(HANDLER_BOUNDS_S).with_these((0.2, 0.3))
PARTITIONS = {"payments-0": "ready", "payments-1": "taking over"}


@pytest.fixture(autouse=True)
def _no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "ENDS_TIMEOUT_S", 0.1)


class FixedStatus(ResourceAdapter):
    """An adapter with two endpoints, one of which has a problem."""

    def status(self) -> list[ActivationStatus]:
        counts = {name: number for number, name in enumerate(COUNTERS)}
        idle = dict.fromkeys(COUNTERS, 0)
        return [
            ActivationStatus(
                "shop", "handle", True, PARTITIONS, 5, 2, 1, ("worker-1", "worker-2"), ("payments-1",), 4, counts, "trouble", HANDLED,
                NO_LATENCY.with_these((0.04,)), {Place("payments", 0): 7},
            ),
            ActivationStatus("store", "handle", False, {}, 0, 0, 0, (), (), 0, idle, ""),
        ]  # fmt: skip


def test_position_and_latency_are_exported_and_lags_only_if_kafka_has_said_where_the_sources_end() -> None:
    registry = CollectorRegistry()
    registry.register(AdapterCollector(FixedStatus({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})))
    assert registry.get_sample_value("bascule_adapter_position_offset", {"group": "shop", "topic": "payments", "partition": "0"}) == 7
    assert registry.get_sample_value("bascule_adapter_latency_seconds_bucket", {"group": "shop", "le": "0.05"}) == 1
    assert [registry.get_sample_value("bascule_adapter_running", {"group": group}) for group in ("shop", "store")] == [1, 0]
    for name in ("records", "bytes", "seconds"):
        found = [registry.get_sample_value(f"bascule_adapter_lag_{name}", {"group": group}) for group in ("shop", "store")]
        assert found == [None, 0], "an endpoint without partitions is behind nothing"


def test_every_count_and_state_of_group_is_exported_as_metric() -> None:
    registry = CollectorRegistry()
    registry.register(AdapterCollector(FixedStatus({})))
    values = {name: registry.get_sample_value(f"bascule_adapter_{name}", {"group": "shop"}) for name in (
        "partitions", "waiting", "delayed", "at_work", "hanging", "blocked", "dead_letters",
    )}  # fmt: skip
    assert values == {"partitions": 2, "waiting": 5, "delayed": 2, "at_work": 1, "hanging": 2, "blocked": 1, "dead_letters": 4}
    totals = [registry.get_sample_value(f"bascule_adapter_{name}_total", {"group": "shop"}) for name in COUNTERS]
    assert totals == list(range(len(COUNTERS)))
    assert registry.get_sample_value("bascule_adapter_handler_seconds_sum", {"group": "shop"}) == 0.5
    assert registry.get_sample_value("bascule_adapter_handler_seconds_bucket", {"group": "shop", "le": "0.25"}) == 1
    assert registry.get_sample_value("bascule_adapter_handler_seconds_count", {"group": "store"}) == 0
    assert registry.get_sample_value("bascule_adapter_waiting", {"group": "store"}) == 0


def test_worker_pool_metrics_are_labelled_with_pool_name() -> None:
    adapter, pool = ResourceAdapter({}), WorkerPool(3, "ours")
    for group in ("a", "b"):
        adapter.activate(ActivationSpec(topics=("topic",), group=group, pool=pool), print)
    adapter.activate(ActivationSpec(topics=("topic",), group="c"), print)
    assert adapter.pools() == [pool]
    registry = CollectorRegistry()
    registry.register(AdapterCollector(adapter))
    values = [registry.get_sample_value(f"bascule_adapter_pool_{name}", {"pool": "ours"}) for name in ("threads", "at_work", "hanging")]
    assert values == [3, 0, 0]
    with pytest.raises(InvalidInput, match="another worker pool has the name 'ours'"):
        adapter.activate(ActivationSpec(topics=("topic",), group="d", pool=WorkerPool(3, "ours")), print)


def test_every_activation_count_has_metric() -> None:
    assert set(COUNTERS) == {each.name for each in fields(Counts) if not each.name.startswith("_")}


def test_metrics_are_served_over_http() -> None:
    port = serve_metrics(FixedStatus({}), 0)
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'bascule_adapter_blocked{group="shop"} 1.0' in text
    assert "\nprocess_cpu_seconds_total " in text


def test_metrics_port_in_use_is_reported() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(Unavailable, match=f"could not serve metrics at 127.0.0.1:{port}"):
            serve_metrics(FixedStatus({}), port)
