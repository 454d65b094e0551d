"""The two sequences of a crash that made other bridges duplicate messages: between an action and the storage of its state.

A crash point stops the writer of the pipelines at the chosen step. Then all processes are killed, and the same broker restarts or its
standby takes over.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.history import TopicHistory
from tests.scenarios.conftest import Connect
from tests.scenarios.topics import Reader, create, produce
from tests.support.proxy import Proxy
from tests.support.system import FAILOVER, SHORT_SESSION, WAIT_S, System, descendants, paused, stands_still, wait_for

pytestmark = pytest.mark.timeout(600)
PREFIX = "seed-000"
#: Time for pipelines to do their pending work.
START_S = 240.0
#: The broker that serves after the crash.
SUCCESSORS = ("same", "standby")
CONFIG = f"""
{SHORT_SESSION}
[pipelines]
master = "local[2]"

[[divert]]
name = "orders"
from = "orders.#"
to = "{PREFIX}.${{address}}"
start = "earliest"
""" + "".join(
    f"""
[[ingress]]
name = "payments-{successor}"
topics = ["{PREFIX}.in.{successor}"]
to = "payments.{successor}"
routing = "anycast"
unbound = "keep"
"""
    for successor in SUCCESSORS
)


class Bridge:
    """A broker, a standby where a test wants one, and pipelines whose writer can be stopped at a crash point."""

    def __init__(self, kafka: EmbeddedKafka, directory: Path) -> None:
        self.bootstrap = kafka.bootstrap
        self._directory = directory
        self.serving, self.other = (System(kafka.bootstrap, directory / name, prefix=PREFIX, config=CONFIG) for name in ("one", "two"))
        self.pipelines = self.serving.pipelines
        self._config = directory / "one" / "bascule.toml"

    def launch_pipelines(self, stop_at: str = "") -> None:
        """``stop_at`` is a crash point in a worker. The first worker that reaches it is suspended there."""
        armed = f"{stop_at}:1:stop" if stop_at else ""
        once = tempfile.mkdtemp(dir=self._directory)
        variables = {ARMED_VARIABLE: armed, ONCE_VARIABLE: once}
        lines = "".join(f'spark."spark.executorEnv.{name}" = "{value}"\n' for name, value in variables.items())
        self._config.write_text(CONFIG.replace("[pipelines]\n", f"[pipelines]\n{lines}"))
        self.pipelines.launch()

    def wait_for_writer(self) -> None:
        """Return when the worker is suspended at its crash point."""
        wait_for(lambda: any(stands_still(Path(f"/proc/{pid}")) for pid in descendants(self.pipelines.pid)), "the writer to stand", START_S)

    def kill_pipelines(self) -> None:
        """Kill driver, Spark and workers at once: a surviving worker would continue its work."""
        for pid in (self.pipelines.pid, *descendants(self.pipelines.pid)):
            with suppress(ProcessLookupError):  # ended with an earlier one
                os.kill(pid, signal.SIGKILL)
        self.pipelines.kill()

    def prepare(self, successor: str) -> None:
        if successor == "standby":
            self.other.broker.launch()
            wait_for(self.other.stands_by, "the standby")
        else:
            self.other.broker.stop()

    def die_and_come_back(self, successor: str) -> None:
        """Crash as a machine does: both processes restart, or the standby of the broker serves instead."""
        self.kill_pipelines()
        self.serving.broker.kill()
        self.launch_pipelines()
        if successor == "standby":
            self.serving, self.other = self.other, self.serving
        else:
            self.serving.broker.launch()
        wait_for(self.serving.serves, "a broker that serves")


@pytest.fixture(scope="module")
def bridge(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    create(kafka.bootstrap, *(f"{PREFIX}.{what}.{successor}" for what in ("orders", "in") for successor in SUCCESSORS))
    found = Bridge(kafka, tmp_path_factory.mktemp(PREFIX))
    with ExitStack() as stack:
        for system in (found.serving, found.other):
            stack.push(system)
        found.serving.broker.start()
        found.launch_pipelines()
        found.pipelines.wait_ready()
        yield found


@pytest.mark.parametrize(
    ("point", "successor"),
    [("writer.commit.before", "same"), pytest.param("writer.commit.after", "standby", marks=pytest.mark.slow)],
)
def test_jms_to_kafka_crash_with_messages_in_transit_and_unanswered_send_is_exactly_once(
    connect_to: Connect, bridge: Bridge, point: str, successor: str
) -> None:
    address, topic_name = f"orders.{successor}", f"{PREFIX}.orders.{successor}"
    bridge.prepare(successor)
    with Proxy(bridge.serving.port) as proxy, closing(Reader(bridge.bootstrap, topic_name)) as topic:
        producer = connect_to(FAILOVER.format(f"{proxy.url},{bridge.other.url}")).session().producer(f"queue:{address}")
        producer.send("message 1")
        topic.read_until("message 1")
        bridge.kill_pipelines()
        producer.send("message 2")
        producer.send("message 3")
        bridge.launch_pipelines(stop_at=point)
        bridge.wait_for_writer()
        # The task of the writer does not learn of a commit, whether there was one or not.
        known = ["message 1"] if point == "writer.commit.before" else ["message 1", "message 2", "message 3"]
        assert topic.read_until(known[-1]) == known
        with closing(Reader(bridge.bootstrap, topic_name, committed=False)) as everything:
            # Records without a known outcome are in Kafka all the same, in an open transaction.
            assert everything.read_until("message 3") == ["message 1", "message 2", "message 3"]
        proxy.hold_answers()
        unanswered = producer.submit_send("message 4")
        bridge.serving.wait_depth(address, 4)
        assert not unanswered.done()
        bridge.serving.broker.kill()
        proxy.cut()
        bridge.die_and_come_back(successor)
        unanswered.result(WAIT_S)
        assert proxy.requests.count(b"message 4") == (2 if successor == "same" else 1)
        producer.send("the end")
        expected = ["message 1", "message 2", "message 3", "message 4", "the end"]
        bridge.pipelines.wait_ready()
        assert topic.read_until("the end") == expected, topic.ids
        messages = connect_to(bridge.serving.url).session().consumer(f"queue:{address}").receive_all(5)
        assert [message.body for message in messages] == expected


@pytest.mark.parametrize("successor", [pytest.param("same", marks=pytest.mark.slow), "standby"])
def test_kafka_to_jms_crash_with_queued_records_and_record_in_transit_is_exactly_once(
    connect_to: Connect, bridge: Bridge, successor: str
) -> None:
    address, topic_name = f"payments.{successor}", f"{PREFIX}.in.{successor}"
    bridge.prepare(successor)
    produce(bridge.bootstrap, topic_name, ["record 1", "record 2", "record 3"])
    bridge.serving.wait_depth(address, 3)
    produce(bridge.bootstrap, topic_name, ["record 4", "record 5"])
    bridge.serving.wait_depth(address, 5)
    if successor == "same":  # 6 is in the pipelines, in an open transaction
        bridge.kill_pipelines()
        produce(bridge.bootstrap, topic_name, ["record 6"])
        bridge.launch_pipelines(stop_at="writer.commit.before")
        bridge.wait_for_writer()
        assert bridge.serving.depth(address) == 5
        bridge.die_and_come_back(successor)
    else:  # 6 is between the pipelines and the broker
        history = TopicHistory({"bootstrap.servers": bridge.bootstrap}, f"{PREFIX}.ingress", 0)
        taken = history.latest()
        with paused(bridge.serving.broker.pid):
            produce(bridge.bootstrap, topic_name, ["record 6"])
            wait_for(lambda: history.latest() > taken, "record 6 to come to the broker's ingress")
            os.kill(bridge.serving.broker.pid, signal.SIGKILL)
        bridge.die_and_come_back(successor)
    produce(bridge.bootstrap, topic_name, ["record 7"])
    bridge.pipelines.wait_ready()
    bridge.serving.wait_depth(address, 7)
    messages = connect_to(bridge.serving.url).session().consumer(f"queue:{address}").receive_all(7)
    assert [message.body for message in messages] == [f"record {number}" for number in range(1, 8)]
