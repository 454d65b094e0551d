"""The pools of Spark's Python workers."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.java_collections import MapConverter

from bascule.pipelines.pools import WorkerPools


def test_pool_applies_within_its_block_and_blocks_may_be_nested() -> None:
    context: Any = SimpleNamespace(environment={"HOME": "here"})
    pools = WorkerPools(lambda: context)
    with pools.using("outer"):
        with pools.using("inner"):
            assert dict(context.environment) == {"HOME": "here", "BASCULE_PIPELINE": "inner"}
        assert dict(context.environment) == {"HOME": "here", "BASCULE_PIPELINE": "outer"}
        with pytest.raises(ZeroDivisionError), pools.using("fails"):
            _ = 1 / 0
    assert dict(context.environment) == {"HOME": "here"}


def test_environment_can_be_changed_and_passed_to_the_jvm() -> None:
    context: Any = SimpleNamespace(environment={"HOME": "here"})
    with WorkerPools(lambda: context).using("one"):
        context.environment["LANG"] = "C"
        assert len(context.environment) == 3
        del context.environment["HOME"]
        assert MapConverter().can_convert(context.environment)
    assert dict(context.environment) == {"LANG": "C"}


def test_pool_of_one_thread_is_not_that_of_another_one_and_neither_waits() -> None:
    context: Any = SimpleNamespace(environment={})
    pools, seen = WorkerPools(lambda: context), list[str]()

    def use() -> None:
        with pools.using("other"):
            seen.append(context.environment["BASCULE_PIPELINE"])
        seen.append(context.environment.get("BASCULE_PIPELINE", "none"))

    with pools.using("one"):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join(30)
        assert seen == ["other", "none"]
        assert context.environment["BASCULE_PIPELINE"] == "one"
