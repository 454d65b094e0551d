"""A soak finds the turns of a broker's event loop that keep others waiting, and no other ones."""

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


async def turns() -> None:
    """A look before and one behind."""
    await asyncio.sleep(2 * PERIOD_S)


def test_stall_of_a_real_event_loop_is_reported_exactly_once() -> None:
    log, registry, loading = StallLog(), CollectorRegistry(), [False]

    def look(at_s: float, pid: int = 7) -> None:
        log.take(at_s, "broker-0", pid, generate_latest(registry).decode())

    async def run() -> None:
        watch = StallWatch(lambda: loading[0])
        registry.register(watch)
        watch.start()
        await turns()
        time.sleep(3 * TURN_S_MAX)  # a machine that gives the broker no processor is no stall of its own
        await turns()
        look(1.0)
        assert log.found == []
        busy(3 * TURN_S_MAX)
        await turns()
        look(2.0)
        look(3.0)
        loading[0] = True
        busy(3 * TURN_S_MAX)
        await turns()
        look(4.0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    (stall,) = log.found
    assert (stall.at_s, stall.part, stall.turns) == (2.0, "broker-0", 1)
    assert stall.bound_s >= 3 * TURN_S_MAX
    assert longest_turn_s(generate_latest(registry).decode()) == stall.bound_s
    look(5.0, pid=8)
    assert [each.turns for each in log.found] == [1, 1]  # another process counts anew


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
