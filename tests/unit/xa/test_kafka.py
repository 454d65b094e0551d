"""What Kafka as a resource answers where its side topic takes no more."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import pytest

from bascule.core.errors import Unavailable
from bascule.kafka.compacted import Outgoing, TooLarge
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.errors import TransactionError
from bascule.xa.kafka import KafkaResource


class Clients:
    """In Kafka's stead: what is appended to the side topic is too large for it."""

    def __init__(self) -> None:
        self.appender = self
        self.deleted: list[bytes | None] = []

    @contextmanager
    def slot(self, _transactional_id: str, *, own: bool) -> Iterator[Clients]:
        assert own
        yield self

    def prepare(self) -> None: ...

    def check(self, _record: Outgoing) -> int:
        return 1

    def append(self, record: Outgoing) -> Future[int]:
        future: Future[int] = Future()
        if record.topic.endswith(".side"):
            future.set_exception(TooLarge(record.topic))
        else:
            future.set_result(0)
            if record.value is None:
                self.deleted.append(record.key)
        return future


def test_a_branch_whose_record_is_too_large_for_the_side_topic_is_rolled_back_at_once_and_for_that_reason() -> None:
    resource, clients = KafkaResource("kafka", {}), Clients()
    resource._clients = cast("Any", clients)
    with TransactionManager("shop", ModelLog(), []) as manager:
        manager.resources["kafka"] = resource
        with pytest.raises(TransactionRolledBack) as raised, manager.begin() as transaction:
            transaction.enlist(resource).send("receipts", b"large")
    assert raised.value.__cause__ is not None
    assert isinstance(raised.value.__cause__.__cause__, TooLarge)
    assert len(clients.deleted) == 1  # what said that it sends
    assert resource._sent == {}
    assert transaction._branches == {}
    assert transaction.unfinished == {}


class Away(Clients):
    """In the stead of a Kafka that does not answer."""

    def turn(self, _transactional_id: str) -> Lock:
        return Lock()

    def transact(self, _make: object) -> None:
        raise Unavailable("no answer")

    def append(self, _record: Outgoing) -> Future[int]:
        future: Future[int] = Future()
        future.set_exception(Unavailable("no answer"))
        return future


@pytest.mark.parametrize("beside", [[], ["db"]], ids=["alone", "beside a database"])
def test_what_was_sent_in_an_outage_is_not_kept(beside: list[str]) -> None:
    """For nobody asks again for what never got into the log."""
    resource, others = KafkaResource("kafka", {}), [ModelResource(name) for name in beside]
    resource._clients = cast("Any", Away())
    with TransactionManager("shop", ModelLog(), others, recovery_interval_s=60) as manager:
        manager.resources["kafka"] = resource
        transaction = manager.begin()
        for each in others:
            transaction.enlist(each).append("row")
        transaction.enlist(resource).send("receipts", b"large")
        with pytest.raises(TransactionError):
            transaction.commit()
        assert (resource._sent, resource._branches._states) == ({}, {})
