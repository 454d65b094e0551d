"""Export and import of pipelines that are defined at run time, with brokers on Kafka in memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bascule.cli.admin import AdminApiClient
from bascule.cli.exports import export_definitions, import_definitions
from bascule.core.errors import InvalidInput
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.cli.test_exports import _no_settings, admin
from tests.unit.server.broker_process import Broker, called, kafka, serving
from tests.unit.server.served import run_async

__all__ = ["_no_settings", "kafka"]

LATE = {"from": "news", "to": "late", "selector": "n > 1"}
PRICES = {"topics": ["prices"], "to": "queue://prices", "start": "latest"}
EMPTY = {"format": "bascule-definitions", "version": 2}
FILE_PIPELINES: Any = {
    "divert": [{"name": "fixed", "from": "orders", "to": "orders.out"}], "ingress": [{"name": "stock", "topics": ["stock"]}],
}  # fmt: skip


def define(broker: Broker) -> None:
    client = AdminApiClient(admin(broker), None)
    client.send("POST", "diverts", name="late", config=LATE)
    client.send("POST", "ingresses", name="prices", config=PRICES)


async def exported(broker: Broker, file: Path) -> dict[str, Any]:
    await called(partial(export_definitions, file, admin=admin(broker)))
    return dict(json.loads(file.read_text()))


async def imported(broker: Broker, file: Path, **options: Any) -> None:
    await called(partial(import_definitions, file, admin=admin(broker), **options))


@run_async
async def test_pipelines_of_one_broker_are_those_of_another_after_an_import(
    kafka: KafkaInMemory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    async with serving(kafka, tmp_path / "data", **FILE_PIPELINES) as broker:
        await called(define, broker)
        found = await exported(broker, one)
    assert capsys.readouterr().out == "queues 0  subscriptions 0  diverts 1  ingresses 1\n"
    assert (found["version"], found["diverts"]) == (2, [{"name": "late", "config": LATE}]), "without those of the file"
    assert found["ingresses"] == [{"name": "prices", "config": PRICES}]
    async with serving(kafka, tmp_path / "second", journal={"prefix": "second"}) as broker:
        await imported(broker, one, dry_run=True)
        assert "diverts 1  ingresses 1  existing 0" in capsys.readouterr().out
        await imported(broker, one, no_pipelines=True)
        assert "diverts 0  ingresses 0  existing 0" in capsys.readouterr().out
        assert (await exported(broker, other))["diverts"] == []
        capsys.readouterr()
        await imported(broker, one)
        assert "diverts 1  ingresses 1  existing 0" in capsys.readouterr().out
        assert await exported(broker, other) == found
        # A default that is given is the same definition.
        found["diverts"][0]["config"]["exclusive"] = False
        one.write_text(json.dumps(found))
        capsys.readouterr()
        await imported(broker, one)
        assert "diverts 0  ingresses 0  existing 2" in capsys.readouterr().out
        assert [each["revision"] for each in await called(AdminApiClient(admin(broker), None).look, "diverts")] == [1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other setting": (
        {"diverts": [{"name": "late", "config": {**LATE, "to": "later"}}]},
        r"divert 'late' exists with another to: 'late' instead of 'later'\. Nothing was created; change it \(bascule divert change\)",
    ),
    "in the file": (
        {"diverts": [{"name": "stock", "config": LATE}]}, r"diverts\[0\]: ingress 'stock' is defined in the configuration file there",
    ),
    "other kind": ({"ingresses": [{"name": "late", "config": PRICES}]}, r"ingresses\[0\]: divert 'late' exists; names .* unique"),
    "wrong setting": ({"diverts": [{"name": "x", "config": {**LATE, "from": ""}}]}, r"diverts\[0\]: from: String should have at least 1"),
    "unknown setting": ({"ingresses": [{"name": "x", "config": {**PRICES, "y": 1}}]}, r"ingresses\[0\]: y: Extra inputs are not permitted"),
}  # fmt: skip


@run_async
async def test_pipeline_that_exists_in_another_way_stops_an_import_before_it_creates_anything(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    async with serving(kafka, tmp_path / "data", **FILE_PIPELINES) as broker:
        await called(define, broker)
        for content, why in REFUSED.values():
            file.write_text(json.dumps({**EMPTY, **content, "queues": [{"name": "new"}]}))
            with pytest.raises(InvalidInput, match=why):
                await imported(broker, file)
        assert (await exported(broker, tmp_path / "after"))["queues"] == []


@run_async
async def test_definition_that_the_broker_refuses_is_named_with_what_was_created_before(
    kafka: KafkaInMemory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.json"
    exclusive = {"name": "taking", "config": {**LATE, "exclusive": True}}
    file.write_text(json.dumps({**EMPTY, "queues": [{"name": "new"}], "diverts": [exclusive]}))
    async with serving(kafka, tmp_path / "data") as broker:
        with pytest.raises(InvalidInput, match="divert 'taking': 'exclusive' cannot be given at run time"):
            await imported(broker, file)
    assert "created before the error: 1 queues, 0 subscriptions, 0 diverts, 0 ingresses" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"diverts": [{"name": "a", "config": []}]}, r"diverts\[0\].config must be an object"),
        ({"diverts": [{"name": "a"}], "ingresses": [{"name": "a"}]}, r"ingresses\[0\]: divert 'a' is in the file already"),
        ({"version": 3}, "has version 3; this program reads versions 1 and 2"),
    ],
)
def test_wrong_pipelines_in_a_file_are_refused_with_the_place(content: dict[str, Any], why: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(json.dumps({**EMPTY, **content}))
    with pytest.raises(InvalidInput, match=why):
        import_definitions(file, admin="http://127.0.0.1:1")
