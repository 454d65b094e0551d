"""Several brokers on one journal: one serves, the others stand by and take over, and a replaced broker has no effect."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupState

from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.compacted import trim
from bascule.kafka.history import TopicHistory
from tests.scenarios.conftest import Connect
from tests.scenarios.test_zombies import stands
from tests.support.proxy import Proxy
from tests.support.qpid import JmsError
from tests.support.system import FAILOVER, SHORT_SESSION, WAIT_S, System, paused, wait_for

#: As long as allowed, so that a slow broker does not count as dead.
LONG_SESSION_S = 60.0


class Pair:
    """Two brokers with one journal."""

    def __init__(self, kafka: EmbeddedKafka, directory: Path, prefix: str, stack: ExitStack, config: str = SHORT_SESSION) -> None:
        self.systems = [System(kafka.bootstrap, directory / name, prefix=prefix, config=config) for name in ("one", "two")]
        stack.enter_context(self.systems[0])
        stack.callback(self.systems[1].broker.stop)
        self.systems[1].broker.launch()
        wait_for(self.systems[1].stands_by, "the second broker to stand by")

    @property
    def url(self) -> str:
        return FAILOVER.format(",".join(system.url for system in self.systems))

    def serving(self) -> System:
        """Return the serving broker, once there is one."""
        found: System = wait_for(lambda: next((system for system in self.systems if system.serves()), None), "a broker that serves")
        return found

    def other(self, system: System) -> System:
        return next(other for other in self.systems if other is not system)


def told(text: str) -> None:
    """Print a figure for the reader of the output; no test depends on it."""
    sys.stdout.write(f"{text}\n")


@pytest.fixture(scope="module")
def pair(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(kafka, tmp_path_factory.mktemp("takeover"), "takeover", stack)


@pytest.fixture
def both(pair: Pair) -> Pair:
    """Return when both brokers run, one serves, and the other stands by."""
    for system in pair.systems:
        if not system.broker.running:
            system.broker.launch()
    serving = pair.serving()
    wait_for(pair.other(serving).stands_by, "the other broker to stand by")
    return pair


def test_standby_takes_over_from_a_killed_broker_and_clients_follow(both: Pair, connect_to: Connect, queue: str) -> None:
    active = both.serving()
    session = connect_to(both.url).session("CLIENT")
    producer, consumer = session.producer(queue), session.consumer(queue)
    producer.send("{n}", count=200)
    first = consumer.receive_many(100)
    session.acknowledge(first[-1])
    session.producer(f"{queue}.other").send("nobody answers an acknowledgement, but a send that is stored behind it")
    active.broker.kill()
    killed_s = time.monotonic()
    assert both.serving() is both.other(active)
    told(f"taken over {time.monotonic() - killed_s:.1f} s after the kill")
    producer.send("after")
    rest = consumer.receive_many(101)
    bodies = [message.body for message in (*first, *rest)]
    assert sorted(bodies[:-1], key=int) == [str(n) for n in range(200)]
    assert bodies[-1] == "after"


def test_broker_stopped_orderly_hands_over_at_once(
    kafka: EmbeddedKafka, connect_to: Connect, queue: str, topic_prefix: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        pair = Pair(kafka, tmp_path, topic_prefix, stack, f"[broker]\nsession_timeout_s = {LONG_SESSION_S}")
        active, standby = pair.systems
        producer = connect_to(pair.url).session().producer(queue)
        producer.send("before")
        begun_s = time.monotonic()
        active.broker.stop()
        stopped_s = time.monotonic()
        wait_for(standby.serves, "the standby to serve before the session of the other broker ends", LONG_SESSION_S - 15)
        told(f"stopped in {stopped_s - begun_s:.1f} s, handed over {time.monotonic() - stopped_s:.1f} s later")
        producer.send("after")
        assert [message.body for message in connect_to(pair.url).session().consumer(queue).receive_many(2)] == ["before", "after"]


def test_suspended_broker_is_replaced_and_does_nothing_after_resume(both: Pair, connect_to: Connect, name: str, queue: str) -> None:
    active = both.serving()
    other = both.other(active)
    connect_to(both.url).session().producer(queue).send("{n}", count=10)
    with Proxy(active.port) as proxy:
        # Clients of the suspended broker that do not reconnect: their requests are in its socket when it resumes.
        faithful = connect_to(proxy.url)
        session, late = faithful.session("CLIENT"), faithful.session()
        held = session.consumer(queue).receive_many(1)
        persistent, direct = (faithful.session().producer(f"{queue}.{kind}") for kind in ("persistent", "direct"))
        waiting = faithful.session().consumer(f"{queue}.direct").submit("receive", count=1, timeout_ms=int(WAIT_S * 1000))
        said = len(active.broker.said())
        with paused(active.broker.pid):
            asked = [persistent.submit_send("an answer?")]
            session.acknowledge(held[0])
            direct.send("a delivery?", persistent=False)
            asked.append(late.submit("browse", **{"from": queue}))
            wait_for(lambda: all(each in proxy.requests for each in (b"an answer?", b"a delivery?", b"copy")), "all of it to be sent")
            wait_for(other.serves, "the standby to take over")
            assert other.depth(name) == 10
            taken = connect_to(other.url).session().consumer(queue).receive_many(10)
            assert [message.body for message in taken] == [str(n) for n in range(10)]
            assert taken[0].redelivered
        wait_for(active.stands_by, "the stopped broker to find out")
        assert "the epoch ends: this process was suspended" in active.broker.said()[said:]
        for each in (*asked, waiting):
            with pytest.raises(JmsError):
                each.result(WAIT_S)
    with pytest.raises(JmsError):
        faithful.session().producer(queue).send("to a broker that is none")
    assert other.serves()
    assert [other.depth(each) for each in (name, f"{name}.persistent", f"{name}.direct")] == [0, 0, 0]


def test_of_two_brokers_starting_at_once_only_one_serves(both: Pair, connect_to: Connect, queue: str) -> None:
    for system in both.systems:
        system.broker.kill()
    for system in both.systems:
        system.broker.launch()
    serving = both.serving()
    wait_for(both.other(serving).stands_by, "the other broker to stand by")
    for number in range(5):
        connect_to(both.url).session().producer(queue).send(str(number))
    assert serving.serves()
    assert not both.other(serving).serves()


def test_of_two_standbys_one_takes_over(both: Pair, kafka: EmbeddedKafka, connect_to: Connect, queue: str, tmp_path: Path) -> None:
    active = both.serving()
    third = System(kafka.bootstrap, tmp_path, prefix="takeover")
    standbys = [both.other(active), third]
    third.broker.launch()
    try:
        wait_for(third.stands_by, "the third broker to stand by")
        urls = FAILOVER.format(",".join(system.url for system in (active, *standbys)))
        producer = connect_to(urls).session().producer(queue)
        producer.send("before")
        active.broker.kill()
        producer.send("after")
        serving = wait_for(lambda: next((system for system in standbys if system.serves()), None), "one to serve")
        (waiting,) = (system for system in standbys if system is not serving)
        wait_for(waiting.stands_by, "the other broker to stand by")
        assert [message.body for message in connect_to(urls).session().consumer(queue).receive_many(2)] == ["before", "after"]
        assert serving.serves()
        assert not waiting.serves()
    finally:
        third.broker.stop()


@pytest.mark.slow
def test_a_second_broker_in_the_same_data_directory_is_refused(both: Pair, kafka: EmbeddedKafka, tmp_path: Path) -> None:
    serving = both.serving()
    twin = System(kafka.bootstrap, tmp_path, prefix="takeover", env={"BASCULE_EMBEDDED__DATA_DIR": str(serving_directory(serving))})
    twin.broker.launch()
    wait_for(lambda: not twin.broker.running, "the twin to end")
    assert "another broker uses the data directory" in twin.broker.said()
    assert serving.serves()


def serving_directory(system: System) -> Path:
    return system.broker.log_file.parent


def gathered(kafka: EmbeddedKafka, group: str, members: int) -> bool:
    """Return whether Kafka counts a number of members, all of which have their assignments."""
    admin = clients.admin({"bootstrap.servers": kafka.bootstrap})
    (asked,) = admin.describe_consumer_groups([group]).values()
    description = asked.result(WAIT_S)
    return description.state == ConsumerGroupState.STABLE and len(description.members) == members


def test_broker_killed_and_restarted_at_once_serves_before_its_session_times_out(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        # No standby takes over before the session ends, so that the restarted broker can be back.
        config = f"[broker]\nsession_timeout_s = {LONG_SESSION_S}\ntakeover_after_s = 0"
        pair = Pair(kafka, tmp_path, topic_prefix, stack, config)
        wait_for(lambda: gathered(kafka, f"{topic_prefix}.brokers", 2), "both to be members")
        active, standby = pair.systems
        os.kill(active.broker.pid, signal.SIGKILL)
        wait_for(lambda: not active.broker.running, "its end")
        active.broker.launch()
        wait_for(active.serves, "it to serve again, before its session is over", LONG_SESSION_S - 15)
        wait_for(standby.stands_by, "the other broker to stand by")
        assert active.serves()


@pytest.mark.slow
def test_after_broker_kill_during_a_join_one_broker_serves_before_the_session_times_out(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        active, joining = (
            System(kafka.bootstrap, tmp_path / name, prefix=topic_prefix, config=f"[broker]\nsession_timeout_s = {LONG_SESSION_S}")
            for name in ("one", "two")
        )
        stack.enter_context(active)
        stack.callback(joining.broker.stop)
        joining.broker.launch()
        wait_for(lambda: not gathered(kafka, f"{topic_prefix}.brokers", 1), "Kafka to rebalance the group")
        os.kill(active.broker.pid, signal.SIGKILL)
        wait_for(lambda: not active.broker.running, "its end")
        active.broker.launch()
        # The broker that Kafka chooses; the killed one no longer holds a place.
        serving = wait_for(lambda: next((one for one in (active, joining) if one.serves()), None), "one to serve", LONG_SESSION_S - 15)
        other = joining if serving is active else active
        wait_for(other.stands_by, "the other broker to stand by")
        assert serving.serves()


def test_standby_has_read_the_whole_journal_before_the_takeover(
    kafka: EmbeddedKafka, connect_to: Connect, queue: str, topic_prefix: str, tmp_path: Path
) -> None:
    journal, client = f"{topic_prefix}.journal", {"bootstrap.servers": kafka.bootstrap}
    history = TopicHistory(client, journal, 0)
    with ExitStack() as stack:
        pair = Pair(kafka, tmp_path, topic_prefix, stack)
        active, standby = pair.systems
        connect_to(pair.url).session().producer(queue).send("{n}", count=200)

        def all_read() -> int | None:
            """Return the end of the journal if both have it: a record without a message may follow the last one."""
            end = history.latest()
            return end if all(system.status()["gauges"]["journal_offset"] == end for system in (active, standby)) else None

        read: int = wait_for(all_read, "both to have read the whole journal")
        trim(client, journal, {0: read})
        assert history.earliest() == read
        # A broker that only now began to read would not find the messages, and would refuse to serve.
        active.broker.kill()
        assert [message.body for message in connect_to(pair.url).session().consumer(queue).receive_many(200)] == [
            str(n) for n in range(200)
        ]


@pytest.mark.slow
def test_of_two_standbys_that_both_believe_to_be_elected_only_one_serves(
    kafka: EmbeddedKafka, connect_to: Connect, queue: str, topic_prefix: str, tmp_path: Path
) -> None:
    history = TopicHistory({"bootstrap.servers": kafka.bootstrap}, f"{topic_prefix}.journal", 0)
    # The broker that is elected first is suspended after Kafka has confirmed the election, before it writes.
    armed = {ARMED_VARIABLE: "election.confirmed:1:stop", ONCE_VARIABLE: str(tmp_path)}
    active = System(kafka.bootstrap, tmp_path / "active", prefix=topic_prefix)
    standbys = [System(kafka.bootstrap, tmp_path / name, prefix=topic_prefix, env=armed) for name in ("one", "two")]
    url = FAILOVER.format(",".join(system.url for system in (active, *standbys)))
    with active, ExitStack() as stack:
        for system in standbys:
            stack.callback(system.broker.stop)
            system.broker.launch()
        for system in standbys:
            wait_for(system.stands_by, "a standby")
        connect_to(url).session().producer(queue).send("{n}", count=10)
        active.broker.kill()
        first = wait_for(lambda: next((system for system in standbys if stands(system)), None), "the elected broker to be suspended")
        second = next(system for system in standbys if system is not first)
        wait_for(second.serves, "the election of the other broker")
        session = connect_to(second.url).session("CLIENT")
        consumer, producer = session.consumer(queue), session.producer(queue)
        taken = consumer.receive_many(10)
        written = history.latest()
        os.kill(first.broker.pid, signal.SIGCONT)
        wait_for(lambda: history.latest() > written, "the first one's start record")
        assert second.serves()  # it does not know of the takeover, and its writes must have no effect
        session.acknowledge(taken[-1])
        with pytest.raises(JmsError):
            producer.send("to an epoch that is over")
        wait_for(second.serves, "the elected one to begin another")
        with pytest.raises(JmsError):
            connect_to(first.url).session().producer(queue).send("to one that is over by now, or to a standby")
        wait_for(first.stands_by, "the first one to find out")
        connect_to(url).session().producer(queue).send("after")
        rest = connect_to(url).session().consumer(queue).receive_many(11)
        assert [message.body for message in rest] == [*(str(n) for n in range(10)), "after"]
        assert all(message.redelivered for message in rest[:-1])
        assert second.serves()
        assert not first.serves()
