"""A transacted Qpid JMS session whose connection breaks during a transaction, and an application that does not learn of it.

Without the measures of the broker (bascule.server.coordinator), the client would process messages twice or withhold them.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.scenarios.conftest import Connect
from tests.support.proxy import Proxy
from tests.support.qpid import CALL_TIMEOUT_S, Connection, Consumer, JmsError, Session
from tests.support.speed import SLOWNESS
from tests.support.system import System, failover, wait_for

COUNT = 60
BATCH = 10
#: Time within which a waiting message is delivered, also after an interruption.
SOON_S = 20.0
#: With a prefetch of 1, a session that was in a send gets a message each time this elapses: the client then asks again.
AGAIN_S = 2.0
SURELY_ROLLED_BACK = "Transaction failed and has been rolled back."
#: Time after which a client abandons a request. The broker must answer each other request within it, also on a busy machine, which may
#: pause all processes for ten seconds.
ANSWER_MS = int(max(12_000, 4_000 * SLOWNESS))
#: The beginning of the message with which a client begins a transaction: a described list.
DECLARE = b"\x00\x53\x31"


class LosesADeclare(Proxy):
    """Cuts the connection once, when a client begins a transaction, before the broker receives the request."""

    armed = False

    def _goes_on(self, data: bytes) -> bool:
        lost = self.armed and DECLARE in data
        self.armed = self.armed and not lost
        return not lost


class HoldsADeclare(LosesADeclare):
    """Stops forwarding what a client sends, once, when the client begins a transaction. Answers still pass."""

    def __init__(self, port: int) -> None:
        self._over = threading.Event()
        super().__init__(port)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        super().__exit__()

    def _goes_on(self, data: bytes) -> bool:
        goes_on = super()._goes_on(data)
        if not goes_on:
            self._over.wait()
        return goes_on


def commit_in_batches(session: Session, consumer: Consumer, count: int) -> list[str]:
    """Run an application that repeats failed transactions, until it has processed a number of messages and no more arrive."""
    done: list[str] = []
    while batch := consumer.receive_many(BATCH, SOON_S if len(done) < count else 0):
        with suppress(JmsError):  # rolled back: all of its messages are redelivered
            session.commit()
            done += [message.body for message in batch]
    return done


def end(session: Session, how: str) -> None:
    """Commit like an application that considers its transaction complete, or roll back like one whose own work has failed."""
    if how == "rollback":
        session.rollback()
    else:
        with pytest.raises(JmsError, match="rolled back"):
            session.commit()


def stopped_in_its_recovery(connection: Connection, queue: str, proxy: LosesADeclare) -> tuple[Session, Consumer]:
    """A session whose connection breaks after three received messages, and whose next Declare the proxy has stopped."""
    session = connection.session("TRANSACTED")
    consumer = session.consumer(queue)
    assert len(consumer.receive_many(3)) == 3
    proxy.armed = True
    proxy.cut()
    wait_for(lambda: not proxy.armed, "the Declare of the recovered session")
    return session, consumer


def wait_restored(connection: Connection) -> None:
    wait_for(lambda: any(event.get("event") == "restored" for event in connection.events()), "the new connection")


@pytest.mark.parametrize("how", ["commit", "rollback"])
@pytest.mark.parametrize("received_again", [0, 3])
@pytest.mark.parametrize("prefetch", [pytest.param(1, marks=pytest.mark.slow), 1000])
@pytest.mark.parametrize("sending", [False, True])
def test_messages_are_processed_once_in_order_after_connection_loss_in_a_transaction(
    connect_to: Connect, system: System, name: str, queue: str, how: str, received_again: int, prefetch: int, sending: bool
) -> None:
    others = connect_to(system.url).session()
    others.producer(queue).send("{n}", count=COUNT)
    full = f"queue:full.{name}"  # delays a send: one is in progress when the connection breaks
    others.producer(full).send("fills it")
    with Proxy(system.port) as proxy:
        connection = connect_to(failover(proxy.url) + f"&jms.prefetchPolicy.all={prefetch}")
        session = connection.session("TRANSACTED")
        consumer, producer = session.consumer(queue), session.producer(full)
        assert len(consumer.receive_many(3)) == 3
        send = producer.submit_send("waits") if sending else None
        proxy.cut()
        wait_restored(connection)
        if send is not None:
            send.result(CALL_TIMEOUT_S)
        assert len(consumer.receive_many(received_again, AGAIN_S)) == received_again
        end(session, how)
        assert commit_in_batches(session, consumer, COUNT) == [str(number) for number in range(COUNT)]
    assert system.depth(name) == 0


@pytest.mark.parametrize(("how", "received_again"), [("commit", 3), pytest.param("rollback", 0, marks=pytest.mark.slow)])
def test_messages_are_processed_once_in_order_after_broker_kill_in_a_transaction(
    connect_to: Connect, system: System, name: str, queue: str, how: str, received_again: int
) -> None:
    connect_to(system.url).session().producer(queue).send("{n}", count=2000)
    connection = connect_to(system.failover_url)
    session = connection.session("TRANSACTED")
    consumer = session.consumer(queue)
    assert len(consumer.receive_many(3)) == 3
    system.broker.restart()
    wait_restored(connection)
    assert len(consumer.receive_many(received_again)) == received_again
    end(session, how)
    assert commit_in_batches(session, consumer, 2000) == [str(number) for number in range(2000)]
    assert system.depth(name) == 0


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_sessions_sharing_an_interrupted_connection_process_each_message_once(
    connect_to: Connect, system: System, name: str, queue: str, batch: int
) -> None:
    count = 2000
    connect_to(system.url).session().producer(queue).send("{n}", count=count)
    done: list[str] = []
    in_doubt: set[str] = set()  # the connection broke while the commit was in flight
    over = threading.Event()
    with Proxy(system.port) as proxy, ThreadPoolExecutor() as workers:
        connection = connect_to(failover(proxy.url))

        def work(session: Session, consumer: Consumer) -> None:
            # A session without messages continues; after the next interruption it may get the messages of the others.
            while not over.is_set():
                if not (messages := consumer.receive_many(batch, 1.0)):
                    continue
                bodies = [message.body for message in messages]
                try:
                    session.commit()
                except JmsError as error:
                    in_doubt.update([] if SURELY_ROLLED_BACK in str(error) else bodies)
                else:
                    done.extend(bodies)

        sessions = [connection.session("TRANSACTED") for _ in range(4)]
        running = [workers.submit(work, session, session.consumer(queue)) for session in sessions]
        try:
            for part in range(1, 4):
                wait_for(lambda part=part: len(done) > part * count // 4, "messages that are processed")
                proxy.cut()
            system.wait_depth(name, 0)
        finally:
            over.set()
        for each in running:
            each.result(CALL_TIMEOUT_S)
    assert len(done) == len(set(done))
    assert {str(number) for number in range(count)} - set(done) <= in_doubt
    assert len(in_doubt) <= 3 * len(sessions) * batch
    assert len(connection.events()) <= 2 * 3 * 3 * SLOWNESS  # the interruption and its consequences are few


def test_messages_are_processed_once_in_order_when_receive_outlasts_the_interruption(
    connect_to: Connect, system: System, name: str, queue: str
) -> None:
    """The client then asks for all messages, as a rollback does."""
    count = 1200  # more than a prefetch
    others = connect_to(system.url).session("TRANSACTED")  # immediately: the proxy delays while the broker is unavailable
    producer = others.producer(queue)
    producer.send("{n}", count=3)
    producer.send("{n}", count=count - 3, first=3, delay_ms=2000)
    others.commit()
    connection = connect_to(system.failover_url)
    session = connection.session("TRANSACTED")
    consumer = session.consumer(queue)
    assert len(consumer.receive_many(3)) == 3
    receiving = consumer.submit("receive", count=1, timeout_ms=500)
    system.broker.restart()
    receiving.result(CALL_TIMEOUT_S)
    wait_restored(connection)
    assert len(consumer.receive_many(3)) == 3
    end(session, "commit")
    assert commit_in_batches(session, consumer, count) == [str(number) for number in range(count)]
    assert system.depth(name) == 0


def test_session_closed_in_its_first_transaction_does_not_interrupt_the_connection(connect_to: Connect, system: System, queue: str) -> None:
    connect_to(system.url).session().producer(queue).send("{n}", count=COUNT)
    with Proxy(system.port) as proxy:
        connection = connect_to(failover(proxy.url))
        session = connection.session("TRANSACTED")
        assert len(session.consumer(queue).receive_many(3)) == 3
        session.close()
        session = connection.session("TRANSACTED")
        assert commit_in_batches(session, session.consumer(queue), COUNT) == [str(number) for number in range(COUNT)]
        assert connection.events() == []


def test_rollback_without_earlier_interruption_does_not_interrupt_the_connection(connect_to: Connect, system: System, queue: str) -> None:
    connect_to(system.url).session().producer(queue).send("{n}", count=COUNT)
    connection = connect_to(system.url)
    session = connection.session("TRANSACTED")
    consumer = session.consumer(queue)
    assert len(consumer.receive_many(3)) == 3
    session.rollback()
    assert commit_in_batches(session, consumer, COUNT) == [str(number) for number in range(COUNT)]
    assert connection.events() == []


def test_client_with_request_timeout_recovers_from_connection_loss_during_recovery(
    connect_to: Connect, system: System, name: str, queue: str
) -> None:
    """Without ``jms.requestTimeout`` the client waits for ever for the answer to that Declare, and does not reconnect."""
    connect_to(system.url).session().producer(queue).send("{n}", count=COUNT)
    with LosesADeclare(system.port) as proxy:
        connection = connect_to(failover(proxy.url) + f"&jms.requestTimeout={ANSWER_MS}")
        session, consumer = stopped_in_its_recovery(connection, queue, proxy)
        wait_restored(connection)
        end(session, "rollback")
        assert commit_in_batches(session, consumer, COUNT) == [str(number) for number in range(COUNT)]
    assert system.depth(name) == 0


def test_client_in_recovery_reconnects_after_orderly_broker_stop_without_request_timeout(
    connect_to: Connect, system: System, name: str, queue: str
) -> None:
    """The client needs no ``jms.requestTimeout`` here: the broker ends the link of the Declare before it ends the connection."""
    connect_to(system.url).session().producer(queue).send("{n}", count=COUNT)
    with HoldsADeclare(system.port) as proxy:
        connection = connect_to(failover(proxy.url))
        session, consumer = stopped_in_its_recovery(connection, queue, proxy)
        system.broker.stop()
        system.broker.start()
        wait_restored(connection)
        end(session, "rollback")
        assert commit_in_batches(session, consumer, COUNT) == [str(number) for number in range(COUNT)]
    assert system.depth(name) == 0


def test_rollback_of_a_client_stalled_in_recovery_may_fail_and_succeeds_when_repeated(
    connect_to: Connect, system: System, name: str, queue: str
) -> None:
    """If the timeout of its requests ends such a rollback, the client delivers nothing more until a later rollback succeeds."""
    connect_to(system.url).session().producer(queue).send("{n}", count=COUNT)
    with LosesADeclare(system.port) as proxy:
        connection = connect_to(failover(proxy.url) + f"&jms.requestTimeout={ANSWER_MS}")
        session, consumer = stopped_in_its_recovery(connection, queue, proxy)
        try:
            session.rollback()
        except JmsError:
            session.rollback()
        assert commit_in_batches(session, consumer, COUNT) == [str(number) for number in range(COUNT)]
    assert system.depth(name) == 0
