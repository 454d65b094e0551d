"""A soak reports the turns of a broker's event loop that delay other tasks, and no other turns."""

from __future__ import annotations

import asyncio
import time

import uvloop
from prometheus_client import CollectorRegistry, generate_latest

from bascule.server.stalls import PERIOD_S, StallWatch
from tests.support.stalls import TURN_S_MAX, StallLog, longest_turn_s


def busy(for_s: float) -> None:
    began_s = time.thread_time()
    while time.thread_time() - began_s < for_s:
        pass


async def two_measurements() -> None:
    """Wait until the watch has measured twice."""
    await asyncio.sleep(2 * PERIOD_S)


def test_stall_of_a_real_event_loop_is_reported_exactly_once() -> None:
    log, registry, loading = StallLog(), CollectorRegistry(), [False]

    def take_sample(at_s: float, pid: int = 7) -> None:
        log.take(at_s, "broker-0", pid, generate_latest(registry).decode())

    async def run() -> None:
        watch = StallWatch(lambda: loading[0])
        registry.register(watch)
        watch.start()
        await two_measurements()
        time.sleep(3 * TURN_S_MAX)  # a loop that gets no CPU time is not a stall of the loop
        await two_measurements()
        take_sample(1.0)
        assert log.found == []
        busy(3 * TURN_S_MAX)
        await two_measurements()
        take_sample(2.0)
        take_sample(3.0)
        loading[0] = True
        busy(3 * TURN_S_MAX)
        await two_measurements()
        take_sample(4.0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    (stall,) = log.found
    assert (stall.at_s, stall.part, stall.turns) == (2.0, "broker-0", 1)
    assert stall.bound_s >= 3 * TURN_S_MAX
    assert longest_turn_s(generate_latest(registry).decode()) == stall.bound_s
    take_sample(5.0, pid=8)
    assert [each.turns for each in log.found] == [1, 1]  # a new process starts a new count


def test_turns_before_a_sample_do_not_count_after_the_sample() -> None:
    now_s, used_s = [0.0], [0.0]
    watch, registry = StallWatch(lambda: False, lambda: now_s[0], lambda: used_s[0]), CollectorRegistry()
    registry.register(watch)

    def metrics(*turns_s: float) -> str:
        for turn_s in turns_s:
            now_s[0] += turn_s
            used_s[0] += turn_s
            watch._due_s = now_s[0] - turn_s
            watch.look()
        return generate_latest(registry).decode()

    before = metrics(0.0, 0.3)
    after = metrics(0.04)
    assert longest_turn_s(after) == 0.5
    assert longest_turn_s(after, since=before) == 0.05
