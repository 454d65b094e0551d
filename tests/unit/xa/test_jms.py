"""The broker as a resource, with a server that has the reactions of each test."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from threading import Event
from typing import Any, cast

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, AmqpError
from bascule.amqp.events import SessionBegun
from bascule.client import Queue
from bascule.client.async_branch import AsyncBranchContext
from bascule.client.errors import IllegalState
from bascule.core.errors import Unavailable
from bascule.testing.xa import ModelLog
from bascule.xa import TransactionManager
from bascule.xa.broker_protocol import Reply, checked
from bascule.xa.errors import BranchRolledBack, Code, ResourceError, ResourceFailed, UnknownXid
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid
from tests.support.outage import Door
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for
from tests.unit.client.server import BODIES, obliging, server

THREADS = 4
WAIT_S = 30.0 * SLOWNESS


def test_refused_session_does_not_affect_other_branches_on_connection() -> None:
    begun = count(1)

    def react(connection: Connection, event: Any) -> None:
        obliging(connection, event)
        if isinstance(event, SessionBegun) and next(begun) == 5:  # the connection itself has two sessions, and each branch has two
            event.session.end(AmqpError(RESOURCE_LIMIT_EXCEEDED, "enough"))

    with server(react) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=5)) as resource:
        first, refused, second = (branch(new_gtrid("shop", 0), "broker") for _ in range(3))
        handle = resource.start(first, timeout_s=5)
        with pytest.raises(ResourceError, match="enough"):
            resource.start(refused, timeout_s=5)
        resource.start(second, timeout_s=5)  # on the only connection that the server accepts
        assert handle.connected
        for each in (first, second):
            resource.rollback(each)


def test_session_with_running_call_is_not_reused_after_rollback() -> None:
    """For example, a transaction times out while its application waits for a message."""
    entered, leave = Event(), Event()

    def call(handle: Any) -> None:
        with handle._one_thread():
            entered.set()
            assert leave.wait(WAIT_S)

    with server(obliging) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=5)) as resource:
        first, second = (branch(new_gtrid("shop", 0), "broker") for _ in range(2))
        handle = resource.start(first, timeout_s=5)
        with ThreadPoolExecutor(1) as threads:
            calling = threads.submit(call, handle)
            assert entered.wait(WAIT_S)
            resource.rollback(first)
            assert resource._idle == []
            leave.set()
            calling.result(WAIT_S)
        with pytest.raises(IllegalState, match="transaction has ended"):
            handle._call(lambda: None)
        resource.start(second, timeout_s=5)
        resource.rollback(second)
        assert len(resource._idle) == 1


def test_closed_event_loop_with_pending_receive_does_not_block_rollback_or_connection() -> None:
    """A program may stop and close its event loop before its tasks end. Nothing wakes these tasks then."""
    loop, got_all = asyncio.new_event_loop(), asyncio.Event()

    async def receive(handle: AsyncBranchContext) -> None:
        consumer = await handle.consumer(Queue("orders"))
        for _ in BODIES:
            assert await consumer.receive()
        got_all.set()
        await consumer.receive()  # no message arrives

    with server(obliging) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=5)) as resource:
        first, second = (branch(new_gtrid("shop", 0), "broker") for _ in range(2))
        other = resource.start(second, timeout_s=5)
        task: Any = loop.create_task(receive(resource.start_on_loop(first, timeout_s=5, loop=loop)))
        loop.run_until_complete(got_all.wait())
        assert len(other._thread._observers) == 1  # the observer of the task
        loop.close()
        resource.rollback(first)  # ends the branch's session, for which the task waits
        with pytest.raises(UnknownXid):
            resource.end(first, success=False)
        other.producer(Queue("orders")).send("on the same connection")
        resource.rollback(second)
        task._log_destroy_pending = False
        task.get_coro().close()


class UnreachableBroker:
    """A broker that never answers. Only one thread at a time waits for its answer."""

    def __init__(self) -> None:
        self.tries = 0
        self.over = Event()

    def connect(self) -> Any:
        self.tries += 1
        assert self.over.wait(WAIT_S)
        raise Unavailable("no answer")


def test_threads_share_one_connection_attempt_while_broker_is_away() -> None:
    resource, broker = JmsResource("broker", "amqp://127.0.0.1:1"), UnreachableBroker()
    door = Door()
    resource._factory, resource._connecting = cast("Any", broker), cast("Any", door)
    with TransactionManager("shop", ModelLog(), [], recovery_interval_s=WAIT_S) as manager, ThreadPoolExecutor(THREADS) as threads:
        manager.resources["broker"] = cast("Any", resource)
        transactions = [manager.begin() for _ in range(THREADS)]
        answers = [threads.submit(transaction.enlist, resource) for transaction in transactions]
        wait_for(lambda: door.came == THREADS, "all to wait")
        broker.over.set()
        for answer in answers:
            with pytest.raises(ResourceFailed):
                answer.result(WAIT_S)
    assert broker.tries == 1


def test_rollback_because_of_unavailable_kafka_is_retriable() -> None:
    answer = Reply(int(Code.XA_RBTRANSIENT), 503, "no answer")
    with pytest.raises(BranchRolledBack, match="no answer") as caught:
        checked(answer)
    assert caught.value.retriable
