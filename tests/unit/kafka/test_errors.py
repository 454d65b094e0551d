"""The table of Kafka's error codes: each code has one verdict, and the product acts on the verdict."""

from __future__ import annotations

import inspect
import re

import pytest
from confluent_kafka import KafkaError

from bascule.kafka import errors
from bascule.kafka.errors import RULES, Verdict, codes_of, passing, verdict_of

CODES = {name: code for name in dir(KafkaError) if name.isupper() and isinstance(code := getattr(KafkaError, name), int)}


@pytest.mark.parametrize("name", sorted(CODES))
def test_every_kafka_error_code_has_verdict_and_reason(name: str) -> None:
    assert CODES[name] in RULES, f"{name} has no verdict"
    assert RULES[CODES[name]].reason


def test_each_kafka_error_code_is_classified_once_with_valid_name() -> None:
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
def test_leader_and_coordinator_changes_are_retriable(name: str) -> None:
    assert passing(KafkaError(CODES[name]))


@pytest.mark.parametrize(
    "name",
    ["_PARTITION_EOF", "_BAD_MSG", "TOPIC_AUTHORIZATION_FAILED", "INVALID_CONFIG", "OFFSET_OUT_OF_RANGE", "MSG_SIZE_TOO_LARGE", "_FENCED"],
)
def test_permanent_kafka_errors_are_not_retriable(name: str) -> None:
    assert not passing(KafkaError(CODES[name]))


def test_fatal_and_retriable_flags_take_precedence_over_error_table() -> None:
    assert verdict_of(KafkaError(KafkaError._STATE, retriable=True)) is Verdict.RETRIABLE
    assert verdict_of(KafkaError(KafkaError._TRANSPORT, fatal=True)) is Verdict.FENCED
    assert verdict_of(KafkaError(KafkaError._AUTHENTICATION, fatal=True)) is Verdict.PROCESS


def test_unknown_kafka_error_code_is_not_retriable() -> None:
    assert verdict_of(KafkaError(9999)) is Verdict.OPERATION


def test_kafka_error_codes_are_found_by_verdict() -> None:
    assert KafkaError.INVALID_TIMESTAMP in codes_of(Verdict.RECORD)
    assert codes_of(*Verdict) == RULES.keys()
