"""The pools of Spark's Python workers."""

from __future__ import annotations

import threading

import pytest

from bascule.pipelines.pools import WorkerPools


def test_pool_applies_within_its_block_and_blocks_may_be_nested() -> None:
    environment: dict[str, str] = {}
    pools = WorkerPools(lambda: environment)
    with pools.using("outer"):
        with pools.using("inner"):
            assert environment == {"BASCULE_PIPELINE": "inner"}
        assert environment == {"BASCULE_PIPELINE": "outer"}
        with pytest.raises(ZeroDivisionError), pools.using("fails"):
            _ = 1 / 0
    assert environment == {}


def test_pool_of_one_thread_is_not_that_of_another_one() -> None:
    environment: dict[str, str] = {}
    pools, seen = WorkerPools(lambda: environment), list[tuple[str, str]]()
    begun, other = threading.Event(), threading.Event()

    def use() -> None:
        begun.set()
        with pools.using("other"):
            other.set()
            seen.append(("other", environment["BASCULE_PIPELINE"]))

    thread = threading.Thread(target=use)
    with pools.using("one"):
        thread.start()
        assert begun.wait(30)
        assert not other.wait(0.05)
        seen.append(("one", environment["BASCULE_PIPELINE"]))
    thread.join()
    assert seen == [("one", "one"), ("other", "other")]
