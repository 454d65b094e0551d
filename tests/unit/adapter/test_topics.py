"""The topics of a group are created for the largest records of its sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bascule.adapter.inbound import ActivationSpec, topics

LARGE = 10 << 20


class Kafka:
    """A cluster with topics, and the maximum record size of each."""

    sizes: Mapping[str, int] = {"pay.large": LARGE, "pay.small": 1 << 10, "other": 2 * LARGE}

    def __init__(self, _kafka: Mapping[str, Any]) -> None: ...

    def reach(self) -> None: ...

    def partitions(self) -> dict[str, int]:
        return dict.fromkeys(self.sizes, 1)

    def config(self, topic: str) -> dict[str, str]:
        return {"max.message.bytes": str(self.sizes[topic])}


@pytest.mark.parametrize(
    ("sources", "largest"), [(("pay.large", "absent"), LARGE), (("^pay\\..*",), LARGE), (("pay.small",), topics.RECORD_BYTES)]
)
def test_retry_and_dead_letter_topics_fit_largest_record_of_sources_and_patterns(
    monkeypatch: pytest.MonkeyPatch, sources: tuple[str, ...], largest: int
) -> None:
    made: dict[str, int] = {}

    def ensure(_kafka: object, topic: str, _role: object, _partitions: int, config: Mapping[str, str], *, record_bytes: int) -> None:
        assert config["max.message.bytes"] == str(record_bytes)
        made[topic] = record_bytes

    monkeypatch.setattr(topics, "Topics", Kafka)
    monkeypatch.setattr(topics, "ensure", ensure)
    topics.set_up({}, ActivationSpec(topics=sources, group="g"))
    assert made == dict.fromkeys(("g.retry", "g.dead-letter"), largest + topics.HEADERS_BYTES_MAX)
