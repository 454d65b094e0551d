from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from bascule.kafka.history import passing


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
