"""Many connections, idle or opening and closing, and one client among them that must not be affected."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bascule.core.log import get_log
from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.crowd import crowd
from tests.support.canary import Canary, canary
from tests.support.speed import SLOWNESS
from tests.support.stalls import check_turns
from tests.support.system import System, wait_for
from tests.support.usage import main_thread_cpu_s, memory_mib

log = get_log(__name__)

#: Processor time of the broker in one round trip of the canary. It stands for a gap of at most one second on a dedicated machine.
GAP_BROKER_S = 1.0 * SLOWNESS
#: Time of a round trip by the clock, on a machine that also runs other tests. The figures are in docs/guarantees.md.
GAP_S = 20.0 * SLOWNESS
#: Processor time of the broker's event loop for a connection that comes and goes, so that a processor serves 500 of them in a second.
EACH_S_MAX = 0.002 * SLOWNESS
#: Memory of the broker for each idle connection with a session.
IDLE_KIB_MAX = 64
#: Limit on file descriptors of a broker with few descriptors.
FEW = 300


@contextmanager
def few_descriptors(pid: int) -> Iterator[None]:
    """Raise this process's limit on file descriptors for the block."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (FEW, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def check(bird: Canary) -> None:
    assert max(bird.broker_s) < GAP_BROKER_S
    assert max(bird.times_s) < GAP_S


def idle(kafka: EmbeddedKafka, directory: Path, prefix: str, count: int) -> None:
    """Check a number of idle connections."""
    with System(kafka.bootstrap, directory, prefix=prefix) as system, canary(system, prefix) as bird:
        before_mib = memory_mib(system.broker.pid)
        begun_s = time.monotonic()
        with crowd("idle", system.port, count) as many:
            connected_s = time.monotonic() - begun_s
            wait_for(lambda: system.status()["gauges"]["connections"] > count, "all connections")
            each_kib = (memory_mib(system.broker.pid) - before_mib) * 1024 / count
            round_trips = bird.look()
            wait_for(lambda: bird.look() > round_trips + 20, "the canary among them")
            assert many.count == count
            assert many.end() == [count]
            bird.look()
        turn_s, gap_s = check_turns(system.metrics()), max(bird.times_s)
        log.info("idle", connections=count, connected_s=connected_s, each_kib=each_kib, longest_gap_s=gap_s, longest_turn_s=turn_s)
        check(bird)
        assert each_kib < IDLE_KIB_MAX
        wait_for(lambda: system.status()["gauges"]["connections"] <= 1, "all are gone")
        assert "Traceback" not in system.broker.said()


def churn(kafka: EmbeddedKafka, directory: Path, prefix: str, per_second: int, seconds: float) -> None:
    """Check a number of connections that open and close each second."""
    with System(kafka.bootstrap, directory, prefix=prefix) as system, canary(system, prefix) as bird:
        before_mib, before_s = memory_mib(system.broker.pid), main_thread_cpu_s(system.broker.pid)
        with crowd("churn", system.port, per_second) as many:
            begun_s = time.monotonic()
            wait_for(lambda: time.monotonic() - begun_s > seconds, "the load", seconds + 60)
            count, rate, longest_open_s = many.end()
            bird.look()
        more_mib, each_s = memory_mib(system.broker.pid) - before_mib, (main_thread_cpu_s(system.broker.pid) - before_s) / count
        turn_s, gap_s = check_turns(system.metrics()), max(bird.times_s)
        log.info(
            "churn", connections=count, rate=rate, open_s=longest_open_s, gap_s=gap_s, more_mib=more_mib, longest_turn_s=turn_s,
            each_s=each_s,
        )  # fmt: skip
        check(bird)
        assert each_s < EACH_S_MAX
        wait_for(lambda: system.status()["gauges"]["connections"] <= 1, "all are gone")
        wait_for(lambda: system.status()["gauges"]["handshakes"] == 0, "no handshake to be left")
        assert more_mib < 32
        assert "Traceback" not in system.broker.said()


def test_idle_connections_do_not_disturb_a_client(kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str) -> None:
    idle(kafka, tmp_path, topic_prefix, 300)


def test_connection_churn_does_not_disturb_a_client(kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str) -> None:
    churn(kafka, tmp_path, topic_prefix, 50, 5)


@pytest.mark.slow
def test_3000_idle_connections_do_not_disturb_a_client(kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str) -> None:
    idle(kafka, tmp_path, topic_prefix, int(os.environ.get("BASCULE_IDLE_CONNECTIONS", "3000")))


@pytest.mark.slow
def test_500_connections_per_second_do_not_disturb_a_client(kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str) -> None:
    churn(kafka, tmp_path, topic_prefix, 500, 30)


def test_connections_beyond_descriptor_limit_are_refused_without_harm_to_connected_clients(
    kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str
) -> None:
    """The broker refuses connections beyond the limit. It still reaches Kafka and its files, and its administrator reaches the broker."""
    with System(kafka.bootstrap, tmp_path, prefix=topic_prefix) as system, canary(system, topic_prefix) as bird:
        with few_descriptors(system.broker.pid), crowd("idle", system.port, FEW) as many:
            assert 0 < many.count < FEW
            assert system.status()["counters"]["connections_refused"] > 0
            round_trips = bird.look()
            wait_for(lambda: bird.look() > round_trips + 20, "the canary among them")
            assert many.end() == [many.count]
        check(bird)
        said = system.broker.said()
        assert said.count("connections refused") == 1
        assert "Traceback" not in said
        with crowd("idle", system.port, 10) as again:
            assert again.count == 10
