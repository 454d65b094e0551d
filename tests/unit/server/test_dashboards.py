"""The Grafana boards and the Prometheus alert rules use metrics and labels that a broker or a driver of pipelines exports."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bascule.config import Settings
from bascule.server.status import UserStatus
from bascule.server.status_metrics import StatusCollector
from bascule.server.tls_watch import TlsWatch
from tests.support.certificates import Authority
from tests.support.kafka_in_memory import KafkaInMemory
from tests.support.metrics_page import documented, sections
from tests.unit.pipelines.test_metrics import Driver
from tests.unit.server.broker_process import called, kafka, serving
from tests.unit.server.served import run_async
from tests.unit.server.test_admin import Broker as StatusOnly

__all__ = ["kafka"]
FILES = Path(__file__).parents[3] / "deploy" / "helm" / "bascule" / "files"
SELECTOR = re.compile(r"\b((?:bascule|process)_[a-z_]+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)")
TEMPLATE = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")
#: Labels that Prometheus adds.
OF_TARGETS = {"job", "instance"}
#: A rule about all metrics whose names match.
BY_PATTERN = re.compile(r'\{__name__=~"([^"]*)"\}')


def queries() -> list[tuple[str, str]]:
    """Return each query with the texts that name its labels."""
    found = []
    for board in FILES.glob("*.json"):
        for panel in json.loads(board.read_text())["panels"]:
            found += [(target["expr"], target["legendFormat"]) for target in panel.get("targets", ())]
        for variable in json.loads(board.read_text())["templating"]["list"]:
            found += [(variable["query"]["query"], "")] if variable["type"] == "query" else []
    for rule in (FILES / "alerts.yaml").read_text().split("- alert: ")[1:]:
        expression = re.search(r"^ +expr: (.*)$", rule, re.MULTILINE)
        assert expression is not None, rule
        found.append((expression[1], rule))
    assert len(found) > 70
    return found


def exported(text: str) -> dict[str, set[str]]:
    """Return the labels of each series of a page of metrics."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        found[family.name + "_total" * (family.type == "counter")] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def labels_of_driver() -> dict[str, set[str]]:
    driver = Driver()
    driver.run()
    return exported(generate_latest(driver.registry).decode())


def labels_of_full_status() -> dict[str, set[str]]:
    broker, registry = StatusOnly(), CollectorRegistry(auto_describe=False)
    user = UserStatus(user="ann", connections=1, sessions=1, links=1, transactions=0, queues=0, durable_subscriptions=0)
    broker.now |= {"users": [user]}
    registry.register(StatusCollector(broker.now))
    return exported(generate_latest(registry).decode())


def labels_of_certificates(authority: Authority) -> dict[str, set[str]]:
    files, registry = authority.issue("server"), CollectorRegistry()
    watch = TlsWatch(Settings.model_validate({"broker": {"tls": {"certificate": files.certificate, "key": files.key}}}))
    registry.register(watch)
    try:
        return exported(generate_latest(registry).decode())
    finally:
        watch.close()


@run_async
async def test_each_query_names_metrics_and_labels_of_a_broker_or_driver(
    kafka: KafkaInMemory, tmp_path: Path, authority: Authority
) -> None:
    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "1")
        port = broker.life._admin_port

        def page() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                text: str = answer.read().decode()
                return text

        there = exported(await called(page))
    listed = {metric.name for section in sections() for metric in documented(section)}
    assert {name.removesuffix("_bucket") for name in there if not name.endswith(("_count", "_sum", "_created"))} <= listed
    for name, labels in (*labels_of_full_status().items(), *labels_of_driver().items(), *labels_of_certificates(authority).items()):
        there.setdefault(name, set()).update(labels)
    assert len(there) > 50
    for query, texts in queries():
        for pattern in BY_PATTERN.findall(query):
            assert any(re.fullmatch(pattern, name) for name in there), query
        for name, matchers in SELECTOR.findall(BY_PATTERN.sub("", query)):
            assert name in there, f"{name} is not exported: {query}"
            unknown = set(LABEL.findall(matchers)) - there[name] - OF_TARGETS
            assert not unknown, f"{name} has no label {unknown}: {query}"
        used = set(TEMPLATE.findall(texts)) - {"value"} - OF_TARGETS
        known = set().union(*(there[name] for name, _ in SELECTOR.findall(BY_PATTERN.sub("", query))))
        assert used <= known, f"no label {used - known}: {query}"
