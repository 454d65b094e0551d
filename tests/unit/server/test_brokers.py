"""The brokers of a journal over HTTP, and how Kafka's answer about the group is read."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicPartition
from starlette.requests import Request

from bascule.core.errors import Unavailable
from bascule.kafka import members
from bascule.kafka.members import BrokerMember, broker_members
from bascule.server.brokers import BrokerPages
from tests.unit.server.served import run_async
from tests.unit.server.test_admin import Broker, get, served


class Group:
    """A client of Kafka that knows one group."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def describe_consumer_groups(self, groups: list[str], request_timeout: float) -> dict[str, Any]:
        assert (groups, request_timeout) == (["brokers"], members.ANSWER_S)
        return {"brokers": self}

    def result(self, _timeout_s: float) -> Any:
        if self._error is not None:
            raise self._error
        return SimpleNamespace(members=[member("b", "/10.1.2.3"), member("a", "/10.1.2.4", TopicPartition("journal", 0)), member("", "x")])


def member(instance: str, host: str, *assigned: TopicPartition) -> SimpleNamespace:
    return SimpleNamespace(
        group_instance_id=instance or None, client_id="rdkafka", host=host, assignment=SimpleNamespace(topic_partitions=list(assigned))
    )


def test_members_of_the_group_are_the_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.kafka.clients.admin", lambda _: Group())
    assert broker_members({}, "brokers", "journal") == [
        BrokerMember("a", "10.1.2.4", True), BrokerMember("b", "10.1.2.3", False), BrokerMember("rdkafka", "x", False),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [TimeoutError(), KafkaException("denied")])
def test_group_that_kafka_does_not_describe_is_unavailable(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr("bascule.kafka.clients.admin", lambda _: Group(error))
    with pytest.raises(Unavailable, match="could not describe group brokers: "):
        broker_members({}, "brokers", "journal")


def test_brokers_are_listed_with_the_one_that_answers() -> None:
    found = [BrokerMember("a", "10.1.2.4", True), BrokerMember("b", "10.1.2.3", False)]

    def ask(port: int) -> None:
        code, text = get(port, "/brokers")
        assert (code, text) == (
            200,
            '[{"name":"a","host":"10.1.2.4","elected":true,"this":false},{"name":"b","host":"10.1.2.3","elected":false,"this":true}]',
        )
        assert get(port, "/brokers?page=1")[0] == 400

    served(Broker(), ask, brokers=BrokerPages(lambda: found, "b"))


@run_async
async def test_requests_that_come_while_kafka_is_asked_share_its_answer_also_if_the_first_of_them_ends() -> None:
    asked, begun, go_on = list[int](), threading.Event(), threading.Event()

    def ask() -> list[BrokerMember]:
        asked.append(len(asked) + 1)
        begun.set()
        assert go_on.wait(60)
        return [BrokerMember(f"answer {asked[-1]}", "10.1.2.3", True)]

    ((_, _, _, answer, _),) = BrokerPages(ask, "a").paths()

    async def request() -> bytes:
        return bytes((await answer(Request({"type": "http", "query_string": b""}))).body)

    first = asyncio.create_task(request())
    assert await asyncio.to_thread(begun.wait, 60)
    others = [asyncio.create_task(request()) for _ in range(3)]
    await asyncio.sleep(0)  # each of them waits
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    go_on.set()
    found = await asyncio.gather(*others)
    assert (asked, len(set(found)), b"answer 1" in found[0]) == ([1], 1, True)
    assert b"answer 2" in await request(), "a later request asks again"
