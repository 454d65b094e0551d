"""A standby takes over long before the session of a killed broker ends, but not because its connection to a live broker was cut."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import free_port
from tests.scenarios.conftest import Connect
from tests.scenarios.test_takeover import Pair, told
from tests.support.proxy import Proxy
from tests.support.system import FAILOVER, WAIT_S, System, paused, wait_for

#: A takeover within half of it has not waited for it. The longest session that a client accepts without a longer interval of polls.
SESSION_S = 60.0
#: A busy machine may delay an answer. A broker that does not live gives none, so the time only delays the takeover.
PATIENT_S = 15.0
#: For a test whose broker is suspended before its connection is cut: no live broker has to answer.
IMPATIENT_S = 2.0
CUTS = 20


def killed_in_turn(pair: Pair, connect_to: Connect, queue: str, kills: int) -> list[float]:
    """Kill the serving broker this many times, and return the seconds of each takeover. No message is lost or doubled."""
    producer = connect_to(pair.url).session().producer(queue)
    times: list[float] = []
    for number in range(kills):
        active = pair.serving()
        standby = pair.other(active)
        wait_for(partial(watches, standby), "the standby to watch the elected broker")
        producer.send(str(number))
        active.broker.kill()
        killed_s = time.monotonic()
        wait_for(standby.serves, "the standby to take over", SESSION_S / 2)
        times.append(time.monotonic() - killed_s)
        active.broker.launch()
        wait_for(active.stands_by, "the killed broker to stand by")
    received = connect_to(pair.url).session().consumer(queue).receive_many(kills)
    assert [message.body for message in received] == [str(number) for number in range(kills)]
    return times


def watches(system: System) -> bool:
    """Return True if a standby has a connection to the elected broker."""
    return bool(system.status()["gauges"]["watches_elected"])


def test_standby_takes_over_from_killed_brokers_long_before_their_sessions_end(
    kafka: EmbeddedKafka, connect_to: Connect, queue: str, topic_prefix: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        pair = Pair(kafka, tmp_path, topic_prefix, stack, f"[broker]\nsession_timeout_s = {SESSION_S}")
        told(f"taken over after {killed_in_turn(pair, connect_to, queue, 2)} s")


@pytest.mark.slow
def test_standby_takes_over_from_twenty_killed_brokers_in_turn(
    kafka: EmbeddedKafka, connect_to: Connect, queue: str, topic_prefix: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        pair = Pair(kafka, tmp_path, topic_prefix, stack, f"[broker]\nsession_timeout_s = {SESSION_S}")
        times = killed_in_turn(pair, connect_to, queue, 20)
        told(f"taken over after {statistics.median(times):.2f} s (median), at most {max(times):.2f} s")


class Watched:
    """A broker whose standby reaches it through a proxy."""

    def __init__(self, kafka: EmbeddedKafka, directory: Path, prefix: str, stack: ExitStack, patience_s: float) -> None:
        port = free_port()
        self.proxy = stack.enter_context(Proxy(port))
        config = f"[broker]\nsession_timeout_s = {SESSION_S}\ntakeover_after_s = {patience_s}\n"
        through = f'standby_port = {port}\nstandby_address = "127.0.0.1:{self.proxy.port}"\n'
        self.active = stack.enter_context(System(kafka.bootstrap, directory / "one", prefix=prefix, config=config + through))
        self.standby = System(kafka.bootstrap, directory / "two", prefix=prefix, config=config)
        stack.callback(self.standby.broker.stop)
        self.standby.broker.launch()
        wait_for(lambda: watches(self.standby), "the standby to watch the elected broker")

    @property
    def url(self) -> str:
        return FAILOVER.format(f"{self.active.url},{self.standby.url}")

    def cut(self) -> None:
        """Cut the connection, and return when the standby has another one."""
        hellos = self.proxy.requests.count(b"\n")
        self.proxy.cut()
        wait_for(lambda: self.proxy.requests.count(b"\n") > hellos and watches(self.standby), "another connection")


@pytest.fixture
def watched(request: pytest.FixtureRequest, kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[Watched]:
    """The parameter is the time after which the standby replaces a broker that does not answer."""
    with ExitStack() as stack:
        yield Watched(kafka, tmp_path, topic_prefix, stack, request.param)


@pytest.mark.parametrize("watched", [PATIENT_S], indirect=True, ids=[""])
def test_cut_connection_between_the_brokers_changes_nothing(watched: Watched, connect_to: Connect, queue: str) -> None:
    session = connect_to(watched.active.url).session()  # without failover: a change of hands would end it
    producer, consumer = session.producer(queue), session.consumer(queue)
    said = len(watched.standby.broker.said())
    for number in range(CUTS // 4):
        watched.cut()
        producer.send(str(number))
        assert consumer.receive_many(1)[0].body == str(number)
    wait_for(lambda: watched.active.serves() and watched.standby.stands_by(), "the brokers to have their roles")
    found = watched.standby.broker.said()[said:]
    assert "challenge answered" in found
    assert "replacing the elected broker" not in found
    # The standby has not spent its trust: it still takes over from a killed broker.
    watched.active.broker.kill()
    wait_for(watched.standby.serves, "the standby to take over", SESSION_S - 15)


@pytest.mark.parametrize("watched", [IMPATIENT_S], indirect=True, ids=[""])
def test_suspended_broker_whose_connection_is_cut_is_replaced_and_stands_by_after_it_resumes(
    watched: Watched, connect_to: Connect, queue: str
) -> None:
    producer = connect_to(watched.url).session().producer(queue)
    producer.send("before")
    with paused(watched.active.broker.pid):
        watched.proxy.cut()
        wait_for(watched.standby.serves, "the standby to take over", SESSION_S - 15)
        connect_to(watched.standby.url).session().producer(queue).send("meanwhile")
    wait_for(watched.active.stands_by, "the replaced broker to stand by")
    assert watched.standby.serves()
    producer.send("after")
    received = connect_to(watched.url).session().consumer(queue).receive_many(3)
    assert [message.body for message in received] == ["before", "meanwhile", "after"]
    wait_for(lambda: watches(watched.active), "the replaced broker to watch its successor", WAIT_S)
