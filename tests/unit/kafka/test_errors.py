"""The table of Kafka's error codes: each code has one verdict, and the product acts on the verdict."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.core.errors import Unavailable
from bascule.kafka import errors
from bascule.kafka.admin import Topics
from bascule.kafka.errors import RULES, Verdict, codes_of, passing, verdict_of, words

ROOT = Path(__file__).parents[3]
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


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KafkaError(KafkaError._TRANSPORT), "Local: Broker transport failure"),
        (KafkaException(KafkaError(KafkaError._TRANSPORT, "Failed to get metadata")), "Failed to get metadata"),
        (BufferError("Local: Queue full"), "Local: Queue full"),
    ],
)
def test_words_of_an_error_have_no_notation_of_the_client(error: KafkaError | Exception, text: str) -> None:
    assert words(error) == text


def test_unreachable_kafka_is_named_by_its_address_and_a_reason_in_words() -> None:
    with pytest.raises(Unavailable, match=r"^Kafka does not answer at 127\.0\.0\.1:1: [^{]*Broker transport failure$"):
        Topics({"bootstrap.servers": "127.0.0.1:1"}).in_sync("flights", 0, timeout_s=1)


def errors_of_kafka(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield where an error of Kafka has which name: caught, received as an argument, or taken from a message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.name and node.type and "Kafka" in ast.unparse(node.type):
            yield node, node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.arg) and inner.annotation and "KafkaError" in ast.unparse(inner.annotation):
                    yield node, inner.arg
                elif isinstance(inner, ast.Assign) and ast.unparse(inner.value).endswith(".error()"):
                    yield node, ast.unparse(inner.targets[0])


def in_notation(source: str) -> list[str]:
    """The places of a source that put an error of Kafka into a text as the client writes it: ``KafkaError{code=...}``."""
    found = []
    for place, name in errors_of_kafka(ast.parse(source)):
        texts = [node.value for node in ast.walk(place) if isinstance(node, ast.FormattedValue)]
        texts += [node.args[0] for node in ast.walk(place) if isinstance(node, ast.Call) and ast.unparse(node.func) == "str" and node.args]
        found += [f"line {text.lineno}: {name}" for text in texts if ast.unparse(text) in (name, f"{name}.args[0]")]
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "src" / "bascule" / "kafka").glob("*.py")), ids=lambda path: path.name)
def test_texts_have_the_words_of_an_error_of_kafka_only(path: Path) -> None:
    assert in_notation(path.read_text()) == []


def test_error_of_kafka_in_the_notation_of_the_client_is_found() -> None:
    assert in_notation("def f(error: KafkaError):\n    return f'refused: {error}'") == ["line 2: error"]
    assert in_notation("def f():\n    try:\n        g()\n    except KafkaException as error:\n        h(str(error))") == ["line 5: error"]
    assert in_notation("def f(error: KafkaError):\n    return f'refused: {words(error)}'") == []
