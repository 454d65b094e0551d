"""The broker as a resource of transactions: what is prepared is nobody's, and stays so over kills, takeovers and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bascule.client import Message, Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bascule.testing.system import System
from bascule.xa import Vote
from bascule.xa.errors import UnknownXid
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid

#: Times to wait for a message that is to come; none where none is to come.
SOON_S = 20.0
Make = Callable[..., JmsResource]


def lasting(*systems: System) -> str:
    """The URL of a client that outlives its broker."""
    return f"failover:({','.join(system.url for system in systems)})?failover.reconnectDelay=20&failover.maxReconnectDelay=200"


@pytest.fixture(scope="module")
def broker(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(
        kafka.bootstrap, tmp_path_factory.mktemp("xa-jms"), prefix="xa-jms", config="[journal]\nsnapshot_records = 100\n"
    ) as system:
        yield system


@pytest.fixture
def make(broker: System) -> Iterator[Make]:
    """Resources, as different processes would have them."""
    with ExitStack() as stack:

        def make(url: str | None = None) -> JmsResource:
            resource = JmsResource("jms", url or lasting(broker), timeout_s=SOON_S)
            stack.callback(resource.close)
            return resource

        yield make


class Work:
    """A queue with one order, and a branch that takes it and sends a bill."""

    def __init__(self, system: System, name: str) -> None:
        self.system = system
        self.orders, self.bills = Queue(f"{name}.in"), Queue(f"{name}.out")
        self.xid = branch(new_gtrid("shop", 0), "jms")
        with connect(lasting(system)) as context:
            context.send(self.orders, "order")
            context.consumer(self.bills).close()

    def done_in(self, resource: JmsResource) -> None:
        handle = resource.start(self.xid, timeout_s=60)
        assert resource_body(handle.consumer(self.orders).receive(SOON_S)) == "order"
        handle.send(self.bills, "bill")
        resource.end(self.xid, success=True)

    def prepared_in(self, resource: JmsResource) -> None:
        self.done_in(resource)
        assert resource.prepare(self.xid) is Vote.YES

    def waiting(self) -> tuple[list[object], list[object]]:
        """What consumers may have now, orders and bills."""
        with connect(lasting(self.system)) as context:
            orders, bills = ([message.body for message in context.browse(queue)] for queue in (self.orders, self.bills))
        return orders, bills

    def held(self) -> int:
        """Orders that somebody has in hands."""
        queue = self.system.queue(self.orders.name)
        return 0 if queue is None else int(queue["delivering"])


def resource_body(message: Message | None) -> object:
    assert message is not None
    return message.body


@pytest.fixture
def work(broker: System, name: str) -> Work:
    return Work(broker, name)


def test_a_prepared_branch_is_nobodys_until_any_process_commits_it(work: Work, make: Make) -> None:
    first, second = make(), make()
    work.prepared_in(first)
    assert work.waiting() == ([], [])
    assert work.held() == 1
    assert work.xid in second.recover()
    second.commit(work.xid)
    assert work.waiting() == ([], ["bill"])
    assert work.held() == 0
    assert work.xid not in first.recover()
    with pytest.raises(UnknownXid, match="committed"):
        first.commit(work.xid)


def test_a_prepared_branch_is_rolled_back_by_any_process(work: Work, make: Make) -> None:
    work.prepared_in(make())
    other = make()
    other.rollback(work.xid)
    assert work.waiting() == (["order"], [])
    with connect(work.system.url) as context:
        message = context.consumer(work.orders).receive(SOON_S)
    assert message is not None
    assert message.redelivered
    with pytest.raises(UnknownXid):
        other.rollback(work.xid)


@pytest.mark.parametrize("commit", [True, False])
def test_killed_between_prepare_and_outcome_the_broker_still_has_the_branch(work: Work, make: Make, commit: bool) -> None:
    resource = make()
    work.prepared_in(resource)
    work.system.broker.restart()
    assert work.waiting() == ([], [])
    assert list(resource.recover()) == [work.xid]
    (resource.commit if commit else resource.rollback)(work.xid)
    work.system.broker.restart()
    assert work.waiting() == (([], ["bill"]) if commit else (["order"], []))
    assert list(resource.recover()) == []
