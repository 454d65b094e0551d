"""Work in a branch, for tests of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.broker import branches
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.testing.broker import Receiver
from tests.unit.broker.conftest import Bench

XID = Xid(7, b"gtrid", b"bqual")


OTHER = Xid(7, b"gtrid", b"other")


class Work:
    """A bench whose broker has one message in "in", and a transaction that receives it and sends one to "out"."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.answers: list[Any] = []
        bench.fill("order", to="in")
        bench.queue("out")
        bench.broker.settle()
        self.consumer = bench.consumer(bench.queue("in"))
        self.transaction = bench.engine.begin(b"1")
        bench.engine.acknowledge_in(self.transaction, self.consumer.consumer, self.consumer.messages[0])
        bench.put("bill", to="out", transaction=self.transaction)
        bench.broker.settle()

    def prepare(self, xid: Xid = XID) -> None:
        branches.prepare(self.bench.engine, self.transaction, xid, "client", self.answers.append)

    def prepared(self) -> Work:
        self.prepare()
        self.bench.broker.settle()
        assert self.answers == [True]
        return self

    def end(self, ending: Ending, xid: Xid = XID) -> None:
        branches.end(self.bench.engine, xid, ending, lambda: self.answers.append(ending))

    def where(self) -> tuple[list[Any], list[Any]]:
        """Return the messages that wait in the two queues."""
        return self.bench.waiting(self.bench.queue("in")), self.bench.waiting(self.bench.queue("out"))

    def listed(self) -> list[Xid]:
        return [each.xid for each in branches.listed(self.bench.engine)]

    def fresh(self, queue: str = "in") -> Receiver:
        """Return a new consumer, after detaching the previous one."""
        self.bench.engine.detach(self.consumer.consumer)
        return self.bench.consumer(self.bench.queue(queue))


@pytest.fixture
def work(bench: Bench) -> Work:
    return Work(bench)
