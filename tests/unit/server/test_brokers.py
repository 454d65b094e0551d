"""The brokers of a journal over HTTP, and how Kafka's answer about the group is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicPartition

from bascule.core.errors import Unavailable
from bascule.kafka import members
from bascule.kafka.members import BrokerMember, broker_members
from bascule.server.brokers import BrokerPages
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
    with pytest.raises(Unavailable, match="group brokers could not be described: "):
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
