"""The metrics of the pipelines of `bascule up` count what was carried, also across a kill of the driver."""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bascule.client import Message, Queue, connect
from bascule.embedded.process import free_port
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory, content_of
from tests.support.system import wait_for
from tests.support.up import Up

#: The driver starts again, and reads counts every five seconds.
COUNTED_S = 90.0
CONFIG = """
[pipelines]
metrics_port = {port}
target_partitions = 1

[[divert]]
name = "orders"
from = "orders"
to = "diverted"

[[ingress]]
name = "stock"
topics = ["stock"]
to = "queue://stock"
body = "map"
"""


class Installation:
    """A `bascule up`, what was sent to it, and what its pipelines export."""

    def __init__(self, up: Up, port: int) -> None:
        self.up = up
        self.kafka = {"bootstrap.servers": up.kafka, "log_level": 0}
        self._page = f"http://127.0.0.1:{port}/metrics"
        self.sent: list[bytes] = []
        self.records = self.bad = 0

    def send(self, count: int) -> None:
        """Send messages for the divert, and records for the ingress, one of which cannot be carried."""
        with connect(self.up.url) as context:
            for _ in range(count):
                self.sent.append(str(len(self.sent)).encode())
                context.producer(Queue("orders")).send(Message(self.sent[-1].decode()))
        producer = clients.producer(self.kafka)
        for number in range(count):
            producer.produce("stock", b"no map" if number == 0 else b'{"a": 1}')
        assert producer.flush(60) == 0
        self.records += count
        self.bad += 1

    def metrics(self) -> dict[str, float]:
        """Return the values of all series, by name and value of the first label; nothing while no driver answers."""
        try:
            with urllib.request.urlopen(self._page, timeout=30) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples if len(sample.labels) < 2]
        return {" ".join((each.name.removeprefix("bascule_pipeline"), *each.labels.values())): each.value for each in samples}

    def await_counts(self) -> dict[str, float]:
        """Return the metrics once they count all that was sent, neither more nor less."""
        wanted = {
            "_records_total divert:orders": len(self.sent), "_records_total ingress:stock": self.records,
            "_dead_letters_total divert:orders": 0, "_dead_letters_total ingress:stock": self.bad,
            "_lag_records divert:orders": 0, "_lag_bytes divert:orders": 0, "s_active": 1,
        }  # fmt: skip

        found: dict[str, float] = {}

        def counted() -> dict[str, float] | None:
            nonlocal found
            found = self.metrics()
            assert all(found.get(name, 0) <= count for name, count in wanted.items() if "lag" not in name), found
            return found if {name: found.get(name) for name in wanted} == wanted else None

        return wait_for(counted, lambda: f"{wanted}; found { ({name: found.get(name) for name in wanted}) }", COUNTED_S)  # type: ignore[no-any-return]

    def carried(self) -> list[bytes | None]:
        history = TopicHistory(self.kafka, "diverted", 0)
        return [content_of(message)[1] for message in history.records(0, history.latest(), committed=True)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_counts_are_those_of_the_carried_records_after_a_kill_of_the_driver(tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "bascule.toml"
    config.write_text(CONFIG.format(port=port))
    with Up(tmp_path, "--config", config) as up:
        bascule = Installation(up, port)
        Topics(bascule.kafka).create("stock", 1, {})
        bascule.send(20)
        before = bascule.await_counts()
        assert before["_bytes_total divert:orders"] > 0
        wait_for(lambda: bascule.metrics()["_latency_seconds_count diverts"] == 20, "the latencies of all messages", COUNTED_S)
        driver = up.pids["pipelines"]
        assert driver is not None
        os.kill(driver, signal.SIGKILL)
        bascule.send(30)
        after = bascule.await_counts()
        assert sorted(filter(None, bascule.carried())) == sorted(bascule.sent)
        assert after["_bytes_total divert:orders"] > before["_bytes_total divert:orders"]
        assert 20 <= after["_latency_seconds_count diverts"] <= 50  # a kill loses the durations of at most one transaction
