"""What the admin server says about the life of a message, on Kafka in memory."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from bascule.client import Queue
from bascule.client.message import Message
from bascule.core.errors import InvalidInput, Unavailable
from bascule.server import message_life
from bascule.server.looks import LOOKS
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import Broker, called, kafka, serving
from tests.unit.server.served import run_async

__all__ = ["kafka"]


async def life(broker: Broker, **parameters: str) -> dict[str, Any]:
    found: Any = await LOOKS["messages/life"].answer(broker.node, parameters)
    return dict(json.loads(json.dumps(found)))


def sent(broker: Broker) -> str:
    with broker.connect() as context:
        return str(context.send(Queue("q"), Message("secret body", properties={"card": "secret property"})).message_id)


@run_async
async def test_life_of_a_message_has_names_of_queues_and_no_content(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        message_id = await called(sent, broker)
        found = await life(broker, id=message_id)
        await broker.receive("q", 1)
        ended = await life(broker, id=message_id, last_s="0")
        later = await life(broker, id=message_id, last_s="3600")
    assert [stay["queue"] for stay in found["messages"][0]["queues"]] == ["q"]
    assert (found["ended"], ended["ended"]) == (False, True)
    assert "secret" not in json.dumps(found)
    assert len(later["messages"]) == 1


@run_async
async def test_few_searches_run_at_once_and_a_failed_one_frees_its_place(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def search(*_: object) -> dict[str, Any]:
        begun.release()
        release.wait()
        raise Unavailable("Kafka does not answer")

    async with serving(kafka, tmp_path) as broker:
        with monkeypatch.context() as patch:
            patch.setattr(message_life, "_answer", search)
            searches = [asyncio.create_task(life(broker, id="ID:a")) for _ in range(message_life.SEARCHES_MAX)]
            for _ in searches:
                await called(begun.acquire)
            with pytest.raises(Unavailable, match="searches for messages are running"):
                await life(broker, id="ID:a")
            release.set()
            results = await asyncio.gather(*searches, return_exceptions=True)
            assert all(isinstance(each, Unavailable) for each in results)
        assert (await life(broker, id="ID:a"))["messages"] == []


@run_async
async def test_cancelled_request_ends_its_search(kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, budgets = threading.Event(), []

    def search(*arguments: Any) -> dict[str, Any]:
        budgets.append(arguments[-1])
        begun.set()
        while not budgets[0].spent:
            arguments[-1].take(1)
        return {}

    monkeypatch.setattr(message_life, "SEARCHED_RECORDS_MAX", None)
    monkeypatch.setattr(message_life, "_answer", search)
    async with serving(kafka, tmp_path) as broker:
        asking = asyncio.create_task(life(broker, id="ID:a"))
        await called(begun.wait)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        for _ in range(message_life.SEARCHES_MAX):
            await called(message_life._slots.acquire)
        for _ in range(message_life.SEARCHES_MAX):
            message_life._slots.release()
    assert budgets[0].spent == "the search was cancelled"


@run_async
async def test_search_that_has_used_its_records_says_so(kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_life, "SEARCHED_RECORDS_MAX", 1)
    async with serving(kafka, tmp_path) as broker:
        await called(sent, broker)
        found = await life(broker, id="ID:a")
    assert any("a search reads at most 1 records" in sentence for sentence in found["unrecorded"])


@pytest.mark.parametrize("parameters", [{}, {"id": ""}, {"id": "x" * 5000}, {"id": "a", "last_s": "-1"}, {"id": "a", "queue": "q"}])
@run_async
async def test_invalid_request_is_refused_and_frees_its_place(kafka: KafkaInMemory, tmp_path: Path, parameters: dict[str, str]) -> None:
    async with serving(kafka, tmp_path) as broker:
        for _ in range(message_life.SEARCHES_MAX + 1):
            with pytest.raises(InvalidInput):
                await life(broker, **parameters)
