"""The sizes that the journal accepts, by the limit of its topic."""

from __future__ import annotations

import pytest

from bascule.kafka.guards import UnsafeTopic
from bascule.server.topics import JournalCapacity

MIB = 1 << 20


@pytest.mark.parametrize(("limit", "content_bytes"), [(70 * MIB, 64 * MIB), (20 * MIB, 14 * MIB), (8 * MIB, 4 * MIB), (1_000_000, 500_000)])
def test_the_message_limit_is_the_record_limit_without_overhead(limit: int, content_bytes: int) -> None:
    room = JournalCapacity("journal", limit, limit)
    assert (room.content_bytes, room.shortage) == (content_bytes, None)


def test_a_record_that_no_epoch_can_store_is_reported_with_its_size() -> None:
    """Even if the topic is large enough for the current configuration: the message may be older."""
    room = JournalCapacity("journal", 1_000_000, 1_000_000)
    room.check([])
    room.check([500_000, 999_000])
    with pytest.raises(UnsafeTopic, match=r"topic 'journal' has max\.message\.bytes=1000000: .*; set 1200128"):
        room.check([500_000, 1_200_000])
