"""The histogram of event loop stalls."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from bascule.server.stalls import PERIOD_S, StallWatch
from tests.unit.server.served import run_async


class Clocks:
    """Time, and the processor time of the thread."""

    def __init__(self) -> None:
        self.now_s = self.used_s = 100.0


def counted(watch: StallWatch, bound: str) -> float:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(watch)
    name = f'bascule_event_loop_stall_seconds_bucket{{le="{bound}"}} '
    text = generate_latest(registry).decode()
    return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


@run_async
async def test_a_late_check_counts_as_a_stall_only_for_processor_time_of_the_thread() -> None:
    clocks = Clocks()
    watch = StallWatch(lambda: False, lambda: clocks.now_s, lambda: clocks.used_s)
    watch.start()
    for late_s, used_s in ((0.0, 0.0), (0.3, 0.3), (0.3, 0.03)):
        clocks.now_s = 100.0 + PERIOD_S + late_s
        clocks.used_s += used_s
        watch.look()
    assert [counted(watch, bound) for bound in ("0.001", "0.02", "0.05", "0.2", "0.5", "+Inf")] == [1, 1, 2, 2, 3, 3]


@run_async
async def test_time_of_loading_does_not_count_as_a_stall() -> None:
    clocks, loading = Clocks(), [False]
    watch = StallWatch(lambda: loading[0], lambda: clocks.now_s, lambda: clocks.used_s)
    watch.start()
    for now_loading in (True, True, False, False):
        loading[0] = now_loading
        clocks.now_s, clocks.used_s = 100.0 + PERIOD_S + 0.3, clocks.used_s + 0.3
        watch.look()
    assert [counted(watch, bound) for bound in ("0.2", "0.5", "+Inf")] == [0, 1, 1]
