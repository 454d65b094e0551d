"""Batches of a Spark job that the writer recognises as repeated, and batches that it refuses."""

from __future__ import annotations

import pytest

from bascule.pipelines.sink import is_written
from bascule.writer.position import Position, PositionLost

#: Batch 2 was the last batch and had five messages.
WRITTEN = Position("batches", "mine", 0, 3, sequence=5)
#: The position that an earlier version wrote, without the number of messages.
UNCOUNTED = Position("batches", "mine", 0, 3)


def written(before: Position | None, batch: int, messages: int = 5, query: str = "mine") -> bool:
    return is_written("w", before, query, batch, messages)


def test_repeated_sink_batch_is_recognised_by_number_and_size() -> None:
    assert written(WRITTEN, 2)
    assert written(UNCOUNTED, 2, messages=7)
    assert not written(WRITTEN, 3, messages=7)
    assert not written(None, 0)


@pytest.mark.parametrize("messages", [0, 4, 6])
def test_last_sink_batch_with_different_size_is_refused(messages: int) -> None:
    with pytest.raises(PositionLost, match=f"batch 2 with 5 messages, and Spark repeats the batch with {messages}: .* is too old"):
        written(WRITTEN, 2, messages)


@pytest.mark.parametrize(
    ("before", "batch", "query"), [(WRITTEN, 1, "mine"), (WRITTEN, 2, "another"), (None, 7, "mine"), (WRITTEN, 0, "new")]
)
def test_sink_query_with_new_checkpoint_needs_new_id(before: Position | None, batch: int, query: str) -> None:
    with pytest.raises(PositionLost, match="another id and the query a new checkpoint"):
        written(before, batch, query=query)
    assert not written(None, 0, query=query)
