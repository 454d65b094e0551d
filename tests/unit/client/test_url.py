"""URLs of brokers, and the order of attempts to connect."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bascule.client.url import BrokerUrl, Endpoint, Plan, Reconnect
from bascule.core.errors import InvalidInput

A, B = Endpoint("a", 5672), Endpoint("b", 1234)


def test_broker_url_is_parsed_with_user_password_and_default_ports() -> None:
    assert BrokerUrl.parse("amqp://ann:h%40sh@broker:1234") == BrokerUrl((Endpoint("broker", 1234),), None, "ann", "h@sh")
    assert BrokerUrl.parse("amqp://[::1]").endpoints == (Endpoint("::1", 5672),)
    assert BrokerUrl.parse("amqps://broker").endpoints == (Endpoint("broker", 5671, tls=True),)


def test_qpid_jms_options_are_parsed_inside_and_after_failover() -> None:
    address = BrokerUrl.parse(
        "failover:(amqp://a,amqp://b:1234)?jms.clientID=billing&failover.reconnectDelay=20&failover.maxReconnectDelay=200"
        "&failover.maxReconnectAttempts=3&failover.randomize=true&jms.prefetchPolicy.all=5&jms.requestTimeout=1500"
    )
    assert address.endpoints == (A, B)
    assert address.reconnect == Reconnect(delay_s=0.02, delay_max_s=0.2, attempts_max=3, randomize=True)
    assert (address.client_id, address.prefetch, address.timeout_s) == ("billing", 5, 1.5)
    assert BrokerUrl.parse("failover:(amqp://a?jms.username=ann&jms.password=x,amqp://b:1234)").user == "ann"
    assert BrokerUrl.parse("amqp://a?jms.requestTimeout=-1").timeout_s is None


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://a", "invalid broker URL"),
        ("amqp://", "invalid broker URL"),
        ("amqp://a:b", "amqp://a:b"),
        ("amqp://a/queue", "invalid broker URL"),
        ("failover:(http://a)", "invalid broker URL"),
        ("amqp://a?jms.clientId=x", "unknown URL option 'jms.clientId'; the options are .*jms.clientID"),
        ("amqp://a?failover.reconnectDelay=1", "only valid after failover"),
        ("failover:(amqp://a)?failover.reconnectDelay=soon", "reconnectDelay: 'soon'"),
    ],
)
def test_invalid_broker_url_is_named_in_error(url: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        BrokerUrl.parse(url)


def steps(plan: Plan, count: int) -> list[tuple[str, float] | None]:
    found = [plan.next() for _ in range(count)]
    return [step and (step[0].host, step[1]) for step in found]


def test_broker_without_failover_is_tried_once() -> None:
    plan = Plan([A], None)
    assert steps(plan, 2) == [("a", 0.0), None]
    plan.succeeded(A)
    assert steps(plan, 1) == [None]


def test_reconnect_delay_grows_each_round_up_to_maximum() -> None:
    plan = Plan([A, B], Reconnect(delay_s=1.0, delay_max_s=3.0))
    assert steps(plan, 8) == [("a", 0.0), ("b", 0.0), ("a", 1.0), ("b", 0.0), ("a", 2.0), ("b", 0.0), ("a", 3.0), ("b", 0.0)]


def test_reconnect_after_success_starts_with_same_broker_and_initial_delay() -> None:
    plan = Plan([A, B], Reconnect(delay_s=1.0, initial_delay_s=0.5))
    steps(plan, 4)
    plan.succeeded(B)
    assert steps(plan, 3) == [("b", 0.5), ("a", 0.0), ("b", 1.0)]


def test_reconnect_attempts_are_limited() -> None:
    policy = Reconnect(attempts_max=1)
    assert [step and step[0] for step in steps(Plan([A, B], policy), 5)] == ["a", "b", "a", "b", None]
    startup = Plan([A], replace(policy, startup_attempts_max=0))
    assert [step and step[0] for step in steps(startup, 2)] == ["a", None]
    startup.succeeded(A)
    assert [step and step[0] for step in steps(startup, 3)] == ["a", "a", None]


def test_failover_list_of_broker_is_added_only_with_failover() -> None:
    for policy, known in ((Reconnect(), [A, B]), (None, [A])):
        plan = Plan([A], policy)
        plan.learn(B)
        plan.learn(B)
        assert plan.endpoints == known


def test_failover_list_of_broker_does_not_lead_a_client_with_tls_to_an_address_without_tls() -> None:
    secure, other = Endpoint("a", 5671, tls=True), Endpoint("c", 5671, tls=True)
    for given, known in (([secure], [secure, other]), ([secure, A], [secure, A, B, other])):
        plan = Plan(list(given), Reconnect())
        for each in (B, other):
            plan.learn(each)
        assert plan.endpoints == known


def test_random_failover_order_contains_every_broker_in_each_round() -> None:
    plan = Plan([A, B], Reconnect(randomize=True), random.Random(1))
    rounds = [{step[0] for step in steps(plan, 2) if step} for _ in range(10)]
    assert rounds == [{"a", "b"}] * 10
