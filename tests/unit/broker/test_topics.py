from __future__ import annotations

from tests.unit.broker.conftest import Bench


def test_each_subscription_receives_every_message_once(bench: Bench) -> None:
    one, two = bench.subscription("one"), bench.subscription("two", durable=False)
    bench.fill(1, 2, to="t")
    assert bench.got(bench.consumer(one)) == [1, 2]
    assert bench.got(bench.consumer(two)) == [1, 2]


def test_acknowledging_for_one_subscription_leaves_the_message_in_the_other(bench: Bench) -> None:
    one, two = bench.subscription("one"), bench.subscription("two")
    bench.fill(1, to="t")
    bench.acknowledge(bench.consumer(one))
    bench.broker.settle()
    bench.crash()
    subscriptions = bench.engine.addresses.subscriptions
    assert bench.waiting(subscriptions["one"]) == []
    assert bench.waiting(subscriptions["two"]) == [1]
    assert (one.name, two.name) == ("one", "two")


def test_a_body_is_released_when_the_last_subscription_releases_the_message(bench: Bench) -> None:
    queues = [bench.subscription(name) for name in ("one", "two")]
    bench.fill(1, to="t")
    bench.acknowledge(bench.consumer(queues[0]))
    assert bench.engine.bodies.memory_bytes > 0
    bench.acknowledge(bench.consumer(queues[1]))
    assert bench.engine.bodies.memory_bytes == 0


def test_a_subscription_gets_no_messages_from_before_its_creation(bench: Bench) -> None:
    bench.fill("before", to="t")
    queue = bench.subscription("late")
    bench.fill("after", to="t")
    assert bench.got(bench.consumer(queue)) == ["after"]


def test_a_subscriptions_selector_is_evaluated_when_the_message_is_sent(bench: Bench) -> None:
    queue = bench.subscription("tall", selector="height > 2")
    bench.fill("small", to="t", properties={"height": 1})
    bench.fill("tall", to="t", properties={"height": 3})
    assert bench.waiting(queue) == ["tall"]


def test_no_local_excludes_messages_of_the_same_connection(bench: Bench) -> None:
    queue = bench.subscription("others", no_local="me")
    bench.fill("mine", to="t", container="me")
    bench.fill("yours", to="t", container="you")
    assert bench.waiting(queue) == ["yours"]


def test_subscription_to_pattern_receives_messages_of_matching_topics(bench: Bench) -> None:
    queue = bench.subscription("news", "t.news.#")
    for topic in ("t.news", "t.news.uk", "t.sport"):
        bench.fill(topic, to=topic)
    assert bench.waiting(queue) == ["t.news", "t.news.uk"]


def test_queue_and_topic_with_same_name_are_separate_destinations(bench: Bench) -> None:
    queue = bench.subscription("one", "q")
    bench.fill(1)
    assert bench.waiting(queue) == []
    assert bench.waiting(bench.queue()) == [1]


def test_a_durable_subscription_keeps_its_messages_and_its_selector_over_a_crash(bench: Bench) -> None:
    bench.subscription("tall", selector="height > 2", no_local="me")
    bench.fill(1, to="t", properties={"height": 3})
    bench.crash()
    queue = bench.engine.addresses.subscriptions["tall"]
    bench.fill(2, to="t", properties={"height": 1})
    bench.fill(3, to="t", properties={"height": 3})
    assert bench.waiting(queue) == [1, 3]
    assert queue.no_local_container == "me"


def test_a_non_durable_subscription_does_not_survive_a_crash(bench: Bench) -> None:
    bench.subscription("passing", durable=False)
    bench.fill(1, to="t")
    bench.crash()
    assert not bench.engine.addresses.subscriptions


def test_a_topic_message_without_subscription_is_journaled_only_for_the_pipelines(bench: Bench) -> None:
    records = len(bench.broker.log.records)
    bench.fill(1, to="t")
    assert bench.sender.accepted_tokens == [1]
    assert len(bench.broker.log.records) == records + 1
    assert bench.engine.bodies.memory_bytes == 0
