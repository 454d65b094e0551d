"""Every error class of the product has the attributes of the vocabulary, with legal values."""

from __future__ import annotations

import http
import importlib
import pkgutil
from collections import Counter

import pytest

import bascule
from bascule.core.errors import BasculeError, InvalidInput, Scope, TransactionRolledBack, TransactionTimedOut, Unavailable, error_classes
from bascule.core.xa_codes import Code

#: AMQP 1.0 part 2, sections 2.8.15 to 2.8.18, and part 4, section 4.5.8.
CONDITIONS = frozenset(
    [f"amqp:{each}" for each in (
        "internal-error", "not-found", "unauthorized-access", "decode-error", "resource-limit-exceeded", "not-allowed", "invalid-field",
        "not-implemented", "resource-locked", "precondition-failed", "resource-deleted", "illegal-state", "frame-size-too-small",
        "connection:forced", "connection:framing-error", "connection:redirect", "session:window-violation", "session:errant-link",
        "session:handle-in-use", "session:unattached-handle", "link:detach-forced", "link:transfer-limit-exceeded",
        "link:message-size-exceeded", "link:redirect", "link:stolen", "transaction:unknown-id", "transaction:rollback",
        "transaction:timeout",
    )]
)  # fmt: skip


def classes() -> list[type[BasculeError]]:
    for module in pkgutil.walk_packages(bascule.__path__, "bascule."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return [each for each in error_classes() if each.__module__.startswith("bascule.")]


CLASSES = classes()


@pytest.mark.parametrize("error", CLASSES, ids=lambda each: each.__name__)
def test_error_class_has_valid_attributes(error: type[BasculeError]) -> None:
    assert isinstance(error.retriable, bool)
    assert isinstance(error.scope, Scope)
    assert error.condition in CONDITIONS
    assert isinstance(error.xa_code, Code)
    assert isinstance(error.xa_rollback_code, Code)
    assert error.http_status in set(http.HTTPStatus)
    assert error.http_status >= 400
    assert error.exit_code in range(1, 4)
    assert error.__doc__


@pytest.mark.parametrize("error", [each for each in CLASSES if BasculeError in each.__bases__], ids=lambda each: each.__name__)
def test_direct_subclass_declares_retriable_and_scope(error: type[BasculeError]) -> None:
    assert {"retriable", "scope"} <= vars(error).keys()


def test_error_class_names_are_unique() -> None:
    assert [name for name, count in Counter(each.__name__ for each in CLASSES).items() if count > 1] == []


def test_error_classes_of_every_package_are_found() -> None:
    packages = {each.__module__.split(".")[1] for each in CLASSES}
    assert packages >= {
        "core",
        "amqp",
        "jms",
        "journal",
        "config",
        "broker",
        "kafka",
        "embedded",
        "pipelines",
        "client",
        "xa",
        "adapter",
        "server",
    }


def test_rolled_back_transaction_takes_condition_and_codes_from_its_cause() -> None:
    cause = TransactionTimedOut("the transaction took longer than 1 s")
    error = TransactionRolledBack(str(cause), cause=cause)
    assert (error.condition, error.xa_code, error.http_status) == ("amqp:transaction:timeout", Code.XA_RBTIMEOUT, 409)
    assert TransactionRolledBack("x", cause=Unavailable("y")).xa_code is Code.XA_RBTRANSIENT
    assert TransactionRolledBack("x", cause=ValueError("y")).condition == "amqp:transaction:rollback"
    assert TransactionRolledBack("x").xa_code is Code.XA_RBROLLBACK


def test_error_message_begins_with_the_transaction_name() -> None:
    error = TransactionRolledBack("was rolled back", transaction_id="shop-1")
    assert str(error) == "transaction shop-1 was rolled back"
    assert (error.transaction_id, error.cause) == ("shop-1", None)


def test_exit_codes_of_invalid_input_and_unavailable_service_differ() -> None:
    assert (InvalidInput.exit_code, Unavailable.exit_code, BasculeError.exit_code) == (2, 3, 1)
