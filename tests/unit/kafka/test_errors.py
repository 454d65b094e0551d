"""The table of Kafka's error codes: each has one verdict, and the verdict is what the product does."""

from __future__ import annotations

import inspect
import re

import pytest
from confluent_kafka import KafkaError

from bascule.kafka import errors
from bascule.kafka.errors import RULES, Verdict, codes_of, passing, verdict_of

CODES = {name: code for name in dir(KafkaError) if name.isupper() and isinstance(code := getattr(KafkaError, name), int)}


@pytest.mark.parametrize("name", sorted(CODES))
def test_every_code_of_the_client_has_a_verdict_and_a_reason(name: str) -> None:
    assert CODES[name] in RULES, f"{name} is not classified"
    assert RULES[CODES[name]].reason


def test_no_code_is_classified_twice_and_each_name_is_one_of_the_client() -> None:
    names = re.findall(r'"(_?[A-Z][A-Z0-9_]+)"', inspect.getsource(errors).partition("RULES")[2])
    assert sorted(names) == sorted(set(names))
    assert set(names) == set(CODES)


@pytest.mark.parametrize(
    "name",
    [
        "LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "OFFSET_NOT_AVAILABLE",
        "KAFKA_STORAGE_ERROR", "BROKER_NOT_AVAILABLE", "REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "NOT_CONTROLLER", "CONCURRENT_TRANSACTIONS",
        "REPLICA_NOT_AVAILABLE", "_TRANSPORT", "_TIMED_OUT", "_ALL_BROKERS_DOWN", "_DESTROY_BROKER",
    ],
)  # fmt: skip
def test_what_a_cluster_at_work_says_while_leaders_and_coordinators_move_is_tried_again(name: str) -> None:
    assert passing(KafkaError(CODES[name]))


@pytest.mark.parametrize(
    "name",
    ["_PARTITION_EOF", "_BAD_MSG", "TOPIC_AUTHORIZATION_FAILED", "INVALID_CONFIG", "OFFSET_OUT_OF_RANGE", "MSG_SIZE_TOO_LARGE", "_FENCED"],
)
def test_what_asking_again_cannot_change_is_not_tried_again(name: str) -> None:
    assert not passing(KafkaError(CODES[name]))


def test_the_clients_own_word_counts_before_the_table() -> None:
    assert verdict_of(KafkaError(KafkaError._STATE, retriable=True)) is Verdict.RETRIABLE
    assert verdict_of(KafkaError(KafkaError._TRANSPORT, fatal=True)) is Verdict.FENCED
    assert verdict_of(KafkaError(KafkaError._AUTHENTICATION, fatal=True)) is Verdict.PROCESS


def test_a_code_of_a_newer_client_is_not_tried_again() -> None:
    assert verdict_of(KafkaError(9999)) is Verdict.OPERATION


def test_codes_are_found_by_their_verdict() -> None:
    assert KafkaError.INVALID_TIMESTAMP in codes_of(Verdict.RECORD)
    assert codes_of(*Verdict) == RULES.keys()
