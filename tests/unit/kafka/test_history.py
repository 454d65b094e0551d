from __future__ import annotations

import time

import pytest
from confluent_kafka import KafkaError

from bascule.core.errors import Unavailable
from bascule.kafka.history import TopicHistory, passing


@pytest.mark.parametrize(
    "code",
    [
        KafkaError._DESTROY_BROKER, KafkaError._TRANSPORT, KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.NOT_LEADER_FOR_PARTITION,
    ],
)  # fmt: skip
def test_what_a_connection_or_a_leader_that_goes_makes_of_a_question_passes(code: int) -> None:
    assert passing(KafkaError(code))


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.INVALID_CONFIG, KafkaError.OFFSET_OUT_OF_RANGE])
def test_what_asking_again_cannot_change_does_not_pass(code: int) -> None:
    assert not passing(KafkaError(code))


def test_a_question_to_nobody_ends_when_it_was_told_to() -> None:
    history = TopicHistory({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "t", 0, timeout_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(Unavailable):
        history.stable()
    assert time.monotonic() - began_s < 5
