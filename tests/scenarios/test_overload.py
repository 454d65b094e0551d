"""Load beyond the memory limit: producers wait, transactions are refused, other clients are served, and memory stays bounded."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bascule.core.log import get_log
from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.overload import Figures, Overload
from tests.support.canary import SOON_S
from tests.support.speed import SLOWNESS
from tests.support.stalls import LONGEST_S_MAX, longest_turn_s
from tests.support.system import System, wait_for

log = get_log(__name__)

#: Memory of a process beside its accounted memory: the allocator, and the temporary needs of a turn.
BEYOND_MIB = 64
#: Processor time of the broker in one round trip of the canary. It stands for a gap of at most one second on a dedicated machine.
GAP_BROKER_S = 1.0 * SLOWNESS
#: Time of a round trip by the clock, on a machine that may give the broker a tenth of a processor.
GAP_S = 20.0 * SLOWNESS
CONFIG = """
[broker]
memory_bytes = "{memory_mib} MiB"
spill_bytes = "64 MiB"
session_timeout_s = 30
"""


@contextmanager
def loaded(kafka: EmbeddedKafka, directory: Path, prefix: str, memory_mib: int) -> Iterator[tuple[System, Overload]]:
    """Give a broker with a limited memory and its clients; check the canary at both ends, and stop them."""
    with System(kafka.bootstrap, directory, prefix=prefix, config=CONFIG.format(memory_mib=memory_mib)) as system:
        load = Overload(system, f"{prefix}.load")
        try:
            wait_for(load.canary.look, "the canary")
            load.start(load.look, load=False)
            yield system, load
            round_trips = load.canary.look()
            wait_for(lambda: load.canary.look() > round_trips, "the canary")
        finally:
            load.stop()
        load.figures.longest_turn_s = longest_turn_s(system.metrics())
        assert "Traceback" not in system.broker.said()


def end_load(load: Overload, consumers: int, normal: Callable[[], bool], what: str) -> None:
    """End the load, and measure the time until consumers have brought the broker back to normal."""
    load.end_load()
    ended_s = time.monotonic()
    for _ in range(consumers):
        load.start(load.consume(0), load=False)
    wait_for(normal, what, 4 * SOON_S)
    load.figures.normal_after_s = time.monotonic() - ended_s


def overload(kafka: EmbeddedKafka, directory: Path, prefix: str, memory_mib: int, load_s: float, hung: int) -> Figures:
    """Producers ten times as fast as consumers, consumers that do not read, large open transactions; until everything is normal again."""
    with loaded(kafka, directory, prefix, memory_mib) as (system, load):
        load.start(load.consume(0.002), load=False)
        load.start(load.transact)
        load.start(load.transact)
        wait_for(lambda: load.figures.refused, "a transaction to be refused")
        for client in (load.produce, load.produce, *(load.hang,) * hung):
            load.start(client)
        begun_s = time.monotonic()
        wait_for(lambda: load.figures.blocked_seen and time.monotonic() - begun_s > load_s, "the load", load_s + SOON_S)
        end_load(load, 2, lambda: not system.status()["memory"]["blocked"], "producers to continue")
    said = system.broker.said()
    assert "producers blocked" in said
    assert "producers unblocked" in said
    return load.figures


def not_reading(kafka: EmbeddedKafka, directory: Path, prefix: str, memory_mib: int, load_s: float, hung: int) -> Figures:
    """Consumers that give credit and do not read, and producers for them; until the waiting messages are received."""
    with loaded(kafka, directory, prefix, memory_mib) as (system, load):
        for client in (*(load.hang,) * hung, load.produce):
            load.start(client)
        begun_s = time.monotonic()
        wait_for(lambda: time.monotonic() - begun_s > load_s, "the load", load_s + SOON_S)
        end_load(load, 1, lambda: not system.depth(load.queue.name), "the waiting messages to be received")
    return load.figures


def check(figures: Figures, memory_mib: int) -> None:
    log.info("overload", **dataclasses.asdict(figures))
    assert figures.peak_mib < figures.idle_mib + memory_mib + BEYOND_MIB
    assert figures.round_trips > 5
    assert 0 < figures.longest_turn_s <= LONGEST_S_MAX
    assert figures.longest_gap_broker_s < GAP_BROKER_S
    assert figures.longest_gap_s < GAP_S


def test_overload_blocks_producers_only_and_memory_stays_bounded(kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str) -> None:
    figures = overload(kafka, tmp_path, topic_prefix, 8, load_s=3, hung=2)
    check(figures, 8)
    assert "amqp:resource-limit-exceeded" in figures.refusal


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_minutes_of_overload_block_producers_only_and_memory_stays_bounded(
    kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str
) -> None:
    load_s = float(os.environ.get("BASCULE_OVERLOAD_S", "120"))
    figures = overload(kafka, tmp_path, topic_prefix, 64, load_s=load_s, hung=20)
    check(figures, 64)
    assert "amqp:resource-limit-exceeded" in figures.refusal


@pytest.mark.slow
def test_200_consumers_that_do_not_read_disturb_no_other_client(kafka: EmbeddedKafka, tmp_path: Path, topic_prefix: str) -> None:
    check(not_reading(kafka, tmp_path, topic_prefix, 64, load_s=30, hung=200), 64)
