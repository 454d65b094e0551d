"""Endpoints that share a worker pool, on a real Kafka."""

from __future__ import annotations

import threading
from collections import Counter
from urllib.request import urlopen

import pytest

from bascule.adapter.inbound import ActivationSpec, PoolStatus, Record, ResourceAdapter, WorkerPool
from bascule.adapter.inbound.metrics import serve_metrics
from bascule.core.errors import InvalidInput
from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.adapter_topics import create, produce
from tests.scenarios.inbound_endpoints import QUICK, Seen, nothing_in_flight, values
from tests.support.system import wait_for

#: Records whose endpoint runs until the test ends it.
SLOW = 40


@pytest.mark.slow
def test_slow_endpoint_blocks_no_other_endpoint_of_its_pool_and_both_stop_cleanly(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    slow_topic, quick_topic = f"{topic_prefix}.slow", f"{topic_prefix}.quick"
    create(kafka.bootstrap, slow_topic, quick_topic)
    go_on, at_work = threading.Event(), threading.Semaphore(0)

    def hold(_: Record) -> None:
        at_work.release()
        go_on.wait()  # as long as the test checks the other endpoint

    slow, quick = Seen(hold), Seen()
    adapter, pool = ResourceAdapter({"bootstrap.servers": kafka.bootstrap}), WorkerPool(4, topic_prefix)
    for topic, endpoint in ((slow_topic, slow), (quick_topic, quick)):
        adapter.activate(
            ActivationSpec(topics=(topic,), group=topic, workers=4, backoff=QUICK, pool=pool, delivery_timeout_s=600), endpoint
        )
    produce(kafka.bootstrap, slow_topic, values(SLOW))
    with adapter:
        try:
            for _ in range(3):  # the fourth thread belongs to the other endpoint
                assert at_work.acquire(timeout=60)
            for count in (10, 20, 30):
                produce(kafka.bootstrap, quick_topic, values(10))
                quick.wait(count)
            # No slow thread has ended, with or without its record, and none has been replaced.
            at_rest = PoolStatus(topic_prefix, 4, 3, 0, (quick_topic, slow_topic))
            wait_for(lambda: pool.status() == at_rest, "the thread of the last quick record to end its work")
            assert slow.records == []
            assert set(adapter.status()[0].counts.values()) == {0}
            assert not at_work.acquire(blocking=False)  # and no fourth one has begun
            with urlopen(f"http://127.0.0.1:{serve_metrics(adapter, 0)}/metrics", timeout=30) as answer:
                said = answer.read().decode()
            assert f'bascule_adapter_pool_at_work{{pool="{topic_prefix}"}} 3.0' in said
            assert f'bascule_adapter_at_work{{group="{slow_topic}"}} 3.0' in said
        finally:
            go_on.set()
    # Records whose endpoint ran are done, and waiting records are in flight; a restart handles them.
    assert pool.status().groups == ()
    wait_for(lambda: not [each for each in threading.enumerate() if each.name.startswith(f"bascule-pool-{topic_prefix}-")], "no thread")
    with adapter:
        slow.wait(SLOW)
    assert Counter(slow.values) == Counter(values(SLOW))
    assert Counter(quick.values) == Counter(values(10) * 3)
    for topic in (slow_topic, quick_topic):
        nothing_in_flight(kafka, topic)


def test_adapter_whose_pool_is_too_small_does_not_start(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    create(kafka.bootstrap, f"{topic_prefix}.a", f"{topic_prefix}.b")
    adapter, pool = ResourceAdapter({"bootstrap.servers": kafka.bootstrap}), WorkerPool(1, topic_prefix)
    seen = Seen()
    for topic in (f"{topic_prefix}.a", f"{topic_prefix}.b"):
        adapter.activate(ActivationSpec(topics=(topic,), group=topic, pool=pool), seen)
    with pytest.raises(InvalidInput, match="raise threads"):
        adapter.start()
    assert pool.status().groups == ()
    adapter.deactivate(adapter._activations[1])
    produce(kafka.bootstrap, f"{topic_prefix}.a", ["one"])
    with adapter:
        assert seen.wait(1) == ["one"]
