"""An activation spec is checked when it is made. The error names the wrong field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bascule.adapter.inbound import ActivationSpec, Backoff, InboundLog, Order, ResourceAdapter, Xa
from bascule.core.errors import InvalidInput
from bascule.xa import FileLog, TransactionManager
from bascule.xa.kafka import KafkaResource

KAFKA = {"bootstrap.servers": "127.0.0.1:1"}


def spec(**changes: Any) -> ActivationSpec:
    return ActivationSpec(**{"topics": ("payments",), "group": "shop", **changes})


def test_default_topics_of_activation_are_derived_from_group() -> None:
    made = spec(topics="payments", order="key")
    assert (made.topics, made.retry_topic, made.dead_letter_topic, made.order) == (
        ("payments",),
        "shop.retry",
        "shop.dead-letter",
        Order.KEY,
    )
    assert made.in_place
    assert not spec().in_place


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"topics": ()}, "topics"),
        ({"topics": ("",)}, "topics"),
        ({"topics": ("^a.*", "b")}, "names or a single pattern"),
        ({"topics": ("^a(",)}, "cannot be used: column"),
        ({"topics": ("^a)(b",)}, "cannot be used"),
        ({"topics": (r"^(a)\1",)}, "are not supported"),
        ({"topics": ("^shop.*",)}, "topics without 'shop.retry'"),
        ({"topics": ("shop.dead-letter",)}, "topics without 'shop.dead-letter'"),
        ({"topics": ("shop.inbound",)}, "inbound log"),
        ({"retry_topic": "same", "dead_letter_topic": "same"}, "three different topics"),
        ({"group": "no blanks"}, "group"),
        ({"workers": 0}, "workers"),
        ({"batch": 0}, "batch"),
        ({"retries": -1}, "retries"),
        ({"delivery_timeout_s": 0}, "delivery_timeout_s"),
        ({"order": "random"}, "order='random'; expected one of none, key, partition"),
        ({"start": "middle"}, "start='middle'; expected one of earliest, latest"),
    ],
)
def test_invalid_activation_setting_is_named_in_error(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named.replace("(", r"\(")):
        spec(**changes)


@pytest.mark.parametrize("wrong", [(-1.0, 2.0, 1.0), (1.0, 0.5, 1.0), (2.0, 2.0, 1.0)])
def test_backoff_grows_to_its_limit_and_invalid_backoff_is_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidInput, match="first_s >= 0"):
        Backoff(*wrong)
    assert [Backoff(0.5, 3.0, 4.0).pause_s(failures) for failures in (1, 2, 3, 1000)] == [0.5, 1.5, 4.0, 4.0]


def test_xa_resources_must_belong_to_manager_and_group(tmp_path: Path) -> None:
    kafka, log = KafkaResource("kafka", KAFKA), InboundLog("inbound", KAFKA, group="shop")
    manager = TransactionManager("shop", FileLog(tmp_path / "log"), [log, kafka])
    assert spec(transacted=Xa(manager, log, kafka)).transacted is not None
    with pytest.raises(InvalidInput, match="'kafka' does not belong to transaction manager 'shop'"):
        Xa(manager, log, KafkaResource("kafka", KAFKA))
    with pytest.raises(InvalidInput, match="belongs to group 'shop', not to group 'other'"):
        spec(group="other", transacted=Xa(manager, log, kafka))


def test_endpoint_must_accept_record_and_group_must_be_unique() -> None:
    adapter = ResourceAdapter(KAFKA)
    with pytest.raises(InvalidInput, match=r"must be a function of a record, or a class with on_record\(record\)"):
        adapter.activate(spec(), dict)
    first = adapter.activate(spec(), print)
    with pytest.raises(InvalidInput, match="group 'shop' already has an endpoint"):
        adapter.activate(spec(), print)
    assert adapter.deactivate(first) == []
    adapter.activate(spec(), print)


@pytest.mark.parametrize(
    ("topics", "missing"),
    [(("orders",), []), (("orders", "paymnts"), ["paymnts"]), (("^ord.*",), []), (("^paymnts.*",), ["^paymnts.*"])],
)
def test_missing_source_topics_are_named(topics: tuple[str, ...], missing: list[str]) -> None:
    assert ActivationSpec(topics=topics, group="shop").missing({"orders", "shop.retry"}) == missing
