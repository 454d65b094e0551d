"""Kafka clients write nothing to standard error. The product raises their errors, or logs them in its own format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bascule.core.errors import Unavailable
from bascule.embedded.process import free_port
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory

#: Time in which a client finds the port closed and could write a message.
ANSWER_S = 0.5


@pytest.mark.parametrize(
    "call",
    [lambda kafka: Topics(kafka).ids(["topic"], ANSWER_S), lambda kafka: TopicHistory(kafka, "topic", 0, ANSWER_S).latest()],
    ids=["topics", "history"],
)
def test_client_of_unreachable_kafka_writes_nothing_to_stderr(
    call: Callable[[dict[str, Any]], object], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Unavailable):
        call({"bootstrap.servers": f"127.0.0.1:{free_port()}"})
    assert "rdkafka" not in capfd.readouterr().err
