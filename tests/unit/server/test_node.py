"""The answers of a node to connections and logs before it serves, and its limits from file descriptors."""

from __future__ import annotations

import resource

import pytest

from bascule.config.settings import Broker, Settings
from bascule.core.errors import Unavailable
from bascule.server import descriptors
from bascule.server.node import Node, usage_limits


def test_starting_node_has_no_engine_and_reports_it() -> None:
    node = Node(Settings())
    with pytest.raises(Unavailable, match="the broker is starting"):
        node.engine  # noqa: B018 - it raises
    assert node.reason == "starting"
    node.end_epoch(Unavailable("of an epoch that there is not"))
    assert not node.awake()


def test_failover_list_contains_host_port_and_scheme() -> None:
    node = Node(Settings(broker=Broker(failover=("one:5672", "::1:5673"))))
    assert node.failover == [
        {"network-host": "one", "hostname": "one", "port": 5672, "scheme": "amqp"},
        {"network-host": "::1", "hostname": "::1", "port": 5673, "scheme": "amqp"},
    ]


@pytest.mark.parametrize(
    ("asked", "allowed", "level"), [({}, 10, "INFO"), ({"max_connections": 100}, 10, "WARNING"), ({"max_connections": 5}, 5, None)]
)
def test_connections_are_limited_by_descriptors_with_a_warning_if_more_are_configured(
    asked: dict[str, int], allowed: int, level: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "client_share", lambda _: 10)
    caplog.set_level("INFO")
    assert usage_limits(Settings(broker=Broker(**asked))).connections == allowed
    assert [record.levelname for record in caplog.records if "file descriptors" in record.getMessage()] == ([level] if level else [])


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 4096), (4096, 4096)),
        ((4096, 4096), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
        ((1024, resource.RLIM_INFINITY), (1 << 20, resource.RLIM_INFINITY)),
    ],
)
def test_file_descriptor_limit_is_raised_to_hard_limit(
    limits: tuple[int, int], raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: told.append(wanted))
    descriptors.raise_limit()
    assert told == ([raised] if raised else [])
